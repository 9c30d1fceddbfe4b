//! Asks the slots to keep their states in memory at one version, for a generation with another number of slots.

use std::time::Duration;

use steadfast_common::ids::Generation;
use steadfast_common::job::spec::Mode;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{CheckpointRecord, GenerationRecord};
use steadfast_coord::{Etcd, now};
use steadfast_host::time::timeout;
use steadfast_master_core::checkpoint_schedule::{
    Attempt, CheckpointSchedule, Next, Outcome, Request, Service,
};
use steadfast_net::TlsIdentity;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::checkpoint::coordinator::{CheckpointError, progress, sleep_until};
use crate::checkpoint::snapshot::{self, Keeper, VersionWait};
use crate::event_loop::handle::{ControlError, Event, EventLoopHandle};

/// After this time the generation begins from the checkpoint. Pservers keep the state for longer.
const HANDOVER_MAX: Duration = Duration::from_secs(15);

/// The largest record of a handover in bytes: it is a part of the generation's, which is written twice.
const RECORD_BYTES_MAX: usize = 256 << 10;

/// Pause after a failed attempt, in milliseconds.
const PAUSE_MS: u64 = 50;

/// Lets slots hand their states over, for one term.
pub(crate) struct HandoverCoordinator {
    pub etcd: Etcd,
    pub keys: Keys,
    pub tls: TlsIdentity,
    pub handle: EventLoopHandle,
}

impl HandoverCoordinator {
    /// Asks the slots of each generation that is to hand its state over, until dropped.
    pub async fn run(self) {
        let mut wanted = self.handle.handovers.clone();
        while wanted.changed().await.is_ok() {
            let Some(generation) = *wanted.borrow_and_update() else { continue };
            let state = match timeout(HANDOVER_MAX, self.hand_over(generation)).await {
                Ok(state) => state.map_err(|error| error.to_string()),
                Err(_) => {
                    Err(format!("the slots did not reach one version within {HANDOVER_MAX:?}"))
                }
            };
            match &state {
                Ok(state) => {
                    let version = state.position.version.0;
                    info!(generation = generation.0, version, "the slots hand their states over");
                }
                Err(reason) => warn!(
                    generation = generation.0,
                    reason, "the slots cannot hand their states over; the checkpoint is used"
                ),
            }
            let state = state.ok().map(Box::new);
            let told = |reply| Event::HandedOver { generation, state, reply };
            if self.handle.ask(told).await.is_err() {
                return;
            }
        }
    }

    /// Returns the states of all slots at one version.
    async fn hand_over(&self, generation: Generation) -> Result<CheckpointRecord, CheckpointError> {
        let mut schedule = CheckpointSchedule::new((None, None), now());
        let _ = schedule.request(Request::Now);
        loop {
            let attempt = match schedule.next(now(), progress(&self.handle)) {
                Next::Take(attempt) => attempt,
                Next::Pause(until) | Next::Wait(Some(until)) => {
                    sleep_until(Some(until)).await;
                    continue;
                }
                // The request is served by then.
                Next::Wait(None) => return Err(ControlError::NotActing.into()),
            };
            let taken = self.attempt(generation, &attempt).await;
            let outcome =
                taken.as_ref().map_or_else(CheckpointError::outcome, |_| Outcome::Committed);
            let progress = progress(&self.handle);
            if schedule.ended(&attempt, outcome, now(), progress, PAUSE_MS) == Service::Over {
                return taken;
            }
        }
    }

    async fn attempt(
        &self,
        wanted: Generation,
        attempt: &Attempt,
    ) -> Result<CheckpointRecord, CheckpointError> {
        let generation = self.etcd.get_json::<GenerationRecord>(&self.keys.generation()).await?;
        let generation = generation.ok_or(CheckpointError::NoGeneration)?;
        if generation.generation != wanted || attempt.generation != wanted {
            let present = generation.generation;
            return Err(ControlError::OtherGeneration { found: wanted, present }.into());
        }
        let none = CheckpointRecord::default();
        let slots = snapshot::slots(&self.etcd, &self.keys, &self.tls, &generation, &none).await?;
        let max = Duration::from_millis(attempt.reach_max_ms);
        let wait = VersionWait { max, stop: CancellationToken::new() };
        let version = Some(attempt.version);
        let status = &self.handle.snapshot;
        let states = snapshot::shards(Keeper::Slots, slots, version, wait, status).await?;
        let record = snapshot::assemble(Mode::Sync, &generation, states, None)?;
        let bytes = serde_json::to_vec(&record)?.len();
        if RECORD_BYTES_MAX < bytes {
            return Err(CheckpointError::TooManyParameters { bytes });
        }
        Ok(record)
    }
}
