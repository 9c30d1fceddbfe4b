//! A job of real processes on a real etcd under a fault schedule.
//!
//! A world restarts every process that ends before the job, as a supervisor does. The world itself makes
//! no random decisions.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nix::libc::{SIGKILL, SIGTERM};
use serde_json::Value;
use steadfast_audit::history::Change;
use steadfast_common::keys::Keys;
use steadfast_common::spec::{JobSpec, Mode};
use tokio::runtime::Runtime;

use super::inject::Heal;
use super::member::Member;
use super::store::StoreDirectory;
use super::{Role, Schedule, Shape, When};
use crate::{
    Ended, EtcdCluster, Job, Network, Process, Quota, Recorder, Scene, audit, free_address, get,
    program,
};

/// Longest time from the start of a world to the result of the job.
const LIFE_MAX: Duration = Duration::from_secs(240);

/// Longest time that processes may take to exit after the end of the job.
const LEAVE_MAX: Duration = Duration::from_secs(30);

const PAUSE: Duration = Duration::from_millis(10);

/// Interval of status requests; each costs some CPU time.
const STATUS_EVERY: Duration = Duration::from_millis(30);

/// Backend quota of etcd: quick to fill, and enough for the history of a job.
const ETCD_ROOM: u64 = 32 << 20;

/// Lines of the event log that a failure shows.
const LINES_SHOWN: usize = 200;

/// A job under faults.
#[derive(Debug)]
pub struct FaultTarget<'a> {
    scene: &'a Scene,
    pub(super) shape: Shape,
    pub keys: Keys,
    pub spec: JobSpec,
    pub(super) members: Vec<Member>,
    pub etcd: EtcdCluster<'a>,
    pub recorder: Recorder<'a>,
    pub(super) store: StoreDirectory,
    pub(super) heals: Vec<Heal>,
    job_file: String,
    status: Option<Value>,
    status_read: Instant,
    steps: u64,
    result: Option<Value>,
    /// When the result was first seen.
    over: Option<Instant>,
    started: Instant,
    /// Event log, printed if the run fails.
    trace: Vec<String>,
    ends: BTreeMap<String, u32>,
    schedule: Schedule,
    seed: Option<u64>,
    /// The last field, dropped after all fields that use it.
    runtime: Runtime,
}

/// Outcome of a job.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub result: Value,
    pub sha: String,
    /// Report of `steadfast audit`, which was clean.
    pub audit: Value,
    /// Processes that ended before the job was over, counted by role and exit status.
    pub ends: BTreeMap<String, u32>,
    /// The checkpoints from which generations started, in order.
    pub checkpoints_loaded: Vec<Value>,
    /// Event log, line by line.
    pub trace: Vec<String>,
    pub wall: Duration,
}

impl<'a> FaultTarget<'a> {
    /// Starts etcd and the example job of the shape.
    pub fn start(scene: &'a Scene, shape: Shape) -> Self {
        let job = shape.job();
        Self::start_job(scene, shape, &job)
    }

    /// Starts etcd and another job.
    pub fn start_job(scene: &'a Scene, shape: Shape, job: &Job) -> Self {
        Self::start_apart(scene, shape, job, None)
    }

    /// As [`FaultTarget::start_job`], with one process in a separate network behind a link that can
    /// break.
    pub fn start_apart(
        scene: &'a Scene,
        shape: Shape,
        job: &Job,
        mut apart: Option<(Role, u32, Network)>,
    ) -> Self {
        let runtime = Runtime::new().expect("threads can be started");
        let etcd = EtcdCluster::start(scene, shape.etcd as usize, Quota::Bytes(ETCD_ROOM));
        let spec = steadfast_common::job_file::parse(&job.text).expect("the job file is sound");
        let keys = Keys::of_job(&spec.name);
        let mut members = Vec::new();
        for role in Role::ALL {
            for index in 0..shape.count(role) {
                let network = apart.take_if(|it| (it.0, it.1) == (role, index)).map(|it| it.2);
                members.push(Member::new(&runtime, role, index, &etcd.urls(), network));
            }
        }
        let mut world = Self {
            recorder: Recorder::start(scene, &etcd.urls(), keys.root()),
            job_file: job.write(scene).display().to_string(),
            store: StoreDirectory::new(scene),
            scene,
            shape,
            keys,
            spec,
            members,
            etcd,
            heals: Vec::new(),
            status: None,
            status_read: Instant::now(),
            steps: 0,
            result: None,
            over: None,
            started: Instant::now(),
            trace: Vec::new(),
            ends: BTreeMap::new(),
            schedule: Schedule::default(),
            seed: None,
            runtime,
        };
        world.tend();
        world
    }

    /// Runs a schedule until its end or the end of the job; returns the number of injected faults. A
    /// failure prints the command that repeats it.
    pub fn run(&mut self, seed: Option<u64>, schedule: &Schedule) -> usize {
        (self.seed, self.schedule) = (seed, schedule.clone());
        let mut before = 0;
        for (number, event) in schedule.events.iter().enumerate() {
            let due = match event.when {
                When::Step(step) => step,
                When::After(steps) => before + steps,
            };
            self.until(&format!("step {due} is done, for {}", event.fault), |world| {
                (due <= world.steps || world.result.is_some()).then_some(())
            });
            if self.result.is_some() {
                self.log(&format!("the job was over before {}", event.fault));
                return number;
            }
            before = due.max(self.steps);
            self.inject(event.fault);
        }
        schedule.events.len()
    }

    /// Waits until `probe` returns a value, while the world continues.
    pub fn until<T>(&mut self, what: &str, mut probe: impl FnMut(&mut Self) -> Option<T>) -> T {
        loop {
            self.go_on();
            if let Some(found) = probe(self) {
                return found;
            }
            let is_late = LIFE_MAX < self.started.elapsed();
            let is_over = self.over.is_some_and(|over| LEAVE_MAX < over.elapsed());
            if is_late || is_over {
                self.panic_on_timeout(what);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits until `step` steps are done.
    pub fn until_step(&mut self, step: u64) {
        let what = format!("step {step} is done");
        self.until(&what, |world| (step <= world.steps).then_some(()));
    }

    /// As [`FaultTarget::finish`], with further checks whose failure prints the command that repeats the
    /// run.
    pub fn finish_as(mut self, check: impl FnOnce(&Outcome)) -> Outcome {
        let outcome = self.wait_for_the_end();
        check(&outcome);
        outcome
    }

    /// Waits for the end of the job, heals all faults, waits until all processes have exited, and checks
    /// all invariants.
    pub fn finish(self) -> Outcome {
        self.finish_as(|_| {})
    }

    fn wait_for_the_end(&mut self) -> Outcome {
        let result = self.until("the job has a result", |world| world.result.clone());
        let wall = self.started.elapsed();
        self.heal_all();
        self.over = Some(Instant::now());
        self.until("all processes exited after the end of the job", |world| {
            world.members.iter().all(|it| !it.is_alive()).then_some(())
        });
        assert_eq!(result["state"], "finished", "{result}");
        let audit = self.audit();
        let sha = result["parameters_sha256"].as_str().unwrap_or_default().to_owned();
        let checkpoints_loaded = self.checkpoints_loaded();
        let (ends, trace) = (self.ends.clone(), self.trace.clone());
        Outcome { sha, result, audit, ends, checkpoints_loaded, trace, wall }
    }

    /// Runs `steadfast audit` on the recorded etcd history and the files.
    fn audit(&self) -> Value {
        let history = self.scene.write("history.json", self.recorder.lines());
        let history = history.display().to_string();
        let urls = self.etcd.urls().join(",");
        let (code, answer) = audit(&urls, &["--job", &self.spec.name, "--history", &history]);
        assert_eq!(code, 0, "the audit is not clean: {answer:#}");
        answer
    }

    fn checkpoints_loaded(&self) -> Vec<Value> {
        let generations = self.recorder.changes().filter(|it| it.key == self.keys.generation());
        let record = |it: &Change| serde_json::from_str::<Value>(it.value.as_deref()?).ok();
        let checkpoints = generations.filter_map(record).map(|mut it| it["checkpoint"].take());
        checkpoints.filter(|it| !it.is_null()).collect()
    }

    /// Returns the last known status of the job.
    pub fn status(&self) -> &Value {
        self.status.as_ref().unwrap_or(&Value::Null)
    }

    /// Returns the number of known steps. In asynchronous mode a step is a mini-batch.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns how often a process was started.
    pub fn lives(&self, role: Role, index: u32) -> u32 {
        self.member(role, index).starts
    }

    /// Returns `Some` if a live process of a role has logged `what`.
    pub fn says(&self, role: Role, what: &str) -> Option<()> {
        let mut of_role = self.members.iter().filter(|it| it.role == role);
        of_role.any(|it| it.stderr().contains(what)).then_some(())
    }

    /// Returns the maximum of a metric without labels over the live processes of a role.
    pub fn metric(&self, role: Role, name: &str) -> Option<f64> {
        let living = self.members.iter().filter(|it| it.role == role && it.is_alive());
        let scrapes = living.filter_map(|it| get(&it.admin, "/metrics"));
        let values = scrapes.filter_map(|it| {
            let line = it.body.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix(' '))?;
            line.parse::<f64>().ok()
        });
        values.max_by(f64::total_cmp)
    }

    /// Returns whether the store has a size limit.
    pub fn store_can_be_full(&self) -> bool {
        self.store.can_be_full()
    }

    /// Returns the processes that ended before the job was over, counted by role and exit status.
    pub fn ends(&self) -> &BTreeMap<String, u32> {
        &self.ends
    }

    fn member(&self, role: Role, index: u32) -> &Member {
        let found = self.members.iter().find(|it| (it.role, it.index) == (role, index));
        found.unwrap_or_else(|| panic!("unknown member {} {index}", role.name()))
    }

    pub(super) fn member_mut(&mut self, role: Role, index: u32) -> &mut Member {
        let found = self.members.iter_mut().find(|it| (it.role, it.index) == (role, index));
        found.unwrap_or_else(|| panic!("unknown member {} {index}", role.name()))
    }

    /// Returns the separate network of a process.
    pub fn network(&self, role: Role, index: u32) -> &Network {
        self.member(role, index).network.as_ref().expect("the process has a separate network")
    }

    /// Returns the ports through which a process reaches etcd.
    pub fn etcd_ports(&self, role: Role, index: u32) -> Vec<u16> {
        self.member(role, index).proxies.iter().map(|it| it.address().port()).collect()
    }

    pub(super) fn log(&mut self, what: &str) {
        let seconds = self.started.elapsed().as_secs_f64();
        self.trace.push(format!("{seconds:8.3} s, step {:5}: {what}", self.steps));
    }

    /// Polls the job, heals due faults, and starts missing processes.
    fn go_on(&mut self) {
        for change in self.recorder.read() {
            if change.key == self.keys.result() {
                self.result = change.value.and_then(|it| serde_json::from_str(&it).ok());
                self.over = Some(Instant::now());
                self.log("the job has a result");
            }
        }
        self.heal_due();
        self.tend();
        if STATUS_EVERY <= self.status_read.elapsed() {
            self.poll_status();
            self.status_read = Instant::now();
        }
    }

    /// Returns the steps reported by each pserver with a slot.
    pub fn steps_of_pservers(&self) -> Vec<u64> {
        let living = self.members.iter().filter(|it| it.role == Role::Pserver && it.is_alive());
        let statuses = living.filter_map(|it| get(&it.admin, "/status"));
        let parsed = statuses.filter_map(|it| serde_json::from_str::<Value>(&it.body).ok());
        parsed.filter_map(|it| self.progress(&it)).map(|(_, steps)| steps).collect()
    }

    /// Polls the status. Pservers report steps even without an acting master.
    fn poll_status(&mut self) {
        let mut newest = None;
        for member in self.members.iter().filter(|it| it.is_alive() && !it.is_paused) {
            if member.role == Role::Trainer {
                continue;
            }
            let Some(answer) = get(&member.admin, "/status") else { continue };
            let Ok(status) = serde_json::from_str::<Value>(&answer.body) else { continue };
            if member.role == Role::Pserver {
                newest = newest.max(self.progress(&status));
            } else if status["state"].is_string() {
                self.status = Some(status);
            }
        }
        if let Some((_, steps)) = newest {
            self.steps = steps;
        }
    }

    /// Returns the generation and the steps that a pserver reports.
    fn progress(&self, status: &Value) -> Option<(u64, u64)> {
        let (generation, shard) = (status["generation"].as_u64()?, &status["shard"]);
        let steps = match self.shape.mode {
            Mode::Sync => shard["version"].as_u64()?,
            Mode::Async => shard["examples"].as_u64()? / u64::from(self.spec.asynchronous.batch),
        };
        Some((generation, steps))
    }

    /// Starts missing processes, unless the job is over.
    pub(super) fn tend(&mut self) {
        for index in 0..self.members.len() {
            if let Some(ended) = self.members[index].ended() {
                self.note_end(index, &ended);
            }
            if self.result.is_none() && self.members[index].is_due() {
                self.start_member(index);
            }
        }
    }

    fn note_end(&mut self, index: usize, ended: &Ended) {
        let life = self.members[index].log_name();
        let how = match (ended.code, ended.signal) {
            (Some(code), _) => format!("with {code}"),
            (None, signal) => format!("by signal {}", signal.unwrap_or_default()),
        };
        let last = ended.stderr.lines().last().unwrap_or_default();
        self.log(&format!("{life} ended {how}: {last}"));
        // A process that exits at the end of the job may have seen the result before the recorder.
        let is_over = self.result.is_some()
            || ended.code == Some(0) && self.etcd.value(&self.keys.result()).is_some();
        if !is_over {
            let role = self.members[index].role.name();
            *self.ends.entry(format!("{role} {how}")).or_default() += 1;
        }
        let is_broken = ended.code == Some(101)
            || ended.signal.is_some_and(|it| it != SIGKILL && it != SIGTERM)
            || ended.stderr.contains("panicked");
        assert!(!is_broken, "{life} failed {how}: {}", ended.stderr);
    }

    fn start_member(&mut self, index: usize) {
        let admin = free_address().to_string();
        let (ttl, slots) =
            (format!("{}s", self.shape.lease_ttl_s), self.shape.pservers.to_string());
        let store = self.store.path().display().to_string();
        let member = &mut self.members[index];
        member.starts += 1;
        let endpoints = member.endpoints();
        let mut args = vec!["--job", &self.spec.name, "--etcd-endpoints", &endpoints];
        args.extend(["--admin-listen", &admin, "--lease-ttl", &ttl]);
        let (listen, advertised) = member.open_front(&self.runtime);
        if member.role != Role::Trainer {
            args.extend(["--listen", &listen, "--advertise", &advertised]);
        }
        if member.network.is_some() {
            // The separate network is as private as loopback.
            args.push("--insecure-allow-plaintext");
        }
        if member.role == Role::Master {
            args.extend(["--job-file", &self.job_file, "--store", &store, "--pservers", &slots]);
        }
        let mut command =
            self.scene.command(&program(&format!("steadfast-{}", member.role.name())));
        command.args(args);
        if let Some(network) = &member.network {
            command = network.wrap(&command);
        }
        let process = Process::start(self.scene.directory(), &member.log_name(), &mut command);
        member.begin(process);
        member.admin = admin;
    }

    fn panic_on_timeout(&self, what: &str) -> ! {
        let status = self.status();
        panic!(
            "timed out after {:?}: {what}; the job is {} and waits for {}; status: {status}",
            self.started.elapsed(),
            status["state"],
            status["waiting"],
        )
    }

    /// Returns the report of a failure.
    fn report(&self) -> String {
        let from = self.trace.len().saturating_sub(LINES_SHOWN);
        format!(
            "{}\nends: {:?}\nseed: {:?}\nschedule: {}\nrepeat with: {}",
            self.trace[from..].join("\n"),
            self.ends,
            self.seed,
            self.schedule,
            self.shape.command(self.seed, &self.schedule),
        )
    }
}

impl Drop for FaultTarget<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.report());
        }
    }
}
