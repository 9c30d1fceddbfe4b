//! The placement of a model's blocks, and of the ranges of its tables, on pserver slots.
//!
//! A [`PlacementRecord`] is committed with every generation and every checkpoint. [`Placement::of`] is the
//! only function that computes which blocks and ranges lie on which slot from it, and every process computes the
//! same.

use std::cmp::Reverse;
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
}

impl Default for PlacementRecord {
    fn default() -> Self {
        Self::LargestFirst { slots: 0 }
    }
}

impl PlacementRecord {
    pub fn slots(&self) -> u32 {
        match self {
            Self::LargestFirst { slots } => *slots,
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
            PlacementRecord::LargestFirst { slots } => Self {
                by_slot: Self::largest_first(layout, *slots),
                range_slots: (*slots).min(RANGES),
            },
        }
    }

    fn largest_first(layout: &Layout, slots: u32) -> Vec<Vec<u32>> {
        let blocks = layout.blocks();
        let mut by_size: Vec<u32> = (0..blocks.len() as u32).collect();
        by_size.sort_by_key(|number| Reverse(blocks[*number as usize].len));
        // A block is placed on an empty slot while there is one, so that slots beyond the number of blocks
        // stay empty. The number of slots may be forged; that of blocks is not.
        let slots = blocks.len().min(slots as usize);
        let (mut by_slot, mut load) = (vec![Vec::new(); slots], vec![0_usize; slots]);
        for number in by_size {
            let Some(slot) = (0..slots).min_by_key(|slot| load[*slot]) else { break };
            load[slot] += blocks[number as usize].len;
            by_slot[slot].push(number);
        }
        by_slot.iter_mut().for_each(|numbers| numbers.sort_unstable());
        by_slot
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
        let record = PlacementRecord::LargestFirst { slots: 3 };
        let text = r#"{"rule":"largest_first","slots":3}"#;
        assert_eq!(serde_json::to_string(&record).unwrap(), text);
        assert_eq!(serde_json::from_str::<PlacementRecord>(text).unwrap(), record);
        let other = text.replace("largest_first", "by_hash");
        assert!(serde_json::from_str::<PlacementRecord>(&other).is_err());
    }
}
