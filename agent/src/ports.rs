//! Free ports for the workers of a round.

use serde::{Deserialize, Serialize};
use steadfast_host::random;
use steadfast_net::HeldPort;
use steadfast_process::Failure;

/// Ports below those that the kernel gives to outgoing connections, so that no connection takes a port
/// between its choice and its use by a worker.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// Ports tried before giving up.
const TRIES: usize = 1000;

/// Where the workers of a node listen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodePorts {
    pub host: String,
    /// The port of each worker.
    pub workers: Vec<u16>,
    /// The port for `MASTER_PORT`, if this is the first node.
    pub master: u16,
}

/// Ports that are held until the workers start.
#[derive(Debug)]
pub(crate) struct HeldPorts {
    pub ports: NodePorts,
    _held: Vec<HeldPort>,
}

impl HeldPorts {
    /// Takes free ports. With `base`, worker i gets the port base + i, and with `master` that is for `MASTER_PORT`, free
    /// or not.
    ///
    /// # Errors
    /// If there are none.
    pub fn take(
        host: &str,
        base: Option<u16>,
        workers: u32,
        master: Option<u16>,
    ) -> Result<Self, Failure> {
        let mut held = Vec::new();
        let mut free = || {
            for _ in 0..TRIES {
                let offset = random::seed() % u64::from(PORTS.end - PORTS.start);
                let port = PORTS.start + offset as u16;
                if let Ok(taken) = HeldPort::take(port) {
                    held.push(taken);
                    return Ok(port);
                }
            }
            let (start, end) = (PORTS.start, PORTS.end);
            Err(Failure::unavailable(format!("no port from {start} to {end} is free")))
        };
        let master = master.map_or_else(&mut free, Ok)?;
        let workers = match base {
            Some(base) => {
                let last = u16::try_from(u32::from(base) + workers - 1);
                let last = last.map_err(|_| {
                    Failure::invalid(format!(
                        "--address: there are no {workers} ports from {base} on"
                    ))
                })?;
                (base..=last).collect()
            }
            None => (0..workers).map(|_| free()).collect::<Result<_, _>>()?,
        };
        let ports = NodePorts { host: host.to_owned(), workers, master };
        Ok(Self { ports, _held: held })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_agents_of_one_host_get_different_ports() {
        let (one, other) =
            (HeldPorts::take("a", None, 8, None), HeldPorts::take("a", None, 8, None));
        let (one, other) = (one.unwrap().ports, other.unwrap().ports);
        let all = [&one.workers[..], &other.workers[..], &[one.master, other.master]].concat();
        let distinct: std::collections::BTreeSet<u16> = all.iter().copied().collect();
        assert_eq!(distinct.len(), 18);
    }

    #[test]
    fn a_given_port_is_that_of_the_first_worker() {
        let held = HeldPorts::take("a", Some(700), 2, Some(29500)).unwrap();
        assert_eq!((held.ports.workers, held.ports.master), (vec![700, 701], 29500));
        assert!(HeldPorts::take("a", Some(65535), 2, None).is_err());
    }
}
