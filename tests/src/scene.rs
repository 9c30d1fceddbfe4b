//! The environment of one test: a directory, a mark on its processes, and a turn on the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

use crate::process::{self, FoundProcess, MARK, Process, program};
use crate::turn::Turn;
use crate::{eventually, within};

static SCENES: AtomicU32 = AtomicU32::new(0);

/// Lines of each log that a failed test shows.
const LINES_SHOWN: usize = 12;

/// The environment of a test. On drop, also after a panic, its processes are killed.
#[derive(Debug)]
pub struct Scene {
    mark: String,
    directory: TempDir,
    _turn: Turn,
}

impl Scene {
    /// Waits for a turn and creates an empty environment.
    pub fn new() -> Self {
        let turn = Turn::take();
        let number = SCENES.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{}-{number}", std::process::id());
        let directory = tempfile::Builder::new()
            .prefix("steadfast-test-")
            .tempdir()
            .expect("a temporary directory can be made");
        Self { mark, directory, _turn: turn }
    }

    /// Returns the path of a file in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Writes a file; returns its path.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).expect("the directory of the test is writable");
        path
    }

    /// Returns a command that runs in the directory, with the mark in its environment.
    pub fn command(&self, path: &Path) -> Command {
        let mut command = Command::new(path);
        command.current_dir(self.directory()).env(MARK, &self.mark);
        command
    }

    /// Runs `steadfast` to its end.
    pub fn steadfast<'b>(&self, args: impl IntoIterator<Item = &'b str>) -> Output {
        let mut command = self.command(&program("steadfast"));
        command.args(args).output().expect("the program starts")
    }

    /// Runs `steadfast`, which must succeed; returns its stdout.
    #[track_caller]
    pub fn shown<'b>(&self, args: impl IntoIterator<Item = &'b str>) -> String {
        let output = self.steadfast(args);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    }

    /// Audits the run in a data directory, which must be clean; returns what the audit says.
    #[track_caller]
    pub fn audited(&self, data: &str) -> String {
        self.shown(["audit", "--data-dir", data])
    }

    /// Starts one of the programs.
    pub fn start(&self, name: &str, program_name: &str, args: &[&str]) -> Process {
        let mut command = self.command(&program(program_name));
        Process::start(self.directory(), name, command.args(args))
    }

    /// Returns the live processes.
    pub fn processes(&self) -> Vec<FoundProcess> {
        process::marked(&self.mark)
    }

    /// Returns the live processes of a role.
    pub fn all_of(&self, role: &str) -> Vec<FoundProcess> {
        self.processes().into_iter().filter(|it| it.role == role).collect()
    }

    /// Waits for a live process of a role.
    pub fn one_of(&self, role: &str) -> FoundProcess {
        eventually(&format!("a {role} runs"), || self.all_of(role).into_iter().next())
    }

    /// Kills a process with SIGKILL.
    pub fn kill(&self, it: &FoundProcess) {
        // An error means that the process has already exited.
        let _ = kill(it.pid, Signal::SIGKILL);
    }

    /// Stops or resumes a process.
    pub fn signal(&self, it: &FoundProcess, signal: Signal) {
        kill(it.pid, signal)
            .unwrap_or_else(|error| panic!("cannot send {signal} to {it:?}: {error}"));
    }

    /// Waits until all processes have exited.
    #[track_caller]
    pub fn leaves_no_process(&self) {
        let start = std::time::Instant::now();
        while start.elapsed() < Duration::from_secs(10) {
            if self.processes().is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("left behind: {:?}", self.processes());
    }

    fn show_logs(&self) {
        for path in files(self.directory()) {
            let is_log = path.extension().is_some_and(|it| it == "log" || it == "err");
            let text = match is_log {
                true => fs::read_to_string(&path).unwrap_or_default(),
                false => continue,
            };
            let lines: Vec<&str> = text.lines().collect();
            let last = &lines[lines.len().saturating_sub(LINES_SHOWN)..];
            let name = path.strip_prefix(self.directory()).unwrap_or(&path).display();
            eprintln!("--- {name}, last of {} lines\n{}", lines.len(), last.join("\n"));
        }
    }
}

impl Default for Scene {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.show_logs();
        }
        // Killed processes may have started others; repeat until none is left.
        let kill_all = || {
            let left = self.processes();
            left.iter().for_each(|it| self.kill(it));
            left.is_empty().then_some(())
        };
        match std::thread::panicking() {
            true => drop(kill_all()),
            false => within(Duration::from_secs(20), "all processes of the test ended", kill_all),
        }
    }
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => found.extend(files(&path)),
            false => found.push(path),
        }
    }
    found.sort();
    found
}

/// Checks that a command was refused with an exit code and a reason.
#[track_caller]
pub fn assert_refused(output: &Output, code: i32, reason: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(text.contains(reason), "{text}");
}
