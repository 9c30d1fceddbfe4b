//! Programs with a coordinator, and workers that run their closures, under faults.
//!
//! Two programs of one job take turns: the holder of the lock schedules the same closures by the same names, and some
//! without a name. The value of a closure is drawn when it is computed, so each run of it has another one: a program
//! that was told two values of one name has counted two runs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use steadfast_common::records::keys::Keys;
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_coordinator::{
    Call, ClosureId, Coordinator, CoordinatorSettings, Lock, OnError, Outcome, ScheduleError,
    Scheduled, Settings, WorkerServer,
};
use steadfast_host::random;
use steadfast_host::task::spawn;
use steadfast_host::time::sleep;
use steadfast_net::TlsIdentity;
use steadfast_process::{Exposure, Failure};

use crate::etcd::EtcdServer;
use crate::host::{Addresses, Simulated, enter};
use crate::net::{Machine, Net};
use crate::network_model::NetworkModel;
use crate::world::{Clock, ProcessId, Turn, World};

/// Closures of a program; every third one has no name.
const CLOSURES: u64 = 24;

const PROGRAMS: u16 = 2;
const WORKERS: u16 = 3;

/// The time for which faults are injected.
const FAULTS: Duration = Duration::from_secs(60);

/// The maximum time that a program may take after the last fault.
const TIMEOUT: Duration = Duration::from_secs(240);

const LEASE_TTL: Duration = Duration::from_secs(2);

/// Time between looks of a program, and of a worker's thread.
const LOOK_EVERY: Duration = Duration::from_millis(5);

const LOCK: &str = "single thread; no holder panics";

/// A record of all runs and results of named closures.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ledger {
    /// Counts the runs that were begun, by name.
    pub runs: BTreeMap<String, u64>,
    /// Holds the values that were computed, by name.
    computed: BTreeMap<String, BTreeSet<u64>>,
    /// Holds the value that a program received, by name.
    pub told: BTreeMap<String, u64>,
    /// Violated invariants; empty if the run passed.
    pub broken: Vec<String>,
    /// Set when a program has the results of all closures.
    pub is_done: bool,
    /// Counts the times that a program acquired the lock.
    pub terms: u64,
}

impl Ledger {
    fn tell(&mut self, name: String, value: u64) {
        if !self.computed.get(&name).is_some_and(|values| values.contains(&value)) {
            self.broken.push(format!("`{name}` has the value {value}, which no run computed"));
        }
        let before = *self.told.entry(name.clone()).or_insert(value);
        if before != value {
            self.broken
                .push(format!("`{name}` was {before} for one program, and {value} for another"));
        }
    }
}

type Shared = Arc<Mutex<Ledger>>;

fn lock(ledger: &Shared) -> MutexGuard<'_, Ledger> {
    ledger.lock().expect(LOCK)
}

/// Runs programs and workers under the faults of a seed, until a program has all results.
pub fn run(seed: u64) -> Ledger {
    let world = World::new(seed);
    let latency = (Duration::from_micros(50), Duration::from_millis(5));
    let net = Net::new(
        &world,
        NetworkModel { broken_before: 0.002, answer_lost: 0.002, ..NetworkModel::fair(latency) },
    );
    let sync = (Duration::from_micros(100), Duration::from_millis(10));
    let etcd = EtcdServer::new(&world, &net, Addresses::ManyHosts, sync);
    let ledger = Shared::default();
    let stage = Stage {
        world: world.clone(),
        net: net.clone(),
        etcd: etcd.clone(),
        ledger: ledger.clone(),
        places: Arc::default(),
    };
    etcd.start();
    let programs = (0..PROGRAMS).map(|number| Place { kind: Kind::Program, number });
    let workers = (0..WORKERS).map(|number| Place { kind: Kind::Worker, number });
    programs.chain(workers).for_each(|place| stage.start(place));
    stage.strike_later();
    let calm = stage.clone();
    world.after(FAULTS, move |_| calm.calm());
    while !lock(&ledger).is_done && lock(&ledger).broken.is_empty() {
        if world.turn() == Turn::Still {
            lock(&ledger).broken.push("no task can run and no event is pending".to_owned());
        }
        if FAULTS + TIMEOUT < world.now() {
            lock(&ledger).broken.push("no program has all results".to_owned());
        }
    }
    world.end();
    net.end();
    lock(&ledger).clone()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Program,
    Worker,
}

/// A place on which processes run one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    kind: Kind,
    number: u16,
}

impl Place {
    fn machine(self) -> Machine {
        match self.kind {
            Kind::Program => Machine(10 + self.number),
            Kind::Worker => Machine(60 + self.number),
        }
    }
}

/// The process of a place, if it runs, and how many there were.
type Lives = (Option<ProcessId>, u16);

#[derive(Clone)]
struct Stage {
    world: World,
    net: Net,
    etcd: EtcdServer,
    ledger: Shared,
    places: Arc<Mutex<BTreeMap<Place, Lives>>>,
}

impl Stage {
    fn start(&self, place: Place) {
        let life = {
            let mut places = self.places.lock().expect(LOCK);
            let (process, lives) = places.entry(place).or_default();
            if process.is_some() {
                return;
            }
            *lives += 1;
            *lives
        };
        let clock = self
            .world
            .roll(|rng| Clock { ahead: Duration::from_secs(rng.between(1, 100_000)), rate: 1.0 });
        let process = self.world.begin(format!("{:?}-{}.{life}", place.kind, place.number), clock);
        self.places.lock().expect(LOCK).insert(place, (Some(process), life));
        self.net.place(process, place.machine());
        let (addresses, machine) = (Addresses::ManyHosts, place.machine());
        let host =
            Arc::new(Simulated::new(&self.world, &self.net, process, machine, addresses, life));
        self.world.settle(process, host.clone());
        let (ledger, etcd) = (self.ledger.clone(), self.etcd.address().to_string());
        let life: BoxFuture<'static, Result<(), Failure>> = enter(&host, || match place.kind {
            Kind::Program => program(ledger, etcd).boxed(),
            Kind::Worker => worker(ledger).boxed(),
        });
        let stage = self.clone();
        let task = async move {
            // A program that finds another one at work ends, and is started again.
            drop(life.await);
            stage.world.clone().after(Duration::ZERO, move |_| stage.kill(place, false));
        };
        self.world.spawn(process, task.boxed());
    }

    fn process(&self, place: Place) -> Option<ProcessId> {
        self.places.lock().expect(LOCK).get(&place).and_then(|(process, _)| *process)
    }

    /// Ends the process of a place, which is started again soon.
    fn kill(&self, place: Place, silent: bool) {
        let Some(process) = self.process(place) else { return };
        self.world.kill(process);
        self.net.remove_process(process, silent);
        if let Some((process, _)) = self.places.lock().expect(LOCK).get_mut(&place) {
            *process = None;
        }
        let pause =
            self.world.roll(|rng| rng.time(Duration::from_millis(20), Duration::from_secs(3)));
        let stage = self.clone();
        self.world.after(pause, move |_| stage.start(place));
    }

    /// Strikes now and then, until faults end.
    fn strike_later(&self) {
        let pause =
            self.world.roll(|rng| rng.time(Duration::from_millis(50), Duration::from_secs(4)));
        if FAULTS < self.world.now() + pause {
            return;
        }
        let stage = self.clone();
        self.world.after(pause, move |_| {
            stage.strike();
            stage.strike_later();
        });
    }

    fn strike(&self) {
        let (kind, number, pause) = self.world.roll(|rng| {
            let kind = rng.below(8);
            let number = rng.below(u64::from(WORKERS)) as u16;
            (kind, number, rng.time(Duration::from_millis(100), Duration::from_secs(6)))
        });
        let worker = Place { kind: Kind::Worker, number };
        let program = Place { kind: Kind::Program, number: number % PROGRAMS };
        let one = if kind % 2 == 0 { worker } else { program };
        let stage = self.clone();
        match kind {
            0 | 1 => self.kill(one, false),
            2 | 3 => self.kill(one, true),
            4 | 5 => {
                let Some(process) = self.process(one) else { return };
                self.world.stop(process);
                self.world.after(pause, move |world| world.resume(process));
            }
            6 => {
                self.etcd.kill();
                self.world.after(pause, move |_| stage.etcd.start());
            }
            _ => {
                let (one, other) = (worker.machine(), program.machine());
                self.net.block(one, other);
                self.net.block(other, one);
                self.world.after(pause, move |_| {
                    stage.net.unblock(one, other);
                    stage.net.unblock(other, one);
                });
            }
        }
    }

    /// Ends all faults.
    fn calm(&self) {
        let latency = (Duration::from_micros(50), Duration::from_millis(5));
        self.net.set_network_model(NetworkModel::fair(latency));
        self.net.heal();
        self.etcd.start();
        let all: Vec<(Place, Option<ProcessId>)> = {
            let places = self.places.lock().expect(LOCK);
            places.iter().map(|(place, (process, _))| (*place, *process)).collect()
        };
        for (place, process) in all {
            match process {
                Some(process) => self.world.resume(process),
                None => self.start(place),
            }
        }
    }
}

/// Runs closures until the process ends.
async fn worker(ledger: Shared) -> Result<(), Failure> {
    let any = "127.0.0.1:0".parse().expect("an address");
    let server = WorkerServer::start(any, &Exposure::Loopback, 2).await?;
    loop {
        match server.next(Duration::ZERO) {
            Some(call) => drop(spawn(compute(call, ledger.clone()))),
            None => sleep(LOOK_EVERY).await,
        }
    }
}

async fn compute(call: Call, ledger: Shared) {
    let name = call.request.key.clone();
    *lock(&ledger).runs.entry(name.clone()).or_default() += 1;
    let value = random::seed();
    sleep(Duration::from_millis(1 + value % 300)).await;
    lock(&ledger).computed.entry(name).or_default().insert(value);
    call.returned(Bytes::copy_from_slice(&value.to_le_bytes()));
}

/// Schedules all closures, and waits for their results.
async fn program(ledger: Shared, etcd: String) -> Result<(), Failure> {
    let endpoints = vec![format!("http://{etcd}")];
    let etcd = Etcd::connect(&EtcdOptions { endpoints, ..EtcdOptions::default() }).await?;
    let coordinator = Coordinator::start(CoordinatorSettings {
        machine: Settings { on_error: OnError::Continue, losses_max: u32::MAX },
        waiting_max: CLOSURES as usize,
        tls: TlsIdentity::default(),
        lock: Some(Lock { etcd, keys: Keys::of_job("closures"), lease_ttl: LEASE_TTL }),
    })
    .await?;
    lock(&ledger).terms += 1;
    for number in 0..WORKERS {
        let machine = Place { kind: Kind::Worker, number }.machine();
        let address = Simulated::address(Addresses::ManyHosts, machine, 10_000);
        coordinator.add_worker(&address.to_string())?;
    }
    let mut closures: Vec<(Option<String>, ClosureId)> = Vec::new();
    for number in 0..CLOSURES {
        let name = (number % 3 != 0).then(|| format!("closure-{number}"));
        let inputs = closures.last().map(|(_, id)| *id).filter(|_| number % 4 == 1);
        let scheduled = Scheduled {
            function: "program:compute".to_owned(),
            arguments: Bytes::copy_from_slice(&number.to_le_bytes()),
            inputs: inputs.into_iter().collect(),
            name: name.as_deref().and_then(|it| it.parse().ok()),
            worker: None,
            identity: None,
            values: Vec::new(),
        };
        match coordinator.schedule(scheduled) {
            Ok(id) => closures.push((name, id)),
            Err(ScheduleError::Failed(failure)) => return Err(failure),
            Err(ScheduleError::Full(_)) => unreachable!("as many may wait"),
        }
    }
    while !closures.is_empty() {
        sleep(LOOK_EVERY).await;
        let mut left = Vec::new();
        for (name, id) in closures {
            let looked = coordinator.wait_for(Duration::ZERO, |table| {
                Some((table.outcome(id).cloned(), table.ended().cloned()))
            });
            match looked {
                Some((Some(Outcome::Returned(value)), _)) => {
                    if let Some(name) = name {
                        let value = <[u8; 8]>::try_from(&*value).map_or(0, u64::from_le_bytes);
                        lock(&ledger).tell(name, value);
                    }
                    coordinator.release(id);
                }
                Some((Some(other), _)) => {
                    lock(&ledger).broken.push(format!("{id} ended with {other:?}"));
                    return Ok(());
                }
                Some((None, Some(failure))) => return Err(failure),
                Some((None, None)) | None => left.push((name, id)),
            }
        }
        closures = left;
    }
    lock(&ledger).is_done = true;
    coordinator.close().await;
    Ok(())
}
