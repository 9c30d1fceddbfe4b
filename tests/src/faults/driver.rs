//! Runs a schedule in a world: waits for the steps of its events, restarts every process that ends before the job,
//! as a supervisor does, and heals faults when their time is over. The driver makes no random decisions.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::libc::{SIGKILL, SIGTERM};
use serde_json::Value;
use steadfast_audit::history::Change;
use steadfast_common::records::keys::Keys;
use tokio::runtime::Runtime;

use super::inject::Heal;
use super::member::Member;
use super::{Fault, Kind, Role, Schedule, When};
use crate::{Ended, EtcdCluster, Process, Recorder, Scene};

/// Longest time that processes may take to exit after the end of the job.
const LEAVE_MAX: Duration = Duration::from_secs(30);

/// Lines of the event log that a failure shows.
const LINES_SHOWN: usize = 200;

/// What differs between the worlds of training and elastic jobs.
pub trait WorldJob: Sized {
    /// Time between looks at the world.
    const PAUSE: Duration;

    fn name(&self) -> &str;

    fn lease_ttl_s(&self) -> u32;

    /// Returns the longest time from the start of a world to the result of the job.
    fn life_max(&self) -> Duration;

    /// Returns the command that repeats a run.
    fn repeat_command(&self, seed: Option<u64>, schedule: &Schedule) -> String;

    /// Describes the job, for a message after a timeout.
    fn description(&self) -> String {
        String::new()
    }

    /// Follows the progress of the job, and sets [`World::steps`].
    fn follow(world: &mut World<'_, Self>);

    /// Notes a change in etcd.
    fn changed(_world: &mut World<'_, Self>, _change: &Change) {}

    /// Returns whether a fault may be injected now.
    fn is_possible(_world: &World<'_, Self>, _fault: Fault) -> bool {
        true
    }

    /// Returns whether a missing process may be started.
    fn may_start(&self, _member: &Member) -> bool {
        true
    }

    /// Returns the command of a member's next process.
    fn command(world: &mut World<'_, Self>, index: usize, admin: &str) -> Command;

    /// Injects a fault of one process.
    fn inject_into(world: &mut World<'_, Self>, role: Role, index: u32, kind: Kind) {
        world.member_mut(role, index).inject(kind);
    }

    /// Heals a fault of one process.
    fn heal_one(world: &mut World<'_, Self>, role: Role, index: u32, kind: Kind) {
        world.member_mut(role, index).heal(kind);
    }

    /// Injects a fault that hits neither one process nor the processes of etcd.
    fn inject_elsewhere(_world: &mut World<'_, Self>, kind: Kind) {
        panic!("this job has no fault {}", kind.name());
    }

    /// Heals a fault that hits neither one process nor the processes of etcd; returns whether it succeeded.
    fn heal_elsewhere(_world: &mut World<'_, Self>, _kind: Kind) -> bool {
        true
    }
}

/// A job under faults.
#[derive(Debug)]
pub struct World<'a, J: WorldJob> {
    pub(super) scene: &'a Scene,
    pub job: J,
    pub keys: Keys,
    pub(super) members: Vec<Member>,
    pub etcd: EtcdCluster<'a>,
    pub recorder: Recorder<'a>,
    pub(super) heals: Vec<Heal>,
    pub(super) steps: u64,
    pub(super) result: Option<Value>,
    /// When the result was first seen.
    over: Option<Instant>,
    started: Instant,
    /// Event log, printed if the run fails.
    pub(super) trace: Vec<String>,
    pub(super) ends: BTreeMap<String, u32>,
    schedule: Schedule,
    seed: Option<u64>,
    /// The last field, dropped after all fields that use it.
    pub(super) runtime: Runtime,
}

/// The end of a job in a world.
#[derive(Debug)]
pub(super) struct End {
    pub result: Value,
    pub wall: Duration,
}

impl<'a, J: WorldJob> World<'a, J> {
    /// Starts etcd, and the members that `members` returns.
    pub(super) fn begin(
        scene: &'a Scene,
        job: J,
        etcd: EtcdCluster<'a>,
        members: impl FnOnce(&Runtime, &[String]) -> Vec<Member>,
    ) -> Self {
        let runtime = Runtime::new().expect("threads can be started");
        let keys = Keys::of_job(job.name());
        let mut world = Self {
            recorder: Recorder::start(scene, &etcd.urls(), keys.root()),
            members: members(&runtime, &etcd.urls()),
            scene,
            job,
            keys,
            etcd,
            heals: Vec::new(),
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
            let fault = event.fault;
            self.until(&format!("step {due} is done, for {fault}"), |world| {
                let is_possible = due <= world.steps && J::is_possible(world, fault);
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

    /// Waits until `probe` returns a value, while the world continues.
    pub fn until<T>(&mut self, what: &str, mut probe: impl FnMut(&mut Self) -> Option<T>) -> T {
        loop {
            self.go_on();
            if let Some(found) = probe(self) {
                return found;
            }
            let is_late = self.job.life_max() < self.started.elapsed();
            let is_over = self.over.is_some_and(|over| LEAVE_MAX < over.elapsed());
            assert!(
                !is_late && !is_over,
                "timed out after {:?}: {what}{}",
                self.started.elapsed(),
                self.job.description(),
            );
            std::thread::sleep(J::PAUSE);
        }
    }

    /// Waits for the end of the job, heals all faults, and waits until all members have exited.
    pub(super) fn wait_for_the_end(&mut self) -> End {
        let result = self.until("the job has a result", |world| world.result.clone());
        let wall = self.started.elapsed();
        self.heal_all();
        self.over = Some(Instant::now());
        self.until("all processes exited after the end of the job", |world| {
            world.members.iter().all(|it| !it.is_alive()).then_some(())
        });
        assert_eq!(result["state"], "finished", "{result}");
        End { result, wall }
    }

    /// Returns the number of known steps. In asynchronous mode a step is a mini-batch.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the processes that ended before the job was over, counted by role and exit status.
    pub fn ends(&self) -> &BTreeMap<String, u32> {
        &self.ends
    }

    pub(super) fn member(&self, role: Role, index: u32) -> &Member {
        let found = self.members.iter().find(|it| (it.role, it.index) == (role, index));
        found.unwrap_or_else(|| panic!("unknown member {} {index}", role.name()))
    }

    pub(super) fn member_mut(&mut self, role: Role, index: u32) -> &mut Member {
        let found = self.members.iter_mut().find(|it| (it.role, it.index) == (role, index));
        found.unwrap_or_else(|| panic!("unknown member {} {index}", role.name()))
    }

    pub(super) fn log(&mut self, what: &str) {
        let seconds = self.started.elapsed().as_secs_f64();
        self.trace.push(format!("{seconds:8.3} s, step {:5}: {what}", self.steps));
    }

    /// Follows the job, heals due faults, and starts missing processes.
    fn go_on(&mut self) {
        for change in self.recorder.read() {
            if change.key == self.keys.result() {
                let value = change.value.as_ref();
                self.result = value.and_then(|it| serde_json::from_str(it).ok());
                self.over = Some(Instant::now());
                self.log("the job has a result");
            }
            J::changed(self, &change);
        }
        J::follow(self);
        self.heal_due();
        self.tend();
    }

    /// Starts missing processes, unless the job is over.
    fn tend(&mut self) {
        for index in 0..self.members.len() {
            if let Some(ended) = self.members[index].ended() {
                self.note_end(index, &ended);
            }
            let member = &self.members[index];
            if self.result.is_none() && member.is_due() && self.job.may_start(member) {
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
        let admin = self.members[index].free_address().to_string();
        self.members[index].starts += 1;
        let mut command = J::command(self, index, &admin);
        let member = &mut self.members[index];
        let process = Process::start(self.scene.directory(), &member.log_name(), &mut command);
        member.begin(process);
        member.admin = admin;
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
            self.job.repeat_command(self.seed, &self.schedule),
        )
    }
}

impl<J: WorldJob> Drop for World<'_, J> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.report());
        }
    }
}
