//! Contributions whose blocks come one by one, and of which some are cut off.

use proptest::prelude::*;
use steadfast_common::ids::{Lane, Version};
use steadfast_common::spec::Mode;
use steadfast_pserver_core::contribution::{
    Contributed, Contribution, LaneEnd, LaneShare, Refusal,
};

use crate::shard::{LANES, bits, contribution, shard, share, train};

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// I6, I7: blocks come one by one, of pushes that are cut off and of those that are not, in any
    /// order; what they make is the same, and shows only when the step is complete.
    #[test]
    fn blocks_may_come_one_by_one_and_pushes_be_cut_off(
        order in Just((0..LANES).flat_map(|lane| (0..5).map(move |part| (lane, part))).collect())
            .prop_shuffle(),
    ) {
        let order: Vec<(u32, usize)> = order;
        let mut shard = shard(Mode::Sync);
        let before = bits(&shard);
        let blocks = shard.blocks().len();
        for (lane, part) in order {
            let given = contribution(&shard, lane, 0);
            let share = [share(&given, LaneEnd::MoreToCome)];
            if part < blocks {
                let one = vec![given.blocks[part].clone()];
                shard.take_part(Version(0), Lane(lane), &share, one).unwrap();
            } else {
                // The last push of the lane is whole, whatever came of it before.
                shard.contribute(Version(0), Lane(lane), &share, given).unwrap();
            }
            if shard.has_early() && !shard.is_under_way() {
                prop_assert!(bits(&shard) == before);
            }
            shard.apply_early();
            prop_assert_eq!(shard.position().version, Version(0));
        }
        prop_assert!(shard.is_step_complete());
        shard.finish_step(None);
        prop_assert!(bits(&shard) == train(&[vec![0, 1, 2, 3]]));
        prop_assert_eq!(shard.position().examples, 3 + 4 + 5 + 6);
    }
}

/// I6: blocks of which some count one way and others another would make a step that nobody computed.
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
    // In as a whole, it is no news whatever is said of it.
    shard.contribute(Version(0), Lane(1), &[said], given).unwrap();
    let other = LaneShare { records: said.records + 1, ..said };
    assert_eq!(shard.take_part(Version(0), Lane(1), &[other], part), Ok(()));
}
