//! The parameter server: holds the blocks of one slot, sums gradients, and applies each exactly once.

mod event;
mod event_loop;
mod follower;
mod follower_record;
mod following;
mod generations;
mod handover;
mod lane_lags;
mod master;
mod metrics;
mod norms;
mod pulls;
mod push_assembler;
mod row_files;
mod run;
mod service;
mod shard_file;
mod slot;
mod slot_lease;
mod state;
mod tensor_service;

pub use run::{Args, run_process};

/// Runs a parameter server with the settings of the command line. (Compiled with this library, not again
/// with each program that calls it.)
pub fn main() -> ! {
    steadfast_process::keep_freed_memory();
    let args: Args = steadfast_process::parse();
    if args.table_memory.is_some() {
        steadfast_process::limit_arenas();
    }
    // RocksDB destroys locks at the exit of the process, which threads that read or write rows still take.
    steadfast_process::run_and_exit("steadfast-pserver", run::run(args))
}
