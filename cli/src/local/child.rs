//! One life of one process: started so that it cannot outlive us, ended politely, then firmly.

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
const TERM_PATIENCE: Duration = Duration::from_secs(10);

/// Settings of this machine's other jobs that a process of ours must not take from the
/// environment; what it needs of them it is told by flags.
const FOREIGN_VARIABLES: &[&str] = &[
    "STEADFAST_ADMIN_LISTEN",
    "STEADFAST_ADVERTISE",
    "STEADFAST_CHECK_CONFIG",
    "STEADFAST_CONFIG",
    "STEADFAST_DATA_DIR",
    "STEADFAST_ETCD_CA",
    "STEADFAST_ETCD_CERT",
    "STEADFAST_ETCD_ENDPOINTS",
    "STEADFAST_ETCD_KEY",
    "STEADFAST_ETCD_PASSWORD_FILE",
    "STEADFAST_ETCD_USER",
    "STEADFAST_JOB",
    "STEADFAST_JOB_FILE",
    "STEADFAST_LEASE_TTL",
    "STEADFAST_LISTEN",
    "STEADFAST_PSERVERS",
    "STEADFAST_ROOT",
    "STEADFAST_STORE",
];

/// A running process.
#[derive(Debug)]
pub struct Life {
    child: Child,
    /// Length of its log when it was started.
    log_start: u64,
}

/// How a life ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Death {
    /// Absent if a signal ended it.
    pub code: Option<i32>,
    /// `exit code 1`, `signal SIGKILL`.
    pub how: String,
    /// What its log says about it.
    pub words: Option<String>,
}

impl Life {
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
            // Ctrl-C at a terminal goes to its foreground group: to us, and not to the children.
            .process_group(0)
            .kill_on_drop(true);
        for name in FOREIGN_VARIABLES {
            command.env_remove(name);
        }
        let parent = getpid();
        let die_with_parent = move || {
            set_pdeathsig(Signal::SIGKILL)?;
            // The parent may have died before the line above, and nobody would tell.
            if getppid() == parent { Ok(()) } else { Err(io::Error::from(Errno::ESRCH)) }
        };
        // SAFETY: between fork and exec it only calls prctl and getppid, which are safe there; it
        // allocates nothing and takes no lock. (The signal is sent when the thread that forks ends:
        // the runtime's worker threads live as long as the runtime.)
        unsafe { command.pre_exec(die_with_parent) };
        let child = command.spawn().map_err(|error| {
            Failure::io(format!("cannot start {}", process.program.display()), &error)
        })?;
        Ok(Self { child, log_start })
    }

    /// Waits for its end.
    pub async fn end(&mut self, process: &Process) -> Death {
        match self.child.wait().await {
            Ok(status) => Death {
                code: status.code(),
                how: describe(status),
                // Whom a signal ended had no time for last words.
                words: status
                    .code()
                    .and_then(|_| log_tail::last_words(&process.log, self.log_start)),
            },
            Err(error) => {
                Death { code: None, how: format!("no exit status: {error}"), words: None }
            }
        }
    }

    /// Asks it to end; ends it if it does not.
    pub async fn terminate(&mut self) {
        let Some(pid) = self.pid() else { return };
        // Errors mean that it has ended already.
        let _ = kill(pid, Signal::SIGTERM);
        if tokio::time::timeout(TERM_PATIENCE, self.child.wait()).await.is_err() {
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
