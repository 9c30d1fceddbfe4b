//! The state machine of a pserver: sums contributions and applies each exactly once. Pure: no clock,
//! no socket, no file.

pub mod buffer_pool;
pub mod contribution;
pub mod lane_sum;
pub mod learning_rate;
pub mod optimizer;
pub mod shard;
mod update;
mod values;
