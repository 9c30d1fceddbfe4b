//! One process of a world, over all its lives.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::runtime::Runtime;

use super::Role;
use crate::{Ended, Network, Process, Proxy, free_address};

/// Least time between two starts, as anybody who starts dead processes again has one.
const RESTART_PAUSE: Duration = Duration::from_millis(300);

/// A place in the world that one process at a time fills.
#[derive(Debug)]
pub(super) struct Member {
    pub role: Role,
    pub index: u32,
    /// Where it reaches each member of etcd.
    pub proxies: Vec<Proxy>,
    /// Where others reach its present life, unless it is a trainer, which nobody calls.
    pub front: Option<Proxy>,
    /// Where the admin port of its present life is.
    pub admin: String,
    pub is_paused: bool,
    pub starts: u32,
    /// Where it runs, if apart from the others.
    pub network: Option<Network>,
    life: Option<Process>,
    started: Instant,
}

impl Member {
    /// Makes an empty place behind proxies to all members of etcd.
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

    /// The name of its present or next life, which its log has.
    pub fn life_name(&self) -> String {
        format!("{}.{}", self.name(), self.starts)
    }

    pub fn endpoints(&self) -> String {
        self.proxies.iter().map(Proxy::url).collect::<Vec<_>>().join(",")
    }

    /// Where its next life is to listen, and where others are to reach it.
    pub fn open_front(&mut self, runtime: &Runtime) -> (String, String) {
        let mut listen = free_address();
        if let Some(network) = &self.network {
            // The link itself is what can break.
            listen.set_ip(network.inside.parse().expect("a network has addresses"));
            return (listen.to_string(), listen.to_string());
        }
        let front = runtime.block_on(Proxy::start(&format!("http://{listen}")));
        let advertised = front.address().to_string();
        self.front = Some(front);
        (listen.to_string(), advertised)
    }

    /// Whether it is time for another life.
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

    /// How its life ended, if it did since this was asked last.
    pub fn ended(&mut self) -> Option<Ended> {
        let life = self.life.as_mut()?;
        if life.is_running() {
            return None;
        }
        let ended = life.end(Duration::ZERO);
        self.life = None;
        Some(ended)
    }

    /// Sends a signal to its present life, if there is one.
    pub fn signal(&mut self, signal: Signal) {
        if let Some(life) = &mut self.life {
            life.signal_if_running(signal);
        }
    }

    /// What its present life said so far.
    pub fn stderr(&self) -> String {
        self.life.as_ref().map(Process::stderr).unwrap_or_default()
    }
}
