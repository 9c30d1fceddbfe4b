//! Tests of shards and of the update rules.

mod optimizers;
mod parts;
mod shard;
mod tables;
