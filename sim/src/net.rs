//! The simulated network: gRPC calls between processes, whose parts arrive late, in any order, or
//! never.
//!
//! It behaves as TCP does. What was sent arrives once, or the connection breaks and neither side knows
//! what the other has seen. So a caller may be told of a break while its request is still under way,
//! and a request may be carried out whose answer gets lost.

mod call;
mod visit;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use tonic::service::Routes;

use call::Call;
pub use call::Wire;
use visit::Visit;

use crate::weather::{Fate, Weather};
use crate::world::{ProcessId, World};

/// Longest time for a connection to open.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// After how long of silence a connection counts as broken: between the least and the most that
/// pings make of it.
const SILENCE: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(10));

/// How often what cannot get through is sent again.
const RESEND: Duration = Duration::from_millis(200);

/// A machine by its number; its processes share its connections to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Machine(pub u16);

/// Sees every call whose answer came at once, at the moment when it is given.
pub type Observer = Box<dyn FnMut(&str, &[Frame<Bytes>], &[Frame<Bytes>]) + Send>;

/// The network. Cheap to clone.
#[derive(Clone)]
pub struct Net(Arc<Shared>);

struct Shared {
    world: World,
    state: Mutex<State>,
    observer: Mutex<Option<Observer>>,
}

struct State {
    weather: Weather,
    ports: BTreeMap<SocketAddr, Port>,
    machines: BTreeMap<ProcessId, Machine>,
    /// Pairs of machines, of which the first does not reach the second.
    blocked: BTreeSet<(Machine, Machine)>,
    /// By how much messages from the first to the second are late.
    slow: BTreeMap<(Machine, Machine), Duration>,
    calls: BTreeMap<u64, Weak<Call>>,
    visits: Vec<Weak<Visit>>,
    made: u64,
    /// What becomes of calls by their number, whatever the weather.
    fates: BTreeMap<u64, Fate>,
}

struct Port {
    process: ProcessId,
    /// Absent until it is served.
    routes: Option<Routes>,
}

const LOCK: &str = "one thread, and nothing panics while it holds this";

impl Net {
    /// A network without anybody.
    pub fn new(world: &World, weather: Weather) -> Self {
        let state = State {
            weather,
            ports: BTreeMap::new(),
            machines: BTreeMap::new(),
            blocked: BTreeSet::new(),
            slow: BTreeMap::new(),
            calls: BTreeMap::new(),
            visits: Vec::new(),
            made: 0,
            fates: BTreeMap::new(),
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

    /// Shows every answer to `observer`.
    pub fn observe(&self, observer: Observer) {
        *self.0.observer.lock().expect(LOCK) = Some(observer);
    }

    /// Forgets who looks at answers and who serves, so that nothing keeps anything else in memory.
    pub fn end(&self) {
        let observer = self.0.observer.lock().expect(LOCK).take();
        let ports = std::mem::take(&mut self.state().ports);
        drop((observer, ports));
    }

    /// Says on which machine a process runs.
    pub fn place(&self, process: ProcessId, machine: Machine) {
        self.state().machines.insert(process, machine);
    }

    /// Changes how the network behaves from now on.
    pub fn set_weather(&self, weather: Weather) {
        self.state().weather = weather;
    }

    /// Decides what becomes of calls by their number, whatever the weather.
    pub fn decide(&self, fates: BTreeMap<u64, Fate>) {
        self.state().fates = fates;
    }

    /// Calls so far.
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

    /// Closes a port; what is under way goes on.
    pub fn close(&self, address: SocketAddr) {
        let routes = self.state().ports.remove(&address);
        drop(routes);
    }

    /// Everything of a process that ended: its ports, and both ends of its connections. `silent` is
    /// how a machine goes that loses power: nobody is told.
    pub fn bury(&self, process: ProcessId, silent: bool) {
        let (ports, calls, visits) = {
            let mut state = self.state();
            let of_it: Vec<SocketAddr> = state
                .ports
                .iter()
                .filter(|(_, port)| port.process == process)
                .map(|(address, _)| *address)
                .collect();
            let ports: Vec<_> = of_it.iter().map(|it| state.ports.remove(it)).collect();
            let calls: Vec<_> = state.calls.values().filter_map(Weak::upgrade).collect();
            let visits: Vec<_> = state.visits.iter().filter_map(Weak::upgrade).collect();
            (ports, calls, visits)
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
        for visit in visits.into_iter().filter(|it| it.at.0 == process && !silent) {
            let (at, visitor) = (visit.at.1, visit.visitor);
            let close = move || visit.close();
            self.carry(at, visitor, Some(Duration::from_secs(3600)), close.clone(), close);
        }
    }

    /// Keeps `from` from reaching `to`.
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

    /// Lets `from` reach `to` again.
    pub fn unblock(&self, from: Machine, to: Machine) {
        self.state().blocked.remove(&(from, to));
    }

    /// Makes messages from `from` to `to` late by so much.
    pub fn slow(&self, from: Machine, to: Machine, late: Duration) {
        self.state().slow.insert((from, to), late);
    }

    /// All links as they should be.
    pub fn heal(&self) {
        let mut state = self.state();
        state.blocked.clear();
        state.slow.clear();
    }

    /// Breaks all connections between two machines. What was under way may still arrive.
    pub fn break_between(&self, one: Machine, other: Machine) {
        let calls: Vec<_> = self.state().calls.values().filter_map(Weak::upgrade).collect();
        for call in calls {
            let ends = (call.from.1, call.to);
            if ends == (one, other) || ends == (other, one) {
                self.fail(&call, "the connection was reset");
                if self.world().roll(|dice| dice.happens(0.5)) {
                    self.leave(&call);
                }
            }
        }
    }

    fn is_blocked(&self, from: Machine, to: Machine) -> bool {
        self.state().blocked.contains(&(from, to))
    }

    /// too long.
    fn carry(
        &self,
        from: Machine,
        to: Machine,
        patience: Option<Duration>,
        arrive: impl FnOnce() + Send + 'static,
        lost: impl FnOnce() + Send + 'static,
    ) {
        let patience =
            patience.unwrap_or_else(|| self.world().roll(|dice| dice.time(SILENCE.0, SILENCE.1)));
        let latency = self.latency(from, to);
        let net = self.clone();
        self.world().after(latency, move |_| net.arrive(from, to, patience, arrive, lost));
    }

    fn arrive(
        &self,
        from: Machine,
        to: Machine,
        patience: Duration,
        arrive: impl FnOnce() + Send + 'static,
        lost: impl FnOnce() + Send + 'static,
    ) {
        if !self.is_blocked(from, to) {
            arrive();
        } else if patience.is_zero() {
            lost();
        } else {
            let (net, left) = (self.clone(), patience.saturating_sub(RESEND));
            self.world().after(RESEND, move |_| net.arrive(from, to, left, arrive, lost));
        }
    }

    fn latency(&self, from: Machine, to: Machine) -> Duration {
        let state = self.state();
        let late = state.slow.get(&(from, to)).copied().unwrap_or_default();
        let (least, most) = state.weather.latency;
        drop(state);
        self.world().roll(|dice| dice.time(least, most)) + late
    }
}

/// The machine that an address is on.
pub fn machine_of(address: &SocketAddr) -> Machine {
    Machine(match address.ip() {
        std::net::IpAddr::V4(ip) if ip.is_loopback() => address.port() / 100,
        std::net::IpAddr::V4(ip) => u16::from_be_bytes([ip.octets()[2], ip.octets()[3]]),
        std::net::IpAddr::V6(_) => 0,
    })
}
