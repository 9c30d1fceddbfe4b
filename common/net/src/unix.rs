//! Unix sockets for processes on the same machine, which are faster than TCP.
//!
//! Socket names are in Linux's abstract namespace, which is part of the network namespace: there is no
//! file to clean up, and a container with its own network does not see them. On other systems binding
//! fails, and only TCP is used.

use std::io;

use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};

/// Prefix of names in the abstract namespace.
const ABSTRACT: char = '\0';

/// Listens on `name`.
///
/// # Errors
/// The I/O error of the system.
pub(crate) fn listen(name: &str) -> io::Result<UnixListener> {
    UnixListener::bind(format!("{ABSTRACT}{name}"))
}

/// Returns connections from processes of the same user; others are dropped.
///
/// # Errors
/// The I/O error of the system.
pub(crate) fn incoming(
    listener: UnixListener,
) -> io::Result<impl Stream<Item = io::Result<UnixStream>>> {
    let own = own_user()?;
    Ok(UnixListenerStream::new(listener).filter(move |stream| match stream {
        Ok(stream) => is_of(stream, own),
        Err(_) => true,
    }))
}

/// Connects to `name` if a process of the same user listens there.
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
