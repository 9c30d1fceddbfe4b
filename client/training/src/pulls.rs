//! Pulls from single slots, and the choice of a version that all slots have.

use std::collections::BTreeMap;
use std::time::Duration;

use steadfast_common::ids::Version;
use steadfast_common::records::position::Position;
use steadfast_host::time::Instant;
use steadfast_proto::v1::{PullHeader, PullRequest};
use steadfast_proto::{
    Decoder, PullAnswer, PullValues, TensorMethod, VersionMatch, call, framed, next,
};
use tonic::Status;

use crate::pservers::{Pulled, SlotClient, with_timeout};

/// Data that arrives after a longer pause was waited for, which restarts the transfer time.
const QUIET_MAX: Duration = Duration::from_millis(5);

/// How long one pull waits at a pserver before it is repeated.
pub(crate) const PULL_WAIT: Duration = Duration::from_secs(10);

/// Where to write blocks, by block number.
pub(crate) type BlockBuffers<'a> = BTreeMap<u32, &'a mut [f32]>;

/// A slot's answer to a pull.
pub(crate) struct PulledShard {
    /// The position of the blocks that were written, or the version of a slot that is past the wanted one.
    pub position: Result<Position, Version>,
    transfer: Duration,
    bytes: u64,
}

/// Pulls from one slot until it has reached or passed the version; writes its blocks if it has it.
pub(crate) async fn pull_one(
    slot: &SlotClient,
    versions: VersionMatch,
    values: PullValues,
    buffers: &mut BlockBuffers<'_>,
) -> Result<PulledShard, Status> {
    loop {
        let request = PullRequest::new(slot.target, versions, PULL_WAIT).of(values);
        let mut channel = slot.channel.clone();
        let mut body =
            with_timeout(call(&mut channel, TensorMethod::Pull, vec![framed(&request)])).await?;
        let (mut began, mut last) = (Instant::now(), Instant::now());
        let (mut decoder, mut written) = (Decoder::<PullHeader>::default(), 0);
        let mut received = 0;
        // The whole stream has no deadline: blocks may arrive early, one by one.
        while let Some(bytes) = with_timeout(next(&mut body)).await? {
            // A pause this long was spent waiting for a push.
            if QUIET_MAX < last.elapsed() {
                began = Instant::now();
            }
            last = Instant::now();
            received += bytes.len() as u64;
            decoder.feed(bytes, |_, number, data| {
                let buffer = buffers.get_mut(&number);
                let buffer = buffer.filter(|it| size_of_val(&***it) == data.len());
                let buffer = buffer.ok_or_else(|| {
                    Status::internal(format!("block {number} does not fit the model's layout"))
                })?;
                data.copy_to(buffer);
                written += 1;
                Ok(())
            })?;
        }
        let cut_off = || Status::unavailable("the answer ended early");
        let header = decoder.end().ok().flatten().ok_or_else(cut_off)?;
        let position = match header.answer(versions) {
            PullAnswer::Ready(_) if written != buffers.len() => return Err(cut_off()),
            PullAnswer::Ready(position) => Ok(position),
            PullAnswer::Past { present } => Err(present),
            PullAnswer::NotYet { .. } => continue,
        };
        return Ok(PulledShard { position, transfer: began.elapsed(), bytes: received });
    }
}

/// Returns the version to request next if some of `slots` slots are past the `wanted` version; `past` holds
/// their versions. `None` if no slot is.
///
/// A slot is at most one step ahead of another, and keeps the previous version then; while its next step
/// is in progress it keeps the current version, which all other slots will reach.
pub(crate) fn common_version(wanted: u64, past: &[u64], slots: usize) -> Option<u64> {
    let most = *past.iter().max()?;
    let all_there = past.len() == slots && past.iter().all(|it| *it == most);
    Some(if all_there { most } else { most.saturating_sub(1).max(wanted + 1) })
}

/// Returns the position that all answering slots have reached.
pub(crate) fn oldest_position(answers: &[PulledShard]) -> Pulled {
    Pulled {
        position: answers
            .iter()
            .filter_map(|it| it.position.ok())
            .min_by_key(|it| it.version)
            .unwrap_or_default(),
        transfer: answers.iter().map(|it| it.transfer).max().unwrap_or_default(),
        bytes: answers.iter().map(|it| it.bytes).sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I7: slots are at most one step apart; a trainer that joins asks for a version that all slots have or
    /// will reach, and never twice for one that a slot is past.
    #[test]
    fn a_pull_while_slots_are_a_step_apart_finds_a_version_that_all_have() {
        assert_eq!(common_version(3, &[], 2), None);
        // All slots are at one version.
        assert_eq!(common_version(0, &[7, 7], 2), Some(7));
        // The slot ahead keeps the previous version.
        assert_eq!(common_version(0, &[7, 6], 2), Some(6));
        assert_eq!(common_version(5, &[7], 2), Some(6));
        // It is at 7 with step 8 in progress, so it keeps 7; the other slot is still at 6.
        assert_eq!(common_version(6, &[7], 2), Some(7));
        assert_eq!(common_version(0, &[1], 2), Some(1));
    }
}
