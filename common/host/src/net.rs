//! Ports, and connections to others: gRPC over HTTP/2, or whatever a simulation puts in its place.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, OptionFuture, try_join};
use hyper_util::rt::TokioIo;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::{Channel, Endpoint, Server};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Service};

use crate::gate::{Access, GateLayer};
use crate::incoming::{Peer, Visitor, visitors};
use crate::role::Role;
use crate::simulated::present;
use crate::task::{Task, spawn};
use crate::{tls, traces, unix, way};

/// HTTP/2 flow-control window of one stream: enough for 10 Gbit/s over 3 ms. Bytes beyond it wait at the
/// sender; larger ones only fill caches here.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;

/// HTTP/2 flow-control window of one connection.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// Largest HTTP/2 frame; large frames keep the cost per byte low.
const FRAME_BYTES: u32 = 1 << 20;

/// Longest time for a connection to open.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// Requests in flight on one connection; more wait.
const STREAMS_MAX: u32 = 1024;

/// Bytes of a request's headers.
const HEADER_BYTES_MAX: u32 = 16 << 10;

/// Time between pings on a connection, and the wait for their answer: a peer that vanished without
/// a word is noticed within their sum.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// A connection that a simulation makes.
pub type SimulatedWire = BoxCloneSyncService<Request, Response, BoxError>;

/// A way to another process, for generated clients. Connects when it is first used, and again
/// whenever that is needed. Cheap to clone.
#[derive(Clone)]
pub struct Wire(Kind);

#[derive(Clone)]
enum Kind {
    Http2(Channel),
    Simulated(SimulatedWire),
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Wire")
    }
}

impl Service<Request> for Wire {
    type Response = Response;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match &mut self.0 {
            Kind::Http2(channel) => channel.poll_ready(context).map_err(BoxError::from),
            Kind::Simulated(wire) => wire.poll_ready(context),
        }
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        match &mut self.0 {
            Kind::Http2(channel) => {
                traces::send(request.headers_mut());
                channel.call(request).map(|it| it.map_err(BoxError::from)).boxed()
            }
            Kind::Simulated(wire) => Pin::from(Box::new(wire.call(request))),
        }
    }
}

/// A way to the process of `role` at `host:port`, with windows for large tensors and pings that notice a
/// peer that is gone. If we have certificates it is not used before the other side has shown one of that
/// role.
///
/// # Errors
/// A sentence, if that is no address.
pub fn dial(address: &str, role: Role) -> Result<Wire, String> {
    if let Some(wire) = simulated(address) {
        return Ok(Wire(Kind::Simulated(wire)));
    }
    let endpoint = endpoint(address)?;
    let Some(credentials) = tls::credentials() else {
        return Ok(Wire(Kind::Http2(endpoint.connect_lazy())));
    };
    let address = address.to_owned();
    let connector = tower::service_fn(move |_: http::Uri| {
        let (address, credentials) = (address.clone(), credentials.clone());
        async move { way::tls(&address, role, &credentials).await.map(TokioIo::new) }
    });
    Ok(Wire(Kind::Http2(endpoint.connect_with_connector_lazy(connector))))
}

/// The same, by the Unix socket `name` where that is of this machine and user (whom the system vouches
/// for), and otherwise to `host:port`.
///
/// # Errors
/// As [`dial`].
pub fn dial_unix_or_tcp(address: &str, name: &str, role: Role) -> Result<Wire, String> {
    if let Some(wire) = simulated(address) {
        return Ok(Wire(Kind::Simulated(wire)));
    }
    let endpoint = endpoint(address)?;
    let (address, name) = (address.to_owned(), name.to_owned());
    let connector = tower::service_fn(move |_: http::Uri| {
        let (address, name) = (address.clone(), name.clone());
        async move { way::unix_or_tcp(&name, &address, role).await.map(TokioIo::new) }
    });
    Ok(Wire(Kind::Http2(endpoint.connect_with_connector_lazy(connector))))
}

fn endpoint(address: &str) -> Result<Endpoint, String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| format!("`{address}`: {error}"))?
        .connect_timeout(CONNECT_MAX)
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_TIMEOUT);
    Ok(endpoint)
}

/// The same for a client that brings its own HTTP/2, while a simulation runs; otherwise nothing.
pub fn simulated(address: &str) -> Option<SimulatedWire> {
    present().map(|host| host.dial(address))
}

/// A port that is bound, and not served yet.
#[derive(Debug)]
pub struct Port(Bound);

#[derive(Debug)]
enum Bound {
    Tcp {
        listener: TcpListener,
        /// For processes of this machine.
        unix: Option<UnixListener>,
    },
    Simulated(SimulatedPort),
}

/// Closes when it is dropped, as a socket does.
#[derive(Debug)]
pub struct SimulatedPort(SocketAddr);

impl Drop for SimulatedPort {
    fn drop(&mut self) {
        if let Some(host) = present() {
            host.close(self.0);
        }
    }
}

impl Port {
    /// Listens on `address`; port 0 picks a free one.
    ///
    /// # Errors
    /// The system's.
    pub async fn bind(address: SocketAddr) -> io::Result<Self> {
        Ok(Self(match present() {
            Some(host) => Bound::Simulated(SimulatedPort(host.listen())),
            None => Bound::Tcp { listener: TcpListener::bind(address).await?, unix: None },
        }))
    }

    /// The address that was bound.
    ///
    /// # Errors
    /// The system's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            Bound::Tcp { listener, .. } => listener.local_addr(),
            Bound::Simulated(port) => Ok(port.0),
        }
    }

    /// Listens at a Unix socket as well, for processes of this machine and user; says whether that is
    /// possible here.
    pub fn also_unix(&mut self, name: &str) -> bool {
        match &mut self.0 {
            Bound::Tcp { unix, .. } => {
                *unix = unix::listen(name).ok();
                unix.is_some()
            }
            Bound::Simulated(_) => false,
        }
    }

    /// The socket, for a server of another kind; a simulated port just stays open.
    ///
    /// # Errors
    /// The simulated port.
    pub fn into_tcp(self) -> Result<TcpListener, SimulatedPort> {
        match self.0 {
            Bound::Tcp { listener, .. } => Ok(listener),
            Bound::Simulated(port) => Err(port),
        }
    }

    /// Answers calls until `stop`, then lets those in flight end. If we have certificates, only to those
    /// who may make them by `access`. The largest message is a setting of each service
    /// (`max_decoding_message_size`).
    pub fn serve(
        self,
        routes: Routes,
        access: Access,
        stop: CancellationToken,
    ) -> Task<Result<(), tonic::transport::Error>> {
        match self.0 {
            Bound::Tcp { listener, unix } => {
                let credentials = tls::credentials();
                let neighbour = match &credentials {
                    // Somebody of our own user; no other process has a use for that way.
                    Some(_) => Peer::of(Role::Trainer),
                    None => Peer::Unasked,
                };
                let tcp = server().layer(GateLayer(access)).add_routes(routes.clone());
                let incoming = visitors(listener, PING_EVERY, credentials);
                let tcp =
                    tcp.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
                let incoming = unix.and_then(|listener| unix::incoming(listener).ok());
                let unix = incoming.map(|incoming| {
                    let unix = server().layer(GateLayer(access)).add_routes(routes);
                    let visit = move |stream| Visitor::new(stream, neighbour.clone());
                    let incoming = incoming.map(move |it| it.map(&visit));
                    unix.serve_with_incoming_shutdown(incoming, stop.cancelled_owned())
                });
                let unix = OptionFuture::from(unix).map(|it| it.unwrap_or(Ok(())));
                spawn(async move { try_join(tcp, unix).await.map(|_| ()) })
            }
            Bound::Simulated(port) => {
                let serving = present().map(|host| host.serve(port.0, routes, stop));
                spawn(async move {
                    let _port = port;
                    if let Some(serving) = serving {
                        serving.await;
                    }
                    Ok(())
                })
            }
        }
    }
}

fn server() -> Server {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        .http2_max_header_list_size(HEADER_BYTES_MAX)
        .http2_keepalive_interval(Some(PING_EVERY))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
}

/// What came of trying to open a connection.
pub enum Knock {
    /// It is open; the future completes when the other side closes it. Whatever is sent over it
    /// means nothing.
    Open(BoxFuture<'static, ()>),
    /// The host says that nobody listens there, or that there is no such host.
    Refused,
    /// Nothing can be said.
    Silent,
}

/// Tries to open a connection to `host:port`.
pub async fn knock(address: &str) -> Knock {
    if let Some(host) = present() {
        return host.knock(address).await;
    }
    match tokio::time::timeout(CONNECT_MAX, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => Knock::Open(closed(stream).boxed()),
        Ok(Err(error)) => match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::HostUnreachable => Knock::Refused,
            _ => Knock::Silent,
        },
        Err(_) => Knock::Silent,
    }
}

async fn closed(mut stream: TcpStream) {
    let mut bytes = [0; 64];
    while let Ok(1..) = stream.read(&mut bytes).await {}
}
