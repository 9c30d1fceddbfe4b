//! Version and clock skew of one etcd member.

use std::fmt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, ClientBuilder, Identity};
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_net::tls;

const TIMEOUT: Duration = Duration::from_secs(5);

/// An etcd version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Answer of one etcd member.
#[derive(Clone, Debug)]
pub struct MemberVersion {
    pub version: Version,
    /// Difference between its clock and this machine's in whole seconds, if it reports the time.
    pub skew: Option<Duration>,
}

/// Queries one member.
///
/// # Errors
/// The reason why there is no answer, for display.
pub async fn ask(endpoint: &str, options: &EtcdOptions) -> Result<MemberVersion, String> {
    let options = EtcdOptions { endpoints: vec![endpoint.to_owned()], ..options.clone() };
    let etcd = Etcd::connect(&options).await.map_err(|error| error.to_string())?;
    let text = etcd.version().await.map_err(|error| error.to_string())?;
    let version = parse(&text).ok_or_else(|| format!("cannot parse the version `{text}`"))?;
    Ok(MemberVersion { version, skew: skew(endpoint, &options).await })
}

/// Measures the clock skew by the HTTP `Date` header, which the embedded etcd does not send.
async fn skew(endpoint: &str, options: &EtcdOptions) -> Option<Duration> {
    let _ = tls::crypto().install_default();
    let client = Client::builder().timeout(TIMEOUT).no_proxy().redirect(Policy::none());
    let client = with_certificates(client, options).ok()?.build().ok()?;
    let answer = client.get(format!("{endpoint}/version")).send().await.ok()?;
    let date = answer.headers().get(reqwest::header::DATE)?.to_str().ok()?;
    let date = httpdate::parse_http_date(date).ok()?;
    let now = SystemTime::now();
    Some(now.duration_since(date).unwrap_or_else(|earlier| earlier.duration()))
}

fn with_certificates(
    mut client: ClientBuilder,
    options: &EtcdOptions,
) -> Result<ClientBuilder, String> {
    let read = |path: &Path| {
        std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
    };
    if let Some(path) = &options.ca_file {
        let authority = Certificate::from_pem(&read(path)?).map_err(|it| it.to_string())?;
        client = client.tls_certs_only([authority]);
    }
    if let (Some(certificate), Some(key)) = (&options.cert_file, &options.key_file) {
        let pem = [read(key)?, read(certificate)?].concat();
        client = client.identity(Identity::from_pem(&pem).map_err(|it| it.to_string())?);
    }
    Ok(client)
}

fn parse(text: &str) -> Option<Version> {
    // A pre-release or build suffix may follow, as in semantic versions. The embedded etcd is
    // `3.4.23-steadfast`.
    let numbers = text.split(['-', '+']).next()?;
    let mut parts = numbers.split('.').map(|part| part.parse().ok());
    Some(Version { major: parts.next()??, minor: parts.next()??, patch: parts.next()?? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(parse("3.4.23").unwrap() < parse("3.10.2").unwrap());
        assert!(parse("3.6.9").unwrap() < parse("3.6.14").unwrap());
        assert_eq!(parse("3.4.23-steadfast"), parse("3.4.23"));
        assert!(parse("<html>").is_none() && parse("3.x.1").is_none());
    }
}
