//! One worker process, the leader of its own process group.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::{Instant, timeout_at};

use crate::guard::Guard;
use crate::output::{LogFiles, OutputTasks};
use crate::processes::{MARKER_VARIABLE, Scope, Swept};
use crate::spawn::{inherit, prepare};
use crate::stop::{stop, sweep};
use crate::{Ending, Exit, Input, Output, StartError, WorkerSpec};

/// Time for descendants of a worker that has ended to write the rest of its output, as `tee` does.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A worker that was started. If this is dropped, its process group is killed.
#[derive(Debug)]
pub struct Worker {
    name: String,
    child: Child,
    pub(crate) group: Pid,
    pub(crate) scope: Scope,
    output: Option<OutputTasks>,
    guard: Arc<Guard>,
    /// How and when the process itself ended.
    ended: Option<(Ending, Instant)>,
    /// The search for its descendants. A wait goes on with the one that a cancelled wait has begun.
    sweep: Option<Shared<BoxFuture<'static, Swept>>>,
    /// Set when its descendants and its output have ended, too.
    exit: Option<Exit>,
}

impl Worker {
    pub(crate) fn start(
        spec: &WorkerSpec,
        token: String,
        marker: &str,
        guard: Arc<Guard>,
    ) -> Result<Self, StartError> {
        if let Some(directory) = spec.directory.as_ref().filter(|it| !it.is_dir()) {
            return Err(StartError::NoDirectory { directory: directory.clone() });
        }
        let mut files = LogFiles::open(spec)?;
        guard.ensure_running().map_err(|source| StartError::Guard { source })?;
        let mut command = command(spec, marker);
        if let Some((stdout, stderr)) = files.take_own() {
            command.stdout(stdout).stderr(stderr);
        }
        let child = command.spawn().map_err(|source| StartError::of(spec, source))?;
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        let group = Pid::from_raw(id.expect("a process that was not waited for has an id"));
        let scope = Scope::new(token, Some(group));
        let name = spec.name.clone();
        let mut worker = Self {
            name,
            child,
            group,
            scope,
            output: None,
            guard,
            ended: None,
            sweep: None,
            exit: None,
        };
        if spec.output != Output::Pending {
            worker.begin(spec, files);
        }
        Ok(worker)
    }

    /// Gives a worker with [`Output::Pending`] the name of `spec`, and its output, which must be one that this process
    /// reads. Until then, a [`crate::Signaller`] does not reach the worker.
    ///
    /// # Errors
    /// If its log files cannot be opened.
    pub fn assign(&mut self, spec: &WorkerSpec) -> Result<(), StartError> {
        let files = LogFiles::open(spec)?;
        self.name.clone_from(&spec.name);
        self.begin(spec, files);
        Ok(())
    }

    /// Returns the name of the worker in its spec.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets the prefix of the lines that the worker prints from now on, if they get one.
    pub fn set_prefix(&self, prefix: &str) {
        if let Some(output) = &self.output {
            output.set_prefix(prefix);
        }
    }

    /// Returns the process id of the worker, if it has not ended.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Takes the writing end of the worker's stdin, once, if stdin is a pipe. The worker's stdin ends when the returned
    /// end is dropped.
    pub fn take_input(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Returns the time of the worker's last output, or of its start if it has written nothing; `None` if its output is
    /// inherited.
    pub fn last_output(&self) -> Option<Instant> {
        self.output.as_ref().map(OutputTasks::last_output)
    }

    /// Waits until the worker ends, and kills what is left of its descendants. Can be cancelled and repeated.
    pub async fn wait(&mut self) -> Exit {
        if let Some(exit) = &self.exit {
            return exit.clone();
        }
        self.drained().await;
        let scope = &self.scope;
        let swept = self.sweep.get_or_insert_with(|| sweep(scope.clone()).boxed().shared());
        let swept = swept.clone().await;
        self.swept(&swept);
        self.finish().await
    }

    /// Stops the worker: asks it to end by SIGTERM; after `grace`, it and all its descendants get SIGKILL.
    pub async fn stop(&mut self, grace: Duration) -> Exit {
        stop(&mut [&mut *self], Signal::SIGTERM, grace).await;
        self.finish().await
    }

    /// Starts to copy the output, and lets signals reach the worker.
    fn begin(&mut self, spec: &WorkerSpec, files: LogFiles) {
        let targets = spec.output.targets();
        self.output =
            targets.map(|targets| OutputTasks::start(spec, targets, &mut self.child, files));
        self.guard.add(self.group);
    }

    /// Sends a signal to the worker's process group.
    pub(crate) fn signal(&self, signal: Signal) {
        // The id of a process that was waited for may belong to another one.
        if self.child.id().is_some() {
            // An error means that no process is left to receive it.
            let _ = killpg(self.group, signal);
        }
    }

    /// Sends SIGTERM to the process itself.
    pub(crate) fn terminate(&self) {
        if self.child.id().is_some() {
            // An error means that it has ended.
            let _ = kill(self.group, Signal::SIGTERM);
        }
    }

    /// Waits until the process itself ends.
    pub(crate) async fn ended(&mut self) -> (Ending, Instant) {
        if let Some(ended) = &self.ended {
            return ended.clone();
        }
        let ending = match self.child.wait().await {
            Ok(status) => Ending::from(status),
            Err(error) => Ending::Unknown(format!("no exit status: {error}")),
        };
        self.ended.insert((ending, Instant::now())).clone()
    }

    /// Waits until the process itself ends, and for a while until its output does.
    pub(crate) async fn drained(&mut self) {
        let (_, ended_at) = self.ended().await;
        if let Some(output) = &mut self.output {
            // A descendant may keep a pipe open for ever.
            let _ = timeout_at(ended_at + DRAIN_TIMEOUT, output.closed()).await;
        }
    }

    /// Returns when the process itself was seen to have ended.
    pub(crate) fn ended_at(&self) -> Option<Instant> {
        self.ended.as_ref().map(|(_, at)| *at)
    }

    /// Gives up waiting for a process that SIGKILL does not end, such as one that waits for a driver.
    pub(crate) fn abandon(&mut self) {
        let reason = format!("process {} still runs after SIGKILL", self.group);
        self.ended.get_or_insert((Ending::Unknown(reason), Instant::now()));
    }

    /// Lets the guard forget the worker, unless processes are left.
    pub(crate) fn swept(&self, swept: &Swept) {
        if swept.left.is_empty() {
            self.guard.remove(self.group);
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.exit.is_some()
    }

    /// Ends the output of a worker that has ended.
    pub(crate) async fn finish(&mut self) -> Exit {
        if let Some(exit) = &self.exit {
            return exit.clone();
        }
        let mut last_lines = Vec::new();
        if let Some(output) = &mut self.output {
            output.finish().await;
            last_lines = output.last_lines();
        }
        let (ending, _) = self.ended().await;
        self.exit.insert(Exit { ending, last_lines }).clone()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.ended.is_none() {
            self.signal(Signal::SIGKILL);
            // Descendants in other groups end with the run.
            self.guard.remove(self.group);
        }
    }
}

fn command(spec: &WorkerSpec, marker: &str) -> Command {
    let mut command = Command::new(&spec.program);
    command.args(&spec.args);
    for name in &spec.env_removed {
        command.env_remove(name);
    }
    command
        .envs(spec.env.iter().map(|(name, value)| (name, value)))
        .env(MARKER_VARIABLE, marker)
        .stdin(match spec.input {
            Input::Empty => Stdio::null(),
            Input::Pipe => Stdio::piped(),
            Input::Inherit => Stdio::inherit(),
        })
        .kill_on_drop(true);
    if let Some(directory) = &spec.directory {
        command.current_dir(directory);
    }
    if spec.output.is_piped() {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    if let Some(descriptor) = &spec.inherited {
        inherit(&mut command, Arc::clone(descriptor));
    }
    prepare(&mut command, spec.input.leads());
    command
}
