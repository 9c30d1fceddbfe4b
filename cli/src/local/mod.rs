//! `steadfast local`: runs a whole job as real processes on this machine, supervised as by Kubernetes.

mod args;
mod backoff;
mod child;
mod directory;
mod etcd_child;
mod flow;
mod log_tail;
mod observer;
mod outages;
mod plan;
mod progress;
mod python;
mod summary;
mod supervisor;

pub use args::LocalArgs;
pub use directory::read_endpoint;
pub use flow::run;
pub use python::interpreter;
