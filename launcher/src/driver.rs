//! The driver of the launcher: acquires the lock, and runs a term of the machine while it holds it.

use std::collections::{BTreeMap, VecDeque};
use std::process::ExitCode;
use std::time::Duration;

use steadfast_agent::OwnRendezvous;
use steadfast_common::error::ErrorKind;
use steadfast_common::records::launch::{LauncherRecord, Outcome};
use steadfast_common::status::{HostStatus, LauncherStatus};
use steadfast_coord::term::{Committer, End, Term};
use steadfast_coord::{CoordError, Leadership, Session, now};
use steadfast_host::random;
use steadfast_host::time::unix_ms;
use steadfast_launcher_core::Exit;
use steadfast_launcher_core::discovery::{Discovery, PollError, Update};
use steadfast_launcher_core::hosts::HostName;
use steadfast_launcher_core::launcher::Launcher;
use steadfast_launcher_core::machine::{Input, LaunchMachine};
use steadfast_launcher_core::settings::Settings;
use steadfast_launcher_core::timers::Timers;
use steadfast_process::{Failure, Shutdown};
use tokio::time::sleep;
use tracing::{error, info, warn};

use crate::admin::LauncherView;
use crate::agents::{Agents, Ended};
use crate::host::{LaunchHost, TermEnd};
use crate::poll::{Poll, Poller};
use crate::store::Store;

/// How long etcd may be away when all agents have ended.
const ALONE_TIMEOUT: Duration = Duration::from_secs(60);

/// A launcher. It has what goes on from term to term; what a term has decided and not committed is decided again in
/// the next one.
#[derive(Debug)]
pub(crate) struct Driver {
    settings: Settings,
    pub(crate) store: Store,
    pub(crate) agents: Agents,
    pub(crate) poller: Poller,
    /// What was committed last.
    record: LauncherRecord,
    timers: Timers,
    /// Created with the first term.
    discovery: Option<Discovery>,
    /// Ends of agents that are not committed.
    pub(crate) ends: VecDeque<Ended>,
    /// Why the job ends, if that was not decided by the machine.
    outcome: Option<Outcome>,
    /// What the user does about a failed discovery.
    discovery_kind: Option<ErrorKind>,
    /// A signal was handled.
    pub(crate) is_draining: bool,
    /// Why agents failed last.
    reasons: BTreeMap<HostName, String>,
    view: LauncherView,
}

impl Driver {
    /// Creates a launcher that has not begun.
    pub fn new(
        settings: Settings,
        store: Store,
        agents: Agents,
        poller: Poller,
        view: LauncherView,
    ) -> Self {
        Self {
            settings,
            view,
            store,
            agents,
            poller,
            record: LauncherRecord::default(),
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
        rendezvous: &mut Option<OwnRendezvous>,
        shutdown: &Shutdown,
    ) -> Result<ExitCode, Failure> {
        let ended = self.terms(rendezvous, shutdown).await;
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
        let Some(outcome) = self.record.outcome.clone() else {
            return Ok(shutdown.exit_code());
        };
        match (&outcome, outcome.kind()) {
            (_, None) => {
                info!(%outcome, "the launcher ends");
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
        rendezvous: &mut Option<OwnRendezvous>,
        shutdown: &Shutdown,
    ) -> Result<(), Failure> {
        loop {
            let (session, leadership) = match self.acquire(shutdown).await {
                Ok(Some(acquired)) => acquired,
                Ok(None) => return Ok(()),
                Err(failure) if failure.kind == ErrorKind::Stale => {
                    warn!(%failure, "acquiring the lock again");
                    continue;
                }
                Err(failure) => return Err(failure),
            };
            self.view.readiness.set_ready();
            let end = self.term(&session, leadership, rendezvous, shutdown).await;
            self.view.readiness.set_not_ready("acquires the lock of the job");
            session.close(&self.store.etcd).await;
            match end {
                Ok(()) => return Ok(()),
                Err(TermEnd::Lost(error)) => warn!(%error, "acquiring the lock again"),
                Err(TermEnd::Failed(failure)) => return Err(failure),
            }
        }
    }

    /// Acquires the lock. Returns `None` if it is not needed any more: after a signal, or because the job has
    /// succeeded and its etcd has ended with it.
    async fn acquire(
        &mut self,
        shutdown: &Shutdown,
    ) -> Result<Option<(Session, Leadership)>, Failure> {
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

    /// Acts while this launcher holds the lock, until the job is over.
    async fn term(
        &mut self,
        session: &Session,
        mut leadership: Leadership,
        rendezvous: &mut Option<OwnRendezvous>,
        shutdown: &Shutdown,
    ) -> Result<(), TermEnd> {
        let machine = self.begin(&mut leadership).await?;
        self.show(&machine);
        let committer = Committer::new(self.store.etcd.clone(), leadership);
        let (term, _) = Term::new(machine, committer);
        let first = self.repeated();
        let mut host = LaunchHost::new(self, session, rendezvous, shutdown);
        match term.begin_with(first).run(&mut host, std::future::pending()).await? {
            End::Over(_) | End::Left(_) => Ok(()),
        }
    }

    /// Reads the state, and repeats its actions.
    async fn begin(&mut self, leadership: &mut Leadership) -> Result<LaunchMachine, CoordError> {
        let mut launcher: Launcher = self.store.load().await?;
        let record = launcher.record();
        let has_begun = record.outcome.is_some() || 0 < record.launches;
        if self.discovery.is_none() {
            let is_over = launcher.is_over();
            if is_over && record.outcome != Some(Outcome::Succeeded) {
                info!(outcome = ?record.outcome, "an earlier launch of this job has ended; beginning again");
                launcher = self.store.begin_again(leadership, &launcher).await?;
            }
            let timeout_ms = self.settings.elastic_timeout_ms;
            self.discovery = Some(match has_begun && !is_over {
                true => Discovery::resumed(timeout_ms, now()),
                false => Discovery::new(timeout_ms),
            });
        }
        let known: BTreeMap<HostName, u64> =
            launcher.agents().map(|(host, agent)| (host.clone(), agent.launch)).collect();
        self.agents.stop_unless(|host, launch| known.get(host) == Some(&launch));
        for action in launcher.actions() {
            self.agents.act(action);
        }
        let discovered = self.discovery.as_ref().and_then(Discovery::hosts).map(<[_]>::to_vec);
        let (settings, timers) = (self.settings, self.timers.clone());
        Ok(LaunchMachine::new(settings, launcher, timers, discovered, now()))
    }

    /// Returns the inputs that no term has committed.
    fn repeated(&self) -> Vec<Input> {
        let ends = self.ends.iter().map(input_of);
        ends.chain(self.outcome.clone().map(Input::End)).collect()
    }

    /// Notes that a signal has arrived.
    pub(crate) fn drain(&mut self, machine: &LaunchMachine) -> Input {
        self.is_draining = true;
        if machine.launcher().record().outcome.is_some() {
            // Those that a job that has succeeded waits for.
            self.agents.stop_all();
        }
        Input::End(self.outcome.get_or_insert(Outcome::Interrupted).clone())
    }

    /// Notes the result of a poll; returns what it means for the machine.
    pub(crate) fn note_poll(&mut self, poll: Poll) -> Option<Input> {
        let discovery = self.discovery.as_mut()?;
        let reason = match poll {
            Ok(hosts) => {
                let is_first = discovery.hosts().is_none();
                let update = discovery.succeeded(now(), &hosts);
                if is_first || update != Update::NoUpdate {
                    let found: Vec<String> = hosts.iter().map(ToString::to_string).collect();
                    info!(?update, hosts = found.join(","), "hosts discovered");
                }
                return discovery.hosts().map(|hosts| Input::Discovered(hosts.to_vec()));
            }
            Err(reason) => reason,
        };
        match discovery.failed(now(), &reason) {
            error @ PollError::Retried { .. } => {
                warn!(%error, "the hosts are not known anew");
                None
            }
            error @ (PollError::Misconfigured { .. } | PollError::TimedOut { .. }) => {
                if self.outcome.is_none() {
                    self.discovery_kind = Some(error.kind());
                }
                let reason = error.to_string();
                let failed = || Outcome::DiscoveryFailed { reason };
                Some(Input::End(self.outcome.get_or_insert_with(failed).clone()))
            }
        }
    }

    /// Notes that what the first of the ends led to is committed.
    pub(crate) fn note_end(&mut self, host: &HostName, exit: Exit, has_failed: bool) {
        let Some(Ended { reason, .. }) = self.ends.pop_front() else { return };
        match (has_failed, exit) {
            (true, _) => {
                error!(%host, reason, "the agent failed");
                self.reasons.insert(host.clone(), reason);
            }
            (false, Exit::Succeeded) => {
                info!(%host, "the agent has ended, since the job succeeded")
            }
            (false, Exit::Failed) => info!(%host, reason, "the agent has ended"),
        }
    }

    /// Notes and publishes what was committed.
    pub(crate) fn show(&mut self, machine: &LaunchMachine) {
        let launcher = machine.launcher();
        self.record.clone_from(launcher.record());
        self.timers.clone_from(machine.timers());
        let (unix_ms, blacklist) = (unix_ms(), launcher.blacklist(&self.timers, now()));
        let hosts = launcher.hosts().map(|(host, record)| {
            let entry = blacklist.iter().find(|entry| entry.host == *host);
            HostStatus {
                host: host.to_string(),
                record: record.clone(),
                blacklisted_until_unix_ms: entry.map(|entry| unix_ms + entry.left_ms),
            }
        });
        let record = &self.record;
        self.view.status.send_replace(LauncherStatus {
            launches: record.launches,
            resets: record.resets,
            outcome: record.outcome.clone(),
            hosts: hosts.collect(),
        });
    }
}

/// Returns the input of an agent's end.
pub(crate) fn input_of(ended: &Ended) -> Input {
    let Ended { host, launch, exit, .. } = ended;
    Input::Exited { host: host.clone(), launch: *launch, exit: *exit, seed: random::seed() }
}
