//! Deterministic simulation of whole jobs.
//!
//! The programs are those that run in production: master, pserver, trainer and agent with all their drivers,
//! the etcd client, and the embedded etcd. Their environment is simulated: time, the network, the object
//! store, etcd's disk, the workers of agents, and the supervisor that restarts processes. One seed determines
//! the whole run: the same seed gives the same run, turn by turn.
//!
//! `docs/simulation.md` describes the checks, how to replay a seed, and the defects found.

mod agent;
mod audit;
mod checks;
pub mod closures;
mod cluster;
mod etcd;
pub mod explore;
mod fault;
mod generation_check;
mod host;
mod job;
pub mod mutations;
mod net;
mod network_model;
mod node_memory;
mod pipe;
mod plan;
mod pointer;
mod rng;
mod run;
mod shrink;
mod store;
mod trace;
mod watch;
mod worker;
mod worker_barriers;
mod worker_checks;
mod workers;
mod workload;
mod world;

pub use audit::Recording;
pub use cluster::{Member, Role};
pub use fault::Fault;
pub use job::{Job, LARGE_STEPS};
pub use plan::Plan;
pub use run::{Outcome, measure_masters, record, run};
pub use shrink::{Smaller, shrink};
pub use trace::print_to_stdout;
pub use workload::{ElasticJob, Mode, Workload};
