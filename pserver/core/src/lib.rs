//! The state machines of a pserver: sum contributions and apply each exactly once. Pure: no clock, no
//! socket, no file.

pub mod async_shard;
pub mod block_store;
pub mod buffer_pool;
pub mod contribution;
pub mod lane_sum;
pub mod optimizer;
pub mod rules;
pub mod shard;
pub mod sync_shard;
pub mod tables;
mod update;
mod values;
