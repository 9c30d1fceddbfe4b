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
//!
//! In a job with parameters, a closure gets a number before it runs, which names what it pushes: each parameter server
//! applies a number once, however often the closure runs. With a name, its number is a fact, too, so another
//! coordinator of the job lets it push under the same one. If a rollback of the parameters undoes a push, its closure
//! runs again, and its first result stays.

mod call;
mod closures;
mod machine;
mod pushes;
#[cfg(test)]
mod tests;
mod workers;

pub use call::{Call, ClosureId, Failure, Outcome, Reply, WorkerIndex};
pub use machine::{CoordinatorMachine, Effect, Fact, Input, OnError, RESULT_BYTES_MAX, Settings};
pub use pushes::{Counted, Push, PushNumber, Pushes};
