//! The etcd client: reads, fenced commits, leases with a deadline on the holder's own clock, and
//! mirrors of key ranges. No other crate on the client's side depends on etcd-client.
//!
//! Calls return boxed futures: an `async fn` is compiled again in every crate that awaits it, together
//! with the gRPC client below it.

mod clock;
mod error;
mod error_counters;
mod etcd;
mod job;
mod leadership;
mod login;
mod members;
mod mirror;
mod op;
mod retry;
mod session;
pub mod term;
mod transaction;
mod users;

pub use clock::now;
pub use error::CoordError;
pub use error_counters::{ErrorCounters, error_counters};
pub use etcd::{Entry, Etcd, EtcdOptions, Unchanged};
pub use job::wait_for_job;
pub use leadership::{Leadership, OPS_MAX};
pub use mirror::{Mirror, Range, View};
pub use op::Op;
pub use retry::backoff;
pub use session::{Deadline, Session};
pub use transaction::Transaction;
pub use users::Grant;
