//! The simulated network: gRPC calls between processes. Parts of calls arrive late, in any order, or
//! never.
//!
//! It behaves like TCP. Data arrive once, or the connection breaks and neither side knows what the other
//! has received. A caller may thus see a broken connection while its request is still in flight, and a
//! request may be executed although its reply is lost.

mod call;
mod held_connection;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use tonic::service::Routes;

use call::Call;
pub use call::Channel;
use held_connection::HeldConnection;

use crate::network_model::{CallOutcome, NetworkModel};
use crate::world::{ProcessId, World};

/// Connect timeout.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// Minimum and maximum time of silence after which keep-alive pings detect a broken connection.
const SILENCE: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(10));

/// Minimum and maximum time of a message within a machine.
const LOCAL: (Duration, Duration) = (Duration::from_micros(10), Duration::from_micros(100));

/// Interval at which blocked messages are sent again.
const RESEND: Duration = Duration::from_millis(200);

/// Number of a machine; the processes of a machine share its links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Machine(pub u16);

/// Called with the process that has answered, path, request and response of every call whose response is complete at
/// once.
pub type Observer = Box<dyn FnMut(ProcessId, &str, &[Frame<Bytes>], &[Frame<Bytes>]) + Send>;

/// The network. Cheap to clone.
#[derive(Clone)]
pub struct Net(Arc<Shared>);

struct Shared {
    world: World,
    state: Mutex<State>,
    observer: Mutex<Option<Observer>>,
}

struct State {
    network_model: NetworkModel,
    ports: BTreeMap<SocketAddr, Port>,
    machines: BTreeMap<ProcessId, Machine>,
    /// Pairs of machines whose messages from the first to the second are blocked.
    blocked: BTreeSet<(Machine, Machine)>,
    /// Extra delay of messages from the first to the second machine.
    slow: BTreeMap<(Machine, Machine), Duration>,
    calls: BTreeMap<u64, Weak<Call>>,
    held_connections: Vec<Weak<HeldConnection>>,
    /// Number of calls between machines.
    made: u64,
    /// Number of calls between machines by their process and method.
    made_of: BTreeMap<(ProcessId, String), u64>,
    /// Number of calls within machines.
    made_locally: u64,
    /// Fixed outcomes of calls, by number; they override the network model.
    outcomes: BTreeMap<u64, CallOutcome>,
}

struct Port {
    process: ProcessId,
    /// Absent until the port is served.
    routes: Option<Routes>,
}

const LOCK: &str = "single thread; no holder panics";

impl Net {
    /// Creates an empty network.
    pub fn new(world: &World, network_model: NetworkModel) -> Self {
        let state = State {
            network_model,
            ports: BTreeMap::new(),
            machines: BTreeMap::new(),
            blocked: BTreeSet::new(),
            slow: BTreeMap::new(),
            calls: BTreeMap::new(),
            held_connections: Vec::new(),
            made: 0,
            made_of: BTreeMap::new(),
            made_locally: 0,
            outcomes: BTreeMap::new(),
        };
        let (world, state) = (world.clone(), Mutex::new(state));
        Self(Arc::new(Shared { world, state, observer: Mutex::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().expect(LOCK)
    }

    fn world(&self) -> &World {
        &self.0.world
    }

    /// Passes every response to `observer`.
    pub fn observe(&self, observer: Observer) {
        *self.0.observer.lock().expect(LOCK) = Some(observer);
    }

    /// Drops the observer and all ports. This breaks reference cycles.
    pub fn end(&self) {
        let observer = self.0.observer.lock().expect(LOCK).take();
        let ports = std::mem::take(&mut self.state().ports);
        drop((observer, ports));
    }

    /// Sets the machine on which a process runs.
    pub fn place(&self, process: ProcessId, machine: Machine) {
        self.state().machines.insert(process, machine);
    }

    /// Returns the processes that have run on a machine.
    pub fn processes_on(&self, machine: Machine) -> Vec<ProcessId> {
        let state = self.state();
        let on_it = state.machines.iter().filter(|(_, of)| **of == machine);
        on_it.map(|(process, _)| *process).collect()
    }

    pub fn set_network_model(&self, network_model: NetworkModel) {
        self.state().network_model = network_model;
    }

    /// Fixes the outcomes of calls, by number; they override the network model.
    pub fn decide(&self, outcomes: BTreeMap<u64, CallOutcome>) {
        self.state().outcomes = outcomes;
    }

    /// Returns the number of calls between machines so far.
    pub fn calls(&self) -> u64 {
        self.state().made
    }

    /// Opens a port.
    pub fn listen(&self, process: ProcessId, address: SocketAddr) {
        self.state().ports.insert(address, Port { process, routes: None });
    }

    /// Serves an open port.
    pub fn serve(&self, address: SocketAddr, routes: Routes) {
        if let Some(port) = self.state().ports.get_mut(&address) {
            port.routes = Some(routes);
        }
    }

    /// Closes a port; calls in flight continue.
    pub fn close(&self, address: SocketAddr) {
        let routes = self.state().ports.remove(&address);
        drop(routes);
    }

    /// Removes the ports and the connections of a process that ended. With `silent`, its peers are not
    /// notified, as after a power failure.
    pub fn remove_process(&self, process: ProcessId, silent: bool) {
        let (ports, calls, held_connections) = {
            let mut state = self.state();
            let of_it: Vec<SocketAddr> = state
                .ports
                .iter()
                .filter(|(_, port)| port.process == process)
                .map(|(address, _)| *address)
                .collect();
            let ports: Vec<_> = of_it.iter().map(|it| state.ports.remove(it)).collect();
            let calls: Vec<_> = state.calls.values().filter_map(Weak::upgrade).collect();
            let held_connections: Vec<_> =
                state.held_connections.iter().filter_map(Weak::upgrade).collect();
            (ports, calls, held_connections)
        };
        drop(ports);
        for call in calls {
            let handler = call.progress.lock().expect(LOCK).handler;
            let is_handler = handler.is_some_and(|(it, _)| it == process);
            if is_handler && !silent {
                let (net, it) = (self.clone(), call.clone());
                let cut = move || net.fail(&it, "the connection was closed");
                self.carry(call.to, call.from.1, None, cut.clone(), cut);
            } else if is_handler {
                self.give_up_later(&call);
            } else if call.from.0 == process && !silent {
                self.leave(&call);
            }
        }
        for connection in held_connections.into_iter().filter(|it| it.at.0 == process && !silent) {
            let (at, client) = (connection.at.1, connection.client);
            let close = move || connection.close();
            self.carry(at, client, Some(Duration::from_secs(3600)), close.clone(), close);
        }
    }

    /// Blocks messages from `from` to `to`.
    pub fn block(&self, from: Machine, to: Machine) {
        self.state().blocked.insert((from, to));
        let calls: Vec<_> = self.state().calls.values().filter_map(Weak::upgrade).collect();
        for call in calls {
            let ends = (call.from.1, call.to);
            if ends == (from, to) || ends == (to, from) {
                self.give_up_later(&call);
            }
        }
    }

    /// Unblocks messages from `from` to `to`.
    pub fn unblock(&self, from: Machine, to: Machine) {
        self.state().blocked.remove(&(from, to));
    }

    /// Delays messages from `from` to `to`.
    pub fn slow(&self, from: Machine, to: Machine, late: Duration) {
        self.state().slow.insert((from, to), late);
    }

    /// Removes all blocks and delays.
    pub fn heal(&self) {
        let mut state = self.state();
        state.blocked.clear();
        state.slow.clear();
    }

    /// Breaks all connections between two machines. Data in flight may still arrive.
    pub fn break_between(&self, one: Machine, other: Machine) {
        if one == other {
            return;
        }
        let calls: Vec<_> = self.state().calls.values().filter_map(Weak::upgrade).collect();
        for call in calls {
            let ends = (call.from.1, call.to);
            if ends == (one, other) || ends == (other, one) {
                self.fail(&call, "the connection was reset");
                if self.world().roll(|rng| rng.happens(0.5)) {
                    self.leave(&call);
                }
            }
        }
    }

    fn is_blocked(&self, from: Machine, to: Machine) -> bool {
        from != to && self.state().blocked.contains(&(from, to))
    }

    /// Calls `arrive` after the latency, or `lost` if the link stays blocked for `limit`.
    fn carry(
        &self,
        from: Machine,
        to: Machine,
        limit: Option<Duration>,
        arrive: impl FnOnce() + Send + 'static,
        lost: impl FnOnce() + Send + 'static,
    ) {
        let limit =
            limit.unwrap_or_else(|| self.world().roll(|rng| rng.time(SILENCE.0, SILENCE.1)));
        let latency = self.latency(from, to);
        let net = self.clone();
        self.world().after(latency, move |_| net.arrive(from, to, limit, arrive, lost));
    }

    fn arrive(
        &self,
        from: Machine,
        to: Machine,
        limit: Duration,
        arrive: impl FnOnce() + Send + 'static,
        lost: impl FnOnce() + Send + 'static,
    ) {
        if !self.is_blocked(from, to) {
            arrive();
        } else if limit.is_zero() {
            lost();
        } else {
            let (net, left) = (self.clone(), limit.saturating_sub(RESEND));
            self.world().after(RESEND, move |_| net.arrive(from, to, left, arrive, lost));
        }
    }

    fn latency(&self, from: Machine, to: Machine) -> Duration {
        if from == to {
            return self.world().roll(|rng| rng.time(LOCAL.0, LOCAL.1));
        }
        let state = self.state();
        let late = state.slow.get(&(from, to)).copied().unwrap_or_default();
        let (least, most) = state.network_model.latency;
        drop(state);
        self.world().roll(|rng| rng.time(least, most)) + late
    }
}

/// Returns the machine of an address.
pub fn machine_of(address: &SocketAddr) -> Machine {
    Machine(match address.ip() {
        std::net::IpAddr::V4(ip) if ip.is_loopback() => address.port() / 100,
        std::net::IpAddr::V4(ip) => u16::from_be_bytes([ip.octets()[2], ip.octets()[3]]),
        std::net::IpAddr::V6(_) => 0,
    })
}
