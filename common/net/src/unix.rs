//! Connections between processes on the same machine, which are faster than TCP: through shared memory that
//! is set up over a Unix socket.
//!
//! Socket names are in Linux's abstract namespace, which is part of the network namespace: there is no
//! file to clean up, and a container with its own network does not see them. On other systems binding
//! fails, and only TCP is used.

use std::io;
use std::time::Duration;

use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tracing::debug;

use crate::CONNECT_MAX;
use crate::shared_memory::{self, Local};

/// How long a server may take to answer, so that there is time left for TCP.
const ANSWER_MAX: Duration = CONNECT_MAX.checked_div(4).expect("not by zero");

/// Pause after an error: without free descriptors, every attempt fails at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

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
) -> io::Result<impl Stream<Item = io::Result<Local>>> {
    let own = own_user()?;
    let sockets = UnixListenerStream::new(listener).then(async |socket| {
        if socket.is_err() {
            sleep(ACCEPT_PAUSE).await;
        }
        socket
    });
    Ok(sockets.filter_map(move |socket| match socket {
        // A client that has gone already concerns nobody else.
        Ok(socket) if is_of(&socket, own) => shared_memory::accept(socket).ok().map(Ok),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    }))
}

/// Connects to `name` if a process of the same user listens there and answers.
pub(crate) async fn connect(name: &str) -> Option<Local> {
    let socket = UnixStream::connect(format!("{ABSTRACT}{name}")).await.ok()?;
    if !is_of(&socket, own_user().ok()?) {
        return None;
    }
    match timeout(ANSWER_MAX, shared_memory::connect(socket)).await {
        Ok(Ok(local)) => Some(local),
        Ok(Err(error)) => {
            debug!(%error, name, "cannot use a Unix socket");
            None
        }
        Err(_) => None,
    }
}

fn is_of(stream: &UnixStream, user: u32) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == user)
}

fn own_user() -> io::Result<u32> {
    let (one, _other) = UnixStream::pair()?;
    Ok(one.peer_cred()?.uid())
}
