//! One child process of a local run, with its log.

use std::ffi::OsStr;
use std::time::Duration;

use steadfast_process::Failure;
use steadfast_supervise::{Ending, Output, Worker, WorkerSpec};

use super::log_tail;
use super::plan::Process;

/// Limits the time that a process takes to end after SIGTERM; then it and all that it has started are killed.
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
    worker: Worker,
    /// Length of its log file at its start.
    log_start: u64,
}

/// How a child process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exit {
    /// Absent if it was killed by a signal.
    pub code: Option<i32>,
    /// Describes how the process ended, such as `exit code 1` or `signal SIGKILL`.
    pub how: String,
    /// The reason given at the end of its log.
    pub words: Option<String>,
}

impl ChildProcess {
    /// Starts a process whose output goes to its log.
    pub fn start(
        process: &Process,
        starter: &steadfast_supervise::Supervisor,
    ) -> Result<Self, Failure> {
        let log_start = process.log.metadata().map_or(0, |log| log.len());
        let mut spec = WorkerSpec::new(&process.name, &process.program);
        spec.args.clone_from(&process.args);
        let names = std::env::vars_os().map(|(name, _)| name);
        spec.env_removed = names.filter(|name| !is_inherited(name)).collect();
        let env = process.env.iter().cloned();
        spec.env = env.map(|(name, value)| (name.into(), value)).collect();
        spec.output = Output::File { path: process.log.clone() };
        let worker = starter.start(&spec);
        let worker = worker.map_err(|error| Failure::new(error.kind(), error.to_string()))?;
        Ok(Self { worker, log_start })
    }

    /// Waits until the process ends.
    pub async fn end(&mut self, process: &Process) -> Exit {
        let exit = self.worker.wait().await;
        let code = match exit.ending {
            Ending::Code(code) => Some(code),
            Ending::Signal(_) | Ending::Unknown(_) => None,
        };
        // A killed process does not log a reason.
        let words = code.and_then(|_| log_tail::last_lines(&process.log, self.log_start));
        Exit { code, how: exit.to_string(), words }
    }

    /// Asks the process to end by SIGTERM, and kills it after a timeout.
    pub async fn terminate(&mut self) {
        self.worker.stop(TERM_TIMEOUT).await;
    }
}
