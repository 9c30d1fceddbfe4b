//! The shape of a world, and the command that repeats its run.

use clap::ValueEnum;
use steadfast_common::job::spec::Mode;

use super::feed::Feed;
use super::{Role, Schedule};
use crate::clicks::clicks;
use crate::{Job, Scene};

/// What a world trains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Workload {
    /// A perceptron on the digits.
    #[default]
    Digits,
    /// A factorization machine, with memory for a tenth of the rows of its table.
    Table,
    /// A softmax regression on digits that come in files, one after another.
    Stream,
}

/// Records of the job with a table: its table takes some 600 KB, half of it in each slot.
const CLICKS: usize = 16_000;

/// Memory of each pserver for rows.
const TABLE_MEMORY: &str = "30KiB";

/// The processes of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    pub workload: Workload,
    pub mode: Mode,
    pub etcd: u32,
    pub masters: u32,
    /// Number of slots.
    pub pservers: u32,
    /// Number of spare pservers.
    pub spares: u32,
    /// Number of slots that spares follow.
    pub warm_spares: u32,
    pub trainers: u32,
    /// Lease TTL in seconds.
    pub lease_ttl_s: u32,
    /// Whether each process has a network of its own; see [`crate::enter_router`].
    pub hosts: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            workload: Workload::Digits,
            mode: Mode::Sync,
            etcd: 1,
            masters: 2,
            pservers: 2,
            spares: 1,
            warm_spares: 0,
            trainers: 3,
            lease_ttl_s: 2,
            hosts: false,
        }
    }
}

impl Shape {
    pub fn count(&self, role: Role) -> u32 {
        match role {
            Role::Master => self.masters,
            Role::Pserver => self.pservers + self.spares,
            Role::Trainer => self.trainers,
            Role::Agent | Role::Worker => 0,
        }
    }

    /// Returns the job, with checkpoints frequent enough for progress between rollbacks. Writes its data to the scene,
    /// unless they are those of an example.
    pub fn job(&self, scene: &Scene) -> Job {
        let job = match (self.workload, self.mode) {
            (Workload::Digits, Mode::Sync) => {
                Job::example("digits").with("every = \"10s\"", "every_steps = 40")
            }
            (Workload::Digits, Mode::Async) => {
                Job::asynchronous().with("every = \"10s\"", "every = \"1s\"")
            }
            (Workload::Table, mode) => table(scene, mode),
            (Workload::Stream, mode) => Feed::job(scene, mode),
        };
        match self.warm_spares {
            0 => job,
            spares => job.with("\nseed = ", &format!("\nwarm_spares = {spares}\nseed = ")),
        }
    }

    /// Returns the memory of each pserver for rows, if it is limited.
    pub fn table_memory(&self) -> Option<&'static str> {
        (self.workload == Workload::Table).then_some(TABLE_MEMORY)
    }

    /// Returns the command that repeats a schedule in a world of this shape.
    pub fn command(&self, seed: Option<u64>, schedule: &Schedule) -> String {
        let mode = match self.mode {
            Mode::Sync => "sync",
            Mode::Async => "async",
        };
        let workload = match self.workload {
            Workload::Digits => "digits",
            Workload::Table => "table",
            Workload::Stream => "stream",
        };
        // The faults of a stream are injected by time.
        let how = match self.workload {
            Workload::Digits | Workload::Table => format!("--schedule '{schedule}'"),
            Workload::Stream => "--minutes 30".to_owned(),
        };
        let hosts = if self.hosts { " --hosts" } else { "" };
        format!(
            "target/release/chaos --seed {} --job {workload} --mode {mode} --etcd {} --masters {} --pservers {} \
             --spares {} --warm-spares {} --trainers {} --lease-ttl {}{hosts} {how}",
            seed.unwrap_or_default(),
            self.etcd,
            self.masters,
            self.pservers,
            self.spares,
            self.warm_spares,
            self.trainers,
            self.lease_ttl_s,
        )
    }
}

fn table(scene: &Scene, mode: Mode) -> Job {
    let data = scene.write("clicks.csv", clicks(CLICKS)).display().to_string();
    let job = Job::example("clicks");
    let example = crate::examples().join("data/clicks.csv").display().to_string();
    let job = job
        .with(&example, &data)
        .with("records_per_task = 100", "records_per_task = 200")
        .with("passes = 30", "passes = 8");
    match mode {
        Mode::Sync => job.with("[evaluation]", "[checkpoint]\nevery_steps = 40\n[evaluation]"),
        Mode::Async => job
            .with("mode = \"sync\"", "mode = \"async\"")
            .with("[sync]\nlanes = 8\nmicro_batch = 25", "[async]\nbatch = 25\npush_every = 2")
            .with("[evaluation]", "[checkpoint]\nevery = \"1s\"\n[evaluation]"),
    }
}
