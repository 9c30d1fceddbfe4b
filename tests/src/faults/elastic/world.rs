//! An elastic job of real processes on a real etcd under a fault schedule.
//!
//! Agents and masters that end before the job are started again, as by a supervisor. A node that left comes back
//! after a while.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::libc::{SIGKILL, SIGTERM};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use steadfast_audit::history::{ElasticJob, HistoryReport, check_elastic, etcdctl};
use steadfast_common::keys::Keys;
use steadfast_common::rendezvous::NodeRange;
use tokio::runtime::Runtime;

use super::history::{self, History};
use super::logs::Logs;
use super::shape::ElasticShape;
use crate::faults::inject::Heal;
use crate::faults::member::Member;
use crate::faults::{Fault, Kind, Role, Schedule, When};
use crate::{Ended, EtcdCluster, Process, Quota, Recorder, Scene, examples, free_address, program};

/// Name of the job.
const JOB: &str = "elastic-digits";

/// Longest time from the start of a world to the result of the job.
const LIFE_MAX: Duration = Duration::from_secs(300);

/// Longest time that processes may take to exit after the end of the job.
const LEAVE_MAX: Duration = Duration::from_secs(30);

/// How long a node stays away after it left.
const AWAY: Duration = Duration::from_secs(2);

/// Time between looks at the processes and their logs.
const PAUSE: Duration = Duration::from_millis(20);

/// Pause of a worker after each step, so that faults hit different steps.
const STEP_PAUSE_MS: u64 = 15;

/// Accuracy on held-out digits that the job must reach under any schedule.
const ACCURACY_MIN: f64 = 0.9;

/// Lines of the event log that a failure shows.
const LINES_SHOWN: usize = 200;

/// An elastic job under faults.
#[derive(Debug)]
pub struct ElasticTarget<'a> {
    scene: &'a Scene,
    shape: ElasticShape,
    keys: Keys,
    members: Vec<Member>,
    etcd: EtcdCluster<'a>,
    recorder: Recorder<'a>,
    logs: Logs,
    heals: Vec<Heal>,
    /// Workers that are stopped, by the index of the fault.
    stopped: BTreeMap<u32, Pid>,
    /// Nodes that are away, until this time, or until a fault adds them.
    away: BTreeMap<u32, Option<Instant>>,
    job_file: PathBuf,
    program: PathBuf,
    steps: u64,
    result: Option<Value>,
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

/// Outcome of an elastic job.
#[derive(Clone, Debug)]
pub struct ElasticOutcome {
    /// What the workers did, which kept all rules.
    pub history: History,
    /// The check of etcd's history, which was clean.
    pub audit: HistoryReport,
    /// Processes that ended before the job was over, counted by role and exit status.
    pub ends: BTreeMap<String, u32>,
    /// Event log, line by line.
    pub trace: Vec<String>,
    pub wall: Duration,
}

impl<'a> ElasticTarget<'a> {
    /// Starts etcd, the masters and the agents.
    pub fn start(scene: &'a Scene, shape: ElasticShape) -> Self {
        let runtime = Runtime::new().expect("threads can be started");
        let etcd = EtcdCluster::start(scene, shape.etcd as usize, Quota::Default);
        let keys = Keys::of_job(JOB);
        let member = |role, index| Member::new(&runtime, role, index, &etcd.urls(), None);
        let masters = (0..shape.masters).map(|index| member(Role::Master, index));
        let agents = (0..shape.nodes_max()).map(|index| member(Role::Agent, index));
        let members = masters.chain(agents).collect();
        let away = (shape.agents..shape.nodes_max()).map(|index| (index, None)).collect();
        let job_file = format!(
            "name = \"{JOB}\"\nkind = \"elastic\"\n[nodes]\nmin = 1\nmax = {}\n\
             last_call = \"1s\"\njoin_timeout = \"60s\"\n",
            shape.nodes_max()
        );
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
        let mut world = Self {
            recorder: Recorder::start(scene, &etcd.urls(), keys.root()),
            job_file: scene.write("job.toml", job_file),
            logs: Logs::new(&scene.path("workers")),
            program: programs.join("elastic_digits.py"),
            scene,
            shape,
            keys,
            members,
            etcd,
            heals: Vec::new(),
            stopped: BTreeMap::new(),
            away,
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

    /// Runs a schedule until its end or the end of the job; returns the number of injected faults.
    pub fn run(&mut self, seed: Option<u64>, schedule: &Schedule) -> usize {
        (self.seed, self.schedule) = (seed, schedule.clone());
        let mut before = 0;
        for (number, event) in schedule.events.iter().enumerate() {
            let due = match event.when {
                When::Step(step) => step,
                When::After(steps) => before + steps,
            };
            let fault = event.fault;
            self.until(&format!("step {due} is done, for {fault}"), |world| {
                let is_possible = due <= world.steps && world.keeps_commits(fault);
                (is_possible || world.result.is_some()).then_some(())
            });
            if self.result.is_some() {
                self.log(&format!("the job was over before {fault}"));
                return number;
            }
            before = due.max(self.steps);
            self.inject(fault);
        }
        schedule.events.len()
    }

    /// Waits for the end of the job, heals all faults, waits until all processes have exited, and checks all
    /// invariants.
    pub fn finish(mut self) -> ElasticOutcome {
        let result = self.until("the job has a result", |world| world.result.clone());
        let wall = self.started.elapsed();
        for heal in std::mem::take(&mut self.heals) {
            self.heal(heal.fault);
        }
        self.until("all processes exited after the end of the job", |world| {
            world.members.iter().all(|it| !it.is_alive()).then_some(())
        });
        self.until("no worker is left", |world| {
            let left = world.scene.processes();
            left.iter().all(|it| it.role.starts_with("etcd")).then_some(())
        });
        assert_eq!(result["state"], "finished", "{result}");
        self.logs.follow();
        let history = history::check(self.logs.entries(), self.shape.steps);
        let history = history.unwrap_or_else(|broken| panic!("{broken}"));
        assert!(ACCURACY_MIN <= history.accuracy, "the accuracy is {}", history.accuracy);
        let audit = self.audit();
        let (ends, trace) = (self.ends.clone(), self.trace.clone());
        ElasticOutcome { history, audit, ends, trace, wall }
    }

    /// Checks every revision of etcd.
    fn audit(&self) -> HistoryReport {
        let revisions = etcdctl::parse(self.recorder.lines()).expect("etcdctl wrote it");
        let nodes = NodeRange::new(1, self.shape.nodes_max()).expect("there are agents");
        let job = ElasticJob { keys: &self.keys, nodes };
        let report = check_elastic(&job, &[], &revisions);
        assert!(report.is_clean(), "{report}");
        report
    }

    /// Whether the newest commit survives a fault: a member of the newest round is left that the fault does not
    /// hit. Commits are in the memory of agents; they do not survive the loss of all of them at once.
    fn keeps_commits(&self, fault: Fault) -> bool {
        if fault.role != Some(Role::Agent) || fault.kind == Kind::Join {
            return true;
        }
        let newest = self.logs.newest_members();
        let mut agents = self.members.iter().filter(|it| it.role == Role::Agent);
        agents.any(|it| {
            it.index != fault.index
                && it.is_alive()
                && !it.is_paused
                && !self.away.contains_key(&it.index)
                && newest.contains(&life(it).as_str())
        })
    }

    fn inject(&mut self, fault: Fault) {
        self.log(&format!("fault: {fault}"));
        match (fault.role, fault.kind) {
            (Some(Role::Worker), kind) => self.inject_into_worker(kind, fault.index),
            (Some(Role::Agent), Kind::Join) => {
                if self.away.remove(&fault.index).is_none() {
                    self.log("skipped: the node is there already");
                }
            }
            (Some(role), kind) => {
                let member = self.member_mut(role, fault.index);
                member.inject(kind);
                if !member.is_alive() {
                    self.log("the process does not run");
                }
                if kind == Kind::Leave {
                    let is_spare = self.shape.agents <= fault.index;
                    let back = (!is_spare).then(|| Instant::now() + AWAY);
                    self.away.entry(fault.index).or_insert(back);
                }
            }
            (None, Kind::EtcdKillLeader) => {
                let leader = self.until("etcd has a leader", |world| world.etcd.leader());
                self.log(&format!("etcd {leader} leads"));
                self.etcd.kill(leader);
            }
            (None, Kind::EtcdKill) => self.etcd.kill(fault.index as usize),
            (None, Kind::EtcdPause) => self.etcd.signal(fault.index as usize, Signal::SIGSTOP),
            (None, Kind::EtcdStall) => self.etcd.signal_all(Signal::SIGSTOP),
            (None, Kind::EtcdMoveLeader) => drop(self.etcd.move_leader()),
            (None, other) => panic!("an elastic job has no fault {}", other.name()),
        }
        self.heals.extend(Heal::of(fault, self.shape.lease_ttl_s));
    }

    fn inject_into_worker(&mut self, kind: Kind, index: u32) {
        let (node, local_rank) = (index / self.shape.workers, index % self.shape.workers);
        let node = life(self.member_mut(Role::Agent, node));
        let started = self.logs.worker(&node, local_rank);
        // A process with the id of a worker that has ended lacks the mark of the scene, most likely.
        let living = self.scene.processes();
        let Some(pid) = started
            .into_iter()
            .map(Pid::from_raw)
            .find(|pid| living.iter().any(|it| it.pid == *pid && it.role.starts_with("python")))
        else {
            self.log("skipped: the worker does not run");
            return;
        };
        let signal = match kind {
            Kind::Kill => Signal::SIGKILL,
            Kind::Pause => Signal::SIGSTOP,
            other => panic!("a worker has no fault {}", other.name()),
        };
        if kind == Kind::Pause {
            self.stopped.insert(index, pid);
        }
        // An error means that it has ended.
        let _ = kill(pid, signal);
    }

    fn heal(&mut self, fault: Fault) {
        let index = fault.index as usize;
        match (fault.role, fault.kind) {
            (Some(Role::Worker), _) => {
                if let Some(pid) = self.stopped.remove(&fault.index) {
                    let _ = kill(pid, Signal::SIGCONT);
                }
            }
            (Some(role), kind) => self.member_mut(role, fault.index).heal(kind),
            (None, Kind::EtcdPause) => self.etcd.signal(index, Signal::SIGCONT),
            (None, Kind::EtcdStall) => self.etcd.signal_all(Signal::SIGCONT),
            (None, _) => self.etcd.start_missing(),
        }
        self.log(&format!("healed: {fault}"));
    }

    /// Waits until `probe` returns a value, while the world continues.
    fn until<T>(&mut self, what: &str, mut probe: impl FnMut(&mut Self) -> Option<T>) -> T {
        loop {
            self.go_on();
            if let Some(found) = probe(self) {
                return found;
            }
            let is_late = LIFE_MAX < self.started.elapsed();
            let is_over = self.over.is_some_and(|over| LEAVE_MAX < over.elapsed());
            assert!(!is_late && !is_over, "timed out after {:?}: {what}", self.started.elapsed());
            std::thread::sleep(PAUSE);
        }
    }

    /// Reads logs, heals faults that are due, and starts missing processes.
    fn go_on(&mut self) {
        for change in self.recorder.read() {
            let record = || change.value.as_ref().and_then(|it| serde_json::from_str(it).ok());
            if change.key == self.keys.result() {
                self.result = record();
                self.over = Some(Instant::now());
                self.log("the job has a result");
            }
            if change.key == self.keys.formed_round() {
                let record: Value = record().unwrap_or_default();
                let (round, workers) = (&record["round"], &record["world_size"]);
                self.log(&format!("round {round} of {workers} workers"));
            }
        }
        self.logs.follow();
        self.steps = self.logs.steps();
        for heal in std::mem::take(&mut self.heals) {
            match heal.is_due(&self.etcd) {
                true => self.heal(heal.fault),
                false => self.heals.push(heal),
            }
        }
        let now = Instant::now();
        self.away.retain(|_, back| back.is_none_or(|back| now < back));
        self.tend();
    }

    /// Starts missing processes, unless the job is over.
    fn tend(&mut self) {
        for index in 0..self.members.len() {
            if let Some(ended) = self.members[index].ended() {
                self.note_end(index, &ended);
            }
            let member = &self.members[index];
            let is_away = member.role == Role::Agent && self.away.contains_key(&member.index);
            if self.result.is_none() && member.is_due() && !is_away {
                self.start_member(index);
            }
        }
    }

    fn note_end(&mut self, index: usize, ended: &Ended) {
        let log_name = self.members[index].log_name();
        let how = match (ended.code, ended.signal) {
            (Some(code), _) => format!("with {code}"),
            (None, signal) => format!("by signal {}", signal.unwrap_or_default()),
        };
        let last = ended.stderr.lines().last().unwrap_or_default();
        self.log(&format!("{log_name} ended {how}: {last}"));
        if self.result.is_none() {
            let role = self.members[index].role.name();
            *self.ends.entry(format!("{role} {how}")).or_default() += 1;
        }
        let is_broken = ended.code == Some(101)
            || ended.signal.is_some_and(|it| it != SIGKILL && it != SIGTERM)
            || ended.stderr.contains("panicked");
        assert!(!is_broken, "{log_name} failed {how}: {}", ended.stderr);
    }

    fn start_member(&mut self, index: usize) {
        let admin = free_address().to_string();
        let ttl = format!("{}s", self.shape.lease_ttl_s);
        let shape = &self.shape;
        let member = &mut self.members[index];
        member.starts += 1;
        let endpoints = member.endpoints();
        let mut command = match member.role {
            Role::Master => {
                let (listen, advertised) = member.open_front(&self.runtime);
                let mut command = self.scene.command(&program("steadfast-master"));
                command.args(["--job", JOB, "--etcd-endpoints", &endpoints]);
                command.args(["--listen", &listen, "--advertise", &advertised, "--job-file"]);
                command.arg(&self.job_file);
                command
            }
            _ => {
                let (nodes, workers) =
                    (format!("1:{}", shape.nodes_max()), shape.workers.to_string());
                let mut command = self.scene.command(&program("steadfast"));
                command.args(["run", "--rdzv-id", JOB, "--rdzv-endpoint", &endpoints]);
                command.args(["--nnodes", &nodes, "--nproc-per-node", &workers]);
                command.args(["--max-restarts", "1000", "--grace", "2s"]);
                command.env("CHAOS_NODE", life(member));
                command
            }
        };
        command.args(["--admin-listen", &admin, "--lease-ttl", &ttl]);
        if member.role == Role::Agent {
            command.arg("--").arg(&shape.python).arg(&self.program);
            command.arg(examples().join("data/digits.csv")).arg(self.logs.directory());
            command.args([shape.steps.to_string(), STEP_PAUSE_MS.to_string()]);
        }
        let process = Process::start(self.scene.directory(), &member.log_name(), &mut command);
        member.begin(process);
        member.admin = admin;
    }

    fn member_mut(&mut self, role: Role, index: u32) -> &mut Member {
        let found = self.members.iter_mut().find(|it| (it.role, it.index) == (role, index));
        found.unwrap_or_else(|| panic!("unknown member {} {index}", role.name()))
    }

    fn log(&mut self, what: &str) {
        let seconds = self.started.elapsed().as_secs_f64();
        self.trace.push(format!("{seconds:8.3} s, step {:5}: {what}", self.steps));
    }
}

/// Returns the name of the current process of an agent, in the logs of its workers.
fn life(agent: &Member) -> String {
    format!("{}.{}", agent.index, agent.starts)
}

impl Drop for ElasticTarget<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let from = self.trace.len().saturating_sub(LINES_SHOWN);
            eprintln!(
                "{}\nends: {:?}\nrepeat with: {}",
                self.trace[from..].join("\n"),
                self.ends,
                self.shape.command(self.seed, &self.schedule)
            );
        }
    }
}
