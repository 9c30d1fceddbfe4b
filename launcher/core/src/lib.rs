//! The decision logic of `steadfast launch`: which hosts run an agent, and with how many slots. It is pure: callers pass
//! the time and random numbers, and perform what is decided.
//!
//! ```text
//!   --hosts, or the output of a script ──▶ hosts ──▶ discovery ──┐
//!                                                                ▼
//!   an agent exited ──▶ exits ──▶ facts ──▶ launcher ──▶ placement ──▶ facts ──▶ actions
//!                                              ▲  │
//!                               records in etcd ──┘──▶ timers ──▶ blacklist ──▶ facts
//! ```
//!
//! [`machine::LaunchMachine`] composes them. Its driver commits [`launcher::Launcher::changes`] in one transaction, and
//! then performs the [`launcher::Action`]s of the facts. After each input it does so with what is due, until nothing
//! is.

pub mod blacklist;
pub mod discovery;
mod exits;
pub mod hosts;
pub mod launcher;
pub mod machine;
mod placement;
pub mod settings;
pub mod source;
#[cfg(test)]
mod tests;
pub mod timers;

pub use exits::Exit;
pub use placement::Shortage;
