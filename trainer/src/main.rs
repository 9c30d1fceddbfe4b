//! Runs the trainer.
fn main() {}
