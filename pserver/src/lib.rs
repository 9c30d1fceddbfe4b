//! The parameter server: holds the blocks of one slot, sums gradients, and applies each exactly once.

mod event;
mod event_loop;
mod generations;
mod lane_lags;
mod master;
mod metrics;
mod norms;
mod pulls;
mod row_files;
mod run;
mod service;
mod shard_file;
mod slot;
mod slot_lease;
mod tensor_service;

use std::process::ExitCode;

pub use run::{Args, run_process};

/// Runs a parameter server with the settings of the command line. (Compiled with this library, not again
/// with each program that calls it.)
pub fn main() -> ExitCode {
    steadfast_process::keep_freed_memory();
    let args: Args = steadfast_process::parse();
    if args.table_memory.is_some() {
        steadfast_process::limit_arenas();
    }
    steadfast_process::run("steadfast-pserver", run::run(args))
}
