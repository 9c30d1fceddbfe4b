//! One run of `steadfast local`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{Ended, Job, Process, Scene, Seen, eventually, program};

/// Longest time that a run of these tests may take on a busy machine.
const RUN_MAX: Duration = Duration::from_secs(100);

/// A run in a scene. Each run of one job in one scene uses the same data folder.
#[derive(Debug)]
pub struct Run<'a> {
    scene: &'a Scene,
    process: Process,
    data: PathBuf,
    /// Where the job's keys are, if not in the etcd of this run.
    etcd: Option<String>,
}

impl<'a> Run<'a> {
    /// Starts a run with leases of two seconds, the shortest that etcd grants.
    pub fn start(scene: &'a Scene, job: &Job, more: &[&str]) -> Self {
        Self::start_in(scene, job, "data", more)
    }

    /// Starts a run in a data folder of that name.
    pub fn start_in(scene: &'a Scene, job: &Job, data: &str, more: &[&str]) -> Self {
        let file = job.write(scene);
        Self::start_file(scene, &file, data, more)
    }

    /// Starts a run of a job file.
    pub fn start_file(scene: &'a Scene, file: &Path, data: &str, more: &[&str]) -> Self {
        let mut command = scene.command(&program("steadfast"));
        command.arg("local").arg(file).args(["--data-dir", data, "--output", "json"]);
        command.args(["--lease-ttl", "2s"]).args(more);
        let process = Process::start(scene.folder(), &format!("local-{data}"), &mut command);
        Self { scene, process, data: scene.path(data), etcd: None }
    }

    /// Runs a job to its end; the result must be there.
    #[track_caller]
    pub fn to_end(scene: &'a Scene, job: &Job, data: &str, more: &[&str]) -> Value {
        Self::start_in(scene, job, data, more).finish()
    }

    /// Says that its job lies in this etcd.
    pub fn at(&mut self, etcd: &str) {
        self.etcd = Some(etcd.to_owned());
    }

    /// Waits for the end, which must be a success, and returns the summary.
    #[track_caller]
    pub fn finish(self) -> Value {
        let ended = self.end();
        assert_eq!(ended.code, Some(0), "stderr: {}", ended.stderr);
        assert!(!ended.stderr.contains("panicked"), "stderr: {}", ended.stderr);
        let summary = summary(&ended);
        assert_eq!(summary["state"], "finished");
        summary
    }

    /// Waits for the end, however it is. No process may be left, none may have panicked.
    #[track_caller]
    pub fn end(mut self) -> Ended {
        let ended = self.process.end(RUN_MAX);
        self.no_log_tells_of_a_panic();
        ended
    }

    #[track_caller]
    fn no_log_tells_of_a_panic(&self) {
        let logs = std::fs::read_dir(self.data.join("logs"));
        for entry in logs.into_iter().flatten().flatten() {
            let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
            assert!(!text.contains("panicked"), "{}: {text}", entry.path().display());
        }
    }

    /// Sends a signal to `steadfast local` itself.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// What it said so far.
    pub fn stderr(&self) -> String {
        self.process.stderr()
    }

    /// The job's status as `steadfast status` tells it, if anybody answers.
    pub fn status(&self) -> Option<Value> {
        let mut command = Command::new(program("steadfast"));
        command.args(["status", "--output", "json"]);
        match &self.etcd {
            Some(url) => command.args(["--etcd-endpoints", url]),
            None => command.arg("--data-dir").arg(&self.data),
        };
        let output = command.output().expect("the program starts");
        serde_json::from_slice(&output.stdout).ok()
    }

    /// Waits until the status is such.
    #[track_caller]
    pub fn until(&mut self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || {
            assert!(self.process.is_running(), "the run ended before {what}: {}", self.stderr());
            self.status().filter(|status| holds(status))
        })
    }

    /// Waits until that many steps are done, on the way to many more.
    #[track_caller]
    pub fn until_step(&mut self, step: u64) {
        self.until(&format!("step {step} is done"), |it| it["version"].as_u64() >= Some(step));
    }

    /// Waits until passes are over.
    #[track_caller]
    pub fn until_pass(&mut self, pass: u64) {
        self.until(&format!("pass {pass} began"), |it| it["pass"].as_u64() >= Some(pass));
    }

    /// Kills one process of a role, waits until another one was started in its place, and returns
    /// the dead one.
    #[track_caller]
    pub fn kill_one(&self, role: &str) -> Seen {
        let it = self.scene.one_of(role);
        self.scene.kill(&it);
        eventually("the death was noticed", || self.stderr().contains("SIGKILL").then_some(()));
        it
    }

    /// Where the embedded etcd of the run listens.
    pub fn endpoint(&self) -> String {
        let file = self.data.join("etcd-endpoint");
        eventually("etcd listens", || {
            std::fs::read_to_string(&file).ok().filter(|text| !text.is_empty())
        })
    }
}

/// The one JSON object on stdout.
#[track_caller]
fn summary(ended: &Ended) -> Value {
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert_eq!(lines.len(), 1, "stdout: {}", ended.stdout);
    serde_json::from_str(lines[0]).expect("stdout is one JSON object")
}

impl Ended {
    /// The summary on stdout.
    #[track_caller]
    pub fn summary(&self) -> Value {
        summary(self)
    }

    /// The lines of stderr that tell an error.
    pub fn errors(&self) -> Vec<&str> {
        self.stderr.lines().filter(|line| line.contains(": error: ")).collect()
    }
}
