//! The parameter server: holds the blocks of one slot, adds up gradients, applies them once.

mod engine;
mod generations;
mod metrics;
mod norms;
mod run;
mod service;
mod shard_file;
mod slot;

pub use run::{Args, run};
