//! The master: owns the task queues, the lanes' assignment, generations and checkpoints of a job.

mod acting;
mod board;
mod checkpoints;
mod decisions;
mod desk;
mod job;
mod members;
mod metrics;
mod office;
mod run;
mod service;
mod store;

pub use run::{Args, run};
