//! Runs a parameter server.

use std::process::ExitCode;

fn main() -> ExitCode {
    steadfast_process::keep_freed_memory();
    let args: steadfast_pserver::Args = steadfast_process::parse();
    steadfast_process::run("steadfast-pserver", steadfast_pserver::run(args))
}
