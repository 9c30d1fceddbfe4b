//! Pulls from the slots, and which version all of them have.

use std::collections::BTreeMap;
use std::time::Duration;

use steadfast_common::ids::{Pass, Version};
use steadfast_host::time::Instant;
use steadfast_proto::v1::{PullHeader, PullRequest};
use steadfast_proto::{Decoder, call, framed, next};
use tonic::Status;

use crate::pservers::{Pulled, SlotClient, in_time};

const PULL: &str = "/steadfast.v1.Pserver/Pull";

/// What comes later than that after what came before it was waited for.
const QUIET_MAX: Duration = Duration::from_millis(5);

/// How long one pull waits at a pserver before it asks again.
const PULL_WAIT: Duration = Duration::from_secs(10);

/// Where blocks go, by their numbers.
pub(crate) type Places<'a> = BTreeMap<u32, &'a mut [f32]>;

/// Which versions will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    AtLeast,
    Exactly,
}

/// What a slot answered to a pull.
pub(crate) struct Answer {
    pub header: PullHeader,
    transfer: Duration,
    bytes: u64,
}

/// Asks one slot until it has the version, or is past it; writes its blocks if it has it.
pub(crate) async fn pull_one(
    slot: &SlotClient,
    version: Version,
    which: Which,
    places: &mut Places<'_>,
) -> Result<Answer, Status> {
    loop {
        let request = PullRequest {
            target: Some(slot.target),
            version: version.0,
            wait_ms: PULL_WAIT.as_millis() as u64,
            exact: which == Which::Exactly,
        };
        let mut wire = slot.wire.clone();
        let mut body = in_time(call(&mut wire, PULL, vec![framed(&request)])).await?;
        let (mut began, mut last) = (Instant::now(), Instant::now());
        let (mut decoder, mut written) = (Decoder::<PullHeader>::default(), 0);
        let mut received = 0;
        // It takes as long as there is something to wait for: blocks may come early, one by one.
        while let Some(bytes) = in_time(next(&mut body)).await? {
            // Then the others waited for somebody's push.
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
        let cut_off = || Status::unavailable("the answer was cut off");
        let header = decoder.end().ok().flatten().ok_or_else(cut_off)?;
        if header.ready && written != places.len() {
            return Err(cut_off());
        }
        if header.ready || version.0 < header.version {
            return Ok(Answer { header, transfer: began.elapsed(), bytes: received });
        }
    }
}

/// What to ask for when some of so many slots are past the `wanted` version, where they are; nothing if
/// none is.
///
/// A slot is at most one step ahead of another, and then it keeps the step before, unless it is on its way
/// to the next one: then it keeps the one that it is at, and all others come to that as well.
pub(crate) fn next_wanted(wanted: u64, past: &[u64], slots: usize) -> Option<u64> {
    let most = *past.iter().max()?;
    let all_there = past.len() == slots && past.iter().all(|it| *it == most);
    Some(if all_there { most } else { most.saturating_sub(1).max(wanted + 1) })
}

/// How far all slots are that answered.
pub(crate) fn least(answers: &[Answer]) -> Pulled {
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

    /// I7: slots are one step apart at most; whoever comes asks for a version that all of them have, or
    /// come to, and for no version twice that a slot is past.
    #[test]
    fn who_comes_while_slots_are_apart_finds_a_version_that_all_have() {
        assert_eq!(next_wanted(3, &[], 2), None);
        // All are there.
        assert_eq!(next_wanted(0, &[7, 7], 2), Some(7));
        // The one ahead keeps the step before.
        assert_eq!(next_wanted(0, &[7, 6], 2), Some(6));
        assert_eq!(next_wanted(5, &[7], 2), Some(6));
        // It is at 7 and on its way to 8, so it keeps 7; the other one still had 6.
        assert_eq!(next_wanted(6, &[7], 2), Some(7));
        assert_eq!(next_wanted(0, &[1], 2), Some(1));
    }
}
