//! One way to listen, and one set of limits for all gRPC servers.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_proto::{CONNECTION_WINDOW_BYTES, FRAME_BYTES, STREAM_WINDOW_BYTES};
use tokio::net::TcpListener;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::Failure;

/// Requests in flight on one connection; more wait.
const STREAMS_MAX: u32 = 1024;

/// Bytes of a request's headers.
const HEADER_BYTES_MAX: u32 = 16 << 10;

/// Time between pings on a connection, and the wait for their answer: a peer that vanished without
/// a word is noticed within their sum.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// A gRPC server with our windows, frame size, pings and limits. The largest message is a setting
/// of each service (`max_decoding_message_size(steadfast_proto::MESSAGE_BYTES_MAX)`).
pub fn server_builder() -> Server {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        .http2_max_header_list_size(HEADER_BYTES_MAX)
        .http2_keepalive_interval(Some(PING_EVERY))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
}

/// Listens on `address`; `flag` is the setting that would choose another.
///
/// # Errors
/// A sentence that names the address, the reason and the flag.
pub async fn bind(address: SocketAddr, flag: &str) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|error| {
        let (kind, reason) = match error.kind() {
            io::ErrorKind::AddrInUse => (ErrorKind::Conflict, "port in use".to_owned()),
            io::ErrorKind::PermissionDenied => (ErrorKind::Denied, "permission denied".to_owned()),
            io::ErrorKind::AddrNotAvailable => {
                (ErrorKind::Invalid, "this machine has no such address".to_owned())
            }
            _ => (ErrorKind::Internal, error.to_string()),
        };
        Failure::new(
            kind,
            format!("cannot listen on {address}: {reason}; choose another with {flag}"),
        )
    })
}

/// The listener as tonic takes it (`serve_with_incoming_shutdown`), without delay of small writes.
pub fn incoming(listener: TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true)).with_keepalive(Some(PING_EVERY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_in_use_is_named_together_with_the_way_out() {
        let first = bind("127.0.0.1:0".parse().unwrap(), "--listen").await.unwrap();
        let address = first.local_addr().unwrap();
        let failure = bind(address, "--listen").await.unwrap_err();
        let expected =
            format!("cannot listen on {address}: port in use; choose another with --listen");
        assert_eq!(failure.message, expected);
        assert_eq!(failure.kind, ErrorKind::Conflict);
    }
}
