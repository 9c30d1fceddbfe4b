//! Tests of shards and of the update rules.

#![allow(clippy::unwrap_used)]

mod optimizers;
mod parts;
mod shard;
mod tables;
