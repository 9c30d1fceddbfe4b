//! The master: owns the task queues, the lanes' assignment, generations and checkpoints of a job.

mod acting;
mod board;
mod checkpoints;
mod chronicle;
mod collection;
mod curve;
mod decisions;
mod desk;
mod generations;
mod job;
mod members;
mod metrics;
mod office;
mod page;
mod recoveries;
mod run;
mod service;
mod snapshot;
mod spendings;
mod store;
mod tensorboard;
mod vigils;

pub use job::Order;
pub use run::{Args, live, run};
