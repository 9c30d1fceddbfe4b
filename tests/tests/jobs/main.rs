//! Whole jobs of real processes: under kills, network faults and invalid input, with monitoring and
//! operator commands.

#![allow(clippy::unwrap_used)]

mod audit;
mod bad_input;
mod change;
mod checkpoints;
mod cluster;
mod convert;
mod crashes;
mod edges;
mod etcd_client;
mod etcd_equivalence;
mod evaluation;
mod extend;
mod faults;
mod monitoring;
mod object_store;
mod operators;
mod optimizers;
mod output;
mod own_loop;
mod page;
mod protocol;
mod python;
mod recovery;
mod security;
mod spares;
mod start;
mod stream;
mod tables;
mod tensorboard;
mod traces;
mod trainers;
mod wire;
