//! Client connections to other processes.

use std::io;
use std::net::SocketAddr;

use rustls::pki_types::ServerName;
use steadfast_common::role::Role;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;
use tracing::{debug, warn};

use crate::CONNECT_MAX;
use crate::shared_memory::Local;
use crate::tls::{Loaded, TlsIdentity};
use crate::unix;

/// A TCP connection, with or without TLS.
type TcpOrTls = Either<TcpStream, TlsStream<TcpStream>>;

/// Connects through the Unix socket `name` if a process of the same machine and user listens there, and otherwise as
/// [`tcp_or_tls`] does.
///
/// # Errors
/// An I/O error, or a failed TLS handshake.
pub(crate) async fn unix_or_tcp(
    name: &str,
    address: &str,
    role: Role,
    identity: &TlsIdentity,
) -> io::Result<Either<Local, TcpOrTls>> {
    if let Some(stream) = unix::connect(name).await {
        return Ok(Either::Left(stream));
    }
    debug!(address, "no Unix socket of the same user; using TCP");
    tcp_or_tls(address, role, identity).await.map(Either::Right)
}

/// Connects to a process of `role` at `address`; with TLS if `identity` has credentials.
///
/// # Errors
/// An I/O error, or a failed TLS handshake.
pub(crate) async fn tcp_or_tls(
    address: &str,
    role: Role,
    identity: &TlsIdentity,
) -> io::Result<TcpOrTls> {
    Ok(match identity.credentials() {
        None => Either::Left(tcp(address).await?),
        Some(credentials) => Either::Right(tls(address, role, &credentials).await?),
    })
}

/// Performs the handshake with a process that must present a certificate of `role`.
async fn tls(address: &str, role: Role, credentials: &Loaded) -> io::Result<TlsStream<TcpStream>> {
    let stream = tcp(address).await?;
    let name = ServerName::try_from(role.dns_name()).expect("it is a DNS name");
    let connector = TlsConnector::from(credentials.client.clone());
    connector.connect(name, stream).await.inspect_err(|error| {
        warn!(address, %role, %error, "TLS handshake with a server failed");
    })
}

/// Tries the addresses of a name in turn. They share the time that a connection may take, so one that does
/// not answer leaves time for the next.
pub(crate) async fn tcp(address: &str) -> io::Result<TcpStream> {
    let addresses: Vec<SocketAddr> = lookup_host(address).await?.collect();
    let limit = CONNECT_MAX / (addresses.len().max(1) as u32);
    let mut result = Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    for address in addresses {
        let connected = timeout(limit, TcpStream::connect(address)).await;
        result = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        if let Ok(stream) = &result {
            stream.set_nodelay(true)?;
            break;
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use futures::future::join;
    use tokio::net::TcpListener;
    use tokio_stream::StreamExt;
    use uuid::Uuid;

    use super::*;

    /// The client uses the socket while it exists, and the port otherwise.
    #[tokio::test]
    async fn a_unix_socket_is_preferred_and_tcp_is_the_way_without_one() {
        let name = format!("steadfast-test-{}", Uuid::new_v4());
        let port = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = port.local_addr().unwrap().to_string();
        let plaintext = TlsIdentity::default();
        let connect = || unix_or_tcp(&name, &address, Role::Pserver, &plaintext);
        let listener = unix::listen(&name).unwrap();
        assert!(unix::listen(&name).is_err(), "the name is in use");
        let mut incoming = Box::pin(unix::incoming(listener).unwrap());
        let (client, server) = join(connect(), incoming.next()).await;
        assert!(matches!(client, Ok(Either::Left(_))));
        assert!(matches!(server, Some(Ok(_))), "the same user is accepted");
        drop((incoming, server));
        assert!(matches!(connect().await, Ok(Either::Right(_))));
        drop(port);
        assert!(connect().await.is_err());
    }
}
