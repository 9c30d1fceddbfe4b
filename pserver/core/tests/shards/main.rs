//! Shards and the rules that update them.

mod optimizers;
mod shard;
