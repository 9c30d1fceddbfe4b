//! Shards and the rules that update them.

mod optimizers;
mod parts;
mod shard;
