//! The client's side of a running job: finds the master and the pservers, follows them when they
//! change, and makes every call idempotent and bounded in time.

mod cluster;
mod error;
mod master;
mod pservers;
mod pulls;

pub use cluster::{Cluster, Crew};
pub use error::ClientError;
pub use master::Master;
pub use pservers::{Gradient, Name, Pservers, Pulled};
