//! The host interface of a process: time, tasks and randomness.
//!
//! The default implementation is tokio and the operating system. A simulation installs a [`Host`] of
//! its own for one thread with [`enter`]: the same program then runs on simulated time, and the same seed
//! gives the same run. Programs therefore use these modules only, and every `select!` is `biased`, because
//! an unbiased one uses a random number generator that the simulation does not control.

pub mod random;
mod simulated;
pub mod task;
pub mod time;

pub use simulated::{Abort, Host, enter};
