//! The gRPC service of a master.

mod discarded_list;
pub(crate) mod service;
