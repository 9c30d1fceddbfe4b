//! An elastic job of real processes on a real etcd under a fault schedule. A node that left comes back after a while.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use steadfast_audit::history::{Change, ElasticJob, HistoryReport, check_elastic, etcdctl};
use steadfast_common::records::commits::RecordOrder;
use steadfast_common::records::rendezvous::NodeRange;

use super::history::{self, History};
use super::logs::Logs;
use super::shape::ElasticShape;
use crate::faults::driver::{End, World, WorldJob};
use crate::faults::member::Member;
use crate::faults::{Fault, Kind, Role, Schedule};
use crate::{EtcdCluster, Quota, Scene, examples, program};

/// Name of the job.
const JOB: &str = "elastic-digits";

/// How long a node stays away after it left.
const AWAY: Duration = Duration::from_secs(2);

/// Pause of a worker after each step, so that faults hit different steps.
const STEP_PAUSE_MS: u64 = 15;

/// Accuracy on held-out digits that the job must reach under any schedule.
const ACCURACY_MIN: f64 = 0.9;

/// An elastic job under faults.
pub type ElasticTarget<'a> = World<'a, Elastic>;

/// An elastic job in a world.
#[derive(Debug)]
pub struct Elastic {
    shape: ElasticShape,
    order: RecordOrder,
    logs: Logs,
    /// Workers that are stopped, by the index of the fault.
    stopped: BTreeMap<u32, Pid>,
    /// Nodes that are away, until this time, or until a fault adds them.
    away: BTreeMap<u32, Option<Instant>>,
    /// Counts the changes of the number of workers.
    scales: u32,
    job_file: PathBuf,
    program: PathBuf,
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

impl WorldJob for Elastic {
    const PAUSE: Duration = Duration::from_millis(20);

    fn name(&self) -> &str {
        JOB
    }

    fn lease_ttl_s(&self) -> u32 {
        self.shape.lease_ttl_s
    }

    fn life_max(&self) -> Duration {
        Duration::from_secs(300)
    }

    fn repeat_command(&self, seed: Option<u64>, schedule: &Schedule) -> String {
        self.shape.command(seed, schedule)
    }

    fn follow(world: &mut ElasticTarget<'_>) {
        let now = Instant::now();
        world.job.logs.follow();
        world.steps = world.job.logs.steps();
        world.job.away.retain(|_, back| back.is_none_or(|back| now < back));
    }

    fn changed(world: &mut ElasticTarget<'_>, change: &Change) {
        if change.key == world.keys.formed_round() {
            let record = change.value.as_ref().and_then(|it| serde_json::from_str(it).ok());
            let record: Value = record.unwrap_or_default();
            let (round, workers) = (&record["round"], &record["world_size"]);
            world.log(&format!("round {round} of {workers} workers"));
        }
    }

    fn is_possible(world: &ElasticTarget<'_>, fault: Fault) -> bool {
        world.keeps_commits(fault)
    }

    fn may_start(&self, member: &Member) -> bool {
        member.role != Role::Agent || !self.away.contains_key(&member.index)
    }

    fn command(world: &mut ElasticTarget<'_>, index: usize, admin: &str) -> Command {
        let Self { shape, order, logs, job_file, program: script, .. } = &world.job;
        let ttl = format!("{}s", shape.lease_ttl_s);
        let member = &mut world.members[index];
        let endpoints = member.endpoints();
        let mut command = match member.role {
            Role::Master => {
                let (listen, advertised) = member.open_front(&world.runtime);
                let mut command = world.scene.command(&program("steadfast-master"));
                command.args(["--job", JOB, "--etcd-endpoints", &endpoints]);
                command.args(["--listen", &listen, "--advertise", &advertised, "--job-file"]);
                command.arg(job_file);
                command
            }
            _ => {
                let (nodes, workers) =
                    (format!("1:{}", shape.nodes_max()), shape.workers.to_string());
                let mut command = world.scene.command(&program("steadfast"));
                command.args(["run", "--rdzv-id", JOB, "--rdzv-endpoint", &endpoints]);
                command.args(["--nnodes", &nodes, "--nproc-per-node", &workers]);
                command.args(["--max-restarts", "1000", "--grace", "2s"]);
                command.env("CHAOS_NODE", life(member));
                command
            }
        };
        command.args(["--admin-listen", admin, "--lease-ttl", &ttl]);
        if member.role == Role::Agent {
            command.arg("--").arg(&shape.python).arg(script);
            command.arg(examples().join("data/digits.csv")).arg(logs.directory());
            command.args([shape.steps.to_string(), STEP_PAUSE_MS.to_string(), order.to_string()]);
        }
        command
    }

    fn inject_into(world: &mut ElasticTarget<'_>, role: Role, index: u32, kind: Kind) {
        match (role, kind) {
            (Role::Worker, kind) => world.inject_into_worker(kind, index),
            (Role::Agent, Kind::Join) => {
                if world.job.away.remove(&index).is_none() {
                    world.log("skipped: the node is there already");
                }
            }
            (role, kind) => {
                let member = world.member_mut(role, index);
                member.inject(kind);
                if !member.is_alive() {
                    world.log("the process does not run");
                }
                if kind == Kind::Leave {
                    let is_spare = world.job.shape.agents <= index;
                    let back = (!is_spare).then(|| Instant::now() + AWAY);
                    world.job.away.entry(index).or_insert(back);
                }
            }
        }
    }

    fn inject_elsewhere(world: &mut ElasticTarget<'_>, kind: Kind) {
        assert_eq!(kind, Kind::Scale, "this job has no fault {}", kind.name());
        let most = world.job.shape.nodes_max() * world.job.shape.workers;
        // Up and down, with each number, and at last without a limit.
        let workers = match most - world.job.scales % (most + 1) {
            0 => "all".to_owned(),
            number if number.is_multiple_of(2) => (most - number + 1).to_string(),
            number => number.to_string(),
        };
        world.job.scales += 1;
        world.log(&format!("{workers} workers"));
        let mut command = world.scene.command(&program("steadfast"));
        command.args(["scale", "--job", JOB, "--workers", &workers, "--etcd-endpoints"]);
        command.arg(world.etcd.urls().join(","));
        // It fails while no master acts.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        if let Err(error) = command.spawn() {
            world.log(&format!("cannot scale: {error}"));
        }
    }

    fn heal_one(world: &mut ElasticTarget<'_>, role: Role, index: u32, kind: Kind) {
        if role != Role::Worker {
            return world.member_mut(role, index).heal(kind);
        }
        if let Some(pid) = world.job.stopped.remove(&index) {
            let _ = kill(pid, Signal::SIGCONT);
        }
    }
}

impl<'a> ElasticTarget<'a> {
    /// Starts etcd, the masters and the agents.
    pub fn start(scene: &'a Scene, shape: ElasticShape, order: RecordOrder) -> Self {
        let etcd = EtcdCluster::start(scene, shape.etcd as usize, Quota::Default);
        let job_file = format!(
            "name = \"{JOB}\"\nkind = \"elastic\"\nrecords = {}\norder = \"{order}\"\n[nodes]\nmin = 1\nmax = {}\n\
             last_call = \"1s\"\njoin_timeout = \"60s\"\n",
            records(),
            shape.nodes_max()
        );
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs");
        let (masters, agents) = (shape.masters, shape.nodes_max());
        let elastic = Elastic {
            job_file: scene.write("job.toml", job_file),
            logs: Logs::new(&scene.path("workers")),
            program: programs.join("elastic_digits.py"),
            stopped: BTreeMap::new(),
            away: (shape.agents..agents).map(|index| (index, None)).collect(),
            shape,
            order,
            scales: 0,
        };
        Self::begin(scene, elastic, etcd, |runtime, urls| {
            let member = |role, index| Member::new(runtime, role, index, urls, None);
            let masters = (0..masters).map(|index| member(Role::Master, index));
            masters.chain((0..agents).map(|index| member(Role::Agent, index))).collect()
        })
    }

    /// Waits for the end of the job, heals all faults, waits until all processes have exited, and checks all
    /// invariants.
    pub fn finish(mut self) -> ElasticOutcome {
        let End { wall, .. } = self.wait_for_the_end();
        self.until("no worker is left", |world| {
            let left = world.scene.processes();
            left.iter().all(|it| it.role.starts_with("etcd")).then_some(())
        });
        self.job.logs.follow();
        let history = history::check(self.job.logs.entries(), self.job.shape.steps);
        let history = history.unwrap_or_else(|broken| panic!("{broken}"));
        assert!(ACCURACY_MIN <= history.accuracy, "the accuracy is {}", history.accuracy);
        let audit = self.audit();
        let (ends, trace) = (self.ends.clone(), self.trace.clone());
        ElasticOutcome { history, audit, ends, trace, wall }
    }

    /// Checks every revision of etcd.
    fn audit(&self) -> HistoryReport {
        let revisions = etcdctl::parse(self.recorder.lines()).expect("etcdctl wrote it");
        let nodes = NodeRange::new(1, self.job.shape.nodes_max()).expect("there are agents");
        let job = ElasticJob { keys: &self.keys, nodes, records: Some(records()) };
        let report = check_elastic(&job, &[], &revisions);
        assert!(report.is_clean(), "{report}");
        let data = report.data.expect("the workers have committed");
        assert!(0 < data.position.seen && data.left_out == 0, "{report}");
        report
    }

    /// Returns whether the newest commit survives a fault: a member of the newest round is left that the fault does not
    /// hit. Commits are in the memory of agents; they do not survive the loss of all of them at once.
    fn keeps_commits(&self, fault: Fault) -> bool {
        if fault.role != Some(Role::Agent) || fault.kind == Kind::Join {
            return true;
        }
        let newest = self.job.logs.newest_members();
        let mut agents = self.members.iter().filter(|it| it.role == Role::Agent);
        agents.any(|it| {
            it.index != fault.index
                && it.is_alive()
                && !it.is_paused
                && !self.job.away.contains_key(&it.index)
                && newest.contains(&life(it).as_str())
        })
    }

    fn inject_into_worker(&mut self, kind: Kind, index: u32) {
        let (node, local_rank) = (index / self.job.shape.workers, index % self.job.shape.workers);
        let node = life(self.member_mut(Role::Agent, node));
        let started = self.job.logs.worker(&node, local_rank);
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
            self.job.stopped.insert(index, pid);
        }
        // An error means that it has ended.
        let _ = kill(pid, signal);
    }
}

/// Returns the number of records that the workers train on: of five digits, one is held out.
fn records() -> u64 {
    let table = std::fs::read_to_string(examples().join("data/digits.csv"));
    let digits = table.expect("the example exists").lines().count() - 1;
    (digits - digits.div_ceil(5)) as u64
}

/// Returns the name of the current process of an agent, in the logs of its workers.
fn life(agent: &Member) -> String {
    format!("{}.{}", agent.index, agent.starts)
}
