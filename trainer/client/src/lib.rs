//! The client library for a running job: finds the master and the pservers, follows changes, and makes
//! every call idempotent and bounded in time.

mod cluster;
mod error;
mod master;
mod pservers;
mod pulls;

pub use cluster::{Cluster, PserverSet};
pub use error::ClientError;
pub use master::Master;
pub use pservers::{Gradient, Name, Pservers, Pulled};
