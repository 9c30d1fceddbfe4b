//! The parameter server: holds the blocks of one slot, adds up gradients, applies them once.

mod engine;
mod event;
mod exchange;
mod generations;
mod master;
mod metrics;
mod norms;
mod pulls;
mod run;
mod service;
mod shard_file;
mod slot;
mod tenure;

use std::process::ExitCode;

pub use run::{Args, live};

/// Runs a parameter server with the command line's settings. (Its code is made with this library, not
/// once more with each program that calls it.)
pub fn main() -> ExitCode {
    steadfast_process::keep_freed_memory();
    let args: Args = steadfast_process::parse();
    steadfast_process::run("steadfast-pserver", run::run(args))
}
