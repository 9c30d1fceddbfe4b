//! What one member of etcd says of itself.

use std::fmt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use reqwest::redirect::Policy;
use reqwest::{Certificate, Client, ClientBuilder, Identity};
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_host::tls;

const PATIENCE: Duration = Duration::from_secs(5);

/// A version of etcd.
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

/// What a member answered.
#[derive(Clone, Debug)]
pub struct Answer {
    pub version: Version,
    /// How much its clock and ours differ, if it told the time. Whole seconds.
    pub skew: Option<Duration>,
}

/// Asks one member.
///
/// # Errors
/// A sentence on why there is no answer.
pub async fn ask(endpoint: &str, options: &EtcdOptions) -> Result<Answer, String> {
    let options = EtcdOptions { endpoints: vec![endpoint.to_owned()], ..options.clone() };
    let etcd = Etcd::connect(&options).await.map_err(|error| error.to_string())?;
    let text = etcd.version().await.map_err(|error| error.to_string())?;
    let version = parse(&text).ok_or_else(|| format!("`{text}` is no version"))?;
    Ok(Answer { version, skew: skew(endpoint, &options).await })
}

/// Only HTTP tells the time, and the embedded etcd has none.
async fn skew(endpoint: &str, options: &EtcdOptions) -> Option<Duration> {
    let _ = tls::crypto().install_default();
    let client = Client::builder().timeout(PATIENCE).no_proxy().redirect(Policy::none());
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
    let mut parts = text.split('.').map(|part| part.parse().ok());
    Some(Version { major: parts.next()??, minor: parts.next()??, patch: parts.next()?? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(parse("3.4.23").unwrap() < parse("3.10.2").unwrap());
        assert!(parse("3.6.9").unwrap() < parse("3.6.14").unwrap());
        assert!(parse("<html>").is_none() && parse("3.x.1").is_none());
    }
}
