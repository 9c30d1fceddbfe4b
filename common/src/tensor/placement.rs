//! The placement of a model's blocks, and of the ranges of its tables, on pserver slots.
//!
//! A [`PlacementRecord`] is committed with every generation and every checkpoint. [`Placement::of`] is the
//! only function that computes which blocks and ranges lie on which slot from it, and every process computes the
//! same.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::ids::Slot;
use crate::tensor::layout::Layout;
use crate::tensor::table::RANGES;

/// `placement` of a generation and of a checkpoint: the rule that places blocks on slots, with its arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "rule")]
pub enum PlacementRecord {
    /// Every block on one slot: blocks by size, the largest first, on the slot with the fewest values so far
    /// (longest-processing-time list scheduling, Graham 1969), ties to the lowest slot. Of every table, each slot
    /// has the same number of consecutive ranges, or one more or less.
    LargestFirst { slots: u32 },
    /// As `LargestFirst`, but with all blocks of a parameter on one slot, for update rules that need them together.
    WholeParameters { slots: u32 },
}

impl Default for PlacementRecord {
    fn default() -> Self {
        Self::LargestFirst { slots: 0 }
    }
}

impl PlacementRecord {
    pub fn slots(&self) -> u32 {
        match self {
            Self::LargestFirst { slots } | Self::WholeParameters { slots } => *slots,
        }
    }
}

/// The blocks and the ranges of every slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    by_slot: Vec<Vec<u32>>,
    /// Slots that the ranges of a table are spread over.
    range_slots: u32,
}

impl Placement {
    /// Computes the placement of the blocks of `layout`, and of the ranges of its tables, by the rule of `record`.
    pub fn of(layout: &Layout, record: &PlacementRecord) -> Self {
        match record {
            PlacementRecord::LargestFirst { slots } => {
                let blocks = 0..layout.blocks().len() as u32;
                Self::largest_first(layout, blocks.map(|number| vec![number]).collect(), *slots)
            }
            PlacementRecord::WholeParameters { slots } => {
                let mut by_param: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
                for (number, block) in (0..).zip(layout.blocks()) {
                    by_param.entry(block.param).or_default().push(number);
                }
                Self::largest_first(layout, by_param.into_values().collect(), *slots)
            }
        }
    }

    /// Places groups of blocks, each of which stays together.
    fn largest_first(layout: &Layout, mut groups: Vec<Vec<u32>>, slots: u32) -> Self {
        let blocks = layout.blocks();
        let len = |group: &[u32]| -> usize {
            group.iter().map(|number| blocks[*number as usize].len).sum()
        };
        groups.sort_by_key(|group| Reverse(len(group)));
        // A group is placed on an empty slot while there is one, so that slots beyond the number of groups
        // stay empty. The number of slots may be forged; that of blocks is not.
        let used = groups.len().min(slots as usize);
        let (mut by_slot, mut load) = (vec![Vec::new(); used], vec![0_usize; used]);
        for group in groups {
            let Some(slot) = (0..used).min_by_key(|slot| load[*slot]) else { break };
            load[slot] += len(&group);
            by_slot[slot].extend(group);
        }
        by_slot.iter_mut().for_each(|numbers| numbers.sort_unstable());
        Self { by_slot, range_slots: slots.min(RANGES) }
    }

    /// Returns the numbers of the blocks of a slot, ascending; empty for a slot without blocks.
    pub fn blocks_of(&self, slot: Slot) -> &[u32] {
        self.by_slot.get(slot.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Returns the ranges that lie on a slot, which are the same for every table.
    pub fn ranges_of(&self, slot: Slot) -> Range<u32> {
        let first = |slot: u32| slot.min(self.range_slots) * RANGES / self.range_slots.max(1);
        first(slot.0)..first(slot.0.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::layout::{BLOCK_LEN_MAX, ParamSpec};

    fn layout() -> Layout {
        Layout::new(vec![
            ParamSpec::new("large", &[3, BLOCK_LEN_MAX]),
            ParamSpec::new("small", &[10]),
            ParamSpec::new("empty", &[0, 5]),
            ParamSpec::new("scalar", &[]),
        ])
    }

    fn place(layout: &Layout, slots: u32) -> Vec<Vec<u32>> {
        let placement = Placement::of(layout, &PlacementRecord::LargestFirst { slots });
        (0..slots).map(|slot| placement.blocks_of(Slot(slot)).to_vec()).collect()
    }

    /// S004-47: each block has one slot for any number of slots; with more slots than blocks, some slots
    /// are empty.
    #[test]
    fn every_block_is_placed_once_for_any_number_of_slots() {
        for slots in 1..=9 {
            let mut all: Vec<u32> = place(&layout(), slots).concat();
            all.sort_unstable();
            assert_eq!(all, (0..layout().blocks().len() as u32).collect::<Vec<_>>());
        }
        assert_eq!(
            place(&layout(), 7),
            [vec![0], vec![1], vec![2], vec![3], vec![4], vec![], vec![]]
        );
    }

    /// S004-47: rules that use the norm of a parameter find all its blocks on one slot.
    #[test]
    fn whole_parameters_stay_on_one_slot() {
        let layout = layout();
        for slots in 1..=9 {
            let placement = Placement::of(&layout, &PlacementRecord::WholeParameters { slots });
            let of_slots: Vec<&[u32]> =
                (0..slots).map(|it| placement.blocks_of(Slot(it))).collect();
            let mut all = of_slots.concat();
            all.sort_unstable();
            assert_eq!(all, (0..layout.blocks().len() as u32).collect::<Vec<_>>());
            for param in 0..4 {
                let has = |blocks: &&&[u32]| {
                    blocks.iter().any(|it| layout.blocks()[*it as usize].param == param)
                };
                assert!(of_slots.iter().filter(has).count() <= 1);
            }
        }
    }

    #[test]
    fn every_range_is_placed_once_for_any_number_of_slots() {
        for slots in [1, 2, 3, 7, 128, 129, 1000] {
            let placement = Placement::of(&layout(), &PlacementRecord::LargestFirst { slots });
            let of_slots: Vec<_> = (0..slots).map(|it| placement.ranges_of(Slot(it))).collect();
            let all: Vec<u32> = of_slots.iter().cloned().flatten().collect();
            assert_eq!(all, (0..RANGES).collect::<Vec<_>>());
            let most = of_slots.iter().map(|it| it.len()).max().unwrap();
            assert!(most <= (RANGES.div_ceil(slots)) as usize);
        }
        let none = Placement::of(&layout(), &PlacementRecord::default());
        assert!(none.ranges_of(Slot(0)).is_empty());
    }

    /// D13: large parameters are split, so that no slot holds more than one block over its share.
    #[test]
    fn slots_hold_nearly_the_same_number_of_bytes() {
        let layout = layout();
        for slots in 1..=3 {
            for blocks in place(&layout, slots) {
                let held: usize = blocks.iter().map(|it| layout.blocks()[*it as usize].len).sum();
                assert!(held <= layout.len().div_ceil(slots as usize) + BLOCK_LEN_MAX);
            }
        }
    }

    /// S004-47: a record of an unknown rule is refused, not read as another one.
    #[test]
    fn a_record_names_its_rule() {
        for (record, text) in [
            (PlacementRecord::LargestFirst { slots: 3 }, r#"{"rule":"largest_first","slots":3}"#),
            (
                PlacementRecord::WholeParameters { slots: 3 },
                r#"{"rule":"whole_parameters","slots":3}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&record).unwrap(), text);
            assert_eq!(serde_json::from_str::<PlacementRecord>(text).unwrap(), record);
        }
        let other = r#"{"rule":"by_hash","slots":3}"#;
        assert!(serde_json::from_str::<PlacementRecord>(other).is_err());
    }
}
