//! The host and the network of a simulated process.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use steadfast_host::{Abort, Host};
use steadfast_net::{Network, Probe, SimulatedChannel};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::net::{Machine, Net};
use crate::world::{ProcessId, World};

/// Unix time at the start of the simulation: the first second of 2026.
pub const CALENDAR: Duration = Duration::from_secs(1_767_225_600);

/// Ports of one process.
const PORTS: u16 = 4;

/// How addresses are assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// All machines share one host and differ by port.
    OneHost,
    /// Each machine has its own host address.
    ManyHosts,
}

/// The host and the network of a simulated process.
pub struct Simulated {
    world: World,
    net: Net,
    process: ProcessId,
    machine: Machine,
    addresses: Addresses,
    /// The next free port; the mutex guards only this number.
    next_port: Mutex<u16>,
}

/// Runs `work` as code of a simulated process.
pub fn enter<T>(host: &Arc<Simulated>, work: impl FnOnce() -> T) -> T {
    steadfast_host::enter(host.clone(), || steadfast_net::enter(host.clone(), work))
}

impl Simulated {
    /// Creates the host of a process on `machine`. `life` is the number of earlier processes there.
    pub fn new(
        world: &World,
        net: &Net,
        process: ProcessId,
        machine: Machine,
        addresses: Addresses,
        life: u16,
    ) -> Self {
        let first = match addresses {
            // Ephemeral ports: an old address is not reused.
            Addresses::OneHost => machine.0 * 100 + (PORTS * life) % 100,
            // Fixed ports: an old address reaches the next process.
            Addresses::ManyHosts => 10_000,
        };
        let (world, net) = (world.clone(), net.clone());
        Self { world, net, process, machine, addresses, next_port: Mutex::new(first) }
    }

    pub fn address(addresses: Addresses, machine: Machine, port: u16) -> SocketAddr {
        let [high, low] = machine.0.to_be_bytes();
        let ip = match addresses {
            Addresses::OneHost => Ipv4Addr::LOCALHOST,
            Addresses::ManyHosts => Ipv4Addr::new(10, 0, high, low),
        };
        SocketAddr::new(IpAddr::V4(ip), port)
    }
}

impl Host for Simulated {
    fn boot_time(&self) -> Duration {
        self.world.local_time(self.process)
    }

    fn unix_time(&self) -> Duration {
        CALENDAR + self.boot_time()
    }

    fn sleep_until(&self, at: Duration) -> BoxFuture<'static, ()> {
        self.world.sleep_until(self.process, at).boxed()
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Abort {
        let (world, task) = (self.world.clone(), self.world.spawn(self.process, task));
        Box::new(move || world.abort(task))
    }

    fn random(&self) -> u64 {
        self.world.roll(|rng| rng.bits())
    }
}

impl Network for Simulated {
    fn listen(&self) -> SocketAddr {
        let mut next = self.next_port.lock().expect("no holder panics");
        let address = Self::address(self.addresses, self.machine, *next);
        *next += 1;
        self.net.listen(self.process, address);
        address
    }

    fn serve(
        &self,
        port: SocketAddr,
        routes: Routes,
        stop: CancellationToken,
    ) -> BoxFuture<'static, ()> {
        self.net.serve(port, routes);
        stop.cancelled_owned().boxed()
    }

    fn close(&self, port: SocketAddr) {
        self.net.close(port);
    }

    fn dial(&self, address: &str) -> SimulatedChannel {
        SimulatedChannel::new(self.net.dial(self.process, address))
    }

    fn probe(&self, address: &str) -> BoxFuture<'static, Probe> {
        self.net.probe(self.process, address)
    }
}
