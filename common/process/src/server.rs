//! Binds ports, with error messages for operators.

use std::io;
use std::net::SocketAddr;

use steadfast_common::error::ErrorKind;
use steadfast_host::net::Port;

use crate::Failure;
use crate::security::may_listen;

/// Listens on `address`, which `flag` sets.
///
/// # Errors
/// A message that names the address, the reason and the flag.
pub async fn bind(address: SocketAddr, flag: &str) -> Result<Port, Failure> {
    may_listen(address, flag)?;
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
