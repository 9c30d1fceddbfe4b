//! Audits of simulated jobs: with real queues and shards under random interleavings, and with one guard
//! removed at a time.

mod async_world;
mod broken_history;
mod etcd;
mod findings;
mod honest;
mod mutations;
mod sync_world;
mod world;
