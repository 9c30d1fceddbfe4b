//! Server ports and client channels: gRPC over HTTP/2, or a simulated network.

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
use tonic::transport::{self, Endpoint, Server};
use tower::util::BoxCloneSyncService;
use tower::{BoxError, Service};

use crate::gate::{Access, GateLayer};
use crate::incoming::{Peer, Visitor, visitors};
use crate::role::Role;
use crate::simulated::present;
use crate::task::{Task, spawn};
use crate::{connect, tls, traces, unix};

/// HTTP/2 flow-control window of one stream: enough for 10 Gbit/s over 3 ms. Bytes beyond it wait at the
/// sender; a larger window only fills caches at the receiver.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;

/// HTTP/2 flow-control window of one connection.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// Largest HTTP/2 frame; large frames keep the cost per byte low.
const FRAME_BYTES: u32 = 1 << 20;

/// Timeout for opening a connection.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// Requests in flight on one connection; more wait.
const STREAMS_MAX: u32 = 1024;

/// Maximum bytes of a request's headers.
const HEADER_BYTES_MAX: u32 = 16 << 10;

/// Interval of pings on a connection, and the timeout for their reply: a peer that disappears without
/// closing the connection is detected within their sum.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

type Request = http::Request<Body>;
type Response = http::Response<Body>;

/// A channel of a simulated network.
pub type SimulatedChannel = BoxCloneSyncService<Request, Response, BoxError>;

/// A channel to another process, for generated clients. Connects on first use and reconnects when
/// needed. Cheap to clone.
#[derive(Clone)]
pub struct Channel(Kind);

#[derive(Clone)]
enum Kind {
    Http2(transport::Channel),
    Simulated(SimulatedChannel),
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Channel")
    }
}

impl Service<Request> for Channel {
    type Response = Response;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match &mut self.0 {
            Kind::Http2(channel) => channel.poll_ready(context).map_err(BoxError::from),
            Kind::Simulated(channel) => channel.poll_ready(context),
        }
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        match &mut self.0 {
            Kind::Http2(channel) => {
                traces::send(request.headers_mut());
                channel.call(request).map(|it| it.map_err(BoxError::from)).boxed()
            }
            Kind::Simulated(channel) => Pin::from(Box::new(channel.call(request))),
        }
    }
}

/// Returns a channel to the process of `role` at `host:port`, with windows for large tensors and pings
/// that detect a dead peer. If this process has credentials, the peer must present a certificate of that
/// role.
///
/// # Errors
/// A message, if the address is invalid.
pub fn dial(address: &str, role: Role) -> Result<Channel, String> {
    if let Some(channel) = simulated(address) {
        return Ok(Channel(Kind::Simulated(channel)));
    }
    let endpoint = endpoint(address)?;
    let Some(credentials) = tls::credentials() else {
        return Ok(Channel(Kind::Http2(endpoint.connect_lazy())));
    };
    let address = address.to_owned();
    let connector = tower::service_fn(move |_: http::Uri| {
        let (address, credentials) = (address.clone(), credentials.clone());
        async move { connect::tls(&address, role, &credentials).await.map(TokioIo::new) }
    });
    Ok(Channel(Kind::Http2(endpoint.connect_with_connector_lazy(connector))))
}

/// Returns a channel as [`dial`] does, over the Unix socket `name` if a process of this machine and user
/// listens there (the kernel verifies the user), and to `host:port` otherwise.
///
/// # Errors
/// As [`dial`].
pub fn dial_unix_or_tcp(address: &str, name: &str, role: Role) -> Result<Channel, String> {
    if let Some(channel) = simulated(address) {
        return Ok(Channel(Kind::Simulated(channel)));
    }
    let endpoint = endpoint(address)?;
    let (address, name) = (address.to_owned(), name.to_owned());
    let connector = tower::service_fn(move |_: http::Uri| {
        let (address, name) = (address.clone(), name.clone());
        async move { connect::unix_or_tcp(&name, &address, role).await.map(TokioIo::new) }
    });
    Ok(Channel(Kind::Http2(endpoint.connect_with_connector_lazy(connector))))
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

/// Returns a simulated channel for a client with its own HTTP/2 implementation, or `None` outside a
/// simulation.
pub fn simulated(address: &str) -> Option<SimulatedChannel> {
    present().map(|host| host.dial(address))
}

/// A bound port that is not served yet.
#[derive(Debug)]
pub struct Port(Bound);

#[derive(Debug)]
enum Bound {
    Tcp {
        listener: TcpListener,
        /// For processes on this machine.
        unix: Option<UnixListener>,
    },
    Simulated(SimulatedPort),
}

/// A simulated port; closes when it is dropped, as a socket does.
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
    /// Listens on `address`; port 0 picks a free port.
    ///
    /// # Errors
    /// The I/O error of the system.
    pub async fn bind(address: SocketAddr) -> io::Result<Self> {
        Ok(Self(match present() {
            Some(host) => Bound::Simulated(SimulatedPort(host.listen())),
            None => Bound::Tcp { listener: TcpListener::bind(address).await?, unix: None },
        }))
    }

    /// Returns the bound address.
    ///
    /// # Errors
    /// The I/O error of the system.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.0 {
            Bound::Tcp { listener, .. } => listener.local_addr(),
            Bound::Simulated(port) => Ok(port.0),
        }
    }

    /// Listens on a Unix socket as well, for processes of this machine and user; returns whether that
    /// succeeded.
    pub fn also_unix(&mut self, name: &str) -> bool {
        match &mut self.0 {
            Bound::Tcp { unix, .. } => {
                *unix = unix::listen(name).ok();
                unix.is_some()
            }
            Bound::Simulated(_) => false,
        }
    }

    /// Returns the listening socket, for a server of another protocol.
    ///
    /// # Errors
    /// Returns a simulated port, which has no socket.
    pub fn into_tcp(self) -> Result<TcpListener, SimulatedPort> {
        match self.0 {
            Bound::Tcp { listener, .. } => Ok(listener),
            Bound::Simulated(port) => Err(port),
        }
    }

    /// Serves calls until `stop`, then waits for those in flight. If this process has credentials,
    /// `access` decides which roles may make a call. Each service limits the size of messages itself
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
                    // The peer runs as the same user; only trainers use the Unix socket.
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

/// Outcome of [`probe`].
pub enum Probe {
    /// The connection is open; the future completes when the peer closes it. Bytes that it sends are
    /// discarded.
    Open(BoxFuture<'static, ()>),
    /// No process listens on the port, or the host is unreachable.
    Refused,
    /// Unknown: no answer, or another error.
    Silent,
}

/// Tries to open a connection to `host:port`.
pub async fn probe(address: &str) -> Probe {
    if let Some(host) = present() {
        return host.probe(address).await;
    }
    match tokio::time::timeout(CONNECT_MAX, TcpStream::connect(address)).await {
        Ok(Ok(stream)) => Probe::Open(closed(stream).boxed()),
        Ok(Err(error)) => match error.kind() {
            io::ErrorKind::ConnectionRefused | io::ErrorKind::HostUnreachable => Probe::Refused,
            _ => Probe::Silent,
        },
        Err(_) => Probe::Silent,
    }
}

async fn closed(mut stream: TcpStream) {
    let mut bytes = [0; 64];
    while let Ok(1..) = stream.read(&mut bytes).await {}
}
