//! The shorter way between two processes of one machine: a Unix socket beside the port.
//!
//! Sockets have names in the abstract namespace of Linux, which belongs to the network namespace: there is
//! no file to clean up, and a container of its own network sees none of them. On other systems nothing can
//! be bound there, and TCP is the only way.

use std::io;

use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tokio_util::either::Either;
use tracing::debug;

/// What tells a name in the abstract namespace from a path.
const ABSTRACT: char = '\0';

/// Listens at `name`.
///
/// # Errors
/// The system's.
pub(crate) fn listen(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind(format!("{ABSTRACT}{name}"))
}

/// Connections of processes of our own user, and of no other.
///
/// # Errors
/// The system's.
pub(crate) fn incoming(
    listener: UnixListener,
) -> io::Result<impl Stream<Item = io::Result<UnixStream>>> {
    let own = own_user()?;
    Ok(UnixListenerStream::new(listener).filter(move |stream| match stream {
        Ok(stream) => is_of(stream, own),
        Err(_) => true,
    }))
}

/// Connects to `name` on this machine, or else to `address` wherever that is.
///
/// # Errors
/// The system's.
pub(crate) async fn connect(
    name: &str,
    address: &str,
) -> io::Result<Either<UnixStream, TcpStream>> {
    match UnixStream::connect(format!("{ABSTRACT}{name}")).await {
        Ok(stream) if is_of(&stream, own_user()?) => Ok(Either::Left(stream)),
        Ok(_) | Err(_) => {
            debug!(address, "no Unix socket of ours; uses TCP");
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok(Either::Right(stream))
        }
    }
}

fn is_of(stream: &UnixStream, user: u32) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == user)
}

fn own_user() -> io::Result<u32> {
    let (one, _other) = UnixStream::pair()?;
    Ok(one.peer_cred()?.uid())
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use uuid::Uuid;

    use super::*;

    /// The socket is taken where it is, and the port where it is not, or not any more.
    #[tokio::test]
    async fn a_unix_socket_is_preferred_and_tcp_is_the_way_without_one() {
        let name = format!("steadfast-test-{}", Uuid::new_v4());
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = tcp.local_addr().unwrap().to_string();
        let listener = listen(&name).unwrap();
        assert!(listen(&name).is_err(), "nobody else takes the name meanwhile");
        let mut incoming = Box::pin(incoming(listener).unwrap());
        assert!(matches!(connect(&name, &address).await, Ok(Either::Left(_))));
        assert!(incoming.next().await.is_some_and(|it| it.is_ok()), "we are of our own user");
        drop(incoming);
        assert!(matches!(connect(&name, &address).await, Ok(Either::Right(_))));
        drop(tcp);
        assert!(connect(&name, &address).await.is_err());
    }
}
