//! The embedded etcd, from without: beside a real one, through etcdctl, and over its own restarts.

mod conformance;
mod durability;
mod etcdctl;
mod leases;
mod support;
mod watching;
