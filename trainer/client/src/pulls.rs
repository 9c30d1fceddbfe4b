//! Pulls from single slots, and the choice of a version that all slots have.

use std::collections::BTreeMap;
use std::time::Duration;

use steadfast_common::ids::{Pass, Version};
use steadfast_host::time::Instant;
use steadfast_proto::v1::{PullHeader, PullRequest};
use steadfast_proto::{Decoder, call, framed, next};
use tonic::Status;

use crate::pservers::{Pulled, SlotClient, in_time};

const PULL: &str = "/steadfast.v1.Pserver/Pull";

/// Data that arrives after a longer pause was waited for, which restarts the transfer time.
const QUIET_MAX: Duration = Duration::from_millis(5);

/// How long one pull waits at a pserver before it is repeated.
const PULL_WAIT: Duration = Duration::from_secs(10);

/// Destinations of blocks, by block number.
pub(crate) type Places<'a> = BTreeMap<u32, &'a mut [f32]>;

/// Which versions satisfy a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    AtLeast,
    Exactly,
}

/// A slot's answer to a pull.
pub(crate) struct PulledShard {
    pub header: PullHeader,
    transfer: Duration,
    bytes: u64,
}

/// Asks one slot until it has reached or passed the version; writes its blocks if it has it.
pub(crate) async fn pull_one(
    slot: &SlotClient,
    version: Version,
    which: Which,
    places: &mut Places<'_>,
) -> Result<PulledShard, Status> {
    loop {
        let request = PullRequest {
            target: Some(slot.target),
            version: version.0,
            wait_ms: PULL_WAIT.as_millis() as u64,
            exact: which == Which::Exactly,
        };
        let mut channel = slot.channel.clone();
        let mut body = in_time(call(&mut channel, PULL, vec![framed(&request)])).await?;
        let (mut began, mut last) = (Instant::now(), Instant::now());
        let (mut decoder, mut written) = (Decoder::<PullHeader>::default(), 0);
        let mut received = 0;
        // The whole stream has no deadline: blocks may arrive early, one by one.
        while let Some(bytes) = in_time(next(&mut body)).await? {
            // A pause this long was spent waiting for a push.
            if QUIET_MAX < last.elapsed() {
                began = Instant::now();
            }
            last = Instant::now();
            received += bytes.len() as u64;
            decoder.feed(bytes, |_, number, data| {
                let place = places.get_mut(&number);
                let place = place.filter(|it| size_of_val(&***it) == data.len());
                let place = place.ok_or_else(|| {
                    Status::internal(format!("block {number} does not fit the model's layout"))
                })?;
                data.copy_to(place);
                written += 1;
                Ok(())
            })?;
        }
        let cut_off = || Status::unavailable("the answer ended early");
        let header = decoder.end().ok().flatten().ok_or_else(cut_off)?;
        if header.ready && written != places.len() {
            return Err(cut_off());
        }
        if header.ready || version.0 < header.version {
            return Ok(PulledShard { header, transfer: began.elapsed(), bytes: received });
        }
    }
}

/// Returns the version to request next if some of `slots` slots are past the `wanted` version; `past` holds
/// their versions. `None` if no slot is.
///
/// A slot is at most one step ahead of another, and keeps the previous version then; while its next step
/// is in progress it keeps the current version, which all other slots will reach.
pub(crate) fn next_wanted(wanted: u64, past: &[u64], slots: usize) -> Option<u64> {
    let most = *past.iter().max()?;
    let all_there = past.len() == slots && past.iter().all(|it| *it == most);
    Some(if all_there { most } else { most.saturating_sub(1).max(wanted + 1) })
}

/// Returns the position that all answering slots have reached.
pub(crate) fn least(answers: &[PulledShard]) -> Pulled {
    let least = answers.iter().map(|it| it.header).min_by_key(|it| it.version);
    least.map_or_else(Pulled::default, |it| Pulled {
        version: Version(it.version),
        pass: Pass(it.pass),
        pass_start: Version(it.pass_start),
        examples: it.examples,
        loss: it.loss,
        transfer: answers.iter().map(|it| it.transfer).max().unwrap_or_default(),
        bytes: answers.iter().map(|it| it.bytes).sum(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I7: slots are at most one step apart; a trainer that joins asks for a version that all slots have or
    /// will reach, and never twice for one that a slot is past.
    #[test]
    fn who_comes_while_slots_are_apart_finds_a_version_that_all_have() {
        assert_eq!(next_wanted(3, &[], 2), None);
        // All slots are at one version.
        assert_eq!(next_wanted(0, &[7, 7], 2), Some(7));
        // The slot ahead keeps the previous version.
        assert_eq!(next_wanted(0, &[7, 6], 2), Some(6));
        assert_eq!(next_wanted(5, &[7], 2), Some(6));
        // It is at 7 with step 8 in progress, so it keeps 7; the other slot is still at 6.
        assert_eq!(next_wanted(6, &[7], 2), Some(7));
        assert_eq!(next_wanted(0, &[1], 2), Some(1));
    }
}
