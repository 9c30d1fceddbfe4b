//! The event loop of the acting master of a training job.
//!
//! The machine decides requests and changes of members; the driver of the term commits its facts, and then the
//! requests are answered. So memory is never ahead of etcd for an observer, and requests share the cost of a commit.

mod decisions;
mod effects;
mod generations;
pub(crate) mod handle;
mod host;
mod live_state;
pub(crate) mod machine;
mod members;
mod recoveries;
mod scaling;
mod stored_state;
#[cfg(test)]
mod tests;
mod time_breakdowns;

use steadfast_common::records::keys::Keys;
use steadfast_common::records::position::Position;
use steadfast_common::records::{CheckpointRecord, ResultRecord};
use steadfast_coord::term::{Committer, End, Term};
use steadfast_coord::{CoordError, Etcd, Leadership, now};
use steadfast_master_core::job_state::JobState;
use steadfast_master_core::lanes::Lanes;

use self::handle::EventLoopHandle;
use self::host::TrainingHost;
use self::live_state::LiveState;
use self::machine::{TrainingJob, holders};
use self::recoveries::Recoveries;
use crate::job::Job;

/// The event loop and the state that it owns.
pub(crate) struct EventLoop {
    term: Term<TrainingJob>,
    host: TrainingHost,
}

impl EventLoop {
    /// Recovers everything from etcd and prepares the loop.
    ///
    /// # Errors
    /// If etcd does not answer, or holds a value that cannot be parsed.
    pub async fn open(
        etcd: &Etcd,
        keys: &Keys,
        job: Job,
        leadership: Leadership,
        own_address: &str,
    ) -> Result<(Self, EventLoopHandle), CoordError> {
        let state = stored_state::read(etcd, keys, &job).await?;
        let position = last_known(etcd, keys, &state).await?;
        // Every earlier term has a smaller epoch, and no term makes 2²⁰ assignments per revision of etcd.
        let first_number = (leadership.epoch() as u64) << 20;
        let mut recoveries = Recoveries::default();
        if state.generation.is_some() {
            recoveries.notice("the previous master ended", now(), None);
        }
        let lanes = Lanes::new(job.record.spec.sync.lanes, first_number);
        let mut live = LiveState::new(lanes, position, recoveries);
        live.scaling.follow(now(), state.scale.as_ref());
        let rules = job.record.spec.checkpoint.clone();
        let mut host = TrainingHost::open(etcd, keys, own_address, rules).await?;
        let gate = host.staleness_gate.clone();
        gate.set_active(&holders(&state));
        let (keys, epoch, views) = (keys.clone(), leadership.epoch(), host.views()?);
        let job = TrainingJob::new(job, keys, epoch, state, live, views, gate.clone());
        let (term, requests) = Term::new(job, Committer::new(etcd.clone(), leadership));
        let handle = EventLoopHandle {
            requests,
            assignments: host.assignments.subscribe(),
            checkpoints: host.checkpoints.subscribe(),
            handovers: host.handovers.subscribe(),
            snapshot: host.snapshot.subscribe(),
            staleness_gate: gate,
            timeline: host.timeline.clone(),
        };
        Ok((Self { term, host }, handle))
    }

    /// Acts until the job is over or `leave` completes; returns the result if the job is over.
    ///
    /// # Errors
    /// When the term is lost, or etcd is unreachable for too long. Decisions that were not committed are
    /// dropped with this event loop.
    pub async fn run(
        mut self,
        leave: impl Future<Output = ()>,
    ) -> Result<Option<ResultRecord>, CoordError> {
        match self.term.run(&mut self.host, leave).await? {
            End::Over(job) => Ok(job.state.result),
            End::Left(_) => Ok(None),
        }
    }
}

/// Returns a lower bound of the training position until a trainer reports it: that of the latest
/// checkpoint, or the start.
async fn last_known(etcd: &Etcd, keys: &Keys, state: &JobState) -> Result<Position, CoordError> {
    let Some(id) = &state.checkpoint else { return Ok(Position::default()) };
    // The beginning of the next generation handles a manifest that cannot be read.
    match etcd.get_json::<CheckpointRecord>(&keys.checkpoint(id)).await {
        Ok(record) => Ok(record.map_or_else(Position::default, |it| it.position)),
        Err(CoordError::BadValue { .. }) => Ok(Position::default()),
        Err(error) => Err(error),
    }
}
