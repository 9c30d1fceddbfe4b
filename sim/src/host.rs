//! A process's view of the simulated world.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use steadfast_host::net::{Knock, SimulatedWire};
use steadfast_host::{Abort, Host};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::net::{Machine, Net};
use crate::world::{ProcessId, World};

/// When the world began, by the calendar: the first second of 2026.
pub const CALENDAR: Duration = Duration::from_secs(1_767_225_600);

/// Where everybody's addresses are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// All on one host, told apart by ports.
    OneHost,
    /// Each machine has its own.
    ManyHosts,
}

/// A process's view of the world.
pub struct Simulated {
    world: World,
    net: Net,
    process: ProcessId,
    machine: Machine,
    addresses: Addresses,
    /// The next free port; guards only itself.
    next_port: Mutex<u16>,
}

impl Simulated {
    /// A process on `machine`. `life` counts the processes that ran there before.
    pub fn new(
        world: &World,
        net: &Net,
        process: ProcessId,
        machine: Machine,
        addresses: Addresses,
        life: u16,
    ) -> Self {
        let first = match addresses {
            // As the system picks free ports: whoever has an old address finds nobody there.
            Addresses::OneHost => machine.0 * 100 + (2 * life) % 100,
            // As a host with settings of its own: whoever has an old address finds the next process.
            Addresses::ManyHosts => 10_000,
        };
        let (world, net) = (world.clone(), net.clone());
        Self { world, net, process, machine, addresses, next_port: Mutex::new(first) }
    }

    /// An address of a machine.
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
        self.world.roll(|dice| dice.bits())
    }

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

    fn dial(&self, address: &str) -> SimulatedWire {
        SimulatedWire::new(self.net.dial(self.process, address))
    }

    fn knock(&self, address: &str) -> BoxFuture<'static, Knock> {
        self.net.knock(self.process, address)
    }
}
