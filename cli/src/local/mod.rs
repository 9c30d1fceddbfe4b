//! `steadfast local`: a whole job as real processes on this machine, supervised as Kubernetes
//! would.

mod args;
mod backoff;
mod child;
mod deaths;
mod etcd_child;
mod flow;
mod folder;
mod log_tail;
mod observer;
mod plan;
mod progress;
mod summary;
mod supervisor;

pub use args::LocalArgs;
pub use flow::run;
pub use folder::read_endpoint;
