//! The trainer: reads records, computes gradients, follows the master and the pservers.
//!
//! A program with its own model is three lines:
//!
//! ```no_run
//! fn main() -> std::process::ExitCode {
//!     let mut models = steadfast_trainer::Registry::built_in();
//!     // models.register("my-model", |spec, inputs| …);
//!     steadfast_trainer::main(models)
//! }
//! ```
//!
//! A program with a training loop of its own uses [`own_loop`].

mod activity;
mod async_loop;
mod buffers;
mod context;
mod course;
mod current;
mod dataset;
mod declared;
mod hang_watch;
mod kept_names;
mod metrics;
pub mod own_loop;
mod run;
mod start;
mod suspects;
mod sync_loop;
mod tasks;
mod trial;

use std::process::ExitCode;

pub use current::{Current, Snapshot};
pub use declared::Declared;
pub use run::{Args, run, run_process};
pub use steadfast_trainer_core::*;

/// Runs a trainer with the settings of the command line and the given models.
pub fn main(models: Registry) -> ExitCode {
    let args: Args = steadfast_process::parse();
    steadfast_process::keep_freed_memory();
    steadfast_process::run("steadfast-trainer", run(args, models))
}
