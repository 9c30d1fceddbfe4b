//! Tests of the embedded etcd from outside: against a real etcd, with etcdctl, and across restarts.

#![allow(clippy::unwrap_used)]

mod conformance;
mod durability;
mod etcdctl;
mod leases;
mod support;
mod watching;
