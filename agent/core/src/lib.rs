//! The decision logic of an agent. It is pure: callers pass the time and random numbers, and perform what is decided.
//!
//! [`round::RoundMachine`] decides what the workers of a node do, in one round after the other.

pub mod round;
#[cfg(test)]
mod tests;
