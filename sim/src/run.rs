//! One run: executes a plan to its end and checks all invariants.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::FutureExt;
use steadfast_audit::history::{Checker, ElasticJob as ElasticHistory, Job as History};
use steadfast_common::ids::TaskId;
use steadfast_common::job::dataset::Manifest;
use steadfast_common::job::spec::Mode;
use steadfast_common::records::commits::CommitRecord;
use steadfast_common::records::given_up::Discarded;
use steadfast_common::records::{JobOutcome, ResultRecord};

use crate::audit::{Auditor, Recording};
use crate::checks::{Observed, Reference, elastic_observer, final_count_mismatch, observer};
use crate::cluster::{Cluster, Member, PERSON, Role};
use crate::etcd::EtcdServer;
use crate::explore::Moment;
use crate::fault::{Fault, Scene};
use crate::job::{FILE_EVERY, Job, STORE};
use crate::net::Net;
use crate::plan::Plan;
use crate::store::Store;
use crate::watch::Watch;
use crate::workload::{ElasticJob, RESTARTS_ENOUGH, Workload};
use crate::world::{Clock, Turn, World};

/// How long a job may take after the last fault.
const TIMEOUT: Duration = Duration::from_secs(240);

/// How long processes may take to exit after the end of their job.
const ENDING: Duration = Duration::from_secs(60);

/// Interval of status requests.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// Outcome of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Violated invariants; empty if the run passed.
    pub broken: Vec<String>,
    /// Simulated time at the end.
    pub time: Duration,
    pub turns: u64,
    /// Digest of all events, in order.
    pub digest: u64,
    pub revisions: u64,
    pub generations: u64,
    pub terms: u64,
    pub pulls: u64,
    /// Checkpoints that were audited.
    pub audits: u64,
    pub faults: usize,
    pub calls: u64,
    pub choices: u64,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:.3?} of simulated time, {} turns, {} revisions, {} terms, {} generations, {} pulls \
             checked, {} checkpoints audited; digest {:016x}",
            self.time,
            self.turns,
            self.revisions,
            self.terms,
            self.generations,
            self.pulls,
            self.audits,
            self.digest
        )?;
        match self.broken.is_empty() {
            true => writeln!(f, "passed"),
            false => writeln!(f, "failed:\n  {}", self.broken.join("\n  ")),
        }
    }
}

thread_local! {
    /// Cached undisturbed runs, by job.
    static REFERENCES: RefCell<BTreeMap<u64, Arc<Reference>>> = const { RefCell::new(BTreeMap::new()) };
}

pub fn run(plan: &Plan) -> Outcome {
    let reference = match &plan.job {
        // The step at which a diverging job fails varies.
        Workload::Training(job) if job.spec.mode == Mode::Sync && !job.diverges => {
            match reference(job) {
                Ok(reference) => Some(reference),
                Err(broken) => return Outcome { broken: vec![broken], ..Outcome::default() },
            }
        }
        Workload::Training(_) | Workload::Elastic(_) => None,
    };
    // A panic in a program counts as a failure.
    let ran = catch_unwind(AssertUnwindSafe(|| Run::new(plan, reference).execute().outcome));
    ran.unwrap_or_else(|_| Outcome { broken: vec!["panic".to_owned()], ..Outcome::default() })
}

/// Executes a plan; returns what an audit of it reads beside the outcome.
pub fn record(plan: &Plan) -> (Outcome, Recording) {
    let run = Run { recording: Some(Recording::default()), ..Run::new(plan, None) };
    let executed = run.execute();
    (executed.outcome, executed.recording.unwrap_or_default())
}

/// Executes a plan; returns the real time that the code of masters took beside the outcome.
pub fn measure_masters(plan: &Plan) -> (Outcome, Duration) {
    let executed = Run::new(plan, None).execute();
    (executed.outcome, executed.of_masters)
}

fn reference(job: &Job) -> Result<Arc<Reference>, String> {
    if let Some(known) = REFERENCES.with_borrow(|all| all.get(&job.number).cloned()) {
        return Ok(known);
    }
    let Executed { outcome, reference, .. } = Run::new(&Plan::undisturbed(job), None).execute();
    if let Some(broken) = outcome.broken.first() {
        return Err(format!("the undisturbed run of job {}: {broken}", job.number));
    }
    let reference = Arc::new(reference);
    REFERENCES.with_borrow_mut(|all| all.insert(job.number, reference.clone()));
    Ok(reference)
}

struct Executed {
    outcome: Outcome,
    reference: Reference,
    recording: Option<Recording>,
    /// Real time that the tasks of masters took.
    of_masters: Duration,
}

struct Run<'a> {
    plan: &'a Plan,
    reference: Option<Arc<Reference>>,
    scene: Scene,
    observed: Arc<Mutex<Observed>>,
    manifest: Manifest,
    /// Collects what an audit reads, if it is wanted.
    recording: Option<Recording>,
    result: Option<ResultRecord>,
    /// The simulated time of the result.
    ended: Duration,
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan, reference: Option<Arc<Reference>>) -> Self {
        let world = World::new(plan.seed);
        let net = Net::new(&world, plan.network_model.clone());
        let store = Store::new(&world, plan.store_model.clone());
        let (shape, job) = (&plan.shape, &plan.job);
        if let Some(member) = plan.forbidden {
            store.forbid(member);
        }
        let etcd = EtcdServer::new(&world, &net, shape.addresses, shape.sync);
        let observed = Arc::<Mutex<Observed>>::default();
        let cluster = Cluster::new(&world, &net, &etcd, job, shape, observed.clone());
        if plan.has_instant_turns {
            world.make_turns_instant();
        }
        world.deviation(plan.deviations.choices.clone());
        net.decide(plan.deviations.calls.clone());
        net.observe(match job {
            Workload::Training(job) => {
                observer(job, reference.clone(), &etcd, &world, observed.clone())
            }
            Workload::Elastic(_) => elastic_observer(&cluster.keys(), &etcd, observed.clone()),
        });
        let (network_model, store_model) = (plan.network_model.clone(), plan.store_model.clone());
        let scene = Scene { world, net, store, etcd, cluster, network_model, store_model };
        let (manifest, ended) = (Manifest::default(), Duration::ZERO);
        let (recording, result) = (None, None);
        Self { plan, reference, scene, observed, manifest, recording, result, ended }
    }

    fn execute(mut self) -> Executed {
        let mounted = steadfast_store::mount(STORE, Arc::new(self.scene.store.clone()));
        let _mounted = mounted.expect("the URL is valid");
        let mut broken = Vec::new();
        let mut outcome = Outcome { faults: self.plan.faults.len(), ..Outcome::default() };
        if let Err(reason) = self.lay_out() {
            broken.push(reason);
        } else {
            let manifest = std::mem::take(&mut self.manifest);
            let keys = self.scene.cluster.keys();
            let checker = match &self.plan.job {
                Workload::Training(job) => {
                    let (keys, spec, manifest) = (&keys, &job.spec, &manifest);
                    Checker::new(&History { keys, spec, manifest }, &[])
                }
                Workload::Elastic(job) => {
                    let (keys, nodes, records) = (&keys, job.nodes, job.spec.records);
                    Checker::of_elastic(&ElasticHistory { keys, nodes, records }, &[])
                }
            };
            let recording = self.recording.take();
            let recording = recording.map(|it| Recording { manifest: manifest.clone(), ..it });
            let auditor = Auditor::new(&keys, &self.scene, recording);
            let mut watch = Watch::new(&keys, checker, auditor, self.observed.clone());
            self.begin();
            broken.extend(self.go_on(&mut watch));
            (self.result, self.ended) = (watch.result.take(), watch.ended);
            if broken.is_empty() {
                broken.extend(self.end(&manifest));
            }
            outcome.revisions = watch.report().revisions;
            outcome.generations = watch.report().generations;
            outcome.terms = watch.report().terms;
            outcome.audits = watch.auditor.audits;
            self.recording = watch.auditor.recording.take();
        }
        let world = &self.scene.world;
        (outcome.time, outcome.turns, outcome.digest) =
            (world.now(), world.turns(), world.digest());
        (outcome.calls, outcome.choices) = (self.scene.net.calls(), world.choices());
        let of_masters = world.busy("master");
        world.end();
        self.scene.net.end();
        let observed = std::mem::take(&mut *self.observed.lock().expect("one thread"));
        outcome.pulls = observed.pulls;
        outcome.broken = broken;
        let reference = Reference {
            blocks: observed.blocks,
            rows: observed.rows,
            parameters_sha256: self
                .result
                .as_ref()
                .and_then(|it| it.parameters_sha256.clone())
                .unwrap_or_default(),
            examples: self.result.as_ref().map_or(0, |it| it.examples),
        };
        Executed { outcome, reference, recording: self.recording, of_masters }
    }

    /// Writes the dataset of a training job to the store and plans its manifest as the master will.
    fn lay_out(&mut self) -> Result<(), String> {
        let Workload::Training(job) = &self.plan.job else { return Ok(()) };
        let (store, job) = (self.scene.store.clone(), job.clone());
        let mut files = job.data().into_iter();
        let (name, bytes) = files.next().expect("a job has records");
        for (at, (name, bytes)) in (1_u32..).zip(files) {
            let store = store.clone();
            // The store in memory never waits.
            let lay = move |_: &World| {
                let _ = store.lay(&name, bytes).now_or_never();
            };
            self.scene.world.after(FILE_EVERY * at, lay);
        }
        store.change(|it| it.latency = (Duration::ZERO, Duration::ZERO));
        let network_model = self.scene.store_model.clone();
        let planned = self.apart(async move {
            store.lay(&name, bytes).await;
            store.change(|it| {
                (it.refused, it.answer_lost, it.torn) = (0.0, 0.0, 0.0);
            });
            let planned = async {
                job.convert_data().await?;
                let (dataset, evaluation) = (&job.spec.dataset, &job.spec.evaluation);
                match job.is_stream {
                    true => Ok(Manifest::default()),
                    false => steadfast_data::plan(dataset, evaluation, None).await,
                }
            };
            let manifest = planned.await;
            store.change(|it| *it = network_model);
            manifest
        });
        self.manifest = planned.map_err(|error| format!("the dataset: {error}"))?;
        Ok(())
    }

    /// Runs `work` in a separate process while the simulation continues.
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
            (Role::Agent, shape.agents),
        ];
        for (role, count) in members {
            for number in 0..count {
                let cluster = scene.cluster.clone();
                // The start order is random, too.
                let late = scene.world.roll(|rng| rng.below(50));
                let start = move |_: &World| cluster.start(Member { role, number });
                scene.world.after(Duration::from_millis(late), start);
            }
        }
        for (at, fault) in &self.plan.faults {
            let (scene, fault) = (self.scene.clone(), fault.clone());
            self.scene.world.after(*at, move |_| scene.strike(&fault));
        }
        if !self.plan.deviations.strikes.is_empty() {
            return;
        }
        let scene = self.scene.clone();
        self.scene.world.after(self.plan.calm(), move |_| scene.calm());
    }

    /// Runs until the job has a result and all processes have ended.
    fn go_on(&self, watch: &mut Watch<'_>) -> Vec<String> {
        let world = self.scene.world.clone();
        let calm = self.plan.calm();
        let mut limit = world.now() + calm + TIMEOUT;
        let mut strikes = self.plan.deviations.strikes.clone();
        let mut next_check = Duration::ZERO;
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
                return vec!["I12: deadlock: no task can run and no event is pending".to_owned()];
            }
            let most = self.plan.turns_max;
            if most < world.turns() {
                return vec![format!("I12: the job has not ended after {most} turns")];
            }
            if limit < world.now() {
                return vec![self.why_no_end(watch)];
            }
            if next_check <= world.now() {
                next_check = world.now() + CHECK_EVERY;
                // During faults a cut link may block the job, which the master cannot detect.
                if calm < world.now() {
                    self.scene.poll_status();
                }
                if let Workload::Training(job) = &self.plan.job
                    && job.is_stream
                    && calm.max(FILE_EVERY * job.data().len() as u32) < world.now()
                {
                    self.scene.drain();
                }
            }
            let was_over = watch.result.is_some();
            let broken = watch.check(&self.scene);
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
            "I12: the job has not ended {:?} after the last fault; result: {}, generations: {}, running: {}",
            TIMEOUT,
            watch.result.is_some(),
            watch.report().generations,
            running.join(" ")
        )
    }

    /// Compares the result of the job with the expected one.
    fn end(&self, manifest: &Manifest) -> Vec<String> {
        let Some(result) = &self.result else { return vec!["the job has no result".to_owned()] };
        let job = match &self.plan.job {
            Workload::Training(job) => job,
            Workload::Elastic(job) if result.state == JobOutcome::Finished => {
                return self.commit_mismatch(job).into_iter().collect();
            }
            Workload::Elastic(job) if self.was_short_of_nodes(job, result) => return Vec::new(),
            Workload::Elastic(job) if self.was_given_up(job, result) => return Vec::new(),
            Workload::Elastic(_) => return vec![format!("the job ended with {result:?}")],
        };
        if job.diverges {
            let reason = result.reason.as_deref().unwrap_or_default();
            let is_reported = result.state == JobOutcome::Failed && reason.contains("not finite");
            let broken =
                || format!("I11: the job's parameters overflow, but it ended with {result:?}");
            return (!is_reported).then(broken).into_iter().collect();
        }
        let may_give_up = !job.is_patient && job.spec.mode == Mode::Async;
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
                    "I7: the result has the SHA-256 {found}; without faults it is {}",
                    reference.parameters_sha256
                ));
            }
            if result.examples != reference.examples {
                let (found, due) = (result.examples, reference.examples);
                broken.push(format!("{found} examples were trained; expected {due}"));
            }
        }
        broken.extend(given_up_wrongly(job, &result.discarded, manifest));
        broken.extend(self.count_mismatch(job, manifest));
        broken.extend(self.row_count_mismatch(job, manifest));
        broken
    }

    /// Compares the last commit with all records of all passes, which the final state has seen once each.
    fn commit_mismatch(&self, job: &ElasticJob) -> Option<String> {
        let due = job.last_position()?;
        let server = self.scene.etcd.server()?;
        let stored = server.get(self.scene.cluster.keys().commit().as_bytes());
        let stored = stored.and_then(|entry| entry.value);
        let found = stored.and_then(|it| serde_json::from_slice::<CommitRecord>(&it).ok());
        let is_right =
            found.as_ref().is_some_and(|found| found.position == due && found.ahead.is_empty());
        (!is_right).then(|| format!("the last commit is {found:?}; expected is {due:?}"))
    }

    /// Returns whether faults kept a node away for the join timeout after others had succeeded: such a job has
    /// failed.
    fn was_short_of_nodes(&self, job: &ElasticJob, result: &ResultRecord) -> bool {
        let reason = result.reason.as_deref().unwrap_or_default();
        let latest = self.plan.calm() + job.spec.nodes.join_timeout;
        !self.plan.faults.is_empty()
            && reason.ends_with("joined another round within the join timeout")
            && self.ended <= latest
    }

    /// Returns whether workers failed more often than the job allows: such a job may fail.
    fn was_given_up(&self, job: &ElasticJob, result: &ResultRecord) -> bool {
        let reason = result.reason.as_deref().unwrap_or_default();
        let has_given_up = self.observed.lock().expect("one thread").workers.has_agent_given_up;
        let may_give_up = job.restarts_max < RESTARTS_ENOUGH;
        may_give_up && reason.contains(" gave up: ")
            || has_given_up && reason.ends_with("joined another round within the join timeout")
    }

    fn count_mismatch(&self, job: &Job, manifest: &Manifest) -> Option<String> {
        if job.spec.mode == Mode::Sync || job.goes_on() {
            return None;
        }
        let store = self.scene.store.clone();
        let Some(model) = self.apart(async move { store.read("model.safetensors").await }) else {
            return Some("the job has a result and no model".to_owned());
        };
        let Ok(tensors) = safetensors::SafeTensors::deserialize(&model) else {
            return Some("the model cannot be read".to_owned());
        };
        let due = self.due(job, manifest);
        ["count", "count_again"].iter().find_map(|name| {
            let Ok(tensor) = tensors.tensor(name) else {
                return Some(format!("the model has no tensor `{name}`"));
            };
            let floats = tensor.data().chunks_exact(4);
            let values: Vec<f32> =
                floats.map(|it| f32::from_le_bytes(it.try_into().expect("four bytes"))).collect();
            final_count_mismatch(job, &due, &values).map(|it| format!("{name}: {it}"))
        })
    }

    /// Compares the rows of the table of counts, which the saver has read, with the passes over each record; returns
    /// the first mismatch.
    fn row_count_mismatch(&self, job: &Job, manifest: &Manifest) -> Option<String> {
        if !job.has_tables() || job.spec.mode == Mode::Sync || job.goes_on() {
            return None;
        }
        let rows = self.observed.lock().expect("one thread").counted_rows.clone();
        let values: Vec<f32> =
            (0..job.records as u64).map(|id| rows.get(&id).copied().unwrap_or(0.0)).collect();
        let found = final_count_mismatch(job, &self.due(job, manifest), &values);
        found.map(|it| format!("row: {it}"))
    }

    /// Returns how often each record must have been applied, as minimum and maximum.
    fn due(&self, job: &Job, manifest: &Manifest) -> Vec<(u32, u32)> {
        let passes = job.spec.passes.unwrap_or(1);
        let mut due = vec![(0, 0); job.records];
        // No simulated job has more given-up tasks than a result lists.
        let given_up = self.result.iter().flat_map(|it| &it.discarded.listed);
        let given_up: BTreeMap<TaskId, u32> =
            given_up.map(|it| (it.task, it.times as u32)).collect();
        if job.is_stream {
            // No task of it is given up.
            return vec![(1, 1); job.records];
        }
        for task in manifest.training_tasks() {
            let times = given_up.get(&task).copied().unwrap_or(0);
            for chunk in manifest.chunks_of(task) {
                let first = chunk.first_record as usize;
                let range = first..first + chunk.records as usize;
                due[range].fill((passes.saturating_sub(times), passes));
            }
        }
        due
    }
}

/// Returns an error unless exactly the tasks with bad records were given up.
fn given_up_wrongly(job: &Job, found: &Discarded, manifest: &Manifest) -> Option<String> {
    let passes = u64::from(job.spec.passes.unwrap_or(1));
    let bad = job.bad_tasks(manifest);
    // A held-out task is given up once for all passes, any other task in each pass.
    let times = |task: &TaskId| if manifest.held_out.contains(task) { 0 } else { passes };
    let due = bad.iter().map(|task| (*task, times(task)));
    // Evaluations may end training before the last pass.
    let times = |task| found.listed.iter().find(|it| it.task == task).map_or(0, |it| it.times);
    let times = |task| match job.spec.evaluation.decides() {
        _ if manifest.held_out.contains(&task) => 0,
        true => times(task).max(1),
        false => passes,
    };
    let crashing = job.crashes.iter().map(|it| (it.name.task, times(it.name.task)));
    let due: BTreeMap<TaskId, u64> = due.chain(crashing).collect();
    let found: BTreeMap<TaskId, u64> = found.listed.iter().map(|it| (it.task, it.times)).collect();
    let is_right = match job.spec.mode {
        Mode::Sync => found == due,
        // Tasks that lost too many trainers are given up as well.
        Mode::Async if job.is_patient => found == due,
        Mode::Async => due.iter().all(|(task, times)| found.get(task) == Some(times)),
    };
    (!is_right).then(|| format!("given-up tasks: {found:?}; tasks with bad records: {due:?}"))
}
