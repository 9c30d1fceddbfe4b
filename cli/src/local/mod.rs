//! `steadfast local`: runs a whole job as real processes on this machine, supervised as by Kubernetes.

mod args;
mod backoff;
mod child;
mod etcd_child;
mod flow;
mod folder;
mod log_tail;
mod observer;
mod outages;
mod plan;
mod progress;
mod summary;
mod supervisor;

pub use args::LocalArgs;
pub use flow::run;
pub use folder::read_endpoint;
