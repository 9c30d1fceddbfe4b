//! The decision logic of a coordinator: which worker runs which closure, and what has become of each. It is pure:
//! callers pass what happened, and perform what is decided.
//!
//! ```text
//!                              ┌──── worker lost, or gives it back ────┐
//!                              ▼                                       │
//!   scheduled ──▶ waiting ──▶ ready ──▶ running ──────────────▶ returned, raised, end of data
//!                    │          │          │
//!                    └──────────┴──────────┴── cancelled, or another one failed ──▶ cancelled
//! ```
//!
//! A closure settles once. Each attempt to run it has a number, and a reply counts only while its attempt is the
//! latest, so a worker that was lost and answers late changes nothing. The result of a closure with a name is a fact,
//! which is committed before anyone learns of it: another coordinator of the same job does not run it again.

mod call;
mod closures;
mod machine;
#[cfg(test)]
mod tests;
mod workers;

pub use call::{Call, ClosureId, Failure, Outcome, Reply, WorkerIndex};
pub use machine::{CoordinatorMachine, Effect, Fact, Input, OnError, RESULT_BYTES_MAX, Settings};
