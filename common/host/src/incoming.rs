//! Connections as they come: as many as there is room for, each with what its other side is.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::stream::{self, Stream, StreamExt};
use nix::sys::resource::{Resource, getrlimit};
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
use crate::refusals::{Refusal, refused};
use crate::role::Role;
use crate::time::unix_ms;
use crate::tls::{Credentials, Described, described};

/// Connections of one port at a time, if the process may open as many files; more wait in the kernel's
/// queue.
const CONNECTIONS_MAX: usize = 8192;

/// One machine may have a share of them: the whole divided by this.
const SHARES: usize = 4;

/// Files that are left for everything else.
const OTHER_FILES: usize = 256;

/// Connections whose sides have not agreed yet. Those who knock take no place of those who came in.
const AGREEING_MAX: usize = 512;

/// Longest time in which the two sides agree on a connection. Whoever only wants to see whether we are
/// there says nothing, and comes again.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// A connection's life is looked after no further ahead.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Pause after a connection could not be accepted (out of file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What is at the other side of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Nobody asked.
    Unasked,
    /// What its certificate says; nothing, if it has none.
    Known(Arc<[Role]>),
}

impl Peer {
    /// Whoever has exactly this role.
    pub fn of(role: Role) -> Self {
        Self::Known(Arc::from([role]))
    }
}

/// A connection that was let in.
pub(crate) struct Visitor<S> {
    stream: S,
    peer: Peer,
    /// When the certificate that it came with is over, and the connection with it.
    over: Option<Pin<Box<Sleep>>>,
    /// It takes a place for as long as it lives.
    _place: Option<Place>,
}

/// A place of the port, and one of those that the machine may take.
struct Place {
    _one: OwnedSemaphorePermit,
    _of_its_share: Admitted,
}

/// A connection by TCP.
pub(crate) type Tcp = Either<TcpStream, TlsStream<TcpStream>>;

impl<S> Visitor<S> {
    /// One that takes nobody's place.
    pub(crate) fn new(stream: S, peer: Peer) -> Self {
        Self { stream, peer, over: None, _place: None }
    }
}

/// Connections to a port; by certificates, if we have some.
pub(crate) fn visitors(
    listener: TcpListener,
    keepalive: Duration,
    credentials: Option<Arc<Credentials>>,
) -> impl Stream<Item = io::Result<Visitor<Tcp>>> {
    let room = room();
    let door = Door {
        incoming: TcpIncoming::from(listener)
            .with_nodelay(Some(true))
            .with_keepalive(Some(keepalive)),
        places: Arc::new(Semaphore::new(room)),
        peers: Peers::new(room / SHARES),
        agreeing: JoinSet::new(),
        credentials,
    };
    stream::unfold(door, |mut door| async move {
        let visitor = door.next().await;
        Some((Ok(visitor), door))
    })
}

struct Door {
    incoming: TcpIncoming,
    places: Arc<Semaphore>,
    peers: Peers,
    /// Connections whose sides have not agreed yet.
    agreeing: JoinSet<Option<Visitor<Tcp>>>,
    credentials: Option<Arc<Credentials>>,
}

impl Door {
    async fn next(&mut self) -> Visitor<Tcp> {
        loop {
            let (stream, place) = tokio::select! {
                biased;
                Some(agreed) = self.agreeing.join_next() => match agreed {
                    Ok(Some(visitor)) => return visitor,
                    Ok(None) => continue,
                    Err(error) => {
                        warn!(%error, "a handshake broke");
                        continue;
                    }
                },
                accepted = accept(&mut self.incoming, &self.places, &self.peers),
                    if self.agreeing.len() < AGREEING_MAX => accepted,
            };
            let Some(credentials) = self.credentials.clone() else {
                let stream = Either::Left(stream);
                return Visitor { stream, peer: Peer::Unasked, over: None, _place: Some(place) };
            };
            self.agreeing.spawn(async move {
                let agreed = agree(stream, TlsAcceptor::from(credentials.current().server.clone()));
                let Agreed { stream, peer, left } = agreed.await?;
                let over = left.map(|left| Box::pin(sleep(left)));
                Some(Visitor { stream: Either::Right(stream), peer, over, _place: Some(place) })
            });
        }
    }
}

/// As many connections as there are files to spare.
fn room() -> usize {
    let files = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft);
    let files = usize::try_from(files).unwrap_or(usize::MAX);
    files.saturating_sub(OTHER_FILES).clamp(OTHER_FILES, CONNECTIONS_MAX)
}

async fn accept(
    incoming: &mut TcpIncoming,
    places: &Arc<Semaphore>,
    peers: &Peers,
) -> (TcpStream, Place) {
    let one = places.clone().acquire_owned().await.expect("the semaphore is never closed");
    loop {
        match incoming.next().await {
            Some(Ok(stream)) => {
                let Ok(address) = stream.peer_addr() else { continue };
                let Some(admitted) = peers.admit(address) else { continue };
                return (stream, Place { _one: one, _of_its_share: admitted });
            }
            Some(Err(error)) => {
                warn!(%error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
            }
            None => std::future::pending().await,
        }
    }
}

/// A connection whose sides have agreed.
#[derive(Debug)]
pub struct Agreed {
    pub stream: TlsStream<TcpStream>,
    pub peer: Peer,
    /// For how long the other side's certificate still counts, if it has one.
    pub left: Option<Duration>,
}

/// Agrees on a connection with its other side; nothing if that is not to be had.
pub async fn agree(stream: TcpStream, acceptor: TlsAcceptor) -> Option<Agreed> {
    let address = stream.peer_addr().ok()?;
    match tokio::time::timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => {
            let known = certificate(&stream);
            let left = known.as_ref().map(|it| time_until(it.not_after));
            let peer = Peer::Known(known.map(|it| it.roles).unwrap_or_default().into());
            Some(Agreed { stream, peer, left })
        }
        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            debug!(%address, "somebody looked whether we are here");
            None
        }
        Ok(Err(error)) => {
            refused(&Refusal::Connection { address, reason: error.to_string() });
            None
        }
        Err(_) => {
            debug!(%address, "somebody said nothing");
            None
        }
    }
}

/// The other side's certificate. The handshake has verified it; one that cannot be read counts as none.
fn certificate(stream: &TlsStream<TcpStream>) -> Option<Described> {
    let (_, connection) = stream.get_ref();
    described(connection.peer_certificates()?.first()?).ok()
}

fn time_until(unix_seconds: i64) -> Duration {
    let now = i64::try_from(unix_ms() / 1000).unwrap_or(i64::MAX);
    let left = u64::try_from(unix_seconds.saturating_sub(now)).unwrap_or(0);
    Duration::from_secs(left).min(LONGEST)
}

impl<S> Connected for Visitor<S> {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Visitor<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.over.as_mut().is_some_and(|over| over.as_mut().poll(context).is_ready()) {
            let why = "the certificate that this connection began with is over";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::PermissionDenied, why)));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Visitor<S> {
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
