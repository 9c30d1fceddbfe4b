//! What one member of etcd says of itself over HTTP.

use std::fmt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use reqwest::{Certificate, Client, ClientBuilder, Identity};
use steadfast_coord::EtcdOptions;
use steadfast_host::tls;

const PATIENCE: Duration = Duration::from_secs(5);

/// A version of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
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
    let _ = tls::crypto().install_default();
    let client = Client::builder().timeout(PATIENCE).no_proxy();
    let client = with_certificates(client, options)?.build().map_err(|it| it.to_string())?;
    let answer = client.get(format!("{endpoint}/version")).send().await;
    let answer = answer.map_err(|error| format!("does not answer: {error}"))?;
    let date = answer.headers().get(reqwest::header::DATE);
    let date = date.and_then(|it| httpdate::parse_http_date(it.to_str().ok()?).ok());
    let skew = date.map(|date| {
        let now = SystemTime::now();
        now.duration_since(date).unwrap_or_else(|earlier| earlier.duration())
    });
    let text = answer.text().await.map_err(|error| error.to_string())?;
    let version = parse(&text).ok_or_else(|| format!("this is no etcd: {text:.80}"))?;
    Ok(Answer { version, skew })
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
    let value: serde_json::Value = serde_json::from_str(text).ok()?;
    let mut parts = value["etcdserver"].as_str()?.split('.');
    Some(Version { major: parts.next()?.parse().ok()?, minor: parts.next()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let parsed = parse(r#"{"etcdserver":"3.10.2","etcdcluster":"3.10.0"}"#).unwrap();
        assert!(Version { major: 3, minor: 4 } < parsed);
        assert!(parse("<html>").is_none() && parse(r#"{"etcdserver":"x"}"#).is_none());
    }
}
