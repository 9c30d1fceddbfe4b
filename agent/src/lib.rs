//! The agent of a node: `steadfast run`. It joins rounds with the agents of other nodes, and starts, watches
//! and ends the workers of its node: the processes of the user's program.
//!
//! ```text
//!   register ──▶ join ──▶ exchange ports ──▶ start workers ──▶ watch ──┬─▶ all succeeded ──▶ exit barrier ──▶ 0
//!                 ▲                                                    ├─▶ the round changes: stop workers ─┐
//!                 │                                                    └─▶ a worker failed: stop the others ┤
//!                 └──────────────── as long as restarts are left (changes of the round do not count) ◀──────┘
//! ```
//!
//! Workers that use `steadfast.elastic` are told of changes and stay ([`worker_service`]); others are restarted.

mod args;
mod commits;
mod coordinator;
mod environment;
mod gpus;
mod interface;
mod job_end;
pub mod launcher_link;
mod metrics;
mod notices;
mod ports;
mod program;
mod rounds;
mod run;
mod streams;
mod worker_service;

pub use args::RunArgs;
pub use coordinator::{Coordinator, CoordinatorSettings, RendezvousArgs, rendezvous};
pub use notices::pass_on;
pub use run::{connect_to_etcd, run};
