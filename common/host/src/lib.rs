//! What a process asks of the machine that it runs on: time, tasks, chance and the network.
//!
//! By itself that is tokio and the operating system. A simulation puts a [`Host`] of its own in
//! place, for one thread, with [`enter`]: then the very same program runs on simulated time, over a
//! simulated network, and does the same again for the same seed. So programs take these things from
//! here and nowhere else, and every `select!` of theirs is `biased`, because an unbiased one rolls
//! dice that no simulation holds.

pub mod chance;
mod gate;
pub mod incoming;
pub mod net;
pub mod peers;
pub mod refusals;
pub mod role;
mod simulated;
pub mod task;
pub mod time;
pub mod tls;
pub mod traces;
mod unix;
mod way;

pub use gate::Access;
pub use simulated::{Abort, Host, enter};
