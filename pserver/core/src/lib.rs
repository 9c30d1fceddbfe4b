//! What a pserver thinks: how contributions are summed and applied, each exactly once. Pure: no
//! clock, no socket, no file.

pub mod contribution;
pub mod lane_sum;
pub mod learning_rate;
pub mod memory;
pub mod optimizer;
pub mod shard;
mod update;
mod values;
