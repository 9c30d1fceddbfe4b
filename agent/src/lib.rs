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
//!
//! [`run`] is the whole agent of this machine. [`run_process`] is the part that a simulation runs as well, over
//! [`WorkerProcesses`]; without it are the signals, the connection to a launcher, the search for the program, and the
//! rendezvous of `--standalone`.

mod args;
mod commits;
mod environment;
mod gpus;
mod interface;
mod job_end;
pub mod launcher_link;
mod metrics;
mod notices;
mod own_rendezvous;
mod ports;
mod processes;
mod program;
mod record_lists;
mod rounds;
mod run;
mod streams;
mod supervised;
mod warm;
mod worker_service;

pub use args::{DataArgs, RunArgs};
pub use commits::CommitBuffer;
pub use job_end::Ended;
pub use notices::pass_on;
pub use own_rendezvous::{OwnRendezvous, OwnRendezvousSettings, RendezvousArgs, rendezvous};
pub use processes::{WorkerProcesses, WorkerStart};
pub use run::{run, run_process};
pub use steadfast_agent_core::round::{HangTimeout, WorkerExit};
