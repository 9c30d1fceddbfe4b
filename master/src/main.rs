//! Runs the master.
fn main() {}
