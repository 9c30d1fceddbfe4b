//! Whole jobs in deterministic simulation.
//!
//! The programs are those that run in production: master, pserver and trainer with all their drivers,
//! the etcd client, and the embedded etcd. What is simulated is what lies outside of them: time, the
//! network, the object store, etcd's disk, and whoever starts processes again. One seed decides
//! everything, and the same seed gives the same run to the last turn of the last task.
//!
//! `docs/simulation.md` says what is checked, how to replay a seed, and what was found.

mod checks;
mod cluster;
mod crew;
mod dice;
mod etcd;
pub mod explore;
mod fault;
mod host;
mod job;
pub mod mutations;
mod net;
mod pipe;
mod plan;
mod pointer;
mod run;
mod shrink;
mod store;
mod story;
mod watch;
mod weather;
mod world;

pub use plan::Plan;
pub use run::{Outcome, run};
pub use shrink::{Smaller, shrink};
pub use steadfast_common::spec::Mode;
pub use story::tell;
