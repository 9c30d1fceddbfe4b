//! A channel to the members of an etcd cluster: one connection at a time, to any member that answers.
//!
//! A member that fails a call is tried last for the next connection. Certificates are read again for each
//! connection, so a process outlives those that it started with.

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{BoxFuture, Shared};
use futures::stream::{FuturesUnordered, StreamExt};
use futures::{FutureExt, TryFutureExt};
use http::HeaderMap;
use steadfast_host::random;
use steadfast_host::time::{sleep, timeout};
use steadfast_net::connect_once;
use tonic::body::Body;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, ConnectError, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tower::{BoxError, Service, ServiceExt};
use tracing::warn;

use crate::{CoordError, EtcdOptions};

/// Timeout for opening a connection.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// Delay between the attempts to connect to one member and to the next: a member that does not answer
/// costs no more than this.
const STAGGER: Duration = Duration::from_millis(100);

/// Time within which a member must begin its answer; shorter than the timeout of a call, so that the next
/// call goes to another member.
const ANSWER_MAX: Duration = Duration::from_secs(4);

/// Interval of pings on the connection, and the timeout for their reply.
const PING_EVERY: Duration = Duration::from_secs(3);
const PING_TIMEOUT: Duration = Duration::from_secs(3);

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// The members of a cluster as one channel for etcd-client. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Members(Arc<Inner>);

struct Inner {
    urls: Vec<String>,
    tls: Option<TlsFiles>,
    state: Mutex<State>,
}

struct State {
    /// The member to which to connect first.
    first: usize,
    connection: Option<Connecting>,
    /// The TLS configuration as last read without an error.
    tls: Option<ClientTlsConfig>,
}

/// A connection, shared by all calls that wait for it or use it.
type Connecting = Shared<BoxFuture<'static, Result<Connection, NotSent>>>;

#[derive(Clone)]
struct Connection {
    member: usize,
    channel: Channel,
}

/// No member could be reached, so the call was not sent and can be repeated.
#[derive(Clone, Debug)]
pub(crate) struct NotSent(String);

impl fmt::Display for NotSent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for NotSent {}

impl NotSent {
    /// Returns whether a call failed because no member could be reached.
    pub(crate) fn caused(error: &etcd_client::Error) -> bool {
        match error {
            etcd_client::Error::GRpcStatus(status) => {
                causes(status).any(|cause| cause.is::<Self>())
            }
            _ => false,
        }
    }
}

impl From<NotSent> for Status {
    fn from(error: NotSent) -> Self {
        let mut status = Self::unavailable(error.to_string());
        status.set_source(Arc::new(error));
        status
    }
}

/// PEM files of the client's side of TLS.
#[derive(Clone, Debug)]
struct TlsFiles {
    ca: Option<PathBuf>,
    /// The certificate and its key.
    identity: Option<(PathBuf, PathBuf)>,
}

impl TlsFiles {
    fn of(options: &EtcdOptions) -> Option<Self> {
        let identity = options.cert_file.clone().zip(options.key_file.clone());
        let ca = options.ca_file.clone();
        (ca.is_some() || identity.is_some()).then_some(Self { ca, identity })
    }

    fn load(&self) -> Result<ClientTlsConfig, CoordError> {
        let mut config = ClientTlsConfig::new();
        if let Some(path) = &self.ca {
            config = config.ca_certificate(Certificate::from_pem(read(path)?));
        }
        if let Some((certificate, key)) = &self.identity {
            config = config.identity(Identity::from_pem(read(certificate)?, read(key)?));
        }
        Ok(config)
    }
}

impl Members {
    /// Checks the URLs and reads the certificates; connects with the first call.
    ///
    /// # Errors
    /// [`CoordError::BadFile`] or [`CoordError::BadEndpoint`].
    pub(crate) fn of(options: &EtcdOptions) -> Result<Self, CoordError> {
        let tls = TlsFiles::of(options);
        let loaded = tls.as_ref().map(TlsFiles::load).transpose()?;
        for url in &options.endpoints {
            endpoint(url, loaded.clone())?;
        }
        if options.endpoints.is_empty() {
            return Err(bad_endpoint("", "no endpoint is given"));
        }
        let first = (random::seed() % options.endpoints.len() as u64) as usize;
        let state = Mutex::new(State { first, connection: None, tls: loaded });
        Ok(Self(Arc::new(Inner { urls: options.endpoints.clone(), tls, state })))
    }

    /// Returns the open connection, or begins to open one.
    fn connection(&self) -> Connecting {
        let mut state = self.0.state.lock().expect("no holder panics");
        if let Some(connection) = &state.connection {
            return connection.clone();
        }
        if let Some(files) = &self.0.tls {
            match files.load() {
                Ok(loaded) => state.tls = Some(loaded),
                Err(error) => warn!(%error, "cannot read certificates; using those read before"),
            }
        }
        let connection = connect(self.0.urls.clone(), state.first, state.tls.clone()).boxed();
        state.connection.insert(connection.shared()).clone()
    }

    /// Gives up a connection. Calls that are in progress on it go on; the next call opens another one.
    fn abandon(&self, failed: &Connecting) {
        let mut state = self.0.state.lock().expect("no holder panics");
        if !state.connection.as_ref().is_some_and(|it| it.ptr_eq(failed)) {
            return;
        }
        state.connection = None;
        if let Some(Ok(connection)) = failed.peek() {
            state.first = (connection.member + 1) % self.0.urls.len();
        }
    }

    /// Gives up the connection, if there is one: its member does not answer a stream.
    pub(crate) fn reconnect(&self) {
        let current = self.0.state.lock().expect("no holder panics").connection.clone();
        if let Some(connection) = current {
            self.abandon(&connection);
        }
    }

    async fn send(self, request: Request) -> Result<Response, Status> {
        let connecting = self.connection();
        let answer = match connecting.clone().await {
            Ok(connection) => ask(connection.channel, request).await,
            Err(error) => Err(error.into()),
        };
        let is_failure = match &answer {
            Ok(response) => is_unavailable(response.headers()),
            Err(_) => true,
        };
        if is_failure {
            self.abandon(&connecting);
        }
        answer
    }
}

impl Service<Request> for Members {
    type Response = Response;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Self::Future {
        self.clone().send(request).map_err(BoxError::from).boxed()
    }
}

async fn ask(channel: Channel, request: Request) -> Result<Response, Status> {
    match timeout(ANSWER_MAX, channel.oneshot(request)).await {
        Ok(Ok(response)) => Ok(response),
        Ok(Err(error)) if is_connect_error(&error) => Err(NotSent(reason(&error)).into()),
        Ok(Err(error)) => Err(Status::unavailable(reason(&error))),
        Err(_) => Err(Status::unavailable(format!("no answer within {ANSWER_MAX:?}"))),
    }
}

/// Connects to the member that answers first. Begins with `first`, and with each other a little later.
async fn connect(
    urls: Vec<String>,
    first: usize,
    tls: Option<ClientTlsConfig>,
) -> Result<Connection, NotSent> {
    let members = (0..urls.len()).map(|place| (first + place) % urls.len());
    let mut attempts: FuturesUnordered<_> = members
        .zip(0u32..)
        .map(|(member, place)| {
            let (url, tls) = (&urls[member], tls.clone());
            async move {
                sleep(STAGGER * place).await;
                let opened = open(url, tls).await;
                opened.map(|channel| Connection { member, channel }).map_err(|it| (member, it))
            }
        })
        .collect();
    let mut errors = Vec::new();
    while let Some(attempt) = attempts.next().await {
        match attempt {
            Ok(connection) => return Ok(connection),
            Err(error) => errors.push(error),
        }
    }
    errors.sort();
    Err(NotSent(match errors.as_slice() {
        [(_, reason)] => reason.clone(),
        several => several
            .iter()
            .map(|(member, reason)| format!("{}: {reason}", urls[*member]))
            .collect::<Vec<_>>()
            .join("; "),
    }))
}

async fn open(url: &str, tls: Option<ClientTlsConfig>) -> Result<Channel, String> {
    let endpoint = endpoint(url, tls).map_err(|error| error.to_string())?;
    let opening = async {
        let channel = connect_once(&endpoint).await.map_err(|error| reason(&error))?;
        // The kernel accepts connections for a process that hangs. Any answer, also an error, proves that it does not.
        let check = HealthCheckRequest::default();
        match HealthClient::new(channel.clone()).check(check).await {
            Err(status) if status.source().is_some() => Err(reason(&status)),
            Ok(_) | Err(_) => Ok(channel),
        }
    };
    match timeout(CONNECT_MAX, opening).await {
        Ok(opened) => opened,
        Err(_) => Err(format!("no answer within {CONNECT_MAX:?}")),
    }
}

fn endpoint(url: &str, tls: Option<ClientTlsConfig>) -> Result<Endpoint, CoordError> {
    let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|it| bad_endpoint(url, it))?;
    let endpoint = endpoint
        .connect_timeout(CONNECT_MAX)
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true);
    if !url.starts_with("https://") {
        return Ok(endpoint);
    }
    let secured = endpoint.tls_config(tls.unwrap_or_default());
    secured.map_err(|error| bad_endpoint(url, reason(&error)))
}

fn bad_endpoint(url: &str, reason: impl fmt::Display) -> CoordError {
    CoordError::BadEndpoint { endpoint: url.to_owned(), reason: reason.to_string() }
}

fn read(path: &Path) -> Result<Vec<u8>, CoordError> {
    std::fs::read(path).map_err(|error| CoordError::BadFile {
        path: path.display().to_string(),
        reason: error.to_string(),
    })
}

/// Returns whether a reply without a body says that the member cannot serve: it has no leader, or it is stopping.
fn is_unavailable(headers: &HeaderMap) -> bool {
    Status::from_header_map(headers).is_some_and(|status| status.code() == Code::Unavailable)
}

fn is_connect_error(error: &(dyn Error + 'static)) -> bool {
    causes(error).any(|cause| cause.is::<ConnectError>())
}

/// Returns the root cause of an error, which is more specific than its wrappers.
fn reason(error: &(dyn Error + 'static)) -> String {
    let deepest = causes(error).last().unwrap_or(error);
    match deepest.downcast_ref::<std::io::Error>() {
        Some(io) if io.kind() == std::io::ErrorKind::ConnectionRefused => {
            "connection refused".to_owned()
        }
        _ => deepest.to_string(),
    }
}

fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}
