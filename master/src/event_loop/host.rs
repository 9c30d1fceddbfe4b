//! What surrounds the machine of a training job: the keys in etcd, the clock, and those who watch.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::ids::Generation;
use steadfast_common::job::spec::CheckpointSpec;
use steadfast_common::records::keys::Keys;
use steadfast_coord::term::Host;
use steadfast_coord::{CoordError, Etcd, Mirror, Range, Transaction, View};
use steadfast_host::time::{Interval, interval, unix_ms};
use steadfast_master_core::job_state::Fact;
use tokio::sync::watch;

use crate::event_loop::effects::Effect;
use crate::event_loop::handle::StalenessGate;
use crate::event_loop::machine::{Input, TrainingJob};
use crate::event_loop::members::Views;
use crate::event_loop::stored_state;
use crate::failure_detector::FailureDetector;
use crate::status::status_snapshot::{Assignments, StatusSnapshot};
use crate::status::timeline::Timeline;

/// How often deadlines are checked and the status is updated without an event.
const TICK: Duration = Duration::from_millis(100);

/// What surrounds the machine.
pub(crate) struct TrainingHost {
    etcd: Etcd,
    keys: Keys,
    slots: Followed,
    followers: Followed,
    desired: Followed,
    trainers: Followed,
    code: Followed,
    failure_detector: FailureDetector,
    tick: Interval,
    pub staleness_gate: Arc<StalenessGate>,
    pub assignments: watch::Sender<Arc<Assignments>>,
    /// By which rules checkpoints are taken.
    pub checkpoints: watch::Sender<CheckpointSpec>,
    /// The generation whose slots are to hand their states over.
    pub handovers: watch::Sender<Option<Generation>>,
    pub snapshot: watch::Sender<Arc<StatusSnapshot>>,
    /// The mutex guards short reads and writes of the timeline.
    pub timeline: Arc<Mutex<Timeline>>,
}

/// A range of keys and its changes.
struct Followed {
    mirror: Mirror,
    changes: watch::Receiver<Arc<View>>,
}

impl Followed {
    async fn start(etcd: &Etcd, range: Range) -> Result<Self, CoordError> {
        let mirror = Mirror::start(etcd, range).await?;
        let changes = mirror.subscribe();
        Ok(Self { mirror, changes })
    }
}

impl TrainingHost {
    /// Begins to follow the members of the job.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn open(
        etcd: &Etcd,
        keys: &Keys,
        own_address: &str,
        rules: CheckpointSpec,
    ) -> Result<Self, CoordError> {
        Ok(Self {
            etcd: etcd.clone(),
            keys: keys.clone(),
            slots: Followed::start(etcd, Range::Prefix(keys.ps_prefix())).await?,
            followers: Followed::start(etcd, Range::Prefix(keys.followers_prefix())).await?,
            desired: Followed::start(etcd, Range::Key(keys.ps_desired())).await?,
            trainers: Followed::start(etcd, Range::Prefix(keys.trainers_prefix())).await?,
            code: Followed::start(etcd, Range::Key(keys.code())).await?,
            failure_detector: FailureDetector::new(etcd, own_address),
            tick: interval(TICK),
            staleness_gate: Arc::default(),
            assignments: watch::Sender::default(),
            checkpoints: watch::Sender::new(rules),
            handovers: watch::Sender::default(),
            snapshot: watch::Sender::default(),
            timeline: Arc::default(),
        })
    }

    /// Returns what etcd shows of the members.
    ///
    /// # Errors
    /// If the number of slots cannot be parsed.
    pub fn views(&mut self) -> Result<Views, CoordError> {
        let (slots, trainers) = (self.slots.mirror.view(), self.trainers.mirror.view());
        let followers = self.followers.mirror.view();
        self.failure_detector.follow(&[slots.clone(), followers.clone(), trainers.clone()]);
        let desired = self.desired.mirror.view().single()?;
        // A value that cannot be read is an error for the trainers, which write it.
        let code = self.code.mirror.view().single().ok().flatten();
        Ok(Views { slots, followers, trainers, desired, code })
    }

    fn show(&self, job: &TrainingJob) {
        let snapshot = StatusSnapshot::of(job);
        self.timeline.lock().expect("no holder panics").note(&snapshot.status, unix_ms());
        self.snapshot.send_replace(Arc::new(snapshot));
    }
}

impl Host for TrainingHost {
    type Machine = TrainingJob;
    type Error = CoordError;

    async fn next(&mut self, _: &TrainingJob) -> Result<Input, CoordError> {
        tokio::select! {
            biased;
            _ = self.slots.changes.changed() => {}
            _ = self.followers.changes.changed() => {}
            _ = self.desired.changes.changed() => {}
            _ = self.trainers.changes.changed() => {}
            _ = self.code.changes.changed() => {}
            () = self.tick.tick() => return Ok(Input::Tick),
        }
        Ok(Input::Members(self.views()?))
    }

    fn write(&self, fact: &Fact, transaction: &mut Transaction) {
        stored_state::write(&self.keys, fact, transaction);
    }

    async fn perform(
        &mut self,
        job: &TrainingJob,
        effect: Effect,
    ) -> Result<Option<Input>, CoordError> {
        match effect {
            Effect::Answer(answer) => answer.send(),
            Effect::Active(trainers) => self.staleness_gate.set_active(&trainers),
            Effect::Assign(assignments) => {
                self.assignments.send_replace(assignments);
            }
            Effect::Checkpoints(rules) => {
                self.checkpoints.send_replace(*rules);
            }
            Effect::HandOver(generation) => {
                self.handovers.send_replace(Some(generation));
            }
            Effect::Show => self.show(job),
            Effect::Read { round } => {
                let stored = stored_state::read_stored(&self.etcd, &self.keys, round).await?;
                return Ok(Some(Input::Stored(stored)));
            }
        }
        Ok(None)
    }
}
