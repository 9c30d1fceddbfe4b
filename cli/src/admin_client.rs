//! HTTP client for the admin ports of a job's processes.

use std::net::SocketAddr;
use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, Method, StatusCode};
use serde_json::Value;
use steadfast_common::error::ErrorKind;
use steadfast_common::role::ANY_ROLE;
use steadfast_net::TlsIdentity;
use steadfast_net::tls::{Loaded, crypto};
use steadfast_process::Failure;
use uuid::Uuid;

/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum size of a response body.
const BODY_MAX: usize = 16 << 20;

/// Sends a GET request to an admin port. If `tls` has credentials, the request uses mutual TLS and
/// accepts the certificate of any role of the job, at any address, and no other certificate.
///
/// # Errors
/// If the address does not answer.
pub async fn ask(
    address: &str,
    path: &str,
    tls: &TlsIdentity,
) -> Result<(StatusCode, String), Failure> {
    request(address, Method::GET, path, tls).await
}

async fn request(
    address: &str,
    method: Method,
    path: &str,
    tls: &TlsIdentity,
) -> Result<(StatusCode, String), Failure> {
    // Fails if a crypto provider is installed already, which is harmless.
    let _ = crypto().install_default();
    let no_answer = |error: reqwest::Error| {
        Failure::unavailable(format!("{address} does not answer: {}", root_cause(&error)))
    };
    // No proxies or redirects: members write these addresses to etcd themselves.
    let client = Client::builder().timeout(TIMEOUT).no_proxy().redirect(Policy::none());
    let (client, origin) = match tls.credentials() {
        None => (client, format!("http://{address}")),
        Some(credentials) => {
            let at = resolve(address).await?;
            trusting(client, &credentials, at)
        }
    };
    let request = client.build().map_err(no_answer)?.request(method, format!("{origin}{path}"));
    let mut answer = request.send().await.map_err(|error| {
        if error.is_builder() {
            Failure::new(ErrorKind::Invalid, format!("`{address}` is not a HOST:PORT address"))
        } else {
            no_answer(error)
        }
    })?;
    let status = answer.status();
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await.map_err(no_answer)? {
        if BODY_MAX < body.len() + chunk.len() {
            return Err(Failure::new(
                ErrorKind::TooLarge,
                format!("the response of {address} exceeds {} MiB", BODY_MAX >> 20),
            ));
        }
        body.extend_from_slice(&chunk);
    }
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

/// Returns the `/status` of a process.
///
/// # Errors
/// If the process does not answer, or denies access.
pub async fn status(address: &str, tls: &TlsIdentity) -> Result<Value, Failure> {
    let (code, text) = ask(address, "/status", tls).await?;
    let text = allowed(address, code, text)?;
    serde_json::from_str(&text).map_err(|error| {
        Failure::internal(format!("cannot parse the status of {address}: {error}"))
    })
}

/// Asks the process with this id to drain.
///
/// # Errors
/// If the process does not answer or denies access, or if another process answers at this address.
pub async fn drain(address: &str, id: Uuid, tls: &TlsIdentity) -> Result<(), Failure> {
    let path = format!("/drain?member={id}");
    let (code, text) = request(address, Method::POST, &path, tls).await?;
    allowed(address, code, text).map(|_| ())
}

fn allowed(address: &str, code: StatusCode, text: String) -> Result<String, Failure> {
    match code.is_success() {
        true => Ok(text),
        false => Err(Failure::new(ErrorKind::Denied, format!("{address}: {}", text.trim_end()))),
    }
}

fn trusting(
    client: ClientBuilder,
    credentials: &Loaded,
    address: SocketAddr,
) -> (ClientBuilder, String) {
    let config = rustls::ClientConfig::clone(&credentials.client);
    let client = client.use_preconfigured_tls(config).resolve(ANY_ROLE, address);
    (client, format!("https://{ANY_ROLE}:{}", address.port()))
}

async fn resolve(address: &str) -> Result<SocketAddr, Failure> {
    let found = tokio::net::lookup_host(address).await;
    let mut found = found.map_err(|error| {
        Failure::new(ErrorKind::Invalid, format!("cannot resolve `{address}` (HOST:PORT): {error}"))
    })?;
    found.next().ok_or_else(|| Failure::unavailable(format!("`{address}` resolves to no address")))
}

/// Returns the root cause, which is the part that a user can act on.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
