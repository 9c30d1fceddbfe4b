//! A run of `steadfast local`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{Ended, FoundProcess, Job, Process, Scene, eventually, program};

/// Timeout of a run, for a busy machine.
const RUN_MAX: Duration = Duration::from_secs(100);

/// A run in a scene. All runs of a job in a scene use the same data directory.
#[derive(Debug)]
pub struct Run<'a> {
    scene: &'a Scene,
    process: Process,
    data: PathBuf,
    /// URL of the etcd of the job, if it is not the etcd of this run.
    etcd: Option<String>,
}

impl<'a> Run<'a> {
    /// Starts a run with a lease TTL of two seconds, the minimum of etcd.
    pub fn start(scene: &'a Scene, job: &Job, more: &[&str]) -> Self {
        Self::start_in(scene, job, "data", more)
    }

    /// Starts a run in the data directory `data`.
    pub fn start_in(scene: &'a Scene, job: &Job, data: &str, more: &[&str]) -> Self {
        let file = job.write(scene);
        Self::start_file(scene, &file, data, more)
    }

    /// Starts a run with these variables in the environment of all its processes.
    pub fn start_with(
        scene: &'a Scene,
        job: &Job,
        data: &str,
        environment: &[(&str, &PathBuf)],
    ) -> Self {
        let mut command = Self::command(scene, &job.write(scene), data, &[]);
        command.envs(environment.iter().copied());
        Self::begin(scene, data, command)
    }

    /// Starts a run of a job file.
    pub fn start_file(scene: &'a Scene, file: &Path, data: &str, more: &[&str]) -> Self {
        Self::begin(scene, data, Self::command(scene, file, data, more))
    }

    fn command(scene: &Scene, file: &Path, data: &str, more: &[&str]) -> Command {
        let mut command = scene.command(&program("steadfast"));
        command.arg("local").arg(file).args(["--data-dir", data, "--output", "json"]);
        command.args(["--lease-ttl", "2s"]).args(more);
        command
    }

    fn begin(scene: &'a Scene, data: &str, mut command: Command) -> Self {
        let process = Process::start(scene.directory(), &format!("local-{data}"), &mut command);
        Self { scene, process, data: scene.path(data), etcd: None }
    }

    /// Runs a job to its end; returns the summary.
    #[track_caller]
    pub fn to_end(scene: &'a Scene, job: &Job, data: &str, more: &[&str]) -> Value {
        Self::start_in(scene, job, data, more).finish()
    }

    /// Returns the summary of a run of a job to its end without faults. Tests of one program that ask for the same job
    /// share it. The caller has no scene of its own yet.
    #[track_caller]
    pub fn undisturbed(job: &Job) -> Value {
        static KNOWN: Mutex<BTreeMap<String, Value>> = Mutex::new(BTreeMap::new());
        // A failed run fails the tests that wait for it as well.
        let mut known = KNOWN.lock().expect("the run of another test succeeded");
        let run = || Run::to_end(&Scene::new(), job, "data", &[]);
        known.entry(job.text.clone()).or_insert_with(run).clone()
    }

    /// Sets the etcd of the job.
    pub fn at(&mut self, etcd: &str) {
        self.etcd = Some(etcd.to_owned());
    }

    /// Waits for the end of the run, which must succeed; returns the summary.
    #[track_caller]
    pub fn finish(self) -> Value {
        let ended = self.end();
        assert_eq!(ended.code, Some(0), "stderr: {}", ended.stderr);
        assert!(!ended.stderr.contains("panicked"), "stderr: {}", ended.stderr);
        let summary = summary(&ended);
        assert_eq!(summary["state"], "finished");
        summary
    }

    /// Waits for the end of the run, with any status. No process may be left or have panicked.
    #[track_caller]
    pub fn end(mut self) -> Ended {
        let ended = self.process.end(RUN_MAX);
        self.no_log_has_a_panic();
        ended
    }

    #[track_caller]
    fn no_log_has_a_panic(&self) {
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

    /// Returns the stderr so far.
    pub fn stderr(&self) -> String {
        self.process.stderr()
    }

    /// Returns the status of the job from `steadfast status`, if available.
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

    /// Waits until the status meets a condition.
    #[track_caller]
    pub fn until(&mut self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || {
            assert!(self.process.is_running(), "the run ended before {what}: {}", self.stderr());
            self.status().filter(|status| holds(status))
        })
    }

    /// Waits until `step` steps are done; the job must not end before.
    #[track_caller]
    pub fn until_step(&mut self, step: u64) {
        self.until(&format!("step {step} is done"), |it| it["version"].as_u64() >= Some(step));
    }

    /// Waits until pass `pass` begins.
    #[track_caller]
    pub fn until_pass(&mut self, pass: u64) {
        self.until(&format!("pass {pass} began"), |it| it["pass"].as_u64() >= Some(pass));
    }

    /// Kills one process of a role, waits for its replacement, and returns the killed process.
    #[track_caller]
    pub fn kill_one(&self, role: &str) -> FoundProcess {
        let it = self.scene.one_of(role);
        self.scene.kill(&it);
        eventually("the death was detected", || self.stderr().contains("SIGKILL").then_some(()));
        it
    }

    /// Returns the endpoint of the embedded etcd of the run.
    pub fn endpoint(&self) -> String {
        let file = self.data.join("etcd-endpoint");
        eventually("etcd listens", || {
            std::fs::read_to_string(&file).ok().filter(|text| !text.is_empty())
        })
    }
}

/// Returns the single JSON object on stdout.
#[track_caller]
fn summary(ended: &Ended) -> Value {
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert_eq!(lines.len(), 1, "stdout: {}", ended.stdout);
    serde_json::from_str(lines[0]).expect("stdout is one JSON object")
}

impl Ended {
    /// Returns the summary on stdout.
    #[track_caller]
    pub fn summary(&self) -> Value {
        summary(self)
    }

    /// Returns the error lines of stderr.
    pub fn errors(&self) -> Vec<&str> {
        self.stderr.lines().filter(|line| line.contains(": error: ")).collect()
    }
}
