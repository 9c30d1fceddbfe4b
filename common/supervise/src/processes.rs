//! Finds the processes of a run in `/proc`, and kills them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::{Pid, getsid};
use rustix::process::{PidfdFlags, kill_process, pidfd_open, pidfd_send_signal};

/// The environment variable that marks the processes of a run: the tokens of the runs and workers which they
/// belong to, separated by commas. Runs can be nested.
pub const MARKER_VARIABLE: &str = "STEADFAST_RUN_PROCESS";

/// Time between two searches.
const SEARCH_PAUSE: Duration = Duration::from_millis(10);

/// So many searches must find nothing.
const EMPTY_SEARCHES: u32 = 2;

/// A process that is replacing its program (`exec`) has neither arguments nor environment for an instant, which may be
/// long on a busy machine: so the search goes on for this time while there is such a process. It does not go on for
/// ever, since a program may erase its own arguments.
const DOUBT_LIMIT: Duration = Duration::from_secs(2);

/// The process id of the parent of all threads of the kernel.
const KERNEL_THREADS: i32 = 2;

/// Programs that wait for a command and pass no signal on to it.
const SHELLS: [&str; 9] = ["ash", "bash", "busybox", "dash", "fish", "ksh", "mksh", "sh", "zsh"];

/// Greatest size of an environment on Linux, rounded up.
const ENVIRONMENT_BYTES_MAX: u64 = 8 << 20;

/// The processes that belong to some workers: those with one of the tokens in their marker, those in one of the
/// process groups, and all descendants of these.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Scope {
    pub tokens: BTreeSet<String>,
    /// Groups whose leader is, or was recently, a worker.
    pub groups: BTreeSet<i32>,
    /// The session of the workers. A group of the same number in another session is not theirs.
    pub session: i32,
    /// Processes that were found earlier, and may since have lost the parent by which they were found.
    pub known: Vec<Process>,
}

/// A process, identified for good by its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Process {
    pub id: i32,
    parent: i32,
    pub group: i32,
    session: i32,
    /// In clock ticks since the boot of the machine.
    started: u64,
}

/// Processes as one search found them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Processes(pub Vec<Process>);

/// What a sweep did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Swept {
    pub killed: BTreeSet<i32>,
    /// Processes that did not die.
    pub left: Vec<i32>,
}

impl Scope {
    /// Returns the scope of a worker: the leader of `group`, marked with `token`.
    pub fn new(token: String, group: Option<Pid>) -> Self {
        let session = getsid(None).map_or(0, Pid::as_raw);
        let groups = group.into_iter().map(Pid::as_raw).collect();
        Self { tokens: BTreeSet::from([token]), groups, session, known: Vec::new() }
    }

    /// Extends this scope by another one of the same session.
    pub fn extend(&mut self, other: &Self) {
        self.tokens.extend(other.tokens.iter().cloned());
        self.groups.extend(&other.groups);
        self.session = other.session;
    }

    /// Returns the processes that are alive, with one search for all of them.
    pub fn processes(&self) -> Processes {
        Processes::all().of(self)
    }

    /// Kills the processes until none is left or the time is over. Blocks.
    pub fn sweep(&self, limit: Duration) -> Swept {
        let start = Instant::now();
        let mut swept = Swept::default();
        let mut empty = 0;
        let mut last_found = start;
        loop {
            let found = self.processes();
            if found.is_empty() {
                empty += 1;
            } else {
                empty = 0;
                last_found = Instant::now();
            }
            for process in &found.0 {
                process.send(Signal::SIGKILL);
                swept.killed.insert(process.id);
            }
            let is_clear = EMPTY_SEARCHES <= empty
                && (DOUBT_LIMIT <= last_found.elapsed() || !Processes::all().have_one_in_doubt());
            if is_clear || limit <= start.elapsed() {
                swept.left = found.0.iter().map(|it| it.id).collect();
                return swept;
            }
            std::thread::sleep(SEARCH_PAUSE);
        }
    }

    fn contains(&self, process: &Process) -> bool {
        // A worker that reads the terminal leads a session of its own.
        let in_session = process.session == self.session || process.session == process.group;
        let in_group = self.groups.contains(&process.group) && in_session;
        in_group
            || self.known.iter().any(|it| it.is_same(process))
            || markers(process.id).iter().any(|token| self.tokens.contains(token))
    }
}

impl Processes {
    /// Returns all processes of the machine.
    fn all() -> Self {
        Self(process_ids().filter_map(Process::read).collect())
    }

    /// Returns the processes that belong to a scope, with all their descendants.
    pub fn of(&self, scope: &Scope) -> Self {
        let own = self.0.iter().filter(|it| scope.contains(it));
        let mut found: BTreeMap<i32, Process> = own.map(|it| (it.id, *it)).collect();
        loop {
            let is_new =
                |it: &&Process| found.contains_key(&it.parent) && !found.contains_key(&it.id);
            let children: Vec<Process> = self.0.iter().filter(is_new).copied().collect();
            if children.is_empty() {
                return Self(found.into_values().collect());
            }
            found.extend(children.into_iter().map(|it| (it.id, it)));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether one of the processes may be in the middle of its start. A process that was started with an
    /// empty environment is not: it has arguments, which Linux shows from the same moment on.
    fn have_one_in_doubt(&self) -> bool {
        let is_of_kernel = |it: &&Process| [it.id, it.parent].contains(&KERNEL_THREADS);
        self.0.iter().filter(|it| !is_of_kernel(it)).any(|it| {
            let arguments = fs::File::open(format!("/proc/{}/cmdline", it.id));
            arguments.is_ok_and(|mut file| file.read(&mut [0]).is_ok_and(|read| read == 0))
        })
    }

    pub fn get(&self, id: i32) -> Option<Process> {
        self.0.iter().find(|it| it.id == id).copied()
    }

    pub fn children(&self, id: i32) -> impl Iterator<Item = Process> {
        self.0.iter().filter(move |it| it.parent == id).copied()
    }

    /// Returns the processes whose parent is not one of these processes.
    pub fn roots(&self) -> impl Iterator<Item = Process> {
        self.0.iter().filter(|it| self.get(it.parent).is_none()).copied()
    }
}

impl Process {
    /// Reads a process that has not ended.
    fn read(id: i32) -> Option<Self> {
        let stat = fs::read(format!("/proc/{id}/stat")).ok()?;
        // The name, in parentheses, may itself contain anything.
        let end = stat.iter().rposition(|byte| *byte == b')')?;
        let rest = String::from_utf8_lossy(&stat[end + 1..]).into_owned();
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let number = |index: usize| fields.get(index).and_then(|it| it.parse().ok());
        // Other threads may go on after the first one, whose state this is, has ended.
        let is_alive = !matches!(*fields.first()?, "Z" | "X") || 1 < number(17)?;
        is_alive.then_some(Self {
            id,
            parent: number(1)?,
            group: number(2)?,
            session: number(3)?,
            started: fields.get(19)?.parse().ok()?,
        })
    }

    /// Returns whether two findings are of one process: ids are reused, and parents change.
    fn is_same(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }

    /// Returns the process id and the time of the start, which no other process shares, before or after.
    pub fn identity(&self) -> (i32, u64) {
        (self.id, self.started)
    }

    /// Returns whether the process handles a signal: it has a handler, or blocks the signal to wait for it, as
    /// `tini` and programs with `sigwait` do.
    pub fn handles(&self, signal: Signal) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/status", self.id)).unwrap_or_default();
        let mask = |name: &str| {
            let mask = status.lines().find_map(|line| line.strip_prefix(name));
            mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
        };
        (mask("SigCgt:") | mask("SigBlk:")) & (1 << (signal as i32 - 1)) != 0
    }

    /// Returns whether the process runs a shell.
    pub fn is_shell(&self) -> bool {
        let program = fs::read_link(format!("/proc/{}/exe", self.id)).unwrap_or_default();
        program.file_name().and_then(|name| name.to_str()).is_some_and(|it| SHELLS.contains(&it))
    }

    /// Sends a signal, unless another process now has the same id.
    pub fn send(&self, signal: Signal) {
        let Some(id) = rustix::process::Pid::from_raw(self.id) else { return };
        let Some(signal) = rustix::process::Signal::from_named_raw(signal as i32) else { return };
        let pidfd = pidfd_open(id, PidfdFlags::empty());
        // The descriptor refers to one process for good; make sure that it is the one that was found.
        if Self::read(self.id).is_none_or(|it| !it.is_same(self)) {
            return;
        }
        // An error means that it has ended, or that its user differs, which the next search shows.
        let _ = match pidfd {
            Ok(pidfd) => pidfd_send_signal(pidfd, signal),
            Err(rustix::io::Errno::NOSYS) => kill_process(id, signal),
            Err(error) => Err(error),
        };
    }
}

fn process_ids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns the tokens in the marker of a process; none if its environment cannot be read.
fn markers(id: i32) -> Vec<String> {
    let Ok(file) = fs::File::open(format!("/proc/{id}/environ")) else { return Vec::new() };
    let mut environment = Vec::new();
    // What was read before an error counts.
    let _ = file.take(ENVIRONMENT_BYTES_MAX).read_to_end(&mut environment);
    let value = environment
        .split(|byte| *byte == 0)
        .find_map(|variable| variable.strip_prefix(MARKER_VARIABLE.as_bytes())?.strip_prefix(b"="));
    let value = String::from_utf8_lossy(value.unwrap_or_default());
    // An empty token would be that of every process without a marker.
    value.split(',').filter(|token| !token.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};

    use super::*;

    /// A process that ends with the test.
    struct Sleeping(Child);

    impl Sleeping {
        fn start(marker: &str) -> Self {
            let mut command = Command::new("sleep");
            // This program may lead a session, whose number its group has then.
            command.arg("1000").env(MARKER_VARIABLE, marker).process_group(0);
            let started = Self(command.spawn().unwrap());
            // In the middle of its start, a process has no environment yet.
            let environment = format!("/proc/{}/environ", started.id());
            while std::fs::read(&environment).unwrap().is_empty() {
                std::thread::yield_now();
            }
            started
        }

        fn id(&self) -> i32 {
            self.0.id().try_into().unwrap()
        }
    }

    impl Drop for Sleeping {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    #[test]
    fn only_processes_with_the_whole_token_are_found() {
        // Tests of another checkout may run beside these.
        let own = format!("run-{}", std::process::id());
        let sleeping = Sleeping::start(&format!("{own}-outer,{own}-a,{own}-a.1"));
        let found = |token: &str| Scope::new(token.to_owned(), None).processes().0;
        for token in ["-outer", "-a", "-a.1"].map(|it| format!("{own}{it}")) {
            assert_eq!(found(&token).iter().map(|it| it.id).collect::<Vec<_>>(), [sleeping.id()]);
        }
        for token in ["", "-a.", "-a.11", "-1"].map(|it| format!("{own}{it}")) {
            assert_eq!(found(&token), [], "{token}");
        }
        assert_eq!(found(""), []);
    }

    #[test]
    fn another_process_with_a_reused_id_is_not_killed() {
        let mut sleeping = Sleeping::start("run-b");
        let process = Process::read(sleeping.id()).unwrap();
        Process { started: process.started - 1, ..process }.send(Signal::SIGKILL);
        assert_eq!(Process::read(sleeping.id()), Some(process));
        assert_eq!(sleeping.0.try_wait().unwrap(), None);
    }

    #[test]
    fn a_group_of_the_same_number_in_another_session_is_not_found() {
        let sleeping = Sleeping::start("run-c");
        let process = Process::read(sleeping.id()).unwrap();
        let mut scope = Scope::new("run-d".to_owned(), Some(Pid::from_raw(process.group)));
        scope.session = process.session + 1;
        assert_eq!(scope.processes().0, []);
    }
}
