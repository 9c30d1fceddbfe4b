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
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;
use tonic::transport::server::{Connected, TcpIncoming};
use tracing::{debug, warn};

use crate::refusals::{Refusal, refused};
use crate::role::Role;
use crate::tls::{Credentials, described};

/// Connections of one port at a time, if the process may open as many files; more wait in the kernel's
/// queue.
const CONNECTIONS_MAX: usize = 8192;

/// Files that are left for everything else.
const OTHER_FILES: usize = 256;

/// Connections whose sides have not agreed yet. Those who knock take no place of those who came in.
const AGREEING_MAX: usize = 512;

/// Longest time in which the two sides agree on a connection. Whoever only wants to see whether we are
/// there says nothing, and comes again.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

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
    /// It takes a place for as long as it lives.
    _place: Option<OwnedSemaphorePermit>,
}

/// A connection by TCP.
pub(crate) type Tcp = Either<TcpStream, TlsStream<TcpStream>>;

impl<S> Visitor<S> {
    /// One that takes nobody's place.
    pub(crate) fn new(stream: S, peer: Peer) -> Self {
        Self { stream, peer, _place: None }
    }
}

/// Connections to a port; by certificates, if we have some.
pub(crate) fn visitors(
    listener: TcpListener,
    keepalive: Duration,
    credentials: Option<Arc<Credentials>>,
) -> impl Stream<Item = io::Result<Visitor<Tcp>>> {
    let door = Door {
        incoming: TcpIncoming::from(listener)
            .with_nodelay(Some(true))
            .with_keepalive(Some(keepalive)),
        places: Arc::new(Semaphore::new(room())),
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
                accepted = accept(&mut self.incoming, &self.places),
                    if self.agreeing.len() < AGREEING_MAX => accepted,
            };
            let Some(credentials) = self.credentials.clone() else {
                let stream = Either::Left(stream);
                return Visitor { stream, peer: Peer::Unasked, _place: Some(place) };
            };
            self.agreeing.spawn(async move {
                let agreed = agree(stream, TlsAcceptor::from(credentials.current().server.clone()));
                let (stream, peer) = agreed.await?;
                Some(Visitor { stream: Either::Right(stream), peer, _place: Some(place) })
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
) -> (TcpStream, OwnedSemaphorePermit) {
    let place = places.clone().acquire_owned().await.expect("the semaphore is never closed");
    loop {
        match incoming.next().await {
            Some(Ok(stream)) => return (stream, place),
            Some(Err(error)) => {
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
            None => std::future::pending().await,
        }
    }
}

/// Agrees on a connection with its other side; nothing if that is not to be had.
pub async fn agree(
    stream: TcpStream,
    acceptor: TlsAcceptor,
) -> Option<(TlsStream<TcpStream>, Peer)> {
    let address = stream.peer_addr().ok()?;
    match tokio::time::timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => {
            let peer = peer(&stream);
            Some((stream, peer))
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

fn peer(stream: &TlsStream<TcpStream>) -> Peer {
    let (_, connection) = stream.get_ref();
    let chain = connection.peer_certificates().unwrap_or_default();
    // The handshake has verified it; one that cannot be read has no role.
    let roles = chain.first().and_then(|own| described(own).ok()).map(|it| it.roles);
    Peer::Known(roles.unwrap_or_default().into())
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
