//! The host interface of a process: time, tasks, randomness and the network.
//!
//! The default implementation is tokio and the operating system. A simulation installs a [`Host`] of
//! its own for one thread with [`enter`]: the same program then runs on simulated time over a simulated
//! network, and the same seed gives the same run. Programs therefore use these modules only, and every
//! `select!` is `biased`, because an unbiased one uses a random number generator that the simulation
//! does not control.

mod connect;
mod gate;
pub mod incoming;
pub mod net;
pub mod peers;
pub mod random;
pub mod refusals;
pub mod role;
mod simulated;
pub mod task;
pub mod time;
pub mod tls;
pub mod traces;
mod unix;

pub use gate::Access;
pub use simulated::{Abort, Host, enter};
