//! A training job of real processes on a real etcd under a fault schedule.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;
use steadfast_audit::history::Change;
use steadfast_common::job::spec::{JobSpec, Mode};

use super::driver::{End, World, WorldJob};
use super::feed::Feed;
use super::member::Member;
use super::store::StoreDirectory;
use super::{Kind, Role, Schedule, Shape, Workload};
use crate::{
    EtcdCluster, Job, Network, Preloaded, Process, Quota, Scene, audit, eventually, get, program,
};

/// Longest time from the start of a job to its result.
const LIFE_MAX: Duration = Duration::from_secs(240);

/// Longest time from the end of a stream to that of the command that has drained it.
const DRAIN_MAX: Duration = Duration::from_secs(30);

/// Interval of status requests; each costs some CPU time.
const STATUS_EVERY: Duration = Duration::from_millis(30);

/// Backend quota of etcd: quick to fill, and enough for the history of a job.
const ETCD_ROOM: u64 = 32 << 20;

/// Seconds.
const HOUR: i64 = 3600;

/// Exit code of a command to which etcd, a master or a store does not answer.
const UNAVAILABLE: i32 = 6;

/// A training job under faults.
pub type FaultTarget<'a> = World<'a, Training>;

/// A training job in a world.
#[derive(Debug)]
pub struct Training {
    shape: Shape,
    spec: JobSpec,
    store: StoreDirectory,
    /// Absent without a C compiler.
    preloaded: Option<Preloaded>,
    /// By how many seconds the clocks of the processes are ahead.
    shift: i64,
    job_file: String,
    status: Option<Value>,
    status_read: Instant,
    pub(super) life_max: Duration,
    /// The files of a stream, until it is drained.
    pub(super) feed: Option<Feed>,
    drain: Option<Process>,
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

impl WorldJob for Training {
    const PAUSE: Duration = Duration::from_millis(10);

    fn name(&self) -> &str {
        &self.spec.name
    }

    fn lease_ttl_s(&self) -> u32 {
        self.shape.lease_ttl_s
    }

    fn life_max(&self) -> Duration {
        self.life_max
    }

    fn repeat_command(&self, seed: Option<u64>, schedule: &Schedule) -> String {
        self.shape.command(seed, schedule)
    }

    fn description(&self) -> String {
        let status = self.status();
        let (state, waiting) = (&status["state"], &status["waiting"]);
        format!("; the job is {state} and waits for {waiting}; status: {status}")
    }

    fn follow(world: &mut FaultTarget<'_>) {
        if let Some(feed) = &mut world.job.feed {
            feed.go_on();
        }
        if STATUS_EVERY <= world.job.status_read.elapsed() {
            world.poll_status();
            world.job.status_read = Instant::now();
        }
    }

    fn changed(world: &mut FaultTarget<'_>, change: &Change) {
        if let Some(feed) = &mut world.job.feed {
            feed.changed(&world.keys, change);
        }
    }

    fn command(world: &mut FaultTarget<'_>, index: usize, admin: &str) -> Command {
        let Self { shape, spec, store, job_file, .. } = &world.job;
        let (ttl, slots) = (format!("{}s", shape.lease_ttl_s), shape.pservers.to_string());
        let store = store.path().display().to_string();
        let rows = world.scene.path("rows").display().to_string();
        let member = &mut world.members[index];
        let endpoints = member.endpoints();
        let mut args = vec!["--job", &spec.name, "--etcd-endpoints", &endpoints];
        args.extend(["--admin-listen", admin, "--lease-ttl", &ttl]);
        let (listen, advertised) = member.open_front(&world.runtime);
        if member.role != Role::Trainer {
            args.extend(["--listen", &listen, "--advertise", &advertised]);
        }
        if member.network.is_some() {
            // The separate network is as private as loopback.
            args.push("--insecure-allow-plaintext");
        }
        if member.role == Role::Master {
            args.extend(["--job-file", job_file, "--store", &store, "--pservers", &slots]);
        }
        if let (Role::Pserver, Some(memory)) = (member.role, shape.table_memory()) {
            args.extend(["--table-memory", memory, "--table-directory", &rows]);
        }
        let mut command =
            world.scene.command(&program(&format!("steadfast-{}", member.role.name())));
        command.args(args);
        command.envs(world.job.preloaded.iter().flat_map(Preloaded::environment));
        match &member.network {
            Some(network) => network.wrap(&command),
            None => command,
        }
    }

    fn inject_elsewhere(world: &mut FaultTarget<'_>, kind: Kind) {
        match kind {
            // Keep revisions that the recorder has not read yet.
            Kind::EtcdCompact => drop(world.etcd.compact(world.recorder.last())),
            Kind::EtcdFull => {
                let is_full = world.etcd.fill(&world.filler_mark());
                world.log(if is_full { "etcd is full" } else { "etcd could not be filled" });
            }
            Kind::StoreFull if world.store_can_be_full() => world.job.store.fill(),
            Kind::StoreFull => world.log("skipped: this process may not mount a file system"),
            Kind::StoreAway => world.job.store.take_away(),
            Kind::Slots => world.change_slots(),
            Kind::SyncFail | Kind::Clock if world.job.preloaded.is_none() => {
                world.log("skipped: there is no C compiler");
            }
            Kind::SyncFail => world.job.preloaded.iter().for_each(|it| it.fail_syncs(true)),
            Kind::Clock => {
                // An hour ahead, then an hour behind, and so on.
                world.job.shift = if world.job.shift == HOUR { -HOUR } else { HOUR };
                let shift = world.job.shift;
                world.job.preloaded.iter().for_each(|it| it.shift_clock(shift));
            }
            Kind::KillAll => {
                world.heal_all();
                world.members.iter_mut().for_each(|it| it.signal(Signal::SIGKILL));
                world.etcd.kill_all();
                world.etcd.start_missing();
            }
            other => unreachable!("{} hits one of many", other.name()),
        }
    }

    fn heal_elsewhere(world: &mut FaultTarget<'_>, kind: Kind) -> bool {
        match kind {
            Kind::EtcdFull => return world.give_space_back(),
            Kind::StoreFull | Kind::StoreAway => world.job.store.heal(),
            Kind::SyncFail => world.job.preloaded.iter().for_each(|it| it.fail_syncs(false)),
            other => unreachable!("{} needs no healing here", other.name()),
        }
        true
    }
}

impl Training {
    fn status(&self) -> &Value {
        self.status.as_ref().unwrap_or(&Value::Null)
    }
}

impl<'a> FaultTarget<'a> {
    /// Starts etcd and the example job of the shape.
    pub fn start(scene: &'a Scene, shape: Shape) -> Self {
        let job = shape.job(scene);
        Self::start_job(scene, shape, &job)
    }

    /// Starts etcd and another job.
    pub fn start_job(scene: &'a Scene, shape: Shape, job: &Job) -> Self {
        Self::start_apart(scene, shape, job, None)
    }

    /// Starts etcd and a job as [`FaultTarget::start_job`] does, with one process in a separate network behind a link
    /// that can break.
    pub fn start_apart(
        scene: &'a Scene,
        shape: Shape,
        job: &Job,
        mut apart: Option<(Role, u32, Network)>,
    ) -> Self {
        let etcd = EtcdCluster::start(scene, shape.etcd as usize, Quota::Bytes(ETCD_ROOM));
        let training = Training {
            spec: steadfast_common::job::job_file::parse(&job.text).expect("the job file is sound"),
            store: StoreDirectory::new(scene),
            preloaded: Preloaded::build(scene),
            shift: 0,
            job_file: job.write(scene).display().to_string(),
            status: None,
            status_read: Instant::now(),
            life_max: LIFE_MAX,
            feed: (shape.workload == Workload::Stream).then(|| Feed::start(scene)),
            drain: None,
            shape: shape.clone(),
        };
        Self::begin(scene, training, etcd, |runtime, urls| {
            let mut members = Vec::new();
            for role in Role::ALL {
                for index in 0..shape.count(role) {
                    let network = apart.take_if(|it| (it.0, it.1) == (role, index)).map(|it| it.2);
                    let own = || Network::make().expect("there is a router");
                    let network = network.or_else(|| shape.hosts.then(own));
                    members.push(Member::new(runtime, role, index, urls, network));
                }
            }
            members
        })
    }

    /// Sets the number of slots to one more than at the start, or back to it.
    fn change_slots(&mut self) {
        let Shape { pservers, spares, .. } = self.job.shape;
        let key = self.keys.ps_desired();
        let present = self.etcd.value(&key).and_then(|it| it.trim().parse().ok());
        let wanted = if present == Some(pservers) { pservers + spares.min(1) } else { pservers };
        let is_put = present.is_some() && self.etcd.put(&key, &wanted.to_string());
        self.log(&if is_put {
            format!("{wanted} slots are desired")
        } else {
            "skipped: etcd has no number of slots to change".to_owned()
        });
    }

    /// Ends a stream with the files that are there, after all faults are healed; returns the number of its files.
    pub fn drain(&mut self) -> Option<usize> {
        let feed = self.job.feed.take()?;
        self.heal_all();
        let urls = self.etcd.urls().join(",");
        let args = ["drain", "--job", &self.job.spec.name, "--etcd-endpoints", &urls];
        self.job.drain = Some(self.scene.start("drain", "steadfast", &args));
        Some(feed.files())
    }

    /// Waits until `step` steps are done.
    pub fn until_step(&mut self, step: u64) {
        let what = format!("step {step} is done");
        self.until(&what, |world| (step <= world.steps).then_some(()));
    }

    /// Ends the run as [`FaultTarget::finish`] does, with further checks whose failure prints the command that repeats
    /// the run.
    pub fn finish_as(mut self, check: impl FnOnce(&Outcome)) -> Outcome {
        let End { result, wall } = self.wait_for_the_end();
        if let Some(mut drain) = self.job.drain.take() {
            let ended = drain.end(DRAIN_MAX);
            assert_eq!(ended.code, Some(0), "the drain failed: {}", ended.stderr);
        }
        let audit = self.audit();
        let sha = result["parameters_sha256"].as_str().unwrap_or_default().to_owned();
        let checkpoints_loaded = self.checkpoints_loaded();
        let (ends, trace) = (self.ends.clone(), self.trace.clone());
        let outcome = Outcome { sha, result, audit, ends, checkpoints_loaded, trace, wall };
        check(&outcome);
        outcome
    }

    /// Waits for the end of the job, heals all faults, waits until all processes have exited, and checks
    /// all invariants.
    pub fn finish(self) -> Outcome {
        self.finish_as(|_| {})
    }

    /// Runs `steadfast audit` on the recorded etcd history and the files.
    fn audit(&self) -> Value {
        let history = self.scene.write("history.json", self.recorder.lines());
        let history = history.display().to_string();
        let urls = self.etcd.urls().join(",");
        let args = ["--job", &self.job.spec.name, "--history", &history];
        // The last fault may have left etcd without a leader, for an election.
        let (code, answer) = eventually("etcd answers the audit", || {
            Some(audit(&urls, &args)).filter(|(code, _)| *code != UNAVAILABLE)
        });
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
        self.job.status()
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
        self.job.store.can_be_full()
    }

    /// Returns the separate network of a process.
    pub fn network(&self, role: Role, index: u32) -> &Network {
        self.member(role, index).network.as_ref().expect("the process has a separate network")
    }

    /// Returns the ports through which a process reaches etcd.
    pub fn etcd_ports(&self, role: Role, index: u32) -> Vec<u16> {
        self.member(role, index).proxies.iter().map(|it| it.address().port()).collect()
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
                self.job.status = Some(status);
            }
        }
        if let Some((_, steps)) = newest {
            self.steps = steps;
        }
    }

    /// Returns the generation and the steps that a pserver reports.
    fn progress(&self, status: &Value) -> Option<(u64, u64)> {
        let (generation, shard) = (status["generation"].as_u64()?, &status["shard"]);
        let steps = match self.job.shape.mode {
            Mode::Sync => shard["version"].as_u64()?,
            Mode::Async => {
                shard["examples"].as_u64()? / u64::from(self.job.spec.asynchronous.batch)
            }
        };
        Some((generation, steps))
    }

    /// Returns a key that only the recorder reads.
    fn filler_mark(&self) -> String {
        format!("{}/filler", self.keys.root())
    }

    /// Frees the space of etcd; returns whether it succeeded. The history is compacted only after the
    /// recorder has read it.
    fn give_space_back(&self) -> bool {
        let mark = self.filler_mark();
        self.etcd.empty(&mark)
            && match self.recorder.last_of(&mark) {
                Some((revision, change)) if change.value.is_none() => self.etcd.reclaim(revision),
                Some(_) | None => false,
            }
    }
}
