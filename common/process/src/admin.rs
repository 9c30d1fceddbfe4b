//! The admin port of a process: liveness, readiness, metrics and status over HTTP, or HTTPS if the process
//! has certificates. With HTTPS, everything except liveness and readiness requires an administrator's
//! certificate or the port's token; orchestrators probe those two without either.
//!
//! The server reads no request body, and limits connections, header bytes and time, so that a client
//! cannot exhaust the memory of the process.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use prometheus_client::registry::Registry;
use serde_json::Value;
use steadfast_auth::{Peer, Refusal, refused};
use steadfast_host::task::{Task, spawn};
use steadfast_host::time::sleep;
use steadfast_net::Port;
use steadfast_net::TlsIdentity;
use steadfast_net::incoming::handshake;
use steadfast_net::peers::Peers;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tracing::{debug, info, warn};
use uuid::Uuid;

use crate::admin_lock::{CHALLENGE, Lock};
use crate::page::{self, Head, Section, Sections};
use crate::process_metrics::ProcessMetrics;
use crate::{Exposure, Failure, Readiness, Ready, Shutdown, bind, tables};

/// Concurrent connections; more wait in the kernel's accept queue.
const CONNECTIONS_MAX: usize = 64;

/// Concurrent connections of one address.
const PER_ADDRESS_MAX: usize = 32;

/// Concurrent connections that listen for changes, which are long-lived.
const LISTENERS_MAX: usize = 16;

/// Timeout for the headers of a request; also ends idle connections.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum age of a connection.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(120);

/// Maximum bytes and number of a request's headers.
const HEADER_BYTES_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;

/// Delay after an accept error, such as running out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A bound admin port that is not served yet.
#[derive(Debug)]
pub struct Admin {
    port: Port,
    address: SocketAddr,
    exposure: Exposure,
}

/// The content of an admin port.
pub struct AdminContent {
    /// `master`, `pserver`, …
    pub role: &'static str,
    pub job: String,
    /// Returns the current member id of the process; must not block.
    pub id: Box<dyn Fn() -> Uuid + Send + Sync>,
    pub readiness: Readiness,
    pub metrics: Registry,
    /// Authorizes clients without a certificate; see [`crate::SecurityArgs::admin_token`].
    pub token: Option<String>,
    /// Triggered by `/drain`. Absent in a process that ends only with the user's program.
    pub shutdown: Option<Shutdown>,
    /// Returns the status of the process; must not block.
    pub status: Box<dyn Fn() -> Value + Send + Sync>,
    /// Renders the page; by default the status as tables.
    pub page: Option<Sections>,
}

/// The content of an admin port, and the limit on clients that listen for changes.
struct AdminState {
    content: AdminContent,
    exposure: Exposure,
    listeners: Arc<Semaphore>,
}

impl Deref for AdminState {
    type Target = AdminContent;

    fn deref(&self) -> &AdminContent {
        &self.content
    }
}

/// A served admin port; it closes when this is dropped.
#[derive(Debug)]
pub struct AdminServer {
    address: SocketAddr,
    task: Task<()>,
}

impl Admin {
    /// Binds `--admin-listen`.
    ///
    /// # Errors
    /// If the address cannot be bound; the message names it.
    pub async fn bind(address: SocketAddr, exposure: Exposure) -> Result<Self, Failure> {
        let port = bind(address, "--admin-listen", &exposure).await?;
        let address = port
            .local_addr()
            .map_err(|error| Failure::io("cannot read the admin port's address", &error))?;
        Ok(Self { port, address, exposure })
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Starts to serve `content`, and registers the metrics of the process in it. A simulated port is only kept open.
    pub fn serve(self, mut content: AdminContent) -> AdminServer {
        let Self { port, address, exposure } = self;
        let collector = ProcessMetrics { role: content.role, exposure: exposure.clone() };
        content.metrics.register_collector(Box::new(collector));
        let (listeners, identity) = (Arc::new(Semaphore::new(LISTENERS_MAX)), exposure.identity());
        let router = router(Arc::new(AdminState { content, exposure, listeners }));
        let task = match port.into_tcp() {
            Ok(listener) => spawn(accept(listener, router, identity)),
            // A simulated port only has to be open for probes.
            Err(port) => spawn(async move {
                let _port = port;
                std::future::pending().await
            }),
        };
        AdminServer { address, task }
    }
}

impl AdminServer {
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Closes the port, and waits until it is closed.
    pub async fn close(mut self) {
        self.task.abort();
        // It ends in no other way.
        let _ = (&mut self.task).await;
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, router: Router, identity: TlsIdentity) {
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let peers = Peers::new(PER_ADDRESS_MAX);
    let mut connections = JoinSet::new();
    loop {
        let permit = permits.clone().acquire_owned().await.expect("the semaphore is never closed");
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, address)) => {
                let (router, identity) = (router.clone(), identity.clone());
                let Some(admitted) = peers.admit(address) else { continue };
                connections.spawn(async move {
                    let (_permit, _admitted) = (permit, admitted);
                    let served = serve_stream(stream, router, &identity);
                    if tokio::time::timeout(CONNECTION_TIMEOUT, served).await.is_err() {
                        debug!("admin connection closed: maximum age reached");
                    }
                });
            }
            Err(error) => {
                warn!(%error, "cannot accept a connection on the admin port");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve_stream(stream: TcpStream, router: Router, identity: &TlsIdentity) {
    let Some(credentials) = identity.credentials() else {
        return serve_http(stream, Peer::Anonymous, router).await;
    };
    if let Some(accepted) = handshake(stream, credentials.admin.clone().into()).await {
        serve_http(accepted.stream, accepted.peer, router).await;
    }
}

async fn serve_http<S>(stream: S, peer: Peer, router: Router)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    // Clients without a role get one request per connection, so that probes find a free connection.
    let is_known = match &peer {
        Peer::Anonymous => true,
        Peer::Authenticated(roles) => !roles.is_empty(),
    };
    let router = router.layer(Extension(peer));
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(is_known)
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(HEADER_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await;
    if let Err(error) = served {
        debug!(%error, "admin connection failed");
    }
}

fn router(content: Arc<AdminState>) -> Router {
    let lock = Arc::new(Lock::new(content.token.clone()));
    // The token gives read access only.
    let changes = from_fn_with_state(Arc::new(Lock::new(None)), authorize);
    let acts = Router::new().route("/drain", post(drain)).route_layer(changes);
    Router::new()
        .route("/", get(page))
        .route("/page.css", get(page::style))
        .route("/page.js", get(page::script))
        .route("/events", get(events))
        .route("/metrics", get(metrics))
        .route("/status", get(status))
        .route_layer(from_fn_with_state(lock, authorize))
        .merge(acts)
        .route("/healthz", get(async || Ok::<_, Infallible>("alive\n")))
        .route("/readyz", get(ready))
        .with_state(content)
}

/// Passes authorized requests on, and refuses others.
async fn authorize(
    State(lock): State<Arc<Lock>>,
    Extension(peer): Extension<Peer>,
    request: Request,
    next: Next,
) -> Response {
    if lock.opens(&peer, request.headers().get(header::AUTHORIZATION)) {
        return next.run(request).await;
    }
    let (path, caller) = (request.uri().path().to_owned(), "an unauthorized client".to_owned());
    refused(&Refusal::Call { path, caller });
    let why = "this requires an administrator's certificate, or, for read access, the token as bearer token \
               or password\n";
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, CHALLENGE)], why).into_response()
}

type Content = State<Arc<AdminState>>;

async fn ready(State(content): Content) -> Response {
    match content.readiness.get() {
        Ready::Yes => "ready\n".into_response(),
        Ready::No(reason) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {reason}\n")).into_response()
        }
    }
}

async fn metrics(State(content): Content) -> Response {
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &content.metrics) {
        Ok(()) => ([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response(),
        Err(error) => {
            warn!(%error, "cannot write metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

async fn status(State(content): Content) -> Response {
    axum::Json((content.status)()).into_response()
}

/// Time for the answer to a request for a drain to leave.
const DRAIN_DELAY: Duration = Duration::from_millis(50);

/// Requests a drain. Refuses requests of browsers, which send an `Origin` header, because a page of another
/// site could make them (cross-site request forgery).
async fn drain(State(content): Content, request: Request) -> Response {
    if request.headers().contains_key(header::ORIGIN) {
        return (StatusCode::FORBIDDEN, "requests from browsers are not permitted\n")
            .into_response();
    }
    // An address from etcd may lead to another process: ports are reused, and a loopback address differs
    // on every machine.
    let meant = request.uri().query().and_then(|query| query.strip_prefix("member="));
    let id = (content.id)().to_string();
    if meant.is_some_and(|meant| meant != id) {
        let why = format!("this is {} {id}, not the requested member\n", content.role);
        return (StatusCode::CONFLICT, why).into_response();
    }
    let Some(shutdown) = content.shutdown.clone() else {
        let why = format!("a {} ends with its program, and is not drained\n", content.role);
        return (StatusCode::METHOD_NOT_ALLOWED, why).into_response();
    };
    info!("draining: requested on the admin port");
    spawn(async move {
        // An idle process may exit at once, and the answer would be lost.
        sleep(DRAIN_DELAY).await;
        shutdown.trigger();
    });
    (StatusCode::ACCEPTED, "draining\n").into_response()
}

async fn page(State(content): Content) -> Response {
    let warning = match content.exposure {
        Exposure::Plaintext => {
            Some("INSECURE: any client that can connect can read and change everything")
        }
        Exposure::Loopback | Exposure::Tls(_) => None,
    };
    let (ready, sections) = content.render();
    let head = Head { role: content.role, job: &content.job, ready: &ready, warning };
    page::page(&head, &sections)
}

async fn events(State(content): Content) -> Response {
    match content.listeners.clone().try_acquire_owned() {
        Ok(permit) => page::events(move || {
            let _permit = &permit;
            content.render()
        }),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "too many event streams\n").into_response(),
    }
}

impl AdminContent {
    /// Returns the readiness as text, and the sections of the page.
    fn render(&self) -> (String, Vec<Section>) {
        let ready = match self.readiness.get() {
            Ready::Yes => "ready".to_owned(),
            Ready::No(reason) => format!("not ready: {reason}"),
        };
        let sections = match &self.page {
            Some(write) => write(),
            None => {
                let body = tables(&(self.status)());
                vec![Section { id: "status", title: "Status", body }]
            }
        };
        (ready, sections)
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::counter::Counter;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn start(readiness: &Readiness) -> AdminServer {
        serve(readiness, &Shutdown::manual()).await
    }

    async fn serve(readiness: &Readiness, shutdown: &Shutdown) -> AdminServer {
        let mut metrics = Registry::default();
        let steps: Counter = Counter::default();
        metrics.register("steadfast_steps", "Steps", steps.clone());
        steps.inc_by(3);
        let content = AdminContent {
            role: "master",
            job: "digits".to_owned(),
            id: Box::new(Uuid::nil),
            readiness: readiness.clone(),
            metrics,
            token: None,
            shutdown: Some(shutdown.clone()),
            status: Box::new(|| serde_json::json!({ "note": "<script>alert(1)</script>" })),
            page: None,
        };
        Admin::bind("127.0.0.1:0".parse().unwrap(), Exposure::Loopback)
            .await
            .unwrap()
            .serve(content)
    }

    async fn send(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        // The server may answer a refused request and reset the connection before it read all of it.
        let _ = stream.read_to_string(&mut answer).await;
        answer
    }

    async fn fetch(address: SocketAddr, path: &str) -> String {
        send(address, &format!("GET {path} HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n"))
            .await
    }

    #[tokio::test]
    async fn readiness_and_its_reason_are_shown_while_liveness_stays() {
        let readiness = Readiness::new("waiting for a slot");
        let server = start(&readiness).await;
        let address = server.local_addr();
        assert!(fetch(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        let answer = fetch(address, "/readyz").await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("waiting for a slot"));
        readiness.set_ready();
        assert!(fetch(address, "/readyz").await.starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn metrics_are_open_metrics() {
        let server = start(&Readiness::new("")).await;
        let answer = fetch(server.local_addr(), "/metrics").await;
        assert!(answer.contains("content-type: application/openmetrics-text; version=1.0.0"));
        assert!(answer.contains("steadfast_steps_total 3"), "{answer}");
        assert!(answer.ends_with("# EOF\n"));
    }

    #[tokio::test]
    async fn the_page_shows_status_as_text_and_loads_nothing_external() {
        let server = start(&Readiness::new("")).await;
        let answer = fetch(server.local_addr(), "/").await;
        assert!(answer.contains("content-security-policy: default-src 'none'"));
        assert!(answer.contains("&lt;script&gt;") && !answer.contains("<script>alert"));
        let answer = fetch(server.local_addr(), "/status").await;
        assert!(answer.contains("content-type: application/json"));
    }

    /// A page of another site in a local browser cannot drain the process.
    #[tokio::test]
    async fn a_page_of_another_site_cannot_drain_the_process() {
        let shutdown = Shutdown::manual();
        let server = serve(&Readiness::new(""), &shutdown).await;
        let ask_for = async |method: &str, path: &str, more: &str| {
            let head = "HTTP/1.1\r\nHost: it\r\nContent-Length: 0\r\nConnection: close";
            send(server.local_addr(), &format!("{method} {path} {head}\r\n{more}\r\n")).await
        };
        let ask = async |method, more| ask_for(method, "/drain", more).await;
        assert!(ask("GET", "").await.starts_with("HTTP/1.1 405"));
        let foreign = ask("POST", "Origin: http://elsewhere.example\r\n").await;
        assert!(foreign.starts_with("HTTP/1.1 403"), "{foreign}");
        let another = format!("/drain?member={}", Uuid::from_u128(1));
        let another = ask_for("POST", &another, "").await;
        assert!(another.starts_with("HTTP/1.1 409"), "{another}");
        assert!(!shutdown.is_draining());
        let this = format!("/drain?member={}", Uuid::nil());
        assert!(ask_for("POST", &this, "").await.starts_with("HTTP/1.1 202"));
        shutdown.drain().await;
        assert!(ask("POST", "").await.starts_with("HTTP/1.1 202"));
    }

    /// A browser receives changes without polling.
    #[tokio::test]
    async fn changes_are_sent_to_subscribers() {
        let readiness = Readiness::new("starting");
        let server = start(&readiness).await;
        let mut stream = TcpStream::connect(server.local_addr()).await.unwrap();
        stream.write_all(b"GET /events HTTP/1.1\r\nHost: it\r\n\r\n").await.unwrap();
        let mut received = String::new();
        let mut until = async |what: &str| {
            while !received.contains(what) {
                let mut bytes = [0; 4096];
                let read = tokio::time::timeout(Duration::from_secs(5), stream.read(&mut bytes));
                let count = read.await.unwrap().unwrap();
                received += &String::from_utf8_lossy(&bytes[..count]);
            }
        };
        until("not ready: starting").await;
        readiness.set_ready();
        until("\"ready\":\"ready\"").await;
    }

    /// F49: idle connections of one address do not block other addresses.
    #[tokio::test]
    async fn one_machine_cannot_take_all_connections() {
        let server = start(&Readiness::new("")).await;
        let address = server.local_addr();
        let mut idle = Vec::new();
        for _ in 0..2 * CONNECTIONS_MAX {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        let mut other = socket.connect(address).await.unwrap();
        let request = b"GET /healthz HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n";
        other.write_all(request).await.unwrap();
        let mut received = String::new();
        let reading = other.read_to_string(&mut received);
        tokio::time::timeout(HEADER_TIMEOUT / 2, reading).await.unwrap().unwrap();
        assert!(received.starts_with("HTTP/1.1 200"), "{received}");
    }

    #[tokio::test]
    async fn a_request_with_endless_headers_is_rejected() {
        let server = start(&Readiness::new("")).await;
        let request = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(64 << 10));
        let answer = send(server.local_addr(), &request).await;
        assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(fetch(server.local_addr(), "/healthz").await.starts_with("HTTP/1.1 200"));
    }
}
