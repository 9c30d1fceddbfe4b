//! Runs a parameter server.

use std::process::ExitCode;

fn main() -> ExitCode {
    steadfast_pserver::main()
}
