//! The records that the workers of a node use in a round, in a job whose order is dynamic.
//!
//! Each worker has a list, to which records are added at its end when they are asked for. A place in it is read as often
//! as it is asked for, so that the processes of a loader may read ahead, each its own part, and ask again after an answer
//! was lost. What a state has used is the front of the list up to a place.

use std::collections::BTreeMap;
use std::ops::Range;

use steadfast_common::records::ranges::Ranges;
use steadfast_elastic_client::{DealtRecords, RecordsWish};

/// The part of what the workers have not used yet that is asked for at once, so that shares grow with what they use.
const SHARES: u64 = 8;

/// The lists of a node in one round.
#[derive(Debug, Default)]
pub(crate) struct RecordLists {
    /// Counts the records that the node was given.
    total: u64,
    /// Holds those that are in no list yet.
    unlisted: Ranges,
    lists: BTreeMap<u32, List>,
    /// Whether no more are left to deal.
    is_end: bool,
    wish: Option<RecordsWish>,
}

/// The records of one worker, without those at its front that a commit has seen.
#[derive(Debug, Default)]
struct List {
    /// The place of the first one.
    start: u64,
    ranges: Vec<Range<u64>>,
}

/// A process of a worker asks for this part of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fetch {
    pub place: u64,
    pub wanted: u64,
    pub least: u64,
    pub end: u64,
}

/// Some records, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fetched {
    pub ranges: Vec<Range<u64>>,
    /// Whether the list ends behind them.
    pub is_end: bool,
}

impl List {
    fn end(&self) -> u64 {
        self.start + self.ranges.iter().map(|range| range.end - range.start).sum::<u64>()
    }

    /// Returns the records between two places, as far as there are some.
    fn between(&self, places: Range<u64>) -> Vec<Range<u64>> {
        let (mut at, mut found) = (self.start, Vec::new());
        for range in &self.ranges {
            let here = at..at + (range.end - range.start);
            let (from, to) = (places.start.max(here.start), places.end.min(here.end));
            if from < to {
                found.push(range.start + (from - here.start)..range.start + (to - here.start));
            }
            at = here.end;
        }
        found
    }

    fn append(&mut self, ranges: &Ranges) {
        for range in ranges.iter() {
            match self.ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                Some(_) | None => self.ranges.push(range.clone()),
            }
        }
    }
}

impl RecordLists {
    /// Returns records of a worker from a place of its list on: at least so many as it needs, or all that are left. If
    /// there are too few, `None`: they will be asked for.
    pub fn fetch(&mut self, local_rank: u32, fetch: Fetch) -> Option<Fetched> {
        let list = self.lists.entry(local_rank).or_default();
        let (least, wanted) = (fetch.least.max(1), fetch.wanted.max(fetch.least).max(1));
        let (least, wanted) =
            (fetch.place.saturating_add(least), fetch.place.saturating_add(wanted));
        let missing = wanted.saturating_sub(list.end());
        list.append(&self.unlisted.take_first(missing));
        let end = list.end();
        if end < least && !self.is_end {
            self.wish_for(wanted - end, &fetch);
            return None;
        }
        let ranges = list.between(fetch.place..wanted);
        Some(Fetched { ranges, is_end: self.is_end && end <= wanted })
    }

    /// Wishes for what this and all other workers need.
    fn wish_for(&mut self, missing: u64, fetch: &Fetch) {
        let held = self.lists.values().map(|list| list.end() - list.start).sum::<u64>();
        let (wanted, least, end) = (missing.max(held / SHARES), fetch.least.max(1), fetch.end);
        let own = RecordsWish { wanted, least, end };
        let other = self.wish.unwrap_or(own);
        let (wanted, least) = (own.wanted.max(other.wanted), own.least.max(other.least));
        self.wish = Some(RecordsWish { wanted, least, end });
    }

    /// Returns what the node asks for, and how many records it was given so far; `None` if it has enough.
    pub fn wish(&self) -> Option<(u64, RecordsWish)> {
        self.wish.map(|wish| (self.total, wish))
    }

    /// Adds what the node was given.
    pub fn add(&mut self, dealt: &DealtRecords) {
        let mut new = dealt.ranges.clone();
        self.lists.values().flat_map(|list| &list.ranges).for_each(|it| new.remove(it.clone()));
        self.unlisted.add_all(&new);
        (self.total, self.is_end) = (dealt.total, dealt.is_end);
        self.wish = None;
    }

    /// Returns the records that states have used which have come to these places, by local rank, since the last commit.
    pub fn used(&self, places: &BTreeMap<u32, u64>) -> Ranges {
        let used = self.lists.iter().flat_map(|(local_rank, list)| {
            let place = places.get(local_rank).copied().unwrap_or_default();
            list.between(list.start..place)
        });
        used.collect()
    }

    /// Forgets what a commit has seen: the states of which have come to these places.
    pub fn settle(&mut self, places: &BTreeMap<u32, u64>) {
        for (local_rank, list) in &mut self.lists {
            let place = places.get(local_rank).copied().unwrap_or_default();
            let place = place.clamp(list.start, list.end());
            *list = List { ranges: list.between(place..u64::MAX), start: place };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FETCH: Fetch = Fetch { place: 0, wanted: 4, least: 2, end: 0 };

    fn dealt(total: u64, ranges: &[(u64, u64)], is_end: bool) -> DealtRecords {
        DealtRecords { total, ranges: Ranges::try_from(ranges.to_vec()).unwrap(), is_end }
    }

    fn fetched(pairs: &[(u64, u64)], is_end: bool) -> Option<Fetched> {
        let ranges = pairs.iter().map(|(start, end)| *start..*end).collect();
        Some(Fetched { ranges, is_end })
    }

    fn at(place: u64) -> Fetch {
        Fetch { place, ..FETCH }
    }

    /// S002-2: processes that read ahead, and calls that are repeated, find the same records at a place.
    #[test]
    fn a_place_of_a_list_is_read_again() {
        let mut lists = RecordLists::default();
        assert_eq!(lists.fetch(0, FETCH), None);
        assert_eq!(lists.wish(), Some((0, RecordsWish { wanted: 4, least: 2, end: 0 })));
        lists.add(&dealt(8, &[(0, 2), (6, 12)], false));
        assert_eq!(lists.wish(), None);
        let first = fetched(&[(0, 2), (6, 8)], false);
        assert_eq!(lists.fetch(0, FETCH), first);
        assert_eq!(lists.fetch(1, FETCH), fetched(&[(8, 12)], false));
        assert_eq!(lists.fetch(0, FETCH), first);
        assert_eq!(lists.fetch(0, at(4)), None);
        // The second worker's records are not the first one's.
        lists.add(&dealt(11, &[(0, 2), (6, 12), (20, 23)], false));
        assert_eq!(lists.fetch(0, at(3)), fetched(&[(7, 8), (20, 23)], false));
    }

    /// S002-3: what a state has used is the front of each list.
    #[test]
    fn a_commit_has_used_the_fronts_of_the_lists() {
        let mut lists = RecordLists::default();
        lists.add(&dealt(8, &[(0, 8)], false));
        (0..2).for_each(|local_rank| drop(lists.fetch(local_rank, FETCH)));
        let places = BTreeMap::from([(0, 3), (1, 1)]);
        assert_eq!(lists.used(&places), Ranges::try_from(vec![(0, 3), (4, 5)]).unwrap());
        lists.settle(&places);
        assert_eq!(lists.used(&places), Ranges::default());
        let one = Fetch { wanted: 1, least: 1, ..at(3) };
        assert_eq!(lists.fetch(0, one), fetched(&[(3, 4)], false));
        let later = BTreeMap::from([(0, 4), (1, 4)]);
        assert_eq!(lists.used(&later), Ranges::try_from(vec![(3, 4), (5, 8)]).unwrap());
        // An answer that still lists what the commit has seen adds nothing.
        lists.add(&dealt(8, &[(3, 4), (5, 8)], true));
        assert_eq!(lists.fetch(0, at(4)), fetched(&[], true));
    }

    #[test]
    fn at_the_end_there_are_fewer_records_than_a_worker_needs() {
        let mut lists = RecordLists::default();
        lists.add(&dealt(3, &[(5, 8)], true));
        assert_eq!(lists.fetch(0, FETCH), fetched(&[(5, 8)], true));
        assert_eq!(lists.fetch(1, FETCH), fetched(&[], true));
        let more_than_wanted = Fetch { wanted: 1, least: 9, ..FETCH };
        assert_eq!(lists.fetch(0, more_than_wanted), fetched(&[(5, 8)], true));
        assert_eq!(lists.wish(), None);
    }
}
