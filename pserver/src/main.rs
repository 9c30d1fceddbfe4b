//! Runs the pserver.
fn main() {}
