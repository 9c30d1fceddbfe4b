//! Runs a master.

use std::process::ExitCode;

fn main() -> ExitCode {
    steadfast_master::main()
}
