//! Decides the commits of a job whose records are counted.
//!
//! Each member of a round enters the barrier [`COMMIT_TAG`] when its workers have a copy of their state, and says which
//! records that state has seen. The last one decides: the release of the barrier and the new position are one
//! transaction. So a record counts when every member has a state that has seen it, and a state that some members have,
//! but not all, does not count: in the next round all of them begin with the last commit that was decided.
//!
//! The first phase of a round is the state that all of its workers begin with. It is the last commit, or an earlier one
//! if no worker and no agent is left that has it: then the position goes back with the state.
//!
//! [`COMMIT_TAG`]: steadfast_common::records::commits::COMMIT_TAG

use steadfast_common::ids::Phase;
use steadfast_common::records::commits::{CommitId, CommitRecord, DataPosition, RecordOrder};

use super::state::{Entries, Rendezvous};
use super::{BarrierId, Caller, Refusal, Settings};

impl Rendezvous {
    /// Returns the commit that a member with this state takes part in, if all do.
    pub(super) fn commit_of(
        &self,
        caller: Caller,
        barrier: &BarrierId,
        entries: &Entries,
        data: &[u8],
        settings: &Settings,
    ) -> Result<CommitRecord, Refusal> {
        let records = settings.records.ok_or(Refusal::NoRecords)?;
        if settings.order == RecordOrder::Dynamic {
            return self.commit_of_progress(caller, barrier, entries, data, records);
        }
        let own = DataPosition::parse(data).filter(|own| own.used <= records);
        let own = own.ok_or_else(|| {
            let what = String::from_utf8_lossy(data).into_owned();
            Refusal::Position { what, records }
        })?;
        let others = entries.data().values().filter_map(|other| DataPosition::parse(other));
        if let Some(other) = others.into_iter().find(|other| *other != own) {
            return Err(Refusal::OtherPosition { own, other });
        }
        if let Some(last) = self.commit.as_deref() {
            let is_next = match barrier.phase {
                Phase(0) => is_at_most(own, last.position),
                _ => follows(last.position, own, records),
            };
            if !is_next {
                return Err(Refusal::NotNext { given: own, last: Box::new(last.clone()) });
            }
        }
        let id = CommitId { round: barrier.round, phase: barrier.phase };
        Ok(CommitRecord::new(id, own))
    }
}

/// Returns whether a state may be that of `last`, or an earlier one.
fn is_at_most(state: DataPosition, last: DataPosition) -> bool {
    (state.pass, state.used) <= (last.pass, last.used) && state.seen <= last.seen
}

/// Returns whether a state can follow that of `last` by updates that use each record of a pass at most once.
fn follows(last: DataPosition, state: DataPosition, records: u64) -> bool {
    let Some(seen) = state.seen.checked_sub(last.seen) else { return false };
    let Some(passes) = state.pass.0.checked_sub(last.pass.0) else { return false };
    if passes == 0 {
        return state.used.checked_sub(last.used) == Some(seen);
    }
    // What was left of the pass, and whole ones between.
    let before = u128::from(records.saturating_sub(last.used))
        + u128::from(passes - 1) * u128::from(records);
    state.used <= seen && u128::from(seen - state.used) <= before
}
