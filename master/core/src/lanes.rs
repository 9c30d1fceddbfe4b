//! Assignment of lanes to trainers.
//!
//! Assignments are hints: two trainers that compute the same lane push the same bits under the same
//! name. They are therefore kept in memory only, and a new master makes new ones.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};

use steadfast_common::ids::{Lane, TrainerId};

/// The current owners of all lanes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lanes {
    owners: Vec<Option<TrainerId>>,
    /// Raised whenever an owner changes.
    number: u64,
}

impl Lanes {
    /// Creates `count` lanes without owners. `number` is the first assignment number; a new master uses
    /// one that no former master can have reached.
    pub fn new(count: u32, number: u64) -> Self {
        Self { owners: vec![None; count as usize], number }
    }

    /// Returns the number of the current assignment, which rises whenever an owner changes.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the lanes of one trainer, in ascending order.
    pub fn of(&self, trainer: TrainerId) -> Vec<Lane> {
        let owned = self.owners.iter().enumerate().filter(|(_, owner)| **owner == Some(trainer));
        owned.map(|(lane, _)| Lane(lane as u32)).collect()
    }

    /// Assigns all lanes anew, adjacent lanes to the same trainer: that trainer adds them up and sends one sum. The
    /// caller calls this when the pass changes, because lanes then have no data that another trainer would have to load
    /// again. (A new master learns the pass in the middle of one, once.)
    pub fn assign(&mut self, live: &BTreeSet<TrainerId>) {
        let trainers: Vec<TrainerId> = live.iter().copied().collect();
        let count = self.owners.len();
        let owner_of = |lane: usize| trainers.get(lane * trainers.len() / count).copied();
        self.set_owners((0..count).map(owner_of).collect());
    }

    /// Spreads the lanes over `live`. The numbers of lanes of two trainers differ by at most one, and as
    /// few lanes as possible move.
    pub fn rebalance(&mut self, live: &BTreeSet<TrainerId>) {
        let before = self.owners.clone();
        for owner in &mut self.owners {
            *owner = owner.filter(|trainer| live.contains(trainer));
        }
        self.release_surplus(live);
        self.assign_free(live);
        let owners = std::mem::replace(&mut self.owners, before);
        self.set_owners(owners);
    }

    fn set_owners(&mut self, owners: Vec<Option<TrainerId>>) {
        if self.owners != owners {
            self.owners = owners;
            self.number += 1;
        }
    }

    /// Moves `lane` from a trainer that cannot compute it now to the next one of `live`. A trainer that
    /// cannot compute any lane thus has none until the next rebalancing. Returns whether another trainer
    /// has the lane now.
    pub fn move_to_next(
        &mut self,
        lane: Lane,
        from: TrainerId,
        live: &BTreeSet<TrainerId>,
    ) -> bool {
        let lane = lane.0 as usize;
        let Some(Some(owner)) = self.owners.get(lane).copied() else { return false };
        if owner != from {
            return true;
        }
        let next = live.range((Excluded(from), Unbounded)).next().or(live.first());
        let Some(to) = next.copied().filter(|it| *it != from) else { return false };
        self.owners[lane] = Some(to);
        self.number += 1;
        true
    }

    fn load(&self, live: &BTreeSet<TrainerId>) -> BTreeMap<TrainerId, usize> {
        let mut load: BTreeMap<TrainerId, usize> = live.iter().map(|it| (*it, 0)).collect();
        for owner in self.owners.iter().flatten() {
            *load.entry(*owner).or_default() += 1;
        }
        load
    }

    /// Takes lanes from trainers that hold more than their share. If the lanes do not divide evenly, the
    /// trainers with the most lanes keep one more.
    fn release_surplus(&mut self, live: &BTreeSet<TrainerId>) {
        if live.is_empty() {
            return;
        }
        let share = self.owners.len() / live.len();
        let mut extra = self.owners.len() % live.len();
        let mut by_load: Vec<(TrainerId, usize)> = self.load(live).into_iter().collect();
        by_load.sort_by_key(|(_, load)| std::cmp::Reverse(*load));
        for (trainer, load) in by_load {
            let allowed = if share < load && 0 < extra {
                extra -= 1;
                share + 1
            } else {
                share
            };
            let surplus = load.saturating_sub(allowed);
            let owned = self.owners.iter_mut().rev().filter(|owner| **owner == Some(trainer));
            owned.take(surplus).for_each(|owner| *owner = None);
        }
    }

    fn assign_free(&mut self, live: &BTreeSet<TrainerId>) {
        let mut load: BTreeSet<(usize, TrainerId)> =
            self.load(live).into_iter().map(|(trainer, load)| (load, trainer)).collect();
        for owner in self.owners.iter_mut().filter(|owner| owner.is_none()) {
            let Some((held, trainer)) = load.pop_first() else { return };
            *owner = Some(trainer);
            load.insert((held + 1, trainer));
        }
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    fn trainers(ids: &[u128]) -> BTreeSet<TrainerId> {
        ids.iter().map(|id| TrainerId(Uuid::from_u128(*id))).collect()
    }

    /// S004-34: every lane has an owner while a trainer lives; the numbers of lanes of two trainers differ
    /// by at most one; a lane of a trainer that stays moves only for balance.
    #[test]
    fn lanes_are_balanced_and_sticky_through_any_sequence_of_members() {
        let mut lanes = Lanes::new(8, 0);
        let crowds: [&[u128]; 7] =
            [&[1], &[1, 2], &[1, 2, 3], &[2, 3], &[], &[4, 5, 6, 7, 8, 9, 10, 11, 12], &[4]];
        for crowd in crowds {
            let live = trainers(crowd);
            let before = lanes.clone();
            lanes.rebalance(&live);
            let loads: Vec<usize> = live.iter().map(|it| lanes.of(*it).len()).collect();
            if !live.is_empty() {
                assert_eq!(loads.iter().sum::<usize>(), 8);
                let spread = loads.iter().max().unwrap() - loads.iter().min().unwrap();
                assert!(spread <= 1, "{loads:?}");
            }
            let again = lanes.clone();
            lanes.rebalance(&live);
            assert_eq!(lanes, again, "rebalancing twice changed the owners");
            assert_eq!(lanes.number() != before.number(), lanes.owners != before.owners);
        }
    }

    /// S004-10: a trainer that cannot compute a lane does not keep it from trainers that can.
    #[test]
    fn a_lane_that_is_moved_on_reaches_every_trainer() {
        let live = trainers(&[1, 2, 3]);
        let mut lanes = Lanes::new(8, 0);
        lanes.rebalance(&live);
        let lane = Lane(4);
        let mut met = BTreeSet::new();
        for _ in 0..3 {
            let from = lanes.owners[4].unwrap();
            met.insert(from);
            let number = lanes.number();
            assert!(lanes.move_to_next(lane, from, &live));
            assert_eq!(lanes.number(), number + 1);
            assert!(lanes.move_to_next(lane, from, &live), "another trainer has it");
            assert_eq!(lanes.number(), number + 1);
        }
        assert_eq!(met, live);
    }

    #[test]
    fn a_lane_stays_with_the_only_trainer() {
        let live = trainers(&[1]);
        let mut lanes = Lanes::new(2, 0);
        lanes.rebalance(&live);
        let only = *live.first().unwrap();
        assert!(!lanes.move_to_next(Lane(0), only, &live));
        assert!(!lanes.move_to_next(Lane(9), only, &live), "there is no such lane");
        assert_eq!(lanes.of(only).len(), 2);
    }

    /// S004-34: each trainer gets adjacent lanes, and the numbers of lanes of two trainers differ by at
    /// most one.
    #[test]
    fn each_trainer_is_assigned_adjacent_lanes() {
        for crowd in 0..=10_u128 {
            let live = trainers(&Vec::from_iter(1..=crowd));
            let mut lanes = Lanes::new(8, 0);
            lanes.assign(&live);
            let loads: Vec<usize> = live.iter().map(|it| lanes.of(*it).len()).collect();
            assert_eq!(loads.iter().sum::<usize>(), if live.is_empty() { 0 } else { 8 });
            let most = loads.iter().max().copied().unwrap_or_default();
            assert!(loads.iter().all(|load| most <= load + 1), "{loads:?}");
            let runs = 1 + lanes.owners.windows(2).filter(|it| it[0] != it[1]).count();
            assert!(runs <= live.len().max(1), "{:?}", lanes.owners);
            let assigned = lanes.clone();
            lanes.rebalance(&live);
            lanes.assign(&live);
            assert_eq!(lanes, assigned, "a balanced assignment changed");
        }
    }

    #[test]
    fn a_joiner_takes_only_its_share() {
        let mut lanes = Lanes::new(6, 0);
        lanes.rebalance(&trainers(&[1, 2]));
        let before = lanes.owners.clone();
        lanes.rebalance(&trainers(&[1, 2, 3]));
        let moved = lanes.owners.iter().zip(&before).filter(|(now, then)| now != then).count();
        assert_eq!(moved, 2);
    }
}
