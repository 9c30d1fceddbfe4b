//! The parameter server: holds the blocks of one slot, adds up gradients, applies them once.

mod engine;
mod event;
mod exchange;
mod generations;
mod master;
mod metrics;
mod norms;
mod pulls;
mod run;
mod service;
mod shard_file;
mod slot;
mod tenure;

pub use run::{Args, live, run};
