//! Binds ports, with error messages for operators.

use std::io;
use std::net::SocketAddr;

use steadfast_common::error::ErrorKind;
use steadfast_net::Port;

use crate::Failure;
use crate::security::{Exposure, may_listen};

/// Listens on `address`, which `flag` sets; without TLS only on loopback, unless `exposure` allows more.
///
/// # Errors
/// A message that names the address, the reason and the flag.
pub async fn bind(address: SocketAddr, flag: &str, exposure: &Exposure) -> Result<Port, Failure> {
    may_listen(address, flag, exposure)?;
    Port::bind(address).await.map_err(|error| {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_in_use_is_reported_with_a_hint() {
        let first =
            bind("127.0.0.1:0".parse().unwrap(), "--listen", &Exposure::Loopback).await.unwrap();
        let address = first.local_addr().unwrap();
        let failure = bind(address, "--listen", &Exposure::Loopback).await.unwrap_err();
        let expected =
            format!("cannot listen on {address}: port in use; choose another with --listen");
        assert_eq!(failure.message, expected);
        assert_eq!(failure.kind, ErrorKind::Conflict);
    }
}
