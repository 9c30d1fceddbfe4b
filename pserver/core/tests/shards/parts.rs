//! Contributions whose blocks arrive one by one, some of them cut off.

use proptest::prelude::*;
use steadfast_common::ids::{Lane, Version};
use steadfast_common::records::contribution::{LaneEnd, LaneShare};
use steadfast_pserver_core::contribution::{Contributed, Contribution, Refusal};

use crate::shard::{LANES, contribution, shard, share, state, train};

/// Runs a step in which each lane's blocks arrive one by one (the parts below the number of blocks),
/// followed by two complete pushes, in the given order of lanes and parts.
fn step(order: &[(u32, usize)]) {
    let mut shard = shard();
    let (before, blocks) = (state(&mut shard), shard.blocks().list().len());
    for (lane, part) in order {
        let given = contribution(shard.blocks(), *lane, 0);
        let share = [share(&given, LaneEnd::MoreToCome)];
        if *part < blocks {
            let one = vec![given.blocks[*part].clone()];
            shard.add_blocks(Version(0), Lane(*lane), &share, one).unwrap();
        } else {
            // The last push of a lane is complete, regardless of the blocks received before.
            shard.contribute(Version(0), Lane(*lane), &share, given).unwrap();
        }
        assert!(state(&mut shard) == before);
        drop(shard.apply_early());
        assert_eq!(shard.blocks().position().version, Version(0));
    }
    assert!(shard.is_step_complete());
    shard.finish_step(None).unwrap();
    assert!(state(&mut shard) == train(&[vec![0, 1, 2, 3]]));
    assert_eq!(shard.blocks().position().examples, 3 + 4 + 5 + 6);
}

/// Three blocks and two complete pushes.
const PARTS: usize = 5;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// I6, I7: blocks arrive one by one, from cut-off and complete pushes, in any order; the result is the
    /// same and becomes visible only when the step is complete.
    #[test]
    fn blocks_may_arrive_one_by_one_from_interrupted_pushes(
        order in Just((0..LANES).flat_map(|lane| (0..PARTS).map(move |part| (lane, part))).collect())
            .prop_shuffle(),
    ) {
        let order: Vec<(u32, usize)> = order;
        step(&order);
    }
}

/// I6: every block has all lanes, and all of them are sent again.
#[test]
fn repeated_blocks_count_once() {
    let order: Vec<(u32, usize)> =
        (0..PARTS).flat_map(|part| (0..LANES).map(move |lane| (lane, part))).collect();
    step(&order);
}

/// I6: a mix of blocks that reflect different records would be a step that no trainer computed.
#[test]
fn a_conflicting_share_of_a_partly_received_lane_is_refused() {
    let mut shard = shard();
    let given = contribution(shard.blocks(), 1, 0);
    let said = share(&given, LaneEnd::MoreToCome);
    let part = vec![given.blocks[0].clone()];
    shard.add_blocks(Version(0), Lane(1), &[said], part.clone()).unwrap();
    let refused = Err(Refusal::ConflictingShare { lane: Lane(1) });
    for other in [
        LaneShare { records: said.records + 1, ..said },
        LaneShare { checksum: said.checksum + 1, ..said },
    ] {
        let taken = shard.add_blocks(Version(0), Lane(1), &[other], part.clone());
        assert_eq!(taken.map(|()| Contributed::Waiting), refused);
        let of_both = [share(&contribution(shard.blocks(), 0, 0), LaneEnd::MoreToCome), other];
        let taken = shard.add_blocks(Version(0), Lane(0), &of_both, part.clone());
        assert_eq!(taken.map(|()| Contributed::Waiting), refused);
        let given = Contribution {
            records: other.records.into(),
            checksum: other.checksum,
            ..given.clone()
        };
        assert_eq!(shard.contribute(Version(0), Lane(1), &[other], given), refused);
    }
}

/// I6: another slot may lack a lane that this one has received, in this step or the previous one. It would
/// accept the other share, and the two slots would reflect different records.
#[test]
fn a_conflicting_share_of_a_lane_that_another_slot_may_lack_is_refused() {
    let mut shard = shard();
    let refused = |lane| Err(Refusal::ConflictingShare { lane: Lane(lane) });
    for lane in 0..LANES {
        let given = contribution(shard.blocks(), lane, 0);
        let said = share(&given, LaneEnd::MoreToCome);
        shard.contribute(Version(0), Lane(lane), &[said], given.clone()).unwrap();
        let other = LaneShare { records: said.records + 1, ..said };
        assert_eq!(shard.add_blocks(Version(0), Lane(lane), &[other], Vec::new()), refused(lane));
        assert_eq!(shard.add_blocks(Version(0), Lane(lane), &[said], given.blocks), Ok(()));
    }
    shard.finish_step(None).unwrap();
    let said = share(&contribution(shard.blocks(), 1, 0), LaneEnd::MoreToCome);
    let other = LaneShare { checksum: said.checksum + 1, ..said };
    assert_eq!(shard.add_blocks(Version(0), Lane(1), &[other], Vec::new()), refused(1));
    assert_eq!(shard.add_blocks(Version(0), Lane(1), &[said], Vec::new()), Ok(()));
    assert_eq!(shard.blocks().position().version, Version(1));
}
