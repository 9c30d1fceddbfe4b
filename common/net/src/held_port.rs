//! Ports that are held for another process.

use std::io;
use std::net::Ipv4Addr;

use tokio::net::TcpSocket;

use crate::simulated::present;

/// A port that no other process takes until this is dropped. Connections to it are refused, so a client that comes before
/// the process for which it is held tries again.
#[derive(Debug)]
pub struct HeldPort(
    /// Absent in a simulation, whose workers do not listen.
    #[expect(dead_code, reason = "holds the port")]
    Option<TcpSocket>,
);

impl HeldPort {
    /// Takes a port on all addresses.
    ///
    /// # Errors
    /// The I/O error of the system, such as that another process has the port.
    pub fn take(port: u16) -> io::Result<Self> {
        match present() {
            Some(_) => Ok(Self(None)),
            None => {
                // It does not listen: the kernel would take connections, and reset them when the port is released.
                let held = TcpSocket::new_v4()?;
                held.bind((Ipv4Addr::UNSPECIFIED, port).into())?;
                Ok(Self(Some(held)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// S003-20: a worker that joins a round before rank 0 listens finds its connection refused, and not lost.
    #[test]
    fn a_held_port_refuses_connections_and_other_owners_until_it_is_released() {
        let (held, port) = (20_000..32_000)
            .find_map(|port| HeldPort::take(port).ok().map(|held| (held, port)))
            .expect("a port is free");
        let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).map_err(|it| it.kind());
        let listen = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, port));
        assert_eq!(connect().unwrap_err(), io::ErrorKind::ConnectionRefused);
        assert_eq!(HeldPort::take(port).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(listen().unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(held);
        let _listener = listen().unwrap();
        connect().unwrap();
    }
}
