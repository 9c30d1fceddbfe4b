//! Supervises processes: restarts those that end, with exponential backoff.

use std::sync::Arc;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_process::{Failure, belongs_to_the_line_above};
use steadfast_supervise::Supervisor as Starter;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::backoff::{Backoff, Ending};
use super::child::{ChildProcess, Exit};
use super::plan::{Process, Role};

/// Time between the clean exit of a process and this process seeing the result of the job.
const RESULT_DELAY: Duration = Duration::from_millis(500);

/// Shown if the log of a process has no reason for its exit.
const NO_REASON: &str = "its log gives no reason";

/// Event that the run handles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A process ended and will be restarted.
    Restart { name: String, exit: Exit, pause: Duration },
    /// A process ended, and a restart would not help.
    Fatal(Failure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SupervisorCommand {
    Run,
    /// Processes that end are not restarted.
    Leave,
    Terminate,
}

/// A group of supervised processes; all are killed when this is dropped.
#[derive(Debug)]
pub struct Supervisor {
    commands: watch::Sender<SupervisorCommand>,
    tasks: JoinSet<()>,
}

impl Supervisor {
    pub fn start(
        processes: Vec<Process>,
        notices: &mpsc::Sender<Notice>,
        starter: &Arc<Starter>,
    ) -> Self {
        let commands = watch::Sender::new(SupervisorCommand::Run);
        let mut tasks = JoinSet::new();
        for process in processes {
            tasks.spawn(supervise(
                process,
                commands.subscribe(),
                notices.clone(),
                Arc::clone(starter),
            ));
        }
        Self { commands, tasks }
    }

    /// Stops restarting processes.
    pub fn leave(&self) {
        self.commands.send_replace(SupervisorCommand::Leave);
    }

    /// Waits up to `limit` for the processes to end, then sends SIGTERM, then SIGKILL.
    pub async fn stop(mut self, limit: Duration) {
        self.leave();
        let ended = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(limit, ended).await.is_ok() {
            return;
        }
        self.commands.send_replace(SupervisorCommand::Terminate);
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Runs one process and restarts it until the command changes.
async fn supervise(
    process: Process,
    mut commands: watch::Receiver<SupervisorCommand>,
    notices: mpsc::Sender<Notice>,
    starter: Arc<Starter>,
) {
    // Notices are rare and read promptly; if the channel is full, dropping one of many is acceptable.
    let send = |notice| drop(notices.try_send(notice));
    let mut backoff = Backoff::new();
    let last = match process.role {
        // It does not know of the job's end.
        Role::Worker => SupervisorCommand::Leave,
        Role::Etcd | Role::Master | Role::Pserver | Role::Trainer | Role::Program => {
            SupervisorCommand::Terminate
        }
    };
    while *commands.borrow() == SupervisorCommand::Run {
        let started = Instant::now();
        let mut child = match ChildProcess::start(&process, &starter) {
            Ok(child) => child,
            Err(failure) => return send(Notice::Fatal(failure)),
        };
        let exit = tokio::select! {
            exit = child.end(&process) => exit,
            () = until(&mut commands, last) => return child.terminate().await,
        };
        if let Some(failure) = fatal(&process, &exit) {
            return send(Notice::Fatal(failure));
        }
        let ending = match exit.code {
            None | Some(0) => Ending::Other,
            Some(_) => Ending::Failed,
        };
        let pause = backoff.after(started.elapsed(), ending);
        if exit.code == Some(0) {
            // Most likely it saw the result of the job before this process did.
            let left =
                tokio::time::timeout(RESULT_DELAY, until(&mut commands, SupervisorCommand::Leave));
            if left.await.is_ok() {
                return;
            }
            if process.role == Role::Program {
                let message = format!(
                    "{} has ended, and the job has not: call `finish_job` of the coordinator at its end; see {}",
                    process.name,
                    process.log.display()
                );
                return send(Notice::Fatal(Failure::new(ErrorKind::Invalid, message)));
            }
        }
        if *commands.borrow() != SupervisorCommand::Run {
            return;
        }
        let Some(pause) = pause else {
            return send(Notice::Fatal(repeated_failure(&process, &exit)));
        };
        send(Notice::Restart { name: process.name.clone(), exit, pause });
        let _ = tokio::time::timeout(pause, until(&mut commands, SupervisorCommand::Leave)).await;
    }
}

/// Completes when the command is at least as strict as `command`.
async fn until(commands: &mut watch::Receiver<SupervisorCommand>, command: SupervisorCommand) {
    let strict = |given: &SupervisorCommand| match command {
        SupervisorCommand::Run => true,
        SupervisorCommand::Leave => *given != SupervisorCommand::Run,
        SupervisorCommand::Terminate => *given == SupervisorCommand::Terminate,
    };
    // An error means that the supervisor was dropped, which aborts this task.
    let _ = commands.wait_for(strict).await;
}

/// Returns the failure of a process that fails repeatedly.
fn repeated_failure(process: &Process, exit: &Exit) -> Failure {
    let kinds = [ErrorKind::Unavailable, ErrorKind::NotFound, ErrorKind::TooLarge];
    let kind = kinds.into_iter().find(|it| exit.code == Some(i32::from(it.exit_code())));
    let words = exit.words.as_deref().and_then(|words| words.lines().next());
    let words = words.unwrap_or(match kind {
        // The log is empty if its own disk is full.
        Some(ErrorKind::TooLarge) => "no space left on its disk, or a limit is exceeded",
        Some(_) | None => NO_REASON,
    });
    let message = format!(
        "{} failed repeatedly ({}): {words}; see {}",
        process.name,
        exit.how,
        process.log.display()
    );
    Failure::new(kind.unwrap_or(ErrorKind::Internal), message)
}

/// Returns a failure if the exit code requires user action rather than a restart.
fn fatal(process: &Process, exit: &Exit) -> Option<Failure> {
    let is = |kind: ErrorKind| exit.code == Some(i32::from(kind.exit_code()));
    let any_role = [ErrorKind::Invalid, ErrorKind::Conflict, ErrorKind::Denied];
    // For the master, these concern the job's data; other roles can recover by a restart.
    let master = [ErrorKind::NotFound, ErrorKind::TooLarge];
    let kind = any_role
        .into_iter()
        .find(|kind| is(*kind))
        .or_else(|| master.into_iter().find(|kind| process.role == Role::Master && is(*kind)))?;
    let words = exit.words.as_deref().unwrap_or(NO_REASON);
    let lines: Vec<String> = words
        .lines()
        .map(|line| match belongs_to_the_line_above(line) {
            true => line.to_owned(),
            false => format!("{} ended ({}): {line}", process.name, exit.how),
        })
        .collect();
    Some(Failure::new(kind, lines.join("\n")))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use nix::sys::signal::kill;
    use nix::unistd::Pid;
    use steadfast_supervise::{GuardProgram, run_guard_if_requested};

    use super::*;

    fn shell(directory: &Path, role: Role, script: &str) -> Process {
        Process {
            role,
            name: format!("{role}-0"),
            program: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            env: Vec::new(),
            log: directory.join("it.log"),
        }
    }

    /// Not a test: the guard process of the tests.
    #[test]
    fn guard_process() {
        run_guard_if_requested();
    }

    fn starter() -> Arc<Starter> {
        let path = module_path!().split_once("::").unwrap().1;
        let args = ["--exact", &format!("{path}::guard_process"), "--nocapture"].map(Into::into);
        let program = GuardProgram::new(std::env::current_exe().unwrap(), args.to_vec());
        Arc::new(Starter::new(program).unwrap())
    }

    async fn next(notices: &mut mpsc::Receiver<Notice>) -> Notice {
        tokio::time::timeout(Duration::from_secs(20), notices.recv()).await.unwrap().unwrap()
    }

    #[tokio::test]
    async fn a_process_that_dies_is_started_again_after_growing_pauses() {
        let directory = tempfile::tempdir().unwrap();
        let (tx, mut notices) = mpsc::channel(8);
        let process = shell(directory.path(), Role::Trainer, "echo broken; exit 1");
        let supervisor = Supervisor::start(vec![process], &tx, &starter());
        for expected_ms in [100, 200, 400] {
            let Notice::Restart { name, exit, pause } = next(&mut notices).await else {
                panic!("fatal");
            };
            assert_eq!(name, "trainer-0");
            assert_eq!(exit.how, "exit code 1");
            assert_eq!(exit.words.as_deref(), Some("broken"));
            assert_eq!(pause.as_millis(), expected_ms);
        }
        supervisor.stop(Duration::ZERO).await;
    }

    #[tokio::test]
    async fn bad_configuration_is_fatal_and_the_error_of_the_process_is_shown() {
        let directory = tempfile::tempdir().unwrap();
        let (tx, mut notices) = mpsc::channel(8);
        let script = "echo 'steadfast-master: error: unknown column `x`' >&2; exit 2";
        let process = shell(directory.path(), Role::Master, script);
        let supervisor = Supervisor::start(vec![process], &tx, &starter());
        let expected = "master-0 ended (exit code 2): unknown column `x`";
        assert_eq!(next(&mut notices).await, Notice::Fatal(Failure::invalid(expected)));
        supervisor.stop(Duration::ZERO).await;
    }

    #[test]
    fn a_missing_dependency_is_fatal_only_for_a_master() {
        let exit = Exit { code: Some(3), how: "exit code 3".to_owned(), words: None };
        assert!(fatal(&shell(Path::new("/"), Role::Master, ""), &exit).is_some());
        assert!(fatal(&shell(Path::new("/"), Role::Trainer, ""), &exit).is_none());
        for code in [None, Some(0), Some(1), Some(5), Some(6), Some(101)] {
            let exit = Exit { code, ..exit.clone() };
            assert!(fatal(&shell(Path::new("/"), Role::Master, ""), &exit).is_none());
        }
    }

    #[tokio::test]
    async fn a_clean_exit_shortly_before_the_end_of_the_job_is_not_a_failure() {
        let directory = tempfile::tempdir().unwrap();
        let (tx, mut notices) = mpsc::channel(8);
        let supervisor =
            Supervisor::start(vec![shell(directory.path(), Role::Trainer, "")], &tx, &starter());
        tokio::time::sleep(Duration::from_millis(100)).await;
        supervisor.stop(Duration::from_secs(10)).await;
        drop(tx);
        assert_eq!(notices.recv().await, None);
    }

    #[tokio::test]
    async fn stopping_sends_sigterm_first_and_leaves_no_process() {
        let directory = tempfile::tempdir().unwrap();
        let (tx, _notices) = mpsc::channel(8);
        let script = "trap 'echo bye; exit 0' TERM; echo $$; while :; do sleep 0.05; done";
        let process = shell(directory.path(), Role::Trainer, script);
        let log = process.log.clone();
        let supervisor = Supervisor::start(vec![process], &tx, &starter());
        let pid = loop {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            if let Some(line) = text.lines().next() {
                break Pid::from_raw(line.parse().unwrap());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        supervisor.stop(Duration::ZERO).await;
        assert!(kill(pid, None).is_err());
        assert!(std::fs::read_to_string(&log).unwrap().ends_with("bye\n"));
    }

    #[tokio::test]
    async fn a_program_behind_a_shell_gets_sigterm() {
        let directory = tempfile::tempdir().unwrap();
        let (tx, _notices) = mpsc::channel(8);
        let script = "(trap 'echo bye; exit' TERM; echo ready; while :; do sleep 0.05; done); :";
        let process = shell(directory.path(), Role::Trainer, script);
        let log = process.log.clone();
        let supervisor = Supervisor::start(vec![process], &tx, &starter());
        while std::fs::read_to_string(&log).unwrap_or_default().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        supervisor.stop(Duration::ZERO).await;
        let text = std::fs::read_to_string(&log).unwrap();
        // The shell may report that its `sleep` was terminated as well.
        assert!(text.starts_with("ready\n") && text.ends_with("bye\n"), "{text}");
    }

    #[tokio::test]
    async fn a_missing_program_is_fatal() {
        let directory = tempfile::tempdir().unwrap();
        let (tx, mut notices) = mpsc::channel(8);
        let mut process = shell(directory.path(), Role::Trainer, "");
        process.program = directory.path().join("nothing");
        let _supervisor = Supervisor::start(vec![process], &tx, &starter());
        let Notice::Fatal(failure) = next(&mut notices).await else { panic!("restarted") };
        assert!(failure.message.ends_with("nothing does not exist"), "{failure}");
    }
}
