//! Whole jobs: real programs in real processes, and what they do when they are killed, cut off, fed
//! garbage, watched and operated.

mod audit;
mod bad_input;
mod checkpoints;
mod cluster;
mod etcd_equivalence;
mod faults;
mod monitoring;
mod object_store;
mod operators;
mod page;
mod protocol;
mod python;
mod recovery;
mod security;
mod tensorboard;
mod traces;
mod wire;
