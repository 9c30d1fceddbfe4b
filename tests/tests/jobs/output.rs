//! Commands whose output cannot be written.

use std::fs::OpenOptions;
use std::process::{Command, Stdio};

use steadfast_tests::{Job, Run, Scene, program};

/// Returns a stream on a device that is always full.
fn full() -> Stdio {
    OpenOptions::new().write(true).open("/dev/full").expect("Linux has it").into()
}

/// A full disk is an error of its own, and no panic: a script that keeps the output must not take a command
/// without output for a success.
#[test]
fn a_command_whose_output_cannot_be_written_fails_with_the_reason() {
    let scene = Scene::new();
    let job = Job::small();
    Run::to_end(&scene, &job, "data", &[]);
    let file = job.write(&scene).display().to_string();
    let commands: &[&[&str]] = &[
        &["local", &file, "--data-dir", "data"],
        &["local", &file, "--data-dir", "data", "--output", "json"],
        &["status", "--data-dir", "data"],
        &["status", "--data-dir", "data", "--json"],
        &["checkpoint", "list", "--data-dir", "data"],
        &["audit", "--data-dir", "data"],
        &["tasks", "--data-dir", "data"],
        &["completions", "bash"],
    ];
    for args in commands {
        let mut command = scene.command(&program("steadfast"));
        let output = command.args(*args).stdin(Stdio::null()).stdout(full()).output();
        let output = output.expect("the program starts");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(7), "{args:?}: {stderr}");
        let reason = "cannot write to stdout: no space left on the device";
        assert!(stderr.contains(reason) && !stderr.contains("panicked"), "{args:?}: {stderr}");
    }
    // Without a place for the error, the exit code is what is left.
    let mut command: Command = scene.command(&program("steadfast"));
    let status = command.args(["status", "--data-dir", "none"]).stderr(full()).status();
    assert!(status.expect("the program starts").code().is_some_and(|code| (2..9).contains(&code)));
}
