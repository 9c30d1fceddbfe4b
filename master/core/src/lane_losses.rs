//! Lanes that lose several trainers at the same step. A record that crashes the trainer causes this
//! pattern, because each trainer that computes the record next is lost as well.

use std::collections::BTreeMap;

use steadfast_common::ids::{Lane, Version};

/// Losses at one lane from which it is reported; a single loss can have any cause.
const LOSSES_MIN: u32 = 2;

/// How many trainers each lane has lost at the present version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneLosses {
    version: Version,
    of: BTreeMap<Lane, u32>,
}

impl LaneLosses {
    /// Records the loss of a trainer that had `lanes` when training was at `version`.
    pub fn note(&mut self, version: Version, lanes: &[Lane]) {
        if self.version != version {
            *self = Self { version, of: BTreeMap::new() };
        }
        for lane in lanes {
            *self.of.entry(*lane).or_default() += 1;
        }
    }

    /// Returns the lanes that lost several trainers, and how many, if training is still at `version`.
    pub fn suspects(&self, version: Version) -> Vec<(Lane, u32)> {
        if self.version != version {
            return Vec::new();
        }
        let several = self.of.iter().filter(|(_, losses)| LOSSES_MIN <= **losses);
        several.map(|(lane, it)| (*lane, *it)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// F9
    #[test]
    fn a_lane_that_loses_a_second_trainer_at_the_same_step_is_a_suspect() {
        let mut losses = LaneLosses::default();
        losses.note(Version(7), &[Lane(0), Lane(1)]);
        assert_eq!(losses.suspects(Version(7)), []);
        losses.note(Version(7), &[Lane(1), Lane(2)]);
        assert_eq!(losses.suspects(Version(7)), [(Lane(1), 2)]);
        losses.note(Version(7), &[Lane(0)]);
        assert_eq!(losses.suspects(Version(7)), [(Lane(0), 2), (Lane(1), 2)]);
    }

    #[test]
    fn a_step_that_is_done_clears_all_suspicion() {
        let mut losses = LaneLosses::default();
        losses.note(Version(7), &[Lane(0)]);
        losses.note(Version(7), &[Lane(0)]);
        assert_eq!(losses.suspects(Version(8)), []);
        losses.note(Version(8), &[Lane(0)]);
        assert_eq!(losses.suspects(Version(8)), []);
    }
}
