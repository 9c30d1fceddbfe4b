//! Runs a trainer with the built-in models.

use std::process::ExitCode;

fn main() -> ExitCode {
    steadfast_trainer::main(steadfast_trainer::Registry::built_in())
}
