//! What surrounds the machine of an elastic job: the keys in etcd, the clock, and those who wait.

use std::sync::Arc;
use std::time::Duration;

use steadfast_common::records::keys::Keys;
use steadfast_common::status::ElasticStatus;
use steadfast_common::status::MasterStatus;
use steadfast_coord::term::Host;
use steadfast_coord::{CoordError, Etcd, Mirror, Range, Transaction, View};
use steadfast_host::time::{Interval, interval};
use steadfast_master_core::rendezvous::Fact;
use tokio::sync::watch;
use tracing::info;

use super::launch::Launch;
use super::machine::{Effect, ElasticJob, Input};
use super::stored;
use crate::failure_detector::FailureDetector;

/// How often deadlines are checked and the status is updated without an event.
const TICK: Duration = Duration::from_millis(50);

/// What surrounds the machine.
pub(super) struct ElasticHost {
    keys: Keys,
    /// Held, so that the view goes on.
    _agents: Mirror,
    agents: watch::Receiver<Arc<View>>,
    failure_detector: FailureDetector,
    launch: Launch,
    tick: Interval,
    master: MasterStatus,
    /// Changes when the answer to a waiting node, or to a member of a round, may have changed.
    pub rounds: watch::Sender<u64>,
    /// Changes when a barrier was released or has ended.
    pub barriers: watch::Sender<u64>,
    pub status: watch::Sender<Arc<ElasticStatus>>,
}

impl ElasticHost {
    /// Begins to follow what etcd has of the job.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn open(
        etcd: &Etcd,
        keys: &Keys,
        master: MasterStatus,
        first: ElasticStatus,
    ) -> Result<Self, CoordError> {
        let mirror = Mirror::start(etcd, Range::Prefix(keys.agents_prefix())).await?;
        Ok(Self {
            keys: keys.clone(),
            agents: mirror.subscribe(),
            _agents: mirror,
            failure_detector: FailureDetector::new(etcd, &master.address),
            launch: Launch::follow(etcd, keys).await?,
            tick: interval(TICK),
            master,
            rounds: watch::Sender::new(0),
            barriers: watch::Sender::new(0),
            status: watch::Sender::new(Arc::new(first)),
        })
    }

    /// Returns the registrations of agents.
    pub fn view(&mut self) -> Arc<View> {
        let view = self.agents.borrow_and_update().clone();
        self.failure_detector.follow(std::slice::from_ref(&view));
        view
    }

    /// Publishes a new status.
    pub fn show(&mut self, job: &ElasticJob) {
        let (master, launcher) = (Some(self.master.clone()), self.launch.status());
        let status = ElasticStatus { master, launcher, ..job.status() };
        self.status.send_replace(Arc::new(status));
    }
}

impl Host for ElasticHost {
    type Machine = ElasticJob;
    type Error = CoordError;

    async fn next(&mut self, _: &ElasticJob) -> Result<Input, CoordError> {
        tokio::select! {
            biased;
            _ = self.agents.changed() => Ok(Input::Agents(self.view())),
            () = self.tick.tick() => Ok(Input::Tick),
        }
    }

    fn write(&self, fact: &Fact, transaction: &mut Transaction) {
        stored::write(&self.keys, fact, transaction);
    }

    async fn perform(
        &mut self,
        job: &ElasticJob,
        effect: Effect,
    ) -> Result<Option<Input>, CoordError> {
        match effect {
            Effect::Answer(answer) => job.answer(answer),
            Effect::WakeBarriers => self.barriers.send_modify(|changes| *changes += 1),
            Effect::WakeAll => {
                self.rounds.send_modify(|changes| *changes += 1);
                self.barriers.send_modify(|changes| *changes += 1);
            }
            Effect::Formed(record) => {
                let (members, workers) = (record.members.len(), record.world_size);
                info!(round = record.round.0, members, workers, "round formed");
            }
            Effect::Show => self.show(job),
        }
        Ok(None)
    }
}
