//! Elastic jobs of real processes: the service that any program can call, and agents with their workers, under
//! kills and invalid input.

#![allow(clippy::unwrap_used)]

mod agents;
mod bad_input;
mod job;
mod operators;
mod played;
mod ranks;
mod service;
mod signals;
