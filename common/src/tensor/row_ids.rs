//! Ids of rows, without their values.

use std::ops::Range;

use crate::tensor::table::{RowsError, decode_ids, range_of};

/// Ids of rows of one table, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowIds(Vec<u64>);

impl RowIds {
    /// Wraps ids.
    ///
    /// # Panics
    /// If the ids do not ascend.
    pub fn new(ids: Vec<u64>) -> Self {
        assert!(ids.is_sorted_by(|left, right| left < right), "ids ascend");
        Self(ids)
    }

    /// Sorts ids, and drops repeated ones.
    pub fn distinct(mut ids: Vec<u64>) -> Self {
        ids.sort_unstable();
        ids.dedup();
        Self(ids)
    }

    /// Reads ids that belong to `ranges` from bytes as [`encode_ids`](crate::tensor::table::encode_ids) writes them.
    ///
    /// # Errors
    /// If the bytes are not whole ids, the ids do not ascend, or one belongs to another range.
    pub fn decode(ranges: &Range<u32>, bytes: &[u8]) -> Result<Self, RowsError> {
        decode_ids(ranges, bytes).map(Self)
    }

    pub fn as_slice(&self) -> &[u64] {
        &self.0
    }

    pub fn into_vec(self) -> Vec<u64> {
        self.0
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends ids behind all others.
    ///
    /// # Errors
    /// If they do not follow the last one.
    pub fn append(&mut self, mut other: Self) -> Result<(), RowsError> {
        if let (Some(before), Some(id)) = (self.0.last(), other.0.first())
            && id <= before
        {
            return Err(RowsError::Order { before: *before, id: *id });
        }
        self.0.append(&mut other.0);
        Ok(())
    }

    /// Divides the ids among parts; `part_of` says to which part, below `parts`, the ids of a range belong.
    pub fn divided(&self, parts: usize, part_of: impl Fn(u32) -> usize) -> Vec<Self> {
        let mut divided = vec![Self::default(); parts];
        self.0.iter().for_each(|id| divided[part_of(range_of(*id))].0.push(*id));
        divided
    }

    /// Divides the ids into groups of `len`, the last of which may be smaller.
    pub fn chunks(&self, len: usize) -> impl Iterator<Item = Self> {
        self.0.chunks(len).map(|ids| Self(ids.to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::table::{RANGES, encode_ids};

    #[test]
    fn ids_ascend_however_they_were_put_together() {
        let mut ids = RowIds::distinct(vec![9, 3, 9, 5]);
        assert_eq!(ids, RowIds::new(vec![3, 5, 9]));
        assert_eq!(ids.append(RowIds::new(vec![9])), Err(RowsError::Order { before: 9, id: 9 }));
        assert_eq!(ids.append(RowIds::new(vec![10, 12])), Ok(()));
        assert_eq!(ids.as_slice(), [3, 5, 9, 10, 12]);
        assert_eq!(RowIds::decode(&(0..RANGES), &encode_ids(ids.as_slice())).as_ref(), Ok(&ids));
    }

    #[test]
    fn every_id_is_in_one_part() {
        let ids = RowIds::new((0..1000).collect());
        let parts = ids.divided(3, |range| (range % 3) as usize);
        assert!(parts.iter().all(|part| !part.is_empty()));
        let joined = parts.into_iter().flat_map(RowIds::into_vec).collect();
        assert_eq!(RowIds::distinct(joined), ids);
        assert_eq!(
            ids.chunks(300).map(|part| part.len()).collect::<Vec<_>>(),
            [300, 300, 300, 100]
        );
    }
}
