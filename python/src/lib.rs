//! The extension module of the Python package: a trainer whose model computes in Python, the agent of a node of an
//! elastic job, and a coordinator of closures with its workers.
//!
//! The trainer runs on threads of its own. It sends what the model must compute as [`Request`]s to the
//! Python program, which answers them on one thread: frameworks keep threads and random state per process,
//! and the program's own loop is that thread.
//!
//! [`Request`]: request::Request

mod arrays;
mod closure_worker;
mod coordinator;
mod error;
mod files;
mod job;
mod logs;
mod model;
mod node;
mod own_process;
mod program_parameters;
mod request;
mod settings;
mod trainer;
mod values;
mod work;
mod worker;

use pyo3::prelude::*;

#[pymodule(name = "_native")]
mod native {
    #[expect(non_upper_case_globals, reason = "the name is that of Python")]
    #[pymodule_export]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    #[pymodule_export]
    use super::arrays::category_ids;
    #[pymodule_export]
    use super::closure_worker::{Closure, ClosureWorker, decode_arguments};
    #[pymodule_export]
    use super::coordinator::{Coordinator, PerWorker, RemoteValue};
    #[pymodule_export]
    use super::files::Files;
    #[pymodule_export]
    use super::job::{job_file, toml_to_json};
    #[pymodule_export]
    use super::node::{Node, Round};
    #[pymodule_export]
    use super::trainer::Trainer;
    #[pymodule_export]
    use super::work::{Key, Work};
    #[pymodule_export]
    use super::worker::{Worker, WorkerPlace, commit_number};
}
