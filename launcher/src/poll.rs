//! Polls for the hosts of a job.

use std::ffi::OsString;
use std::future::pending;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_host::task::{Task, spawn};
use steadfast_launcher_core::hosts::{Host, OUTPUT_BYTES_MAX, parse_output};
use steadfast_process::Failure;
use steadfast_supervise::{CaptureLimits, capture};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use crate::own_machine::OwnMachine;
use crate::shell_words;

/// Time from the start of one poll to that of the next.
const PERIOD: Duration = Duration::from_secs(1);

/// A list of hosts, or why there is none.
pub(crate) type Poll = Result<Vec<Host>, String>;

/// Where a poll finds the hosts.
#[derive(Clone, Debug)]
pub(crate) enum HostSource {
    Fixed(Vec<Host>),
    Script(Script),
}

/// A program that prints the hosts.
#[derive(Clone, Debug)]
pub(crate) struct Script {
    program: PathBuf,
    args: Vec<OsString>,
    default_slots: u32,
    timeout: Duration,
    /// Refuses hosts that cannot reach what is served on loopback.
    only_local: Option<OwnMachine>,
}

/// Polls until it is dropped.
#[derive(Debug)]
pub(crate) struct Poller {
    polls: mpsc::Receiver<Poll>,
    task: Task<()>,
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Poller {
    /// Starts to poll. A fixed list arrives once.
    pub fn start(source: HostSource) -> Self {
        // One result waits at most, so that it is not old when it is taken.
        let (tx, polls) = mpsc::channel(1);
        Self { polls, task: spawn(poll(source, tx)) }
    }

    /// Waits for the next result.
    pub async fn next(&mut self) -> Poll {
        match self.polls.recv().await {
            Some(poll) => poll,
            // The runtime is shutting down.
            None => pending().await,
        }
    }
}

async fn poll(source: HostSource, tx: mpsc::Sender<Poll>) {
    match source {
        HostSource::Fixed(hosts) => {
            // An error means that the poller was dropped.
            let _ = tx.send(Ok(hosts)).await;
            pending().await
        }
        HostSource::Script(script) => {
            let mut ticks = interval(PERIOD);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                if tx.send(script.run().await).await.is_err() {
                    return;
                }
            }
        }
    }
}

impl Script {
    /// Reads the command line of a script.
    ///
    /// # Errors
    /// If it is invalid, or names no executable program.
    pub fn new(
        line: &str,
        default_slots: u32,
        timeout: Duration,
        only_local: Option<OwnMachine>,
    ) -> Result<Self, Failure> {
        let flag = "--host-discovery-script";
        let words = shell_words::split(line);
        let mut words =
            words.map_err(|error| Failure::invalid(format!("{flag}: {error}")))?.into_iter();
        let name = words.next().unwrap_or_default();
        let program = find(&name).ok_or_else(|| {
            let message = format!("{flag}: there is no program `{name}`");
            Failure::new(ErrorKind::NotFound, message)
        })?;
        if !is_executable(&program) {
            let message = format!("{flag}: {name} is not executable; use `chmod +x {name}`");
            return Err(Failure::invalid(message));
        }
        let args = words.map(OsString::from).collect();
        Ok(Self { program, args, default_slots, timeout, only_local })
    }

    async fn run(&self) -> Poll {
        let name = self.program.display();
        let limits = CaptureLimits { time: self.timeout, bytes: OUTPUT_BYTES_MAX };
        let output = capture(&self.program, &self.args, limits).await;
        let output = output.map_err(|error| format!("{name}: {error}"))?;
        let hosts = parse_output(&output, self.default_slots);
        let hosts = hosts.map_err(|error| format!("{name}: {error}"))?;
        match self.only_local.as_ref().map_or(Ok(()), |machine| machine.has_all(&hosts)) {
            Ok(()) => Ok(hosts),
            Err(error) => Err(format!("{name}: {error}")),
        }
    }
}

/// Returns the path of a program: in `PATH`, as a shell finds it, or in the current directory.
fn find(name: &str) -> Option<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return path.exists().then(|| path.to_owned());
    }
    let directories = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&directories).map(|directory| directory.join(path));
    let mut found = found.chain([Path::new(".").join(path)]);
    found.find(|path| path.is_file())
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|it| it.is_file() && it.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Instant;

    use super::*;

    /// S001-6: the script runs once a second, not as often as it can.
    #[tokio::test]
    async fn a_script_runs_once_a_second() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let script = directory.path().join("hosts.sh");
        fs::write(&script, "#!/bin/sh\necho localhost:2\n").expect("the directory is writable");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("it is ours");
        let line = script.display().to_string();
        let script = Script::new(&line, 1, Duration::from_secs(30), None);
        let mut poller = Poller::start(HostSource::Script(script.expect("it is executable")));
        assert_eq!(poller.next().await.expect("the script succeeds").len(), 1);
        let first = Instant::now();
        for _ in 0..2 {
            poller.next().await.expect("the script succeeds");
        }
        // The start of a poll is measured at its end, so a period may look shorter by the time that one takes.
        assert!(PERIOD.mul_f64(1.5) < first.elapsed(), "{:?}", first.elapsed());
    }
}
