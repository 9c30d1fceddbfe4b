//! Sets of records by their numbers.
//!
//! The records of all passes form one sequence: record *i* of pass *p* has the number *p · N + i*, if a pass has *N*.

use std::ops::Range;

use rangemap::RangeSet;
use serde::{Deserialize, Serialize};

/// Numbers of records end below this, so that sums of them do not overflow.
pub const NUMBER_MAX: u64 = 1 << 62;

/// A set of numbers. In JSON it is a list of pairs: the first number of a range, and the first one behind it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<(u64, u64)>", into = "Vec<(u64, u64)>")]
pub struct Ranges(RangeSet<u64>);

impl Ranges {
    /// Returns the ranges in ascending order. There is a gap between any two.
    pub fn iter(&self) -> impl Iterator<Item = &Range<u64>> {
        self.0.iter()
    }

    /// Returns how many numbers the set has.
    pub fn count(&self) -> u64 {
        self.iter().map(|range| range.end - range.start).sum()
    }

    /// Returns the lowest range.
    pub fn first(&self) -> Option<Range<u64>> {
        self.0.first().cloned()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the numbers of a range.
    pub fn add(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.0.insert(range);
        }
    }

    /// Adds the numbers of another set.
    pub fn add_all(&mut self, others: &Self) {
        others.iter().for_each(|range| self.0.insert(range.clone()));
    }

    /// Removes the numbers of a range.
    pub fn remove(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.0.remove(range);
        }
    }

    /// Removes the numbers of another set.
    pub fn remove_all(&mut self, others: &Self) {
        others.iter().for_each(|range| self.0.remove(range.clone()));
    }

    /// Returns whether the set has each number of another one.
    pub fn contains_all(&self, others: &Self) -> bool {
        others.iter().all(|range| self.0.gaps(range).next().is_none())
    }

    /// Returns whether the set has a number of another one.
    pub fn overlaps(&self, others: &Self) -> bool {
        others.iter().any(|range| self.0.overlaps(range))
    }

    /// Returns the first `count` numbers of `within` that the set does not have, in at most `parts` ranges; fewer if there
    /// are no more.
    pub fn first_missing(&self, within: Range<u64>, count: u64, parts: usize) -> Self {
        if within.is_empty() {
            return Self::default();
        }
        let mut left = count;
        let gaps = self.0.gaps(&within).take(parts).map_while(|gap| {
            let end = gap.end.min(gap.start.saturating_add(left));
            left -= end - gap.start;
            (gap.start < end).then_some(gap.start..end)
        });
        gaps.collect()
    }

    /// Removes the first `count` numbers and returns them; fewer if there are no more.
    pub fn take_first(&mut self, count: u64) -> Self {
        let (mut taken, mut left) = (Self::default(), count);
        while 0 < left
            && let Some(first) = self.first()
        {
            let end = first.end.min(first.start.saturating_add(left));
            left -= end - first.start;
            self.remove(first.start..end);
            taken.add(first.start..end);
        }
        taken
    }
}

impl From<Ranges> for Vec<(u64, u64)> {
    fn from(ranges: Ranges) -> Self {
        ranges.iter().map(|range| (range.start, range.end)).collect()
    }
}

impl TryFrom<Vec<(u64, u64)>> for Ranges {
    type Error = String;

    fn try_from(pairs: Vec<(u64, u64)>) -> Result<Self, String> {
        let mut ranges = Self::default();
        let mut last = 0;
        for (start, end) in pairs {
            if start < last || end <= start || NUMBER_MAX < end {
                return Err(format!("{start} to {end} is not a range behind {last}"));
            }
            ranges.add(start..end);
            last = end;
        }
        Ok(ranges)
    }
}

impl FromIterator<Range<u64>> for Ranges {
    fn from_iter<T: IntoIterator<Item = Range<u64>>>(ranges: T) -> Self {
        let mut set = Self::default();
        ranges.into_iter().for_each(|range| set.add(range));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(pairs: &[(u64, u64)]) -> Ranges {
        pairs.iter().map(|(start, end)| *start..*end).collect()
    }

    #[test]
    fn neighbors_are_one_range() {
        let ranges = set(&[(0, 3), (5, 6), (3, 5)]);
        assert_eq!((ranges.count(), ranges.iter().count()), (6, 1));
        assert_eq!(serde_json::to_string(&ranges).unwrap(), "[[0,6]]");
    }

    #[test]
    fn what_is_missing_is_found_in_its_order() {
        let ranges = set(&[(2, 4), (7, 8)]);
        assert_eq!(ranges.first_missing(0..10, 4, 9), set(&[(0, 2), (4, 6)]));
        assert_eq!(ranges.first_missing(0..10, 4, 1), set(&[(0, 2)]));
        assert_eq!(ranges.first_missing(3..8, 100, 9), set(&[(4, 7)]));
        assert_eq!(ranges.first_missing(5..5, 1, 9), Ranges::default());
        assert_eq!(ranges.first_missing(8..9, 0, 9), Ranges::default());
    }

    #[test]
    fn numbers_are_taken_from_the_front() {
        let mut ranges = set(&[(2, 4), (7, 20)]);
        assert_eq!(ranges.take_first(3), set(&[(2, 4), (7, 8)]));
        assert_eq!(ranges, set(&[(8, 20)]));
        assert_eq!(ranges.take_first(100).count(), 12);
        assert!(ranges.is_empty());
    }

    #[test]
    fn sets_are_compared_number_by_number() {
        let ranges = set(&[(2, 4), (7, 20)]);
        assert!(
            ranges.contains_all(&set(&[(3, 4), (7, 9)])) && !ranges.contains_all(&set(&[(3, 5)]))
        );
        assert!(ranges.overlaps(&set(&[(0, 3)])) && !ranges.overlaps(&set(&[(0, 2), (4, 7)])));
    }

    /// Q5: a list that is no set is refused, and not repaired.
    #[test]
    fn ranges_that_are_no_set_are_refused() {
        for json in
            ["[[1,1]]", "[[2,1]]", "[[0,2],[1,3]]", "[[5,6],[1,2]]", "[[0,18446744073709551615]]"]
        {
            assert!(serde_json::from_str::<Ranges>(json).is_err(), "{json}");
        }
    }
}
