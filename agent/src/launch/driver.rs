//! The event loop of the launcher: it decides, commits, and acts.

use std::collections::{BTreeMap, VecDeque};
use std::process::ExitCode;
use std::time::Duration;

use steadfast_agent_core::Exit;
use steadfast_agent_core::discovery::{Discovery, PollError, Update};
use steadfast_agent_core::hosts::HostName;
use steadfast_agent_core::launcher::{Fact, Launcher};
use steadfast_agent_core::settings::{Context, Settings};
use steadfast_agent_core::timers::Timers;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Millis;
use steadfast_common::launch::Outcome;
use steadfast_common::status::{HostStatus, LauncherStatus};
use steadfast_coord::CoordError;
use steadfast_host::random;
use steadfast_host::time::{boot_time, unix_ms};
use steadfast_process::{Failure, Shutdown};
use tokio::time::sleep;
use tracing::{error, info, warn};

use super::admin::Shown;
use super::agents::{Agents, Ended};
use super::poll::{Poll, Poller};
use super::store::{Store, Term};
use crate::coordinator::Coordinator;

/// Shortest sleep till a deadline.
const SLEEP_MIN: Duration = Duration::from_millis(10);

/// How long etcd may be away when all agents have ended.
const ALONE_TIMEOUT: Duration = Duration::from_secs(60);

/// Longest sleep without a deadline.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// A launcher.
#[derive(Debug)]
pub(crate) struct Driver {
    settings: Settings,
    store: Store,
    agents: Agents,
    poller: Poller,
    launcher: Launcher,
    timers: Timers,
    /// Created with the first term.
    discovery: Option<Discovery>,
    /// Ends of agents that are not committed.
    ends: VecDeque<Ended>,
    /// Why the job ends, until it is committed.
    outcome: Option<Outcome>,
    /// What the user does about a failed discovery.
    discovery_kind: Option<ErrorKind>,
    /// A signal was handled.
    is_draining: bool,
    /// Why agents failed last.
    reasons: BTreeMap<HostName, String>,
    shown: Shown,
}

/// What the loop waits for.
enum Event {
    Drain,
    LeaseLost,
    Ended(Ended),
    Polled(Poll),
    MasterEnded(Result<(), Failure>),
    Deadline,
}

/// Why a term ended.
enum TermEnd {
    /// The job has ended, and all agents.
    Over,
    /// The lock may be lost: acquire it again.
    Lost(CoordError),
    Failed(Failure),
}

impl From<CoordError> for TermEnd {
    fn from(error: CoordError) -> Self {
        match error.kind() {
            ErrorKind::Stale | ErrorKind::Unavailable => Self::Lost(error),
            ErrorKind::Invalid
            | ErrorKind::NotFound
            | ErrorKind::Conflict
            | ErrorKind::NotYet
            | ErrorKind::TooLarge
            | ErrorKind::Denied
            | ErrorKind::Internal => Self::Failed(error.into()),
        }
    }
}

impl Driver {
    /// Creates a launcher that has not begun.
    pub fn new(
        settings: Settings,
        store: Store,
        agents: Agents,
        poller: Poller,
        shown: Shown,
    ) -> Self {
        Self {
            settings,
            shown,
            store,
            agents,
            poller,
            launcher: Launcher::default(),
            timers: Timers::default(),
            discovery: None,
            ends: VecDeque::new(),
            outcome: None,
            discovery_kind: None,
            is_draining: false,
            reasons: BTreeMap::new(),
        }
    }

    /// Runs until the job has ended, and all agents.
    ///
    /// # Errors
    /// Why the job ended, if it did not succeed, or why this launcher cannot go on.
    pub async fn run(
        mut self,
        coordinator: &mut Option<Coordinator>,
        shutdown: &Shutdown,
    ) -> Result<ExitCode, Failure> {
        let ended = self.terms(coordinator, shutdown).await;
        if self.outcome.is_none() && ended.is_err() {
            info!("stopping all agents");
        }
        let has_succeeded = self.has_succeeded();
        self.agents.end().await;
        ended?;
        if has_succeeded {
            info!("the job succeeded");
            return Ok(ExitCode::SUCCESS);
        }
        let Some(outcome) = self.launcher.record().outcome.clone() else {
            return Ok(shutdown.exit_code());
        };
        match (&outcome, outcome.kind()) {
            (_, None) => {
                info!("{outcome}");
                Ok(ExitCode::SUCCESS)
            }
            (Outcome::Interrupted, Some(_)) => Ok(shutdown.exit_code()),
            (_, Some(kind)) => {
                let reasons =
                    self.reasons.iter().map(|(host, reason)| format!("\n{host}: {reason}"));
                let kind = self.discovery_kind.unwrap_or(kind);
                Err(Failure::new(kind, format!("{outcome}{}", reasons.collect::<String>())))
            }
        }
    }

    /// Acquires the lock, again if it is lost, until the job is over. Agents go on meanwhile.
    async fn terms(
        &mut self,
        coordinator: &mut Option<Coordinator>,
        shutdown: &Shutdown,
    ) -> Result<(), Failure> {
        loop {
            let mut term = match self.acquire(shutdown).await {
                Ok(Some(term)) => term,
                Ok(None) => return Ok(()),
                Err(failure) if failure.kind == ErrorKind::Stale => {
                    warn!("acquiring the lock again: {failure}");
                    continue;
                }
                Err(failure) => return Err(failure),
            };
            self.shown.readiness.set_ready();
            let end = self.term(&mut term, coordinator, shutdown).await;
            self.shown.readiness.set_not_ready("acquires the lock of the job");
            term.end(&self.store.etcd).await;
            match end {
                TermEnd::Over => return Ok(()),
                TermEnd::Lost(error) => warn!("acquiring the lock again: {error}"),
                TermEnd::Failed(failure) => return Err(failure),
            }
        }
    }

    /// Acquires the lock. Returns `None` if it is not needed any more: after a signal, or because the job has
    /// succeeded and its etcd has ended with it.
    async fn acquire(&mut self, shutdown: &Shutdown) -> Result<Option<Term>, Failure> {
        let store = self.store.clone();
        let mut acquiring = std::pin::pin!(store.acquire());
        let finish_timeout = Duration::from_millis(self.settings.finish_timeout_ms);
        loop {
            let (has_succeeded, is_alone) = (self.has_succeeded(), self.agents.is_empty());
            if has_succeeded && is_alone {
                return Ok(None);
            }
            tokio::select! {
                biased;
                () = shutdown.drain() => return Ok(None),
                acquired = &mut acquiring => return acquired.map(Some),
                ended = self.agents.next_end() => self.ends.push_back(ended),
                () = sleep(finish_timeout), if has_succeeded => return Ok(None),
                () = sleep(ALONE_TIMEOUT), if is_alone && !self.ends.is_empty() => {
                    let message = "all agents have ended, and etcd does not answer";
                    return Err(Failure::unavailable(message));
                }
            }
        }
    }

    /// Returns whether an agent has succeeded, and that could not be committed.
    fn has_succeeded(&self) -> bool {
        self.ends.iter().any(|ended| ended.exit == Exit::Succeeded)
    }

    async fn term(
        &mut self,
        term: &mut Term,
        coordinator: &mut Option<Coordinator>,
        shutdown: &Shutdown,
    ) -> TermEnd {
        if let Err(error) = self.begin(term).await {
            return error.into();
        }
        let mut has_master = coordinator.is_some();
        loop {
            match self.settle(term, shutdown).await {
                Ok(()) if self.launcher.is_over() => return TermEnd::Over,
                Ok(()) => {}
                Err(error) => return error.into(),
            }
            let pause = self.pause();
            let event = tokio::select! {
                biased;
                () = shutdown.drain(), if !self.is_draining => Event::Drain,
                () = term.lost() => Event::LeaseLost,
                ended = self.agents.next_end() => Event::Ended(ended),
                ended = master_ended(coordinator), if has_master => Event::MasterEnded(ended),
                poll = self.poller.next() => Event::Polled(poll),
                () = sleep(pause) => Event::Deadline,
            };
            match event {
                Event::Drain | Event::Deadline => {}
                Event::LeaseLost => return TermEnd::Lost(CoordError::LeaseLost),
                Event::Ended(ended) => self.ends.push_back(ended),
                Event::Polled(poll) => self.polled(poll),
                // It ends with the job.
                Event::MasterEnded(Ok(())) => has_master = false,
                Event::MasterEnded(Err(failure)) => {
                    return TermEnd::Failed(failure.context("the master of the job"));
                }
            }
        }
    }

    /// Reads the state, and repeats its actions.
    async fn begin(&mut self, term: &mut Term) -> Result<(), CoordError> {
        self.launcher = self.store.load().await?;
        let record = self.launcher.record();
        let has_begun = record.outcome.is_some() || 0 < record.launches;
        if self.discovery.is_none() {
            let is_over = self.launcher.is_over();
            if is_over && record.outcome != Some(Outcome::Succeeded) {
                info!(outcome = ?record.outcome, "an earlier launch of this job has ended; beginning again");
                self.launcher = self.store.begin_again(term, &self.launcher).await?;
            }
            let timeout_ms = self.settings.elastic_timeout_ms;
            self.discovery = Some(match has_begun && !is_over {
                true => Discovery::resumed(timeout_ms, now()),
                false => Discovery::new(timeout_ms),
            });
        }
        // A wait that began in another term goes on, if the state is the same.
        self.follow();
        let known: BTreeMap<HostName, u64> =
            self.launcher.agents().map(|(host, agent)| (host.clone(), agent.launch)).collect();
        self.agents.stop_unless(|host, launch| known.get(host) == Some(&launch));
        for action in self.launcher.actions() {
            self.agents.act(action);
        }
        Ok(())
    }

    /// Decides and commits until nothing is due.
    async fn settle(&mut self, term: &mut Term, shutdown: &Shutdown) -> Result<(), CoordError> {
        while let Some(ended) = self.ends.front().cloned() {
            let Ended { host, launch, exit, reason } = ended;
            let facts = self.launcher.exited(&host, launch, exit, random::seed(), self.context());
            self.commit(term, &facts).await?;
            self.note_end(&host, &facts, exit, reason);
            self.ends.pop_front();
        }
        if shutdown.is_draining() && !self.is_draining {
            self.is_draining = true;
            if self.launcher.record().outcome.is_some() {
                // Those that a job that has succeeded waits for.
                self.agents.stop_all();
            }
            self.outcome.get_or_insert(Outcome::Interrupted);
        }
        if let Some(outcome) = self.outcome.clone() {
            let facts = self.launcher.end(outcome);
            self.commit(term, &facts).await?;
        }
        loop {
            let facts = self.launcher.due(self.context());
            if facts.is_empty() {
                return Ok(());
            }
            self.commit(term, &facts).await?;
        }
    }

    async fn commit(&mut self, term: &mut Term, facts: &[Fact]) -> Result<(), CoordError> {
        if facts.is_empty() {
            return Ok(());
        }
        let changes = self.launcher.changes(facts);
        self.store.commit(term, &changes).await?;
        for fact in facts {
            log(fact);
            self.launcher.evolve(fact);
        }
        self.follow();
        for action in facts.iter().filter_map(Fact::action) {
            self.agents.act(action);
        }
        Ok(())
    }

    /// Notes the result of a poll. A list of hosts takes effect with what is due then.
    fn polled(&mut self, poll: Poll) {
        let Some(discovery) = &mut self.discovery else { return };
        match poll {
            Ok(hosts) => {
                let is_first = discovery.hosts().is_none();
                let update = discovery.succeeded(now(), &hosts);
                if is_first || update != Update::NoUpdate {
                    let found: Vec<String> = hosts.iter().map(ToString::to_string).collect();
                    info!(?update, hosts = found.join(","), "hosts discovered");
                }
                self.follow();
            }
            Err(reason) => match discovery.failed(now(), &reason) {
                error @ PollError::Retried { .. } => warn!("{error}"),
                error @ (PollError::Misconfigured { .. } | PollError::TimedOut { .. }) => {
                    if self.outcome.is_none() {
                        self.discovery_kind = Some(error.kind());
                    }
                    let reason = error.to_string();
                    self.outcome.get_or_insert(Outcome::DiscoveryFailed { reason });
                }
            },
        }
    }

    fn note_end(&mut self, host: &HostName, facts: &[Fact], exit: Exit, reason: String) {
        let has_failed = facts.iter().any(|fact| matches!(fact, Fact::Failed { .. }));
        match (has_failed, exit) {
            (true, _) => {
                error!(%host, "the agent failed: {reason}");
                self.reasons.insert(host.clone(), reason);
            }
            (false, Exit::Succeeded) => info!(%host, "the agent has ended: the job succeeded"),
            (false, Exit::Failed) => info!(%host, "the agent has ended: {reason}"),
        }
    }

    fn follow(&mut self) {
        let discovered = self.discovery.as_ref().and_then(Discovery::hosts);
        self.timers.follow(now(), &self.launcher, &self.settings, discovered);
        self.show();
    }

    /// Publishes the status.
    fn show(&self) {
        let (unix_ms, blacklist) = (unix_ms(), self.launcher.blacklist(&self.timers, now()));
        let hosts = self.launcher.hosts().map(|(host, record)| {
            let entry = blacklist.iter().find(|entry| entry.host == *host);
            HostStatus {
                host: host.to_string(),
                record: record.clone(),
                blacklisted_until_unix_ms: entry.map(|entry| unix_ms + entry.left_ms),
            }
        });
        let record = self.launcher.record();
        self.shown.status.send_replace(LauncherStatus {
            launches: record.launches,
            resets: record.resets,
            outcome: record.outcome.clone(),
            hosts: hosts.collect(),
        });
    }

    fn context(&self) -> Context<'_> {
        Context {
            settings: &self.settings,
            discovered: self.discovery.as_ref().and_then(Discovery::hosts),
            timers: &self.timers,
            now: now(),
        }
    }

    /// Returns how long nothing is due without an event.
    fn pause(&self) -> Duration {
        let deadline = self.launcher.deadline(self.context());
        let left = deadline.map(|at| Duration::from_millis(at.0.saturating_sub(now().0)));
        left.unwrap_or(SLEEP_MAX).clamp(SLEEP_MIN, SLEEP_MAX)
    }
}

async fn master_ended(coordinator: &mut Option<Coordinator>) -> Result<(), Failure> {
    match coordinator {
        Some(coordinator) => coordinator.master_ended().await,
        None => std::future::pending().await,
    }
}

fn now() -> Millis {
    Millis(boot_time().as_millis() as u64)
}

fn log(fact: &Fact) {
    match fact {
        Fact::Failed { host, cooldown_ms } => {
            warn!(%host, cooldown_ms, "the host is on the blacklist");
        }
        Fact::CooledDown { host } => info!(%host, "the host is not on the blacklist any more"),
        Fact::Reset => info!("the set of agents changes"),
        Fact::Settled => info!("all agents are started"),
        Fact::Ended(Outcome::Succeeded) => info!("an agent has succeeded; waiting for the others"),
        Fact::Ended(outcome) => warn!("stopping the job: {outcome}"),
        // Logged with their actions.
        Fact::Started { .. }
        | Fact::StopRequested { .. }
        | Fact::RestartPending { .. }
        | Fact::Stopped { .. }
        | Fact::Forgotten { .. } => {}
    }
}
