//! The master: owns the task queues, the lanes' assignment, generations and checkpoints of a job.

mod acting_handles;
mod checkpoint;
mod elastic;
mod event_loop;
mod failure_detector;
mod job;
mod plan_warnings;
mod rpc;
mod run;
mod scaling;
mod status;
mod stream;
mod table_watch;

use std::process::ExitCode;

pub use elastic::stored_elastic_status;
pub use job::{ElasticRequest, JobRequest, Request};
pub use run::{Args, run_process};

/// Runs a master with the settings of the command line. Defined in the library so that its code is compiled
/// once, not in each program that calls it.
pub fn main() -> ExitCode {
    let args: Args = steadfast_process::parse();
    steadfast_process::run("steadfast-master", run::run(args))
}
