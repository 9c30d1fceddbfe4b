//! Programs with a coordinator, and workers that run their closures, under faults.
//!
//! Two programs of one job take turns: the holder of the lock schedules the same closures by the same names, and some
//! without a name. The value of a closure is drawn when it is computed, so each run of it has another one: a program
//! that was told two values of one name has counted two runs.
//!
//! With parameters, there are masters, parameter servers and a store as well. Each closure pushes a gradient that adds 1
//! to a value of its own, of two parameters that different slots hold, so the values count how often it was applied.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use steadfast_common::job::job_file;
use steadfast_common::job::spec::CLOSURES as CLOSURES_KIND;
use steadfast_common::records::GenerationRecord;
use steadfast_common::records::keys::Keys;
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_coordinator::{
    Call, ClosureId, Coordinator, CoordinatorSettings, Lock, OnError, Outcome, ParameterClient,
    ScheduleError, Scheduled, Settings, WorkerServer,
};
use steadfast_host::random;
use steadfast_host::task::spawn;
use steadfast_host::time::sleep;
use steadfast_master::{JobRequest, Request};
use steadfast_net::TlsIdentity;
use steadfast_process::{Exposure, Failure, LogIdentity, Shutdown};
use steadfast_pserver_storage::MemoryStores;
use steadfast_trainer::{Current, Declared, Registry};

use crate::cluster::settings;
use crate::etcd::EtcdServer;
use crate::host::{Addresses, Simulated, enter};
use crate::job::STORE;
use crate::net::{Machine, Net};
use crate::network_model::NetworkModel;
use crate::store::{Store, StoreModel};
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

/// Closures of a program with parameters.
const TRAINING_CLOSURES: u64 = 90;

const MASTERS: u16 = 2;
const SLOTS: u32 = 2;
/// One more than there are slots.
const PSERVERS: u16 = 3;

/// The values are read again this long after the last fault: the job has gone back to a checkpoint for each
/// loss then.
const SETTLED_AFTER: Duration = Duration::from_secs(30);

const JOB: &str = "closures";

const JOB_FILE: &str = r#"
name = "closures"
mode = "async"
model = { kind = "closures" }
learning_rate = { base = 1.0 }
checkpoint = { every = "700ms", keep = 2 }
"#;

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
    /// Counts the generations of the parameters, if there are some.
    pub generations: u64,
    /// Set once there are no more faults.
    is_calm: bool,
    /// Set once a program has secured the pushes of all closures: no other one begins, which would push again what is lost.
    is_secured: bool,
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
    run_job(seed, false)
}

/// Runs programs whose closures push to parameter servers, as [`run`]; at the end, each closure with a name counts once
/// in the parameters.
pub fn run_with_parameters(seed: u64) -> Ledger {
    run_job(seed, true)
}

fn run_job(seed: u64, trains: bool) -> Ledger {
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
        trains,
    };
    let latency = (Duration::from_millis(1), Duration::from_millis(30));
    let store = Store::new(&world, StoreModel::fair(latency));
    let _mounted = trains.then(|| steadfast_store::mount(STORE, Arc::new(store)));
    etcd.start();
    if trains {
        let masters = (0..MASTERS).map(|number| Place { kind: Kind::Master, number });
        let pservers = (0..PSERVERS).map(|number| Place { kind: Kind::Pserver, number });
        masters.chain(pservers).for_each(|place| stage.start(place));
    }
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
    if trains {
        let key = Keys::of_job(JOB).generation();
        let stored = etcd.server().and_then(|server| server.get(key.as_bytes()));
        let stored = stored.and_then(|entry| entry.value);
        let found = stored.and_then(|it| serde_json::from_slice::<GenerationRecord>(&it).ok());
        lock(&ledger).generations = found.map_or(0, |it| it.generation.0);
    }
    world.end();
    net.end();
    lock(&ledger).clone()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Program,
    Worker,
    Master,
    Pserver,
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
            Kind::Master => Machine(80 + self.number),
            Kind::Pserver => Machine(90 + self.number),
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
    /// Whether closures push to parameter servers.
    trains: bool,
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
        let trains = self.trains;
        let life: BoxFuture<'static, Result<(), Failure>> = enter(&host, || match place.kind {
            Kind::Program => program(ledger, etcd, trains).boxed(),
            Kind::Worker => worker(ledger, etcd).boxed(),
            Kind::Master => master(etcd).boxed(),
            Kind::Pserver => pserver(etcd).boxed(),
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
            let kind = rng.below(if self.trains { 13 } else { 8 });
            let number = rng.below(u64::from(WORKERS)) as u16;
            (kind, number, rng.time(Duration::from_millis(100), Duration::from_secs(6)))
        });
        let worker = Place { kind: Kind::Worker, number };
        let program = Place { kind: Kind::Program, number: number % PROGRAMS };
        let is_secured = lock(&self.ledger).is_secured;
        let one = if kind % 2 == 0 || is_secured { worker } else { program };
        let pserver = Place { kind: Kind::Pserver, number };
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
            8 => self.kill(Place { kind: Kind::Master, number: number % MASTERS }, false),
            9 | 10 => self.kill(pserver, kind == 10),
            11 => {
                let Some(process) = self.process(pserver) else { return };
                self.world.stop(process);
                self.world.after(pause, move |world| world.resume(process));
            }
            _ => {
                let other = if kind == 12 { pserver } else { program };
                let (one, other) = (worker.machine(), other.machine());
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
        lock(&self.ledger).is_calm = true;
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
async fn worker(ledger: Shared, etcd: String) -> Result<(), Failure> {
    let any = "127.0.0.1:0".parse().expect("an address");
    let etcd = EtcdOptions { endpoints: vec![format!("http://{etcd}")], ..EtcdOptions::default() };
    let server = WorkerServer::start(any, &Exposure::Loopback, 2, etcd).await?;
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
    let mut pushed = None;
    if let Ok(layout) = call.layout() {
        let mut gradient = vec![0.0; layout.len()];
        for param in 0..layout.params().len() {
            let place = layout.range_of(param).start + number_of(&call.request.arguments) as usize;
            gradient[place] = -1.0;
        }
        match call.push(gradient).await {
            Ok(generation) => pushed = Some(generation),
            Err(failure) => {
                return call.raised("Failure".to_owned(), failure.to_string(), String::new());
            }
        }
    }
    call.returned(Bytes::copy_from_slice(&value.to_le_bytes()), pushed);
}

fn number_of(bytes: &Bytes) -> u64 {
    <[u8; 8]>::try_from(&**bytes).map_or(0, u64::from_le_bytes)
}

async fn master(etcd: String) -> Result<(), Failure> {
    let spec = job_file::parse(JOB_FILE).expect("it is valid");
    let request = JobRequest { spec, base: None, store: STORE.to_owned() };
    let args = steadfast_master::Args {
        common: settings(JOB, &etcd, LEASE_TTL),
        job_file: None,
        store: None,
        pservers: SLOTS,
        tensorboard: None,
        start_timeout: FAULTS,
    };
    let (id, request) = (random::uuid(), Request::Training(Box::new(request)));
    let identity = LogIdentity::new("master", JOB, id);
    steadfast_master::run_process(args, Some(request), id, identity, Shutdown::manual()).await
}

async fn pserver(etcd: String) -> Result<(), Failure> {
    let args = steadfast_pserver::Args {
        common: settings(JOB, &etcd, LEASE_TTL),
        drain_timeout: LEASE_TTL,
        table_memory: None,
        table_directory: None,
    };
    let (id, stores) = (random::uuid(), Arc::new(MemoryStores));
    let identity = LogIdentity::new("pserver", JOB, id);
    steadfast_pserver::run_process(args, stores, id, identity, Shutdown::manual()).await
}

/// Runs the trainer of a program, which sets the initial values.
async fn trainer(etcd: String, params: Vec<ParamSpec>) -> Result<(), Failure> {
    let values = vec![0.0; params.iter().map(ParamSpec::len).sum()];
    let declared = Declared { params, values };
    let mut registry = Registry::built_in();
    registry.register(CLOSURES_KIND, move |_, _| Ok(Box::new(declared.clone())));
    let common = settings(JOB, &etcd, LEASE_TTL);
    let args = steadfast_trainer::Args { common, accept_code_change: false };
    let id = random::uuid();
    let (identity, current) = (LogIdentity::new("trainer", JOB, id), Current::default());
    let shutdown = Shutdown::manual();
    steadfast_trainer::run_process(args, registry, id, identity, shutdown, &current).await
}

/// Compares the values of the parameters with the closures, which are over.
fn compare(ledger: &Shared, client: &ParameterClient, values: &[f32], when: &str) {
    for number in 0..TRAINING_CLOSURES {
        for param in 0..client.layout().params().len() {
            let place = client.layout().range_of(param).start + number as usize;
            let found = values[place];
            // One without a name counts once for each program that has run it.
            let is_right = if has_name(number) { found == 1.0 } else { 1.0 <= found };
            if !is_right {
                let violation =
                    format!("{when}, closure {number} counts {found} times in parameter {param}");
                lock(ledger).broken.push(violation);
            }
        }
    }
}

/// Checks, while there are faults, that each closure counts, and that it still does after them once a checkpoint has all
/// of them.
async fn count(ledger: &Shared, coordinator: &Coordinator) -> Result<(), Failure> {
    let Some(client) = coordinator.parameters() else { return Ok(()) };
    let pull = || async { client.pull().await.map_err(|it| Failure::unavailable(it.to_string())) };
    // Half of the programs wait as long as there are faults, and have to learn of each.
    let waits = random::seed().is_multiple_of(2);
    while waits && !lock(ledger).is_calm {
        sleep(LOOK_EVERY).await;
    }
    let values = coordinator.with_all_pushes(pull).await?;
    compare(ledger, &client, &values, "when all are over");
    coordinator.secure_pushes().await?;
    lock(ledger).is_secured = true;
    // Nothing runs again any more.
    coordinator.close().await;
    while !lock(ledger).is_calm {
        sleep(LOOK_EVERY).await;
    }
    sleep(SETTLED_AFTER).await;
    compare(ledger, &client, &pull().await?, "at the end");
    Ok(())
}

fn has_name(number: u64) -> bool {
    !number.is_multiple_of(3)
}

/// Schedules all closures, and waits for their results.
async fn program(ledger: Shared, etcd: String, trains: bool) -> Result<(), Failure> {
    let count_of_all = if trains { TRAINING_CLOSURES } else { CLOSURES };
    let params = match trains {
        true => ["left", "right"].map(|it| ParamSpec::new(it, &[count_of_all as usize])).into(),
        false => Vec::new(),
    };
    let of_trainer = (etcd.clone(), params.clone());
    let endpoints = vec![format!("http://{etcd}")];
    let etcd = Etcd::connect(&EtcdOptions { endpoints, ..EtcdOptions::default() }).await?;
    let coordinator = Coordinator::start(CoordinatorSettings {
        machine: Settings { on_error: OnError::Continue, losses_max: u32::MAX },
        waiting_max: count_of_all as usize,
        tls: TlsIdentity::default(),
        lock: Some(Lock { etcd, keys: Keys::of_job(JOB), lease_ttl: LEASE_TTL }),
        discovers: false,
        params,
    })
    .await?;
    if lock(&ledger).is_secured {
        coordinator.close().await;
        return pending().await;
    }
    let mut trainer = trains.then(|| {
        let (etcd, params) = of_trainer;
        spawn(trainer(etcd, params))
    });
    if let Some(trainer) = &mut trainer {
        tokio::select! {
            biased;
            begun = coordinator.begun() => begun?,
            ended = trainer => drop(ended),
        }
    }
    lock(&ledger).terms += 1;
    for number in 0..WORKERS {
        let machine = Place { kind: Kind::Worker, number }.machine();
        let address = Simulated::address(Addresses::ManyHosts, machine, 10_000);
        coordinator.add_worker(&address.to_string())?;
    }
    let mut closures: Vec<(Option<String>, ClosureId)> = Vec::new();
    for number in 0..count_of_all {
        let name = has_name(number).then(|| format!("closure-{number}"));
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
                        lock(&ledger).tell(name, number_of(&value));
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
    if trains {
        count(&ledger, &coordinator).await?;
    }
    lock(&ledger).is_done = true;
    coordinator.close().await;
    Ok(())
}
