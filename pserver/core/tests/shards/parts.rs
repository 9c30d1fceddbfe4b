//! Contributions whose blocks arrive one by one, some of them cut off.

use proptest::prelude::*;
use steadfast_common::ids::{Lane, Version};
use steadfast_common::spec::Mode;
use steadfast_pserver_core::contribution::{
    Contributed, Contribution, LaneEnd, LaneShare, Refusal,
};

use crate::shard::{LANES, bits, contribution, shard, share, train};

/// Runs a step in which each lane's blocks arrive one by one (the parts below the number of blocks),
/// followed by two complete pushes, in the given order of lanes and parts.
fn step(order: &[(u32, usize)]) {
    let mut shard = shard(Mode::Sync);
    let (before, blocks) = (bits(&shard), shard.blocks().len());
    for (lane, part) in order {
        let given = contribution(&shard, *lane, 0);
        let share = [share(&given, LaneEnd::MoreToCome)];
        if *part < blocks {
            let one = vec![given.blocks[*part].clone()];
            shard.take_part(Version(0), Lane(*lane), &share, one).unwrap();
        } else {
            // The last push of a lane is complete, regardless of the blocks received before.
            shard.contribute(Version(0), Lane(*lane), &share, given).unwrap();
        }
        assert!(shard.is_under_way() || bits(&shard) == before);
        drop(shard.apply_early());
        assert_eq!(shard.position().version, Version(0));
    }
    assert!(shard.is_step_complete());
    shard.finish_step(None);
    assert!(bits(&shard) == train(&[vec![0, 1, 2, 3]]));
    assert_eq!(shard.position().examples, 3 + 4 + 5 + 6);
}

/// Three blocks and two complete pushes.
const PARTS: usize = 5;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// I6, I7: blocks arrive one by one, from cut-off and complete pushes, in any order; the result is the
    /// same and becomes visible only when the step is complete.
    #[test]
    fn blocks_may_come_one_by_one_and_pushes_be_cut_off(
        order in Just((0..LANES).flat_map(|lane| (0..PARTS).map(move |part| (lane, part))).collect())
            .prop_shuffle(),
    ) {
        let order: Vec<(u32, usize)> = order;
        step(&order);
    }
}

/// I6: every block has all lanes, and all of them are sent again.
#[test]
fn blocks_that_were_applied_and_come_again_count_once() {
    let order: Vec<(u32, usize)> =
        (0..PARTS).flat_map(|part| (0..LANES).map(move |lane| (lane, part))).collect();
    step(&order);
}

/// I6: a mix of blocks that reflect different records would be a step that no trainer computed.
#[test]
fn who_says_something_else_of_a_lane_of_which_blocks_are_in_is_refused() {
    let mut shard = shard(Mode::Sync);
    let given = contribution(&shard, 1, 0);
    let said = share(&given, LaneEnd::MoreToCome);
    let part = vec![given.blocks[0].clone()];
    shard.take_part(Version(0), Lane(1), &[said], part.clone()).unwrap();
    let refused = Err(Refusal::OtherShare { lane: Lane(1) });
    for other in [
        LaneShare { records: said.records + 1, ..said },
        LaneShare { checksum: said.checksum + 1, ..said },
    ] {
        let taken = shard.take_part(Version(0), Lane(1), &[other], part.clone());
        assert_eq!(taken.map(|()| Contributed::Waiting), refused);
        let of_both = [share(&contribution(&shard, 0, 0), LaneEnd::MoreToCome), other];
        let taken = shard.take_part(Version(0), Lane(0), &of_both, part.clone());
        assert_eq!(taken.map(|()| Contributed::Waiting), refused);
        let given =
            Contribution { records: other.records, checksum: other.checksum, ..given.clone() };
        assert_eq!(shard.contribute(Version(0), Lane(1), &[other], given), refused);
    }
}

/// I6: another slot may lack a lane that this one has received, in this step or the previous one. It would
/// accept the other share, and the two slots would reflect different records.
#[test]
fn who_says_something_else_of_a_lane_that_another_slot_may_lack_is_refused() {
    let mut shard = shard(Mode::Sync);
    let refused = |lane| Err(Refusal::OtherShare { lane: Lane(lane) });
    for lane in 0..LANES {
        let given = contribution(&shard, lane, 0);
        let said = share(&given, LaneEnd::MoreToCome);
        shard.contribute(Version(0), Lane(lane), &[said], given.clone()).unwrap();
        let other = LaneShare { records: said.records + 1, ..said };
        assert_eq!(shard.take_part(Version(0), Lane(lane), &[other], Vec::new()), refused(lane));
        assert_eq!(shard.take_part(Version(0), Lane(lane), &[said], given.blocks), Ok(()));
    }
    shard.finish_step(None);
    let said = share(&contribution(&shard, 1, 0), LaneEnd::MoreToCome);
    let other = LaneShare { checksum: said.checksum + 1, ..said };
    assert_eq!(shard.take_part(Version(0), Lane(1), &[other], Vec::new()), refused(1));
    assert_eq!(shard.take_part(Version(0), Lane(1), &[said], Vec::new()), Ok(()));
    assert_eq!(shard.position().version, Version(1));
}
