//! One child process: it cannot outlive this process, and is stopped by SIGTERM, then SIGKILL.

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, getpid, getppid};
use steadfast_process::Failure;
use tokio::process::{Child, Command};

use super::log_tail;
use super::plan::Process;

/// Time between SIGTERM and SIGKILL.
const TERM_TIMEOUT: Duration = Duration::from_secs(10);

/// Prefix of the environment variables of Steadfast.
const VARIABLE_PREFIX: &str = "STEADFAST_";

/// The settings that child processes inherit from the environment of `steadfast local`. All others are set by
/// flags or do not apply to them.
const INHERITED: [&str; 6] =
    ["LOG", "LOG_FORMAT", "OTLP_ENDPOINT", "DRAIN_TIMEOUT", "TABLE_MEMORY", "TABLE_DIRECTORY"];

fn is_inherited(variable: &OsStr) -> bool {
    let name = variable.to_string_lossy();
    name.strip_prefix(VARIABLE_PREFIX).is_none_or(|setting| INHERITED.contains(&setting))
}

/// A running process.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
    /// Length of its log file at its start.
    log_start: u64,
}

/// How a child process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Absent if it was killed by a signal.
    pub code: Option<i32>,
    /// `exit code 1`, `signal SIGKILL`.
    pub how: String,
    /// The reason given at the end of its log.
    pub words: Option<String>,
}

impl ChildProcess {
    /// Starts a process whose output goes to its log.
    pub fn start(process: &Process) -> Result<Self, Failure> {
        let cannot_log = |error: io::Error| {
            Failure::io(format!("cannot write the log {}", process.log.display()), &error)
        };
        let log = OpenOptions::new().create(true).append(true).open(&process.log);
        let log = log.map_err(cannot_log)?;
        let log_start = log.metadata().map_err(cannot_log)?.len();
        let mut command = Command::new(&process.program);
        command
            .args(&process.args)
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(cannot_log)?)
            .stderr(log)
            // A terminal sends Ctrl-C to its foreground process group, which must not include the children.
            .process_group(0)
            .kill_on_drop(true);
        for (name, _) in std::env::vars_os().filter(|(name, _)| !is_inherited(name)) {
            command.env_remove(name);
        }
        command.envs(process.env.iter().map(|(name, value)| (name, value)));
        let parent = getpid();
        let die_with_parent = move || {
            set_pdeathsig(Signal::SIGKILL)?;
            // If the parent died before the call above, the signal is never sent.
            if getppid() == parent { Ok(()) } else { Err(io::Error::from(Errno::ESRCH)) }
        };
        // SAFETY: between fork and exec the closure only calls prctl and getppid, which are safe there; it
        // does not allocate or lock. (The kernel sends the signal when the forking thread exits: worker
        // threads of the runtime live as long as the runtime.)
        unsafe { command.pre_exec(die_with_parent) };
        let child = command.spawn().map_err(|error| {
            Failure::io(format!("cannot start {}", process.program.display()), &error)
        })?;
        Ok(Self { child, log_start })
    }

    /// Waits until the process ends.
    pub async fn end(&mut self, process: &Process) -> Exit {
        match self.child.wait().await {
            Ok(status) => Exit {
                code: status.code(),
                how: describe(status),
                // A killed process does not log a reason.
                words: status
                    .code()
                    .and_then(|_| log_tail::last_lines(&process.log, self.log_start)),
            },
            Err(error) => Exit { code: None, how: format!("no exit status: {error}"), words: None },
        }
    }

    /// Sends SIGTERM, then SIGKILL after a timeout.
    pub async fn terminate(&mut self) {
        let Some(pid) = self.pid() else { return };
        // An error means that the process has ended already.
        let _ = kill(pid, Signal::SIGTERM);
        if tokio::time::timeout(TERM_TIMEOUT, self.child.wait()).await.is_err() {
            let _ = killpg(pid, Signal::SIGKILL);
            let _ = self.child.wait().await;
        }
    }

    fn pid(&self) -> Option<Pid> {
        self.child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw)
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(number)) => match Signal::try_from(number) {
            Ok(signal) => format!("signal {signal}"),
            Err(_) => format!("signal {number}"),
        },
        (None, None) => "no exit status".to_owned(),
    }
}
