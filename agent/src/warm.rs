//! Warm workers: processes that have imported the modules of a Python program, and wait to become its workers.
//!
//! ```text
//!   importing ──▶ ready ──▶ the worker of a rank
//!       │           │
//!       └───────────┴─▶ ended, or killed: a new process takes its place
//! ```
//!
//! A warm worker is started as any worker, with all of the environment that no round changes. The variables of the
//! round follow when it is taken; before it has confirmed that it has them, nothing of the program runs.

use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt};
use steadfast_host::time::{Instant, sleep_until, timeout};
use steadfast_process::Failure;
use steadfast_supervise::{
    Connection, Exit, Output, StartError, Supervisor, Target, Worker, WorkerSpec,
};
use tracing::{info, warn};

use crate::args::RunArgs;
use crate::program::Program;

/// The process of a warm worker runs this.
const SOURCE: &str = include_str!("warm.py");

/// Reads it from the socket whose descriptor is the first argument.
const RUN_SOURCE: &str =
    r#"exec(__import__("os").read(int(__import__("sys").argv[1]), 1 << 20), {})"#;

/// Names the modules that the process chooses itself.
const AUTOMATIC: &str = "auto";

/// Time that workers have to start before warm workers take processors from them.
const PAUSE: Duration = Duration::from_secs(5);

/// A warm worker has this long to confirm that it has its variables.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The warm workers of a node.
pub(crate) struct WarmWorkers {
    count: usize,
    /// Options of the interpreter.
    options: Vec<OsString>,
    /// The names of the modules, and the command of the program.
    arguments: Vec<OsString>,
    waiting: Vec<WarmWorker>,
    /// The worker of which they are copies, without the variables of a round.
    model: Option<WorkerSpec>,
    /// When the next one is started, if one is missing.
    due: Option<Instant>,
}

/// A process that is about to be a worker.
pub(crate) struct WarmWorker {
    worker: Worker,
    connection: Connection,
    /// The variables that it has.
    env: Vec<(OsString, OsString)>,
    started: Instant,
    is_ready: bool,
    has_ended: bool,
}

enum Event {
    Ready,
    Ended(Exit),
}

impl WarmWorkers {
    /// Creates as many as `args` ask for; none is started yet.
    ///
    /// # Errors
    /// If there shall be some, and `program` is not one of Python.
    pub fn new(args: &RunArgs, program: &Program) -> Result<Self, Failure> {
        let count = args.warm_workers.min(args.nproc_per_node) as usize;
        let (mut options, mut arguments) = (Vec::new(), Vec::new());
        if 0 < count {
            let (before, command) = program.of_python().ok_or_else(|| not_python(program))?;
            options = before.to_vec();
            let imports = args.warm_imports.join(",");
            let imports = if imports.is_empty() { AUTOMATIC.to_owned() } else { imports };
            arguments.push(imports.into());
            arguments.extend_from_slice(command);
        }
        Ok(Self { count, options, arguments, waiting: Vec::new(), model: None, due: None })
    }

    /// Takes up to `count` warm workers for new workers like `model`. Others are replaced when these have started:
    /// those that still import, and would slow them down, and those with another environment.
    pub fn take(&mut self, model: WorkerSpec, count: usize) -> Vec<WarmWorker> {
        self.waiting.retain(|it| it.is_ready && it.env == model.env);
        self.model = Some(model);
        self.due = Some(Instant::now() + PAUSE);
        self.waiting.drain(..count.min(self.waiting.len())).collect()
    }

    /// Starts warm workers when they are due, and notes which are ready or have ended. Never completes; can be cancelled
    /// and repeated.
    pub async fn keep(&mut self, supervisor: &Supervisor) -> Infallible {
        loop {
            let due = self.due.filter(|_| self.waiting.len() < self.count);
            let waiting = self.waiting.iter_mut().enumerate();
            let mut events: FuturesUnordered<_> =
                waiting.map(|(index, it)| async move { (index, it.next().await) }).collect();
            let event = tokio::select! {
                biased;
                Some(event) = events.next() => Some(event),
                () = until(due) => None,
            };
            drop(events);
            match event {
                Some((index, event)) => self.note(index, event),
                None => self.start_one(supervisor),
            }
        }
    }

    fn note(&mut self, index: usize, event: Event) {
        let warm = &mut self.waiting[index];
        match event {
            Event::Ready => {
                let seconds = warm.started.elapsed().as_secs_f64();
                info!(process = warm.worker.id(), seconds, "a warm worker is ready");
                warm.is_ready = true;
                // One after the other.
                self.due = Some(Instant::now());
            }
            Event::Ended(exit) => {
                let was_ready = warm.is_ready;
                let reason = match exit.reason_lines().last() {
                    Some(line) => format!("{exit}: {line}"),
                    None => exit.to_string(),
                };
                warn!(reason, was_ready, "a warm worker has ended");
                self.waiting.remove(index);
                // What cannot be imported now is tried again with the next workers.
                self.due = was_ready.then(|| Instant::now() + PAUSE);
            }
        }
    }

    fn start_one(&mut self, supervisor: &Supervisor) {
        self.due = None;
        let Some(model) = &self.model else { return };
        match WarmWorker::start(supervisor, model, &self.options, &self.arguments) {
            Ok(warm) => self.waiting.push(warm),
            Err(error) => warn!(%error, "cannot start a warm worker"),
        }
    }
}

impl WarmWorker {
    fn start(
        supervisor: &Supervisor,
        model: &WorkerSpec,
        options: &[OsString],
        arguments: &[OsString],
    ) -> Result<Self, StartError> {
        let no_socket = |source| StartError::Other { program: model.program.clone(), source };
        let (connection, theirs) = Connection::new(SOURCE.as_bytes()).map_err(no_socket)?;
        let descriptor = theirs.as_raw_fd().to_string();
        let run = ["-c", RUN_SOURCE, &descriptor].map(OsString::from);
        let args = options.iter().chain(&run).chain(arguments).cloned().collect();
        let inherited = Some(Arc::new(theirs));
        let spec = WorkerSpec { args, output: Output::Pending, inherited, ..model.clone() };
        let worker = supervisor.start(&spec)?;
        let (env, started) = (spec.env, Instant::now());
        Ok(Self { worker, connection, env, started, is_ready: false, has_ended: false })
    }

    /// Makes the process the worker of `spec`, with these variables besides those that it has. Returns `None`, and kills
    /// it, if it does not answer.
    ///
    /// # Errors
    /// If the log files of the worker cannot be opened.
    pub async fn become_worker(
        mut self,
        spec: &WorkerSpec,
        variables: &[(String, String)],
    ) -> Result<Option<Worker>, StartError> {
        let answered = timeout(ANSWER_TIMEOUT, self.send(variables)).await;
        let error = match answered {
            Ok(Ok(())) => {
                self.worker.assign(spec)?;
                info!(worker = spec.name, process = self.worker.id(), "a warm worker begins");
                return Ok(Some(self.worker));
            }
            Ok(Err(error)) => error,
            Err(_) => io::ErrorKind::TimedOut.into(),
        };
        warn!(%error, "a warm worker does not answer; starting a new process");
        Ok(None)
    }

    /// Sends the variables of a round, and waits until they have arrived.
    async fn send(&mut self, variables: &[(String, String)]) -> io::Result<()> {
        let variables: Vec<String> =
            variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        self.connection.send_last(variables.join("\0").as_bytes()).await?;
        self.connection.receive().await.map(drop)
    }

    /// Waits until the process is ready, or has ended. Can be cancelled and repeated.
    async fn next(&mut self) -> Event {
        if !self.has_ended {
            if self.connection.receive().await.is_ok() {
                return Event::Ready;
            }
            self.has_ended = true;
            // Its last lines say why. Nothing is written to a file.
            let _ = self.worker.assign(&unprinted());
        }
        Event::Ended(self.worker.wait().await)
    }
}

fn unprinted() -> WorkerSpec {
    let mut spec = WorkerSpec::new("warm worker", "");
    let (prefix, directory) = Default::default();
    let (stdout, stderr) = (Target::Nowhere, Target::Nowhere);
    spec.output = Output::Separate { prefix, directory, stdout, stderr };
    spec
}

fn not_python(program: &Program) -> Failure {
    Failure::invalid(format!(
        "--warm-workers is for a program that Python runs (`train.py`, `-m module`, `python train.py`), and {} is \
         another program, or has other options of Python",
        program.path.display()
    ))
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustix::process::{Pid, Signal, kill_process};
    use steadfast_supervise::GuardProgram;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Prints what differs if a program is not run by Python itself.
    const FACTS: &str = r#"
import json, multiprocessing, os, sys
import __main__

def inner(number):
    return number, __name__, os.environ["RANK"]

if __name__ == "__main__":
    facts = [sorted(vars(__main__)), __main__.inner is inner, __file__, __spec__, __package__, __loader__.path]
    facts += [sys.argv, sys.orig_argv, sys.path, sys.flags, sys.warnoptions, sorted(os.environ), os.getcwd()]
    facts += [sorted(os.listdir("/proc/self/fd")), [os.environ[name] for name in ("RANK", "FIXED")]]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        facts += pool.map(inner, [1])
    print(json.dumps(facts, default=str), flush=True)
    sys.exit(3) if sys.argv[1] == "exit" else inner()
"#;

    fn supervisor() -> Supervisor {
        // Nothing is left for a guard.
        Supervisor::new(GuardProgram::new("cat", Vec::new())).unwrap()
    }

    fn model(directory: &Path, source: &str) -> WorkerSpec {
        let script = directory.join("train.py");
        std::fs::write(&script, source).unwrap();
        let mut spec = WorkerSpec::new("worker", "python3");
        spec.args = vec![script.into(), "exit".into()];
        spec.env = vec![("FIXED".into(), "1".into())];
        spec.output = Output::Files { directory: directory.to_owned() };
        spec
    }

    /// Returns the warm workers of a node, which import `modules`, after the first workers like `model` have started.
    fn warm_workers(model: &WorkerSpec, count: usize, modules: &str) -> WarmWorkers {
        let arguments = [modules.into()].into_iter().chain(model.args.clone()).collect();
        let (waiting, options) = (Vec::new(), Vec::new());
        let mut warm = WarmWorkers { count, options, arguments, waiting, model: None, due: None };
        assert!(warm.take(model.clone(), 1).is_empty());
        warm.due = Some(Instant::now());
        warm
    }

    /// Lets the workers warm up until a condition holds.
    async fn keep_until(
        warm: &mut WarmWorkers,
        supervisor: &Supervisor,
        holds: impl Fn(&WarmWorkers) -> bool,
    ) {
        let begun = Instant::now();
        while !holds(warm) {
            assert!(begun.elapsed() < LIMIT);
            let _ = timeout(Duration::from_millis(10), warm.keep(supervisor)).await;
        }
    }

    fn are_ready(count: usize) -> impl Fn(&WarmWorkers) -> bool {
        move |warm| warm.waiting.iter().filter(|it| it.is_ready).count() == count
    }

    fn signal(warm: &WarmWorker, signal: Signal) {
        let id = warm.worker.id().unwrap().try_into().unwrap();
        kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
    }

    fn rank(rank: &str) -> Vec<(String, String)> {
        vec![("RANK".to_owned(), rank.to_owned())]
    }

    /// S003-21: it has the arguments, the variables, the descriptors, the output and the exit code of a new process.
    #[tokio::test]
    async fn a_program_does_not_differ_in_a_warm_worker() {
        let directory = tempfile::tempdir().unwrap();
        let supervisor = supervisor();
        for end in ["exit", "raise"] {
            let mut model = model(directory.path(), FACTS);
            model.args[1] = end.into();
            let mut warm = warm_workers(&model, 1, "json");
            keep_until(&mut warm, &supervisor, are_ready(1)).await;
            let mut spec = model.clone();
            spec.env.push(("RANK".into(), "5".into()));
            let outputs = ["new", "warm"].map(|name| directory.path().join(end).join(name));
            spec.output = Output::Files { directory: outputs[0].clone() };
            let new = supervisor.start(&spec).unwrap().wait().await;
            spec.output = Output::Files { directory: outputs[1].clone() };
            let taken = warm.take(model, 1).pop().unwrap();
            let mut worker = taken.become_worker(&spec, &rank("5")).await.unwrap().unwrap();
            assert_eq!(worker.wait().await, new);
            let [new, warm] = outputs.map(|it| {
                ["stdout.log", "stderr.log"]
                    .map(|name| std::fs::read_to_string(it.join(name)).unwrap())
            });
            assert_eq!(warm, new);
            assert!(new[0].contains("__mp_main__"), "{new:?}");
        }
    }

    /// Variables such as OMP_NUM_THREADS have an effect when a module is imported.
    #[tokio::test]
    async fn a_warm_worker_with_another_environment_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let (supervisor, model) = (supervisor(), model(directory.path(), ""));
        let mut warm = warm_workers(&model, 1, "json");
        keep_until(&mut warm, &supervisor, are_ready(1)).await;
        let mut other = model.clone();
        other.env[0].1 = "2".into();
        assert!(warm.take(other, 1).is_empty());
        assert!(warm.waiting.is_empty());
        // The next one has it.
        warm.due = Some(Instant::now());
        keep_until(&mut warm, &supervisor, are_ready(1)).await;
        assert!(warm.take(model, 1).is_empty());
    }

    #[tokio::test]
    async fn a_warm_worker_that_does_not_answer_is_killed_for_a_new_process() {
        let directory = tempfile::tempdir().unwrap();
        let (supervisor, model) = (supervisor(), model(directory.path(), "print('runs')"));
        let mut warm = warm_workers(&model, 1, "json");
        keep_until(&mut warm, &supervisor, are_ready(1)).await;
        let taken = warm.take(model.clone(), 1).pop().unwrap();
        signal(&taken, Signal::STOP);
        let begun = Instant::now();
        assert!(taken.become_worker(&model, &rank("0")).await.unwrap().is_none());
        assert!(begun.elapsed() < 2 * ANSWER_TIMEOUT);
        assert!(!directory.path().join("stdout.log").exists());
    }

    #[tokio::test]
    async fn a_warm_worker_that_still_imports_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("slow.py"), "import time; time.sleep(1000)").unwrap();
        let (supervisor, model) = (supervisor(), model(directory.path(), ""));
        let mut warm = warm_workers(&model, 2, "slow");
        keep_until(&mut warm, &supervisor, |warm| warm.waiting.len() == 1).await;
        assert!(warm.take(model, 1).is_empty());
        assert!(warm.waiting.is_empty());
    }

    /// A module that does not exist is no reason for a process a second.
    #[tokio::test]
    async fn what_cannot_be_imported_is_tried_again_with_the_next_workers() {
        let directory = tempfile::tempdir().unwrap();
        let (supervisor, model) = (supervisor(), model(directory.path(), ""));
        let mut warm = warm_workers(&model, 1, "nothing_of_this_name");
        // It was due before it was started, and is not due again after it has ended.
        keep_until(&mut warm, &supervisor, |it| it.due.is_none() && it.waiting.is_empty()).await;
        warm.take(model, 1);
        assert!(warm.due.is_some());
    }

    #[tokio::test]
    async fn a_warm_worker_that_is_killed_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (supervisor, model) = (supervisor(), model(directory.path(), ""));
        let mut warm = warm_workers(&model, 2, "json");
        keep_until(&mut warm, &supervisor, are_ready(2)).await;
        signal(&warm.waiting[0], Signal::KILL);
        keep_until(&mut warm, &supervisor, are_ready(1)).await;
        keep_until(&mut warm, &supervisor, are_ready(2)).await;
    }
}
