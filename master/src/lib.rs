//! The master: owns the task queues, the lanes' assignment, generations and checkpoints of a job.

mod acting;
mod board;
mod checkpoints;
mod chronicle;
mod collection;
mod curve;
mod decisions;
mod desk;
mod generations;
mod job;
mod members;
mod metrics;
mod office;
mod page;
mod recoveries;
mod run;
mod service;
mod snapshot;
mod spendings;
mod store;
mod tensorboard;
mod vigils;

use std::process::ExitCode;

pub use job::Order;
pub use run::{Args, live};

/// Runs a master with the command line's settings. (Its code is made with this library, not once more
/// with each program that calls it.)
pub fn main() -> ExitCode {
    let args: Args = steadfast_process::parse();
    steadfast_process::run("steadfast-master", run::run(args))
}
