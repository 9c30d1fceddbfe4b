//! Child processes of a test. They die with the test; descendants are found by a mark in the environment.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpid, getppid};

use crate::within;

/// The environment variable that marks the processes of one scene.
pub const MARK: &str = "SUITE_MARK";

/// The environment variable with the directory of other builds of the programs.
const PROGRAMS: &str = "SUITE_PROGRAMS";

/// Returns the SHA-256 of a file, computed by `sha256sum`.
pub fn sha256sum(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().expect("it is installed");
    let text = String::from_utf8(output.stdout).expect("it is text");
    text.split(' ').next().filter(|it| !it.is_empty()).expect("the file exists").to_owned()
}

/// Returns the path of a program as built by `make test`, or of another build.
pub fn program(name: &str) -> PathBuf {
    let built = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/release");
    let directory = std::env::var_os(PROGRAMS).map_or_else(built, PathBuf::from);
    let path = directory.join(name);
    assert!(path.is_file(), "{} is not built; run `make test`", path.display());
    path
}

/// Returns a number of bytes that `/proc` reports of a process, such as `VmRSS`; `None` if it has ended.
pub fn memory_of(pid: Pid, field: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|it| it.strip_prefix(field)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kibibytes| kibibytes << 10)
}

/// How a process ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Absent if a signal ended it.
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A process that is killed on drop.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Process {
    /// Starts a program with its output in the files `<name>.out` and `<name>.err`.
    ///
    /// The process dies with the calling thread, which is the thread of the test.
    pub fn start(directory: &Path, name: &str, command: &mut Command) -> Self {
        let stdout = directory.join(format!("{name}.out"));
        let stderr = directory.join(format!("{name}.err"));
        let create =
            |path: &Path| File::create(path).expect("the directory of the test is writable");
        command
            .stdin(Stdio::null())
            .stdout(create(&stdout))
            .stderr(create(&stderr))
            .process_group(0);
        let parent = getpid();
        let die_with_parent = move || {
            set_pdeathsig(Signal::SIGKILL)?;
            // The parent may have died before the line above; then no signal would be sent.
            if getppid() == parent { Ok(()) } else { Err(io::Error::from(Errno::ESRCH)) }
        };
        // SAFETY: between fork and exec it only calls prctl and getppid, which are safe there; it
        // allocates nothing and takes no lock.
        unsafe { command.pre_exec(die_with_parent) };
        let child = command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {:?}: {error}", command.get_program()));
        Self { name: name.to_owned(), child, stdout, stderr }
    }

    pub fn pid(&self) -> Pid {
        pid_of(self.child.id())
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("it was not waited for yet");
    }

    /// Sends a signal to the process, unless it has exited.
    pub fn signal_if_running(&mut self, signal: Signal) {
        if self.is_running() {
            self.signal(signal);
        }
    }

    pub fn stdout_path(&self) -> &Path {
        &self.stdout
    }

    /// Returns the stdout so far.
    pub fn stdout(&self) -> String {
        text(&self.stdout)
    }

    /// Returns the stderr so far.
    pub fn stderr(&self) -> String {
        text(&self.stderr)
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_none()
    }

    /// Waits until the process exits; panics after `bound`.
    pub fn end(&mut self, bound: Duration) -> Ended {
        let child = &mut self.child;
        let what = format!("{} ended", self.name);
        let status = within(bound, &what, || child.try_wait().expect("a child can be waited for"));
        Ended {
            code: status.code(),
            signal: status.signal(),
            stdout: text(&self.stdout),
            stderr: text(&self.stderr),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A live process with a mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundProcess {
    pub pid: Pid,
    /// `master`, `pserver`, `trainer`, `etcd`, `local`, or the name of another program.
    pub role: String,
}

/// Returns all live processes with `mark`.
pub fn marked(mark: &str) -> Vec<FoundProcess> {
    let entry = format!("{MARK}={mark}");
    let mut found = Vec::new();
    for directory in fs::read_dir("/proc").expect("Linux has /proc").flatten() {
        let path = directory.path();
        let Some(pid) = directory.file_name().to_str().and_then(|it| it.parse().ok()) else {
            continue;
        };
        // Processes that have ended, or of other users, have no readable environment.
        let environment = fs::read(path.join("environ")).unwrap_or_default();
        if environment.split(|byte| *byte == 0).any(|it| it == entry.as_bytes()) {
            let words = fs::read(path.join("cmdline")).unwrap_or_default();
            found.push(FoundProcess { pid: Pid::from_raw(pid), role: role(&words) });
        }
    }
    // Approximately in start order.
    found.sort_by_key(|it| it.pid);
    found
}

fn role(command_line: &[u8]) -> String {
    let mut words = command_line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    let program = words.next().unwrap_or_default().into_owned();
    let name = Path::new(&program).file_name().and_then(OsStr::to_str).unwrap_or_default();
    match (name, name.strip_prefix("steadfast-")) {
        ("steadfast", _) => words.next().unwrap_or_default().into_owned(),
        (_, Some(role)) => role.to_owned(),
        (other, None) => other.to_owned(),
    }
}

fn pid_of(id: u32) -> Pid {
    Pid::from_raw(i32::try_from(id).expect("process ids are small"))
}

fn text(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned()
}
