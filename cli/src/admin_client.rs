//! Questions to the admin ports of a job's processes.

use std::net::SocketAddr;
use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, Method, StatusCode};
use serde_json::Value;
use steadfast_common::error::ErrorKind;
use steadfast_host::role::ANY_ROLE;
use steadfast_host::tls;
use steadfast_process::Failure;
use uuid::Uuid;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Longest answer.
const BODY_MAX: usize = 16 << 20;

/// Asks an admin port, by certificates if we have some: then any process of the job is believed, wherever
/// it is, and nobody else.
///
/// # Errors
/// If nobody answers there.
pub async fn ask(address: &str, path: &str) -> Result<(StatusCode, String), Failure> {
    request(address, Method::GET, path).await
}

async fn request(
    address: &str,
    method: Method,
    path: &str,
) -> Result<(StatusCode, String), Failure> {
    // Fails when the process has chosen its cryptography already, which is as good.
    let _ = tls::crypto().install_default();
    let silent = |error: reqwest::Error| {
        Failure::unavailable(format!("{address} does not answer: {}", innermost(&error)))
    };
    // Addresses come from etcd, where members write their own.
    let client = Client::builder().timeout(PATIENCE).no_proxy().redirect(Policy::none());
    let (client, origin) = match tls::credentials() {
        None => (client, format!("http://{address}")),
        Some(credentials) => {
            let at = resolve(address).await?;
            trusting(client, &credentials.current(), at)
        }
    };
    let request = client.build().map_err(silent)?.request(method, format!("{origin}{path}"));
    let mut answer = request.send().await.map_err(|error| {
        if error.is_builder() {
            Failure::new(ErrorKind::Invalid, format!("`{address}` is no HOST:PORT"))
        } else {
            silent(error)
        }
    })?;
    let status = answer.status();
    let mut body = Vec::new();
    while let Some(piece) = answer.chunk().await.map_err(silent)? {
        if BODY_MAX < body.len() + piece.len() {
            return Err(Failure::new(
                ErrorKind::TooLarge,
                format!("{address} answers without end"),
            ));
        }
        body.extend_from_slice(&piece);
    }
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

/// What a process says of itself.
///
/// # Errors
/// If it does not answer, or not to us.
pub async fn status(address: &str) -> Result<Value, Failure> {
    let (code, text) = ask(address, "/status").await?;
    let text = allowed(address, code, text)?;
    serde_json::from_str(&text)
        .map_err(|error| Failure::internal(format!("{address} gives no status: {error}")))
}

/// Has the process of that id finish in good order.
///
/// # Errors
/// If it does not answer, or not to us, or another process does.
pub async fn drain(address: &str, id: Uuid) -> Result<(), Failure> {
    let path = format!("/drain?member={id}");
    let (code, text) = request(address, Method::POST, &path).await?;
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
    credentials: &tls::Loaded,
    address: SocketAddr,
) -> (ClientBuilder, String) {
    let config = rustls::ClientConfig::clone(&credentials.client);
    let client = client.use_preconfigured_tls(config).resolve(ANY_ROLE, address);
    (client, format!("https://{ANY_ROLE}:{}", address.port()))
}

async fn resolve(address: &str) -> Result<SocketAddr, Failure> {
    let found = tokio::net::lookup_host(address).await;
    let mut found = found.map_err(|error| {
        Failure::new(ErrorKind::Invalid, format!("`{address}` is no HOST:PORT: {error}"))
    })?;
    found.next().ok_or_else(|| Failure::unavailable(format!("{address} has no address")))
}

/// What went wrong at the bottom, which is what a person can mend.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
