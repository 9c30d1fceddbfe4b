//! Accepts connections up to a limit, and attaches to each the roles of its peer.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::stream::{self, Stream, StreamExt};
use nix::sys::resource::{Resource, getrlimit};
use steadfast_auth::{Peer, Refusal, refused};
use steadfast_host::time::unix_ms;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;
use tonic::transport::server::{Connected, TcpIncoming};
use tracing::{debug, warn};

use crate::peers::{Admitted, Peers};
use crate::tls::{Described, TlsIdentity, described};

/// Concurrent connections of one port, if the limit on open files allows; more wait in the kernel's
/// accept queue.
const CONNECTIONS_MAX: usize = 8192;

/// Divisor of the connection limit that gives the limit for one address.
const SHARES: usize = 4;

/// File descriptors reserved for everything else.
const OTHER_FILES: usize = 256;

/// Concurrent TLS handshakes.
const HANDSHAKES_MAX: usize = 512;

/// Timeout of a TLS handshake. A probe opens a connection and sends nothing; it reconnects after that.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// Upper bound of the timer that ends a connection when its certificate expires.
const TIMER_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// Delay after an accept error, such as running out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// An accepted connection.
pub(crate) struct Connection<S> {
    stream: S,
    peer: Peer,
    /// Completes when the peer's certificate expires, which ends the connection.
    over: Option<Pin<Box<Sleep>>>,
    /// Counts against the connection limits until the connection closes.
    _permits: Option<Permits>,
}

/// Permits of one connection: of the port and of the peer's address.
struct Permits {
    _port: OwnedSemaphorePermit,
    _address: Admitted,
}

/// A TCP connection, with or without TLS.
pub(crate) type Tcp = Either<TcpStream, TlsStream<TcpStream>>;

impl<S> Connection<S> {
    /// Creates a connection that counts against no limit and does not expire.
    pub(crate) fn new(stream: S, peer: Peer) -> Self {
        Self { stream, peer, over: None, _permits: None }
    }
}

/// Returns the connections to a port; with mutual TLS if `identity` has credentials.
pub(crate) fn connections(
    listener: TcpListener,
    keepalive: Duration,
    identity: TlsIdentity,
) -> impl Stream<Item = io::Result<Connection<Tcp>>> {
    let limit = connection_limit();
    let acceptor = Acceptor {
        incoming: TcpIncoming::from(listener)
            .with_nodelay(Some(true))
            .with_keepalive(Some(keepalive)),
        permits: Arc::new(Semaphore::new(limit)),
        peers: Peers::new(limit / SHARES),
        handshakes: JoinSet::new(),
        identity,
    };
    stream::unfold(acceptor, |mut acceptor| async move {
        let connection = acceptor.next().await;
        Some((Ok(connection), acceptor))
    })
}

struct Acceptor {
    incoming: TcpIncoming,
    permits: Arc<Semaphore>,
    peers: Peers,
    /// TLS handshakes in progress.
    handshakes: JoinSet<Option<Connection<Tcp>>>,
    identity: TlsIdentity,
}

impl Acceptor {
    async fn next(&mut self) -> Connection<Tcp> {
        loop {
            let (stream, permits) = tokio::select! {
                biased;
                Some(accepted) = self.handshakes.join_next() => match accepted {
                    Ok(Some(connection)) => return connection,
                    Ok(None) => continue,
                    Err(error) => {
                        warn!(%error, "a TLS handshake task failed");
                        continue;
                    }
                },
                accepted = accept(&mut self.incoming, &self.permits, &self.peers),
                    if self.handshakes.len() < HANDSHAKES_MAX => accepted,
            };
            let Some(credentials) = self.identity.credentials() else {
                let stream = Either::Left(stream);
                return Connection {
                    stream,
                    peer: Peer::Anonymous,
                    over: None,
                    _permits: Some(permits),
                };
            };
            self.handshakes.spawn(async move {
                let accepted = handshake(stream, TlsAcceptor::from(credentials.server.clone()));
                let Accepted { stream, peer, left } = accepted.await?;
                let over = left.map(|left| Box::pin(sleep(left)));
                Some(Connection {
                    stream: Either::Right(stream),
                    peer,
                    over,
                    _permits: Some(permits),
                })
            });
        }
    }
}

/// Returns the connection limit of one port, derived from the limit on open files.
fn connection_limit() -> usize {
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    let files = usize::try_from(files).unwrap_or(usize::MAX);
    files.saturating_sub(OTHER_FILES).clamp(OTHER_FILES, CONNECTIONS_MAX)
}

async fn accept(
    incoming: &mut TcpIncoming,
    permits: &Arc<Semaphore>,
    peers: &Peers,
) -> (TcpStream, Permits) {
    let one = permits.clone().acquire_owned().await.expect("the semaphore is never closed");
    loop {
        match incoming.next().await {
            Some(Ok(stream)) => {
                let Ok(address) = stream.peer_addr() else { continue };
                let Some(admitted) = peers.admit(address) else { continue };
                return (stream, Permits { _port: one, _address: admitted });
            }
            Some(Err(error)) => {
                warn!(%error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
            }
            None => std::future::pending().await,
        }
    }
}

/// A connection after its TLS handshake.
#[derive(Debug)]
pub struct Accepted {
    pub stream: TlsStream<TcpStream>,
    pub peer: Peer,
    /// Time until the peer's certificate expires, if it has one.
    pub left: Option<Duration>,
}

/// Performs the TLS handshake; returns `None` if it fails.
pub async fn handshake(stream: TcpStream, acceptor: TlsAcceptor) -> Option<Accepted> {
    let address = stream.peer_addr().ok()?;
    match tokio::time::timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => {
            let known = certificate(&stream);
            let left = known.as_ref().map(|it| time_until(it.not_after));
            let peer = Peer::Authenticated(known.map(|it| it.roles).unwrap_or_default().into());
            Some(Accepted { stream, peer, left })
        }
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            debug!(%address, "connection closed before the TLS handshake");
            None
        }
        Ok(Err(error)) => {
            refused(&Refusal::Connection { address, reason: error.to_string() });
            None
        }
        Err(_) => {
            debug!(%address, "TLS handshake timed out");
            None
        }
    }
}

/// Returns the peer's certificate, which the handshake has verified. One that cannot be parsed counts as
/// none.
fn certificate(stream: &TlsStream<TcpStream>) -> Option<Described> {
    let (_, connection) = stream.get_ref();
    described(connection.peer_certificates()?.first()?).ok()
}

fn time_until(unix_seconds: i64) -> Duration {
    let now = i64::try_from(unix_ms() / 1000).unwrap_or(i64::MAX);
    let left = u64::try_from(unix_seconds.saturating_sub(now)).unwrap_or(0);
    Duration::from_secs(left).min(TIMER_MAX)
}

impl<S> Connected for Connection<S> {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.over.as_mut().is_some_and(|over| over.as_mut().poll(context).is_ready()) {
            let why = "the peer's certificate of this connection has expired";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::PermissionDenied, why)));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
