//! The machine of the launcher: which hosts it is, and where others reach it.

use std::net::{IpAddr, SocketAddr};

use steadfast_launcher_core::hosts::{Host, HostName};
use steadfast_process::{Failure, own_host};

/// The machine of this process.
#[derive(Clone, Debug)]
pub(crate) struct OwnMachine {
    name: String,
}

impl OwnMachine {
    /// Reads the name of this machine.
    pub fn own() -> Self {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Self { name: name.trim().to_owned() }
    }

    /// Returns whether a host is this machine: `localhost`, a loopback address, or its name.
    pub fn is(&self, host: &HostName) -> bool {
        let host = host.as_str();
        let first = self.name.split('.').next().unwrap_or_default();
        host == "localhost"
            || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
            || (!first.is_empty() && (host == self.name || host == first))
    }

    /// Checks that all hosts are this machine.
    ///
    /// # Errors
    /// A message that names the first other one, and the remedy.
    pub fn has_all(&self, hosts: &[Host]) -> Result<(), String> {
        match hosts.iter().find(|host| !self.is(&host.name)) {
            None => Ok(()),
            Some(host) => Err(format!(
                "host {} is not this machine, and etcd in the launcher has neither TLS nor users; run etcd \
                 and steadfast-master and pass --rdzv-endpoint, or pass --insecure-allow-plaintext",
                host.name
            )),
        }
    }
}

/// Returns the URL at which the hosts reach `bound`.
///
/// # Errors
/// If the address of this machine is not known.
pub(crate) fn advertised(given: Option<&str>, bound: SocketAddr) -> Result<String, Failure> {
    if let Some(given) = given {
        let is_bare_v6 = given.parse::<std::net::Ipv6Addr>().is_ok();
        let has_port = given.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        return Ok(match (is_bare_v6, has_port) {
            (true, _) => format!("http://[{given}]:{}", bound.port()),
            (false, true) => format!("http://{given}"),
            (false, false) => format!("http://{given}:{}", bound.port()),
        });
    }
    if !bound.ip().is_unspecified() {
        return Ok(format!("http://{bound}"));
    }
    Ok(format!("http://{}:{}", own_host()?, bound.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_several_names() {
        let machine = OwnMachine { name: "node-1.cluster".to_owned() };
        let is = |name: &str| machine.is(&name.parse().unwrap());
        assert!(["localhost", "127.0.0.2", "::1", "node-1", "node-1.cluster"].into_iter().all(is));
        assert!(!["node", "node-2", "10.0.0.1", "fd00::1", "localhost2"].into_iter().any(is));
    }

    #[test]
    fn an_advertised_host_gets_the_bound_port() {
        let bound: SocketAddr = "0.0.0.0:4711".parse().unwrap();
        let url = |given| advertised(Some(given), bound).unwrap();
        assert_eq!(url("node"), "http://node:4711");
        assert_eq!(url("node:80"), "http://node:80");
        assert_eq!(url("fd00::1"), "http://[fd00::1]:4711");
        assert_eq!(url("[fd00::1]"), "http://[fd00::1]:4711");
        let bound: SocketAddr = "127.0.0.1:4711".parse().unwrap();
        assert_eq!(advertised(None, bound).unwrap(), "http://127.0.0.1:4711");
    }
}
