//! The shorter way between two processes of one machine: a Unix socket beside the port.
//!
//! Sockets have names in the abstract namespace of Linux, which belongs to the network namespace: there is
//! no file to clean up, and a container of its own network sees none of them. On other systems nothing can
//! be bound there, and TCP is the only way.

use std::io;

use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};

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

/// Connects to `name`, if a process of our own user listens there.
pub(crate) async fn connect(name: &str) -> Option<UnixStream> {
    let stream = UnixStream::connect(format!("{ABSTRACT}{name}")).await.ok()?;
    is_of(&stream, own_user().ok()?).then_some(stream)
}

fn is_of(stream: &UnixStream, user: u32) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == user)
}

fn own_user() -> io::Result<u32> {
    let (one, _other) = UnixStream::pair()?;
    Ok(one.peer_cred()?.uid())
}
