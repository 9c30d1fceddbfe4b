//! Runs `steadfast audit` on the job of a test.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use serde_json::Value;

use crate::{Ended, program};

/// Runs `steadfast audit --json`; returns its exit code and its report.
pub fn audit(etcd: &str, more: &[&str]) -> (i32, Value) {
    let ended = run_audit(etcd, &[&["--json"], more].concat());
    let answer = serde_json::from_str(&ended.stdout);
    let answer = answer.unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    (ended.code.expect("no signal ended it"), answer)
}

/// Runs `steadfast audit`.
pub fn run_audit(etcd: &str, more: &[&str]) -> Ended {
    let mut command = Command::new(program("steadfast"));
    command.args(["audit", "--etcd-endpoints", etcd]).args(more);
    let output = command.output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it is text");
    Ended {
        code: output.status.code(),
        signal: output.status.signal(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}
