//! The guard: a process that outlives a supervising process, and kills what this leaves behind.
//!
//! It reads the process groups of the live workers from a pipe: `+123` after a start, `-123` after an end. When the
//! pipe ends, the supervising process has ended, and the guard kills the rest of the run.

use std::ffi::OsString;
use std::io::{self, BufRead, PipeWriter, Write};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::prctl::set_name;
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::unistd::{Pid, setsid};
use tokio::process::{Child, Command};

use crate::processes::Scope;

/// The environment variable that asks a program to run as guard: the token of the run and the session of its workers.
const GUARD_VARIABLE: &str = "STEADFAST_GUARD";
/// Name of the process in `ps`.
const GUARD_NAME: &str = "steadfast-guard";

/// Time in which killed processes must be gone.
pub(crate) const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether this program can be its own guard.
static CAN_GUARD: AtomicBool = AtomicBool::new(false);

/// The program that runs as guard. It calls [`run_guard_if_requested`] before anything else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuardProgram {
    program: PathBuf,
    args: Vec<OsString>,
}

impl GuardProgram {
    /// Returns this program, to be run as the guard.
    ///
    /// # Panics
    /// If this process has not called [`run_guard_if_requested`]: its guard would start guards without end.
    pub fn this_program() -> Self {
        assert!(
            CAN_GUARD.load(Ordering::Relaxed),
            "a program calls run_guard_if_requested before it is its own guard"
        );
        // Unlike the path of the program, this works after an upgrade has replaced the file.
        Self::new("/proc/self/exe", Vec::new())
    }

    /// Returns another program, to be run as the guard.
    pub fn new(program: impl Into<PathBuf>, args: Vec<OsString>) -> Self {
        Self { program: program.into(), args }
    }
}

/// Runs the guard and exits, if this process was started as one. Called first in `main`.
pub fn run_guard_if_requested() {
    CAN_GUARD.store(true, Ordering::Relaxed);
    let Some(request) = std::env::var_os(GUARD_VARIABLE) else { return };
    // Fails only for a name with a zero byte.
    let _ = set_name(c"steadfast-guard");
    let request = request.to_string_lossy();
    let request = request.split_once(':').filter(|(token, _)| !token.is_empty());
    let Some((token, session)) = request else { std::process::exit(2) };
    let mut scope = Scope::new(token.to_owned(), None);
    scope.session = session.parse().unwrap_or_default();
    // An error ends the pipe, too.
    for line in io::stdin().lock().lines().map_while(Result::ok) {
        match line.parse::<i32>() {
            Ok(group @ 1..) => drop(scope.groups.insert(group)),
            Ok(group) => drop(scope.groups.remove(&-group)),
            Err(_) => {}
        }
    }
    std::process::exit(end(&scope));
}

/// Kills the rest of the run, and returns the exit code.
fn end(scope: &Scope) -> i32 {
    let swept = scope.sweep(KILL_TIMEOUT);
    // If stderr is gone, the exit code remains.
    let report = |text: String| drop(writeln!(io::stderr(), "{GUARD_NAME}: {text}"));
    if !swept.killed.is_empty() {
        report(format!("killed {} processes that had been left behind", swept.killed.len()));
    }
    if !swept.left.is_empty() {
        report(format!("error: processes {:?} did not end after SIGKILL", swept.left));
    }
    i32::from(!swept.left.is_empty())
}

/// The guard process of a run, seen from its supervising process.
#[derive(Debug)]
pub(crate) struct Guard {
    program: GuardProgram,
    token: String,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    scope: Scope,
    /// Absent once the run is closed.
    running: Option<(Child, PipeWriter)>,
}

impl Guard {
    /// Starts a guard of the run `token`.
    pub fn start(program: GuardProgram, token: &str) -> io::Result<Self> {
        let scope = Scope::new(token.to_owned(), None);
        let running = Some(spawn(&program, token, scope.session)?);
        let state = Mutex::new(State { scope, running });
        Ok(Self { program, token: token.to_owned(), state })
    }

    /// Replaces the guard if it has ended.
    pub fn ensure_running(&self) -> io::Result<()> {
        let mut state = self.lock();
        if state.send("\n").is_ok() {
            return Ok(());
        }
        state.running = Some(spawn(&self.program, &self.token, state.scope.session)?);
        let groups: Vec<String> = state.scope.groups.iter().map(|it| format!("+{it}\n")).collect();
        state.send(&groups.concat())
    }

    /// Adds the process group of a new worker.
    pub fn add(&self, group: Pid) {
        let mut state = self.lock();
        state.scope.groups.insert(group.as_raw());
        // The next guard receives all groups.
        let _ = state.send(&format!("+{group}\n"));
    }

    /// Removes a process group of which no process is left.
    pub fn remove(&self, group: Pid) {
        let mut state = self.lock();
        state.scope.groups.remove(&group.as_raw());
        // The next guard does not receive this group.
        let _ = state.send(&format!("-{group}\n"));
    }

    /// Returns the processes of the run.
    pub fn scope(&self) -> Scope {
        self.lock().scope.clone()
    }

    /// Lets the guard end, and returns it.
    pub fn close(&self) -> Option<Child> {
        self.lock().running.take().map(|(child, _)| child)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn send(&mut self, text: &str) -> io::Result<()> {
        match &mut self.running {
            Some((_, pipe)) => pipe.write_all(text.as_bytes()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }
}

fn spawn(program: &GuardProgram, token: &str, session: i32) -> io::Result<(Child, PipeWriter)> {
    let (reader, writer) = io::pipe()?;
    let mut command = Command::new(&program.program);
    command
        .args(&program.args)
        .arg0(GUARD_NAME)
        .env(GUARD_VARIABLE, format!("{token}:{session}"))
        .current_dir("/")
        .stdin(reader)
        .stdout(Stdio::null());
    // SAFETY: between fork and exec the closure only calls setsid and sigaction, which are safe there; it does
    // not allocate or lock. Ignored signals stay ignored after exec, and there is no instant at which they are
    // not.
    unsafe {
        command.pre_exec(|| {
            setsid()?;
            for it in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM] {
                signal(it, SigHandler::SigIgn)?;
            }
            Ok(())
        });
    }
    Ok((command.spawn()?, writer))
}
