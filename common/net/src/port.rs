//! Server ports.

use std::io;
use std::net::SocketAddr;

use futures::FutureExt;
use futures::future::{OptionFuture, try_join};
use steadfast_auth::{Access, GateLayer, Peer};
use steadfast_common::role::Role;
use steadfast_host::task::{Task, spawn};
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::StreamExt;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;

use crate::incoming::{Connection, connections};
use crate::simulated::present;
use crate::tls::TlsIdentity;
use crate::{
    CONNECTION_WINDOW_BYTES, FRAME_BYTES, PING_EVERY, PING_TIMEOUT, STREAM_WINDOW_BYTES, traces,
    unix,
};

/// Requests in flight on one connection; more wait.
const STREAMS_MAX: u32 = 1024;

/// Maximum bytes of a request's headers.
const HEADER_BYTES_MAX: u32 = 16 << 10;

/// A bound port that is not served yet.
#[derive(Debug)]
pub struct Port(Bound);

#[derive(Debug)]
enum Bound {
    Tcp {
        listener: TcpListener,
        /// The Unix socket for processes on this machine.
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

    /// Returns the bound address, with the port that was picked if it was bound to port 0.
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

    /// Serves calls until `stop`, then waits for those in flight. If `identity` has credentials, `access`
    /// decides which roles may make a call. Each service limits the size of messages itself
    /// (`max_decoding_message_size`).
    pub fn serve(
        self,
        routes: Routes,
        access: Access,
        identity: &TlsIdentity,
        stop: CancellationToken,
    ) -> Task<Result<(), tonic::transport::Error>> {
        match self.0 {
            Bound::Tcp { listener, unix } => {
                let local = match identity.credentials() {
                    // The peer runs as the same user; only trainers use the Unix socket.
                    Some(_) => Peer::of(Role::Trainer),
                    None => Peer::Anonymous,
                };
                let tcp = server().layer(GateLayer(access)).add_routes(routes.clone());
                let incoming = connections(listener, PING_EVERY, identity.clone());
                let tcp =
                    tcp.serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
                let incoming = unix.and_then(|listener| unix::incoming(listener).ok());
                let unix = incoming.map(|incoming| {
                    let unix = server().layer(GateLayer(access)).add_routes(routes);
                    let accept = move |stream| Connection::new(stream, local.clone());
                    let incoming = incoming.map(move |it| it.map(&accept));
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
        .trace_fn(|request| traces::receive(request.uri().path(), request.headers()))
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        .http2_max_header_list_size(HEADER_BYTES_MAX)
        .http2_keepalive_interval(Some(PING_EVERY))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
}
