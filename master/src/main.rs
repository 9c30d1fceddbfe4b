//! Runs a master.

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: steadfast_master::Args = steadfast_process::parse();
    steadfast_process::run("steadfast-master", steadfast_master::run(args))
}
