//! The decision logic of `steadfast launch`: which hosts run an agent, and with how many slots. It is pure:
//! callers pass the time and random numbers, commit the facts to etcd, and start and stop the agents.
//!
//! ```text
//!   --hosts, or the output of a script ──▶ hosts ──▶ discovery ──┐
//!                                                                ▼
//!   an agent exited ──▶ exits ──▶ facts ──▶ launcher ──▶ placement ──▶ facts ──▶ actions
//!                                              ▲  │
//!                               records in etcd ──┘──▶ timers ──▶ blacklist ──▶ facts
//! ```
//!
//! The driver repeats: take one event (a poll, an exit, a deadline); decide; commit
//! [`launcher::Launcher::changes`] in one transaction; [`launcher::Launcher::evolve`];
//! [`timers::Timers::follow`]; perform the [`launcher::Action`]s of the facts. After each event it calls
//! [`launcher::Launcher::due`] in the same way until that returns no fact.

pub mod blacklist;
pub mod discovery;
mod exits;
pub mod hosts;
pub mod launcher;
mod placement;
pub mod settings;
pub mod source;
#[cfg(test)]
mod tests;
pub mod timers;

pub use exits::Exit;
pub use placement::Shortage;
