//! One run: a plan carried out to its end, and everything checked on the way.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use steadfast_audit::history::Job as HistoryJob;
use steadfast_common::dataset::Manifest;
use steadfast_common::ids::TaskId;
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_common::spec::Mode;

use crate::checks::{Reference, Seen, miscounted_at_the_end, observer};
use crate::cluster::{Cluster, Member, PERSON, Role};
use crate::etcd::EtcdServer;
use crate::explore::Moment;
use crate::fault::{Fault, Scene};
use crate::job::{Job, STORE};
use crate::net::Net;
use crate::plan::Plan;
use crate::store::Store;
use crate::watch::Watch;
use crate::world::{Clock, Turn, World};

/// How long a job may take once nothing goes wrong any more.
const PATIENCE: Duration = Duration::from_secs(240);

/// How long processes may take to end once their job is over.
const ENDING: Duration = Duration::from_secs(60);

/// Turns after which a run counts as one that goes in circles.
const TURNS_MAX: u64 = 4_000_000;

/// What came of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// What must not be; empty when all is well.
    pub broken: Vec<String>,
    /// Time in the world at the end.
    pub time: Duration,
    pub turns: u64,
    /// Of everything that happened, in order.
    pub digest: u64,
    pub revisions: u64,
    pub generations: u64,
    pub reigns: u64,
    pub pulls: u64,
    pub faults: usize,
    pub calls: u64,
    pub choices: u64,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:.3?} of simulated time, {} turns, {} revisions, {} reigns, {} generations, {} pulls \
             checked; digest {:016x}",
            self.time,
            self.turns,
            self.revisions,
            self.reigns,
            self.generations,
            self.pulls,
            self.digest
        )?;
        match self.broken.is_empty() {
            true => writeln!(f, "all is well"),
            false => writeln!(f, "broken:\n  {}", self.broken.join("\n  ")),
        }
    }
}

thread_local! {
    /// Undisturbed runs of jobs that were needed before.
    static REFERENCES: RefCell<BTreeMap<u64, Arc<Reference>>> = const { RefCell::new(BTreeMap::new()) };
}

/// Carries a plan out.
pub fn run(plan: &Plan) -> Outcome {
    let reference = match plan.job.spec.mode {
        // How far such a job comes is a matter of chance.
        Mode::Sync if plan.job.diverges => None,
        Mode::Sync => match reference(&plan.job) {
            Ok(reference) => Some(reference),
            Err(broken) => {
                return Outcome { broken: vec![broken], ..Outcome::default() };
            }
        },
        Mode::Async => None,
    };
    // A panic in a program is a failure like any other.
    let ran = catch_unwind(AssertUnwindSafe(|| Run::new(plan, reference).carry_out().0));
    ran.unwrap_or_else(|_| Outcome { broken: vec!["panic".to_owned()], ..Outcome::default() })
}

fn reference(job: &Job) -> Result<Arc<Reference>, String> {
    if let Some(known) = REFERENCES.with_borrow(|all| all.get(&job.number).cloned()) {
        return Ok(known);
    }
    let (outcome, reference) = Run::new(&Plan::undisturbed(job), None).carry_out();
    if let Some(broken) = outcome.broken.first() {
        return Err(format!("the undisturbed run of job {}: {broken}", job.number));
    }
    let reference = Arc::new(reference);
    REFERENCES.with_borrow_mut(|all| all.insert(job.number, reference.clone()));
    Ok(reference)
}

struct Run<'a> {
    plan: &'a Plan,
    reference: Option<Arc<Reference>>,
    scene: Scene,
    seen: Arc<Mutex<Seen>>,
    manifest: Manifest,
    result: Option<ResultRecord>,
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan, reference: Option<Arc<Reference>>) -> Self {
        let world = World::new(plan.seed);
        let net = Net::new(&world, plan.weather.clone());
        let store = Store::new(&world, plan.store_weather.clone());
        let (shape, job) = (&plan.shape, &plan.job);
        let etcd = EtcdServer::new(&world, &net, shape.addresses, shape.sync);
        let cluster = Cluster::new(&world, &net, &etcd, job, shape);
        let seen = Arc::<Mutex<Seen>>::default();
        world.detour(plan.detours.choices.clone());
        net.decide(plan.detours.calls.clone());
        net.observe(observer(job, reference.clone(), &etcd, seen.clone()));
        let (weather, store_weather) = (plan.weather.clone(), plan.store_weather.clone());
        let scene = Scene { world, net, store, etcd, cluster, weather, store_weather };
        Self { plan, reference, scene, seen, manifest: Manifest::default(), result: None }
    }

    fn carry_out(mut self) -> (Outcome, Reference) {
        let mounted = steadfast_store::mount(STORE, Arc::new(self.scene.store.clone()));
        let _mounted = mounted.expect("a URL of our own");
        let mut broken = Vec::new();
        let mut outcome = Outcome { faults: self.plan.faults.len(), ..Outcome::default() };
        if let Err(reason) = self.lay_out() {
            broken.push(reason);
        } else {
            let manifest = std::mem::take(&mut self.manifest);
            let keys = self.scene.cluster.keys();
            let spec = &self.plan.job.spec;
            let history = HistoryJob { keys: &keys, spec, manifest: &manifest };
            let mut watch = Watch::new(&history, self.seen.clone());
            self.begin();
            broken.extend(self.go_on(&mut watch));
            self.result = watch.result.take();
            if broken.is_empty() {
                broken.extend(self.end(&manifest));
            }
            outcome.revisions = watch.report().revisions;
            outcome.generations = watch.report().generations;
            outcome.reigns = watch.report().reigns;
        }
        let world = &self.scene.world;
        (outcome.time, outcome.turns, outcome.digest) =
            (world.now(), world.turns(), world.digest());
        (outcome.calls, outcome.choices) = (self.scene.net.calls(), world.choices());
        world.end();
        self.scene.net.end();
        let seen = std::mem::take(&mut *self.seen.lock().expect("one thread"));
        outcome.pulls = seen.pulls;
        outcome.broken = broken;
        let reference = Reference {
            blocks: seen.blocks,
            parameters_sha256: self
                .result
                .as_ref()
                .and_then(|it| it.parameters_sha256.clone())
                .unwrap_or_default(),
            examples: self.result.as_ref().map_or(0, |it| it.examples),
        };
        (outcome, reference)
    }

    /// Puts the dataset into the store and finds out what the master will make of it.
    fn lay_out(&mut self) -> Result<(), String> {
        let (store, job) = (self.scene.store.clone(), self.plan.job.clone());
        let (name, bytes) = job.data();
        store.change(|it| it.latency = (Duration::ZERO, Duration::ZERO));
        let weather = self.scene.store_weather.clone();
        let planned = self.apart(async move {
            store.lay(name, bytes).await;
            store.change(|it| {
                (it.refused, it.answer_lost, it.torn) = (0.0, 0.0, 0.0);
            });
            let manifest =
                steadfast_data::plan(&job.spec.dataset, job.spec.evaluation.fraction, None).await;
            store.change(|it| *it = weather);
            manifest
        });
        self.manifest = planned.map_err(|error| format!("the dataset: {error}"))?;
        Ok(())
    }

    /// Does something by a process of its own, while the world goes on.
    fn apart<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        let world = &self.scene.world;
        let process = world.begin("observer".to_owned(), Clock::right());
        let machine = PERSON;
        self.scene.net.place(process, machine);
        let addresses = self.plan.shape.addresses;
        let host =
            crate::host::Simulated::new(world, &self.scene.net, process, machine, addresses, 0);
        world.settle(process, Arc::new(host));
        let done = Arc::new(Mutex::new(None));
        let out = done.clone();
        let task = async move {
            let outcome = work.await;
            *out.lock().expect("one thread") = Some(outcome);
        };
        world.spawn(process, task.boxed());
        loop {
            if let Some(outcome) = done.lock().expect("one thread").take() {
                return outcome;
            }
            assert!(world.turn() == Turn::Moved, "the observer's work has stopped");
        }
    }

    fn begin(&self) {
        let (scene, shape) = (&self.scene, &self.plan.shape);
        scene.etcd.start();
        let members = [
            (Role::Master, shape.masters),
            (Role::Pserver, shape.pservers),
            (Role::Trainer, shape.trainers),
        ];
        for (role, count) in members {
            for number in 0..count {
                let cluster = scene.cluster.clone();
                // Who comes first is drawn as well.
                let late = scene.world.roll(|dice| dice.below(50));
                let start = move |_: &World| cluster.start(Member { role, number });
                scene.world.after(Duration::from_millis(late), start);
            }
        }
        for (at, fault) in &self.plan.faults {
            let (scene, fault) = (self.scene.clone(), fault.clone());
            self.scene.world.after(*at, move |_| scene.strike(&fault));
        }
        if !self.plan.detours.strikes.is_empty() {
            return;
        }
        let last = self.plan.faults.iter().map(|(at, _)| *at).max().unwrap_or_default();
        let scene = self.scene.clone();
        let calm = last + self.plan.shape.lease_ttl * 2;
        self.scene.world.after(calm, move |_| scene.calm());
    }

    /// Runs until the job's result is there and all processes have ended.
    fn go_on(&self, watch: &mut Watch<'_>) -> Vec<String> {
        let world = self.scene.world.clone();
        let last = self.plan.faults.iter().map(|(at, _)| *at).max().unwrap_or_default();
        let mut limit = world.now() + last + self.plan.shape.lease_ttl * 2 + PATIENCE;
        let mut strikes = self.plan.detours.strikes.clone();
        loop {
            let is_due = |(moment, _): &(Moment, Fault)| match moment {
                Moment::Turn(turn) => *turn <= world.turns(),
                Moment::Revision(at) => *at <= watch.report().revisions,
            };
            if let Some(at) = strikes.iter().position(is_due) {
                let (_, fault) = strikes.swap_remove(at);
                self.scene.strike(&fault);
                if strikes.is_empty() {
                    let scene = self.scene.clone();
                    world.after(self.plan.shape.lease_ttl * 3, move |_| scene.calm());
                }
            }
            if world.turn() == Turn::Still {
                return vec!["I12: nothing will ever happen again".to_owned()];
            }
            if TURNS_MAX < world.turns() {
                return vec![format!("I12: no end after {TURNS_MAX} turns")];
            }
            if limit < world.now() {
                return vec![self.why_no_end(watch)];
            }
            let was_over = watch.result.is_some();
            let broken = watch.look(&self.scene);
            if !broken.is_empty() {
                return broken;
            }
            if watch.result.is_some() && !was_over {
                limit = limit.max(world.now() + ENDING);
            }
            if was_over && self.scene.cluster.is_empty() {
                return Vec::new();
            }
        }
    }

    fn why_no_end(&self, watch: &Watch<'_>) -> String {
        let running: Vec<String> = self
            .scene
            .cluster
            .members()
            .into_iter()
            .filter_map(|member| self.scene.cluster.process(member))
            .map(|process| self.scene.world.name(process))
            .collect();
        format!(
            "I12: no end {:?} after the last fault; result: {}, generations: {}, running: {}",
            PATIENCE,
            watch.result.is_some(),
            watch.report().generations,
            running.join(" ")
        )
    }

    /// Compares what the job has come to with what it had to come to.
    fn end(&self, manifest: &Manifest) -> Vec<String> {
        let Some(result) = &self.result else { return vec!["there is no result".to_owned()] };
        if self.plan.job.diverges {
            let reason = result.reason.as_deref().unwrap_or_default();
            let is_told = result.state == JobOutcome::Failed && reason.contains("not finite");
            let broken = || format!("I11: the job's parameters overflow, and it ended: {result:?}");
            return (!is_told).then(broken).into_iter().collect();
        }
        let may_give_up = !self.plan.job.is_patient && self.plan.job.spec.mode == Mode::Async;
        if result.state != JobOutcome::Finished && may_give_up {
            return Vec::new();
        }
        if result.state != JobOutcome::Finished {
            return vec![format!("the job failed: {:?}", result.reason)];
        }
        let mut broken = Vec::new();
        if let Some(reference) = &self.reference {
            let found = result.parameters_sha256.clone().unwrap_or_default();
            if found != reference.parameters_sha256 {
                broken.push(format!(
                    "I7: the result has the SHA-256 {found}, without faults it is {}",
                    reference.parameters_sha256
                ));
            }
            if result.examples != reference.examples {
                let (found, due) = (result.examples, reference.examples);
                broken.push(format!("{found} examples were counted; {due} were due"));
            }
        }
        if !result.discarded.is_empty() && !may_give_up {
            broken.push(format!("tasks were given up: {:?}", result.discarded));
        }
        broken.extend(self.miscounted(manifest));
        broken
    }

    fn miscounted(&self, manifest: &Manifest) -> Option<String> {
        let job = &self.plan.job;
        if job.spec.mode == Mode::Sync || job.goes_on() {
            return None;
        }
        let store = self.scene.store.clone();
        let model = self.apart(async move { store.read("model.safetensors").await })?;
        let tensors = safetensors::SafeTensors::deserialize(&model).ok()?;
        let due = self.due(manifest);
        ["count", "count_again"].iter().find_map(|name| {
            let Ok(tensor) = tensors.tensor(name) else {
                return Some(format!("the model has no `{name}`"));
            };
            let floats = tensor.data().chunks_exact(4);
            let values: Vec<f32> =
                floats.map(|it| f32::from_le_bytes(it.try_into().expect("four bytes"))).collect();
            miscounted_at_the_end(job, &due, &values).map(|it| format!("{name}: {it}"))
        })
    }

    /// How often each record has to be counted at least, and may be at most.
    fn due(&self, manifest: &Manifest) -> Vec<(u32, u32)> {
        let job = &self.plan.job;
        let passes = job.spec.passes.unwrap_or(1);
        let mut due = vec![(0, 0); job.records];
        let given_up = self.result.iter().flat_map(|it| &it.discarded);
        let given_up: Vec<TaskId> = given_up.map(|it| it.task).collect();
        for task in manifest.training_tasks() {
            let times = given_up.iter().filter(|it| **it == task).count() as u32;
            for chunk in manifest.chunks_of(task) {
                let first = chunk.first_record as usize;
                let range = first..first + chunk.records as usize;
                due[range].fill((passes.saturating_sub(times), passes));
            }
        }
        due
    }
}
