//! Ports that are held for another process.

use std::io;
use std::net::{Ipv4Addr, TcpListener};

use crate::simulated::present;

/// A port that no other process takes until this is dropped. Nothing is served there.
#[derive(Debug)]
pub struct HeldPort(
    /// Absent in a simulation, whose workers do not listen.
    #[expect(dead_code, reason = "holds the port")]
    Option<TcpListener>,
);

impl HeldPort {
    /// Takes a port on all addresses.
    ///
    /// # Errors
    /// The I/O error of the system, such as that another process has the port.
    pub fn take(port: u16) -> io::Result<Self> {
        match present() {
            Some(_) => Ok(Self(None)),
            None => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).map(|held| Self(Some(held))),
        }
    }
}
