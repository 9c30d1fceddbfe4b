//! Audits of simulated jobs: with real queues, shards and rounds under random interleavings, and with one
//! guard removed at a time.

#![allow(clippy::unwrap_used)]

mod async_world;
mod broken_history;
mod elastic_world;
mod etcd;
mod findings;
mod honest;
mod mutations;
mod rounds;
mod sync_world;
mod world;
