//! The agents that this launcher has started: one task each, which starts it, writes to it, and reports its end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use steadfast_agent::launcher_link::{ALIVE, BEAT, SILENCE_MAX, byte_of};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::AgentRecord;
use steadfast_coord::{CoordError, Etcd, Mirror, Range, View};
use steadfast_host::task::{Task, spawn};
use steadfast_launcher_core::Exit;
use steadfast_launcher_core::hosts::HostName;
use steadfast_launcher_core::launcher::Action;
use steadfast_process::Shutdown;
use steadfast_supervise::{Supervisor, Worker};
use tokio::io::AsyncWriteExt;
use tokio::process::ChildStdin;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, interval, sleep_until, timeout};
use tracing::{debug, info, warn};

use crate::template::Template;

/// How long an agent that was asked to stop may take, besides the time for its workers, until the connection to
/// it is ended.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Ends that wait to be handled. An agent's task waits if there are more.
const ENDS_MAX: usize = 64;

/// The end of an agent.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub host: HostName,
    pub launch: u64,
    pub exit: Exit,
    /// The reason for the end, for users; the last line of the agent's stderr, if it has written any.
    pub reason: String,
}

/// What the tasks of all agents share.
#[derive(Debug)]
struct Common {
    supervisor: Supervisor,
    template: Template,
    grace: Duration,
    lease_ttl: Duration,
    /// Holds the notices that this process gets, which the agents get too.
    shutdown: Shutdown,
}

/// The agents that run or are about to.
#[derive(Debug)]
pub(crate) struct Agents {
    common: Arc<Common>,
    tasks: BTreeMap<HostName, AgentTask>,
    /// The registrations of all agents of the job.
    registered: Mirror,
    tx: mpsc::Sender<Ended>,
    ends: mpsc::Receiver<Ended>,
}

#[derive(Debug)]
struct AgentTask {
    launch: u64,
    stop: Shutdown,
    task: Task<()>,
}

impl Agents {
    /// Creates an empty set.
    ///
    /// # Errors
    /// If etcd does not list the registrations.
    pub async fn new(
        supervisor: Supervisor,
        template: Template,
        (grace, lease_ttl): (Duration, Duration),
        etcd: &Etcd,
        keys: &Keys,
        shutdown: &Shutdown,
    ) -> Result<Self, CoordError> {
        let registered = Mirror::start(etcd, Range::Prefix(keys.agents_prefix())).await?;
        let (tx, ends) = mpsc::channel(ENDS_MAX);
        let common =
            Arc::new(Common { supervisor, template, grace, lease_ttl, shutdown: shutdown.clone() });
        Ok(Self { common, tasks: BTreeMap::new(), registered, tx, ends })
    }

    /// Starts or stops an agent, unless this was done before.
    pub fn act(&mut self, action: Action) {
        match action {
            Action::Start { host, slots, launch } => {
                if self.task_of(&host, launch).is_none() {
                    self.spawn(host, launch, Some(slots));
                }
            }
            Action::Stop { host, launch, reason } => match self.task_of(&host, launch) {
                Some(task) => {
                    info!(%host, launch, %reason, "stopping the agent");
                    task.stop.trigger();
                }
                // An earlier launcher has started it: it ends by itself.
                None => self.spawn(host, launch, None),
            },
        }
    }

    /// Stops the agents for which `is_known` is false.
    pub fn stop_unless(&mut self, is_known: impl Fn(&HostName, u64) -> bool) {
        for (host, task) in &self.tasks {
            if !is_known(host, task.launch) && !task.stop.is_draining() {
                warn!(%host, launch = task.launch, "stopping an agent of which etcd has no record");
                task.stop.trigger();
            }
        }
    }

    /// Returns whether all agents have ended, and the driver knows it.
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    pub fn stop_all(&self) {
        self.tasks.values().for_each(|task| task.stop.trigger());
    }

    /// Waits for the end of an agent. Can be cancelled.
    pub async fn next_end(&mut self) -> Ended {
        match self.ends.recv().await {
            Some(ended) => {
                if self.task_of(&ended.host, ended.launch).is_some() {
                    self.tasks.remove(&ended.host);
                }
                ended
            }
            // Not reached: there is a sender in `self`.
            None => std::future::pending().await,
        }
    }

    /// Stops all agents and waits for their ends.
    pub async fn end(mut self) {
        self.stop_all();
        while !self.tasks.is_empty() {
            self.next_end().await;
        }
        // The tasks have ended, and with them their references.
        if let Some(common) = Arc::into_inner(self.common)
            && let Err(still) = common.supervisor.close().await
        {
            warn!(processes = ?still.processes, "some processes of agents could not be ended");
        }
    }

    fn task_of(&self, host: &HostName, launch: u64) -> Option<&AgentTask> {
        self.tasks.get(host).filter(|task| task.launch == launch)
    }

    fn spawn(&mut self, host: HostName, launch: u64, slots: Option<u32>) {
        let stop = Shutdown::manual();
        let agent = AgentRun {
            common: self.common.clone(),
            registered: self.registered.subscribe(),
            host: host.clone(),
            launch,
            stop: stop.clone(),
        };
        let tx = self.tx.clone();
        let task = spawn(async move {
            let ended = agent.run(slots).await;
            // An error means that the waiting caller has gone.
            let _ = tx.send(ended).await;
        });
        if let Some(before) = self.tasks.insert(host, AgentTask { launch, stop, task }) {
            // Another launcher has started an agent here meanwhile.
            before.stop.trigger();
            debug!(launch = before.launch, "replaced");
            drop(before.task);
        }
    }
}

/// One run of an agent on a host, in its task.
struct AgentRun {
    common: Arc<Common>,
    registered: watch::Receiver<Arc<View>>,
    host: HostName,
    launch: u64,
    stop: Shutdown,
}

impl AgentRun {
    /// Starts the agent and waits for its end. Without slots, waits for the end of an agent that another launcher
    /// has started.
    async fn run(mut self, slots: Option<u32>) -> Ended {
        let stop = self.stop.clone();
        tokio::select! {
            biased;
            () = stop.drain() => return self.failed("it was stopped before its start".to_owned()),
            gone = self.until_gone() => if let Err(reason) = gone {
                return self.failed(reason);
            },
        }
        let Some(slots) = slots else {
            return self.failed("it has ended with the launcher that started it".to_owned());
        };
        info!(host = %self.host, slots, launch = self.launch, "starting an agent");
        match self.common.supervisor.start(&self.common.template.spec(
            &self.host,
            slots,
            self.launch,
        )) {
            Ok(worker) => self.watch(worker).await,
            Err(error) => self.failed(error.to_string()),
        }
    }

    /// Waits until no agent of an earlier launch is left on the host.
    async fn until_gone(&mut self) -> Result<(), String> {
        let is_gone = |view: &Arc<View>| {
            !view.entries.values().any(|entry| {
                let record = entry.json::<AgentRecord>();
                let host = record.ok().and_then(|record| record.launched_on);
                host.is_some_and(|host| host == self.host.as_str())
            })
        };
        if !is_gone(&self.registered.borrow().clone()) {
            info!(host = %self.host, "waiting for the end of an earlier agent");
        }
        let limit = SILENCE_MAX + self.common.grace + self.common.lease_ttl + STOP_TIMEOUT;
        match timeout(limit, self.registered.wait_for(is_gone)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err("the registrations of agents cannot be followed".to_owned()),
            Err(_) => Err(format!("an earlier agent still runs after {limit:?}")),
        }
    }

    async fn watch(&self, mut worker: Worker) -> Ended {
        let mut input = worker.take_input();
        let mut beats = interval(BEAT);
        let mut notices = self.common.shutdown.notices();
        let end = self.common.grace + STOP_TIMEOUT;
        let mut kill_at = None;
        let exit = loop {
            let is_stopping = kill_at.is_some();
            tokio::select! {
                biased;
                exit = worker.wait() => break exit,
                () = self.stop.drain(), if !is_stopping => {
                    input = None;
                    kill_at = Some(Instant::now() + end);
                }
                () = sleep_until(kill_at.unwrap_or_else(Instant::now)), if is_stopping => {
                    warn!(host = %self.host, "the agent has not stopped in time; ending the connection");
                    break worker.stop(Duration::ZERO).await;
                }
                Ok(signal) = notices.recv() => write(&mut input, byte_of(signal)).await,
                _ = beats.tick(), if input.is_some() => write(&mut input, ALIVE).await,
            }
        };
        let reason = match exit.reason_lines().last() {
            Some(line) if !exit.is_success() => format!("{exit}: {line}"),
            Some(_) | None => exit.to_string(),
        };
        match exit.is_success() {
            true => Ended { exit: Exit::Succeeded, ..self.failed(reason) },
            false => self.failed(reason),
        }
    }

    fn failed(&self, reason: String) -> Ended {
        Ended { host: self.host.clone(), launch: self.launch, exit: Exit::Failed, reason }
    }
}

/// Shows the agent that this launcher lives, or tells it of a signal. The pipe has room for days of bytes.
async fn write(input: &mut Option<ChildStdin>, byte: u8) {
    if let Some(pipe) = input
        && !matches!(timeout(BEAT, pipe.write_all(&[byte])).await, Ok(Ok(())))
    {
        // The process has closed its stdin; its end is noticed otherwise.
        *input = None;
    }
}
