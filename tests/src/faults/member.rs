//! A process of a world, over all its restarts.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::runtime::Runtime;

use super::{Kind, Role};
use crate::{Ended, Network, Process, Proxy, free_address, memory_of};

/// Minimum time between two starts, as a supervisor has.
const RESTART_PAUSE: Duration = Duration::from_millis(300);

/// Delay of data on a slow connection.
const DELAY: Duration = Duration::from_millis(100);

/// A member of a world; at most one process of it runs at a time.
#[derive(Debug)]
pub struct Member {
    pub role: Role,
    pub index: u32,
    /// Proxies to each member of etcd.
    pub proxies: Vec<Proxy>,
    /// Proxy through which others reach the current process; trainers are not called and have none.
    pub front: Option<Proxy>,
    /// Admin address of the current process.
    pub admin: String,
    pub is_paused: bool,
    pub starts: u32,
    /// Its separate network namespace, if it has one.
    pub network: Option<Network>,
    life: Option<Process>,
    started: Instant,
}

impl Member {
    /// Creates a member without a process, with proxies to all members of etcd.
    pub fn new(
        runtime: &Runtime,
        role: Role,
        index: u32,
        etcd: &[String],
        network: Option<Network>,
    ) -> Self {
        let host = network.as_ref().map_or("127.0.0.1", |it| &it.outside);
        let proxies = etcd.iter().map(|url| runtime.block_on(Proxy::start_at(host, url)));
        Self {
            role,
            index,
            proxies: proxies.collect(),
            front: None,
            admin: String::new(),
            is_paused: false,
            starts: 0,
            network,
            life: None,
            started: Instant::now(),
        }
    }

    pub fn name(&self) -> String {
        format!("{}-{}", self.role.name(), self.index)
    }

    /// Returns the name of the current or next process, which names its log.
    pub fn log_name(&self) -> String {
        format!("{}.{}", self.name(), self.starts)
    }

    pub fn endpoints(&self) -> String {
        self.proxies.iter().map(Proxy::url).collect::<Vec<_>>().join(",")
    }

    /// Returns an address at which the next process can listen.
    pub fn free_address(&self) -> SocketAddr {
        let mut address = free_address();
        if let Some(network) = &self.network {
            address.set_ip(network.inside.parse().expect("a network has addresses"));
        }
        address
    }

    /// Returns the listen address and the advertised address of the next process.
    pub fn open_front(&mut self, runtime: &Runtime) -> (String, String) {
        let listen = self.free_address();
        if self.network.is_some() {
            // Faults act on the link instead of a proxy.
            return (listen.to_string(), listen.to_string());
        }
        let front = runtime.block_on(Proxy::start(&format!("http://{listen}")));
        let advertised = front.address().to_string();
        self.front = Some(front);
        (listen.to_string(), advertised)
    }

    /// Returns whether the next process should be started.
    pub fn is_due(&self) -> bool {
        let is_first = self.starts == 0;
        self.life.is_none() && (is_first || RESTART_PAUSE <= self.started.elapsed())
    }

    pub fn begin(&mut self, process: Process) {
        self.life = Some(process);
        self.started = Instant::now();
        self.is_paused = false;
    }

    pub fn is_alive(&self) -> bool {
        self.life.is_some()
    }

    /// Returns how the process ended, if it has ended since the last call.
    pub fn ended(&mut self) -> Option<Ended> {
        let life = self.life.as_mut()?;
        if life.is_running() {
            return None;
        }
        let ended = life.end(Duration::ZERO);
        self.life = None;
        Some(ended)
    }

    /// Sends a signal to the current process, if any.
    pub fn signal(&mut self, signal: Signal) {
        if let Some(life) = &mut self.life {
            life.signal_if_running(signal);
        }
    }

    /// Injects a fault of one process.
    pub fn inject(&mut self, kind: Kind) {
        match kind {
            Kind::Kill => self.signal(Signal::SIGKILL),
            Kind::Leave => self.signal(Signal::SIGTERM),
            Kind::Pause => {
                self.signal(Signal::SIGSTOP);
                self.is_paused = true;
            }
            Kind::Cut => self.proxies.iter().for_each(Proxy::cut),
            Kind::Isolate => self.proxies.iter().for_each(Proxy::drop_all),
            Kind::Deafen => self.proxies.iter().for_each(Proxy::drop_replies),
            Kind::Slow => self.proxies.iter().for_each(|it| it.delay(DELAY)),
            Kind::Reset => self.proxies.iter().for_each(Proxy::reset),
            Kind::Shut => {
                self.front.iter().for_each(Proxy::drop_all);
                self.network.iter().for_each(Network::deafen);
            }
            Kind::Mute => self.network.iter().for_each(Network::mute),
            other => unreachable!("{} is not a fault of one process", other.name()),
        }
    }

    /// Ends a fault of one process.
    pub fn heal(&mut self, kind: Kind) {
        match kind {
            Kind::Pause => {
                self.signal(Signal::SIGCONT);
                self.is_paused = false;
            }
            Kind::Shut => {
                self.front.iter().for_each(Proxy::open);
                self.network.iter().for_each(Network::hear);
            }
            Kind::Mute => self.network.iter().for_each(Network::speak),
            _ => self.proxies.iter().for_each(Proxy::open),
        }
    }

    /// Returns the resident memory of the current process.
    pub fn memory_bytes(&self) -> Option<u64> {
        memory_of(self.life.as_ref()?.pid(), "VmRSS")
    }

    /// Returns the stderr of the current process so far.
    pub fn stderr(&self) -> String {
        self.life.as_ref().map(Process::stderr).unwrap_or_default()
    }
}
