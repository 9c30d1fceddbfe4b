//! What surrounds the machine of a launcher in one term: agents, signals, polls, and the keys in etcd.

use std::time::Duration;

use steadfast_agent::OwnRendezvous;
use steadfast_common::error::ErrorKind;
use steadfast_common::records::launch::Outcome;
use steadfast_coord::term::Host;
use steadfast_coord::{CoordError, Session, Transaction, now};
use steadfast_launcher_core::launcher::{Change, Fact};
use steadfast_launcher_core::machine::{Effect, Input, LaunchMachine};
use steadfast_process::{Failure, Shutdown};
use tokio::time::sleep;
use tracing::{info, warn};

use crate::driver::{Driver, input_of};

/// Shortest sleep till a deadline.
const SLEEP_MIN: Duration = Duration::from_millis(10);

/// Longest sleep without a deadline.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// Why a term ended before the job.
pub(crate) enum TermEnd {
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

/// What surrounds the machine in one term.
pub(crate) struct LaunchHost<'a> {
    driver: &'a mut Driver,
    session: &'a Session,
    rendezvous: &'a mut Option<OwnRendezvous>,
    shutdown: &'a Shutdown,
    /// The master of the job runs in this process.
    has_master: bool,
}

impl<'a> LaunchHost<'a> {
    pub fn new(
        driver: &'a mut Driver,
        session: &'a Session,
        rendezvous: &'a mut Option<OwnRendezvous>,
        shutdown: &'a Shutdown,
    ) -> Self {
        let has_master = rendezvous.is_some();
        Self { driver, session, rendezvous, shutdown, has_master }
    }
}

impl Host for LaunchHost<'_> {
    type Machine = LaunchMachine;
    type Error = TermEnd;

    async fn next(&mut self, machine: &LaunchMachine) -> Result<Input, TermEnd> {
        let driver = &mut *self.driver;
        let pause = pause(machine);
        let input = tokio::select! {
            biased;
            () = self.shutdown.drain(), if !driver.is_draining => Some(driver.drain(machine)),
            () = self.session.lost() => return Err(TermEnd::Lost(CoordError::LeaseLost)),
            ended = driver.agents.next_end() => {
                let input = input_of(&ended);
                driver.ends.push_back(ended);
                Some(input)
            }
            ended = master_ended(self.rendezvous), if self.has_master => {
                // It ends with the job.
                self.has_master = false;
                ended.map_err(|it| TermEnd::Failed(it.context("the master of the job")))?;
                None
            }
            poll = driver.poller.next() => driver.note_poll(poll),
            () = sleep(pause) => None,
        };
        Ok(input.unwrap_or(Input::Deadline))
    }

    fn write(&self, change: &Change, transaction: &mut Transaction) {
        transaction.add(self.driver.store.op(change));
    }

    async fn perform(
        &mut self,
        machine: &LaunchMachine,
        effect: Effect,
    ) -> Result<Option<Input>, TermEnd> {
        match effect {
            Effect::Committed(fact) => {
                log(&fact);
                if let Some(action) = fact.action() {
                    self.driver.agents.act(action);
                }
            }
            Effect::Exited { host, exit, has_failed } => {
                self.driver.note_end(&host, exit, has_failed);
                // A signal during the commit comes before what the end makes due.
                if self.shutdown.is_draining() && !self.driver.is_draining {
                    return Ok(Some(self.driver.drain(machine)));
                }
            }
            Effect::Changed => self.driver.show(machine),
        }
        Ok(None)
    }
}

/// Returns how long nothing is due without an input.
fn pause(machine: &LaunchMachine) -> Duration {
    let deadline = machine.deadline(now());
    let left = deadline.map(|at| Duration::from_millis(at.0.saturating_sub(now().0)));
    left.unwrap_or(SLEEP_MAX).clamp(SLEEP_MIN, SLEEP_MAX)
}

async fn master_ended(rendezvous: &mut Option<OwnRendezvous>) -> Result<(), Failure> {
    match rendezvous {
        Some(rendezvous) => rendezvous.master_ended().await,
        None => std::future::pending().await,
    }
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
        Fact::Ended(outcome) => warn!(%outcome, "stopping the job"),
        // Logged with their actions.
        Fact::Started { .. }
        | Fact::StopRequested { .. }
        | Fact::RestartPending { .. }
        | Fact::Stopped { .. }
        | Fact::Forgotten { .. } => {}
    }
}
