//! Embedding tables: parameters whose rows are addressed by 64-bit ids.
//!
//! A table has no fixed number of rows. A row that was never updated has its initial values, which are a
//! function of the job's seed, the table and the id, and takes no memory. The ids of a table are divided into
//! [`RANGES`] ranges by [`range_of`]; ranges are placed on slots, as blocks are.

use std::cmp::Ordering;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ids::Pass;
use crate::random::{Purpose, Random};
use crate::tensor::compression::Codec;
use crate::tensor::finite::are_finite;

/// Ranges of each table: the most slots that a table can be spread over.
pub const RANGES: u32 = 128;

/// Bytes of an id on the wire and in files.
pub const ID_BYTES: usize = size_of::<u64>();

/// The longest row, in values.
pub const WIDTH_MAX: usize = 1 << 12;

/// Returns the range of an id. Ids are mixed with the finalizer of SplitMix64 (Steele, Lea and Flood 2014), so
/// that any set of ids is spread evenly.
pub fn range_of(id: u64) -> u32 {
    let mixed = (id ^ (id >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // The highest bits depend on all bits of the id.
    ((mixed ^ (mixed >> 31)) >> (u64::BITS - RANGES.ilog2())) as u32
}

/// Returns whether a row that was last updated in pass `updated` begins again in `pass`, because it had no update for
/// more than `expire_after` passes.
pub fn is_expired(expire_after: Option<u32>, updated: u32, pass: Pass) -> bool {
    expire_after.is_some_and(|after| after < pass.0.saturating_sub(updated))
}

/// SHA-256 of the rows of a range.
pub type RangeDigest = [u8; 32];

/// Sets the values with which rows of a table begin.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Initial {
    Zeros,
    /// Uniform between minus and plus this bound.
    Uniform(f32),
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
}

impl Initial {
    /// Returns whether all rows begin with finite values.
    pub fn is_finite(self) -> bool {
        match self {
            Self::Zeros => true,
            // The largest draw of a normal distribution is below 6 deviations.
            Self::Uniform(most) | Self::Normal(most) => (most * 8.0).is_finite(),
        }
    }

    /// Sets `row` to the initial values of row `id` of the table that is parameter `table`. The values depend on
    /// nothing else.
    pub fn fill(self, seed: u64, table: u32, id: u64, row: &mut [f32]) {
        let random = || Random::keyed(seed, Purpose::Row, table.into(), id, 0);
        match self {
            Self::Zeros => row.fill(0.0),
            Self::Uniform(bound) => {
                let mut random = random();
                row.iter_mut().for_each(|value| *value = bound * (2.0 * random.uniform() - 1.0));
            }
            Self::Normal(deviation) => {
                let mut random = random();
                row.iter_mut().for_each(|value| *value = deviation * random.normal());
            }
        }
    }
}

/// Some rows of one table, by ascending id: values, or gradients with respect to them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    width: usize,
    ids: Vec<u64>,
    /// The values of all rows, `width` for each of `ids`.
    values: Vec<f32>,
}

/// Bytes are not rows of the expected width.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowsError {
    #[error("{found} bytes are not rows of {width} values")]
    Length { found: usize, width: usize },
    #[error("row {id} follows row {before}; ids must ascend")]
    Order { before: u64, id: u64 },
    #[error("row {id} belongs to another slot")]
    Range { id: u64 },
    #[error("row {id} is not finite")]
    NotFinite { id: u64 },
}

impl Rows {
    /// Creates an empty set of rows.
    pub fn new(width: usize) -> Self {
        Self { width, ids: Vec::new(), values: Vec::new() }
    }

    /// Creates rows whose values are all zero.
    ///
    /// # Panics
    /// If the ids do not ascend.
    pub fn zeros(width: usize, ids: Vec<u64>) -> Self {
        let values = vec![0.0; width * ids.len()];
        Self::of(width, ids, values)
    }

    /// Creates rows with these values: `width` for each id, one row after the other.
    ///
    /// # Panics
    /// If the ids do not ascend, or there are not as many values.
    pub fn of(width: usize, ids: Vec<u64>, values: Vec<f32>) -> Self {
        assert!(ids.is_sorted_by(|left, right| left < right), "ids ascend");
        assert_eq!(values.len(), width * ids.len(), "every row has `width` values");
        Self { width, ids, values }
    }

    /// Returns the number of values in each row.
    pub fn width(&self) -> usize {
        self.width
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Returns the ids, ascending.
    pub fn ids(&self) -> &[u64] {
        &self.ids
    }

    /// Returns the values of all rows, one row after the other.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns the values of all rows, one row after the other.
    pub fn into_values(self) -> Vec<f32> {
        self.values
    }

    /// Returns the values of all rows, one row after the other, for changes in place.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Returns the id and the values of each row, by ascending id.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u64, &[f32])> {
        self.ids.iter().enumerate().map(|(place, id)| (*id, self.row(place)))
    }

    /// Returns the id and the values of each row, by ascending id, for changes of the values.
    pub fn iter_mut(&mut self) -> impl ExactSizeIterator<Item = (u64, &mut [f32])> {
        self.ids.iter().copied().zip(self.values.chunks_exact_mut(self.width.max(1)))
    }

    /// Returns the place of a row in the order of ids; `None` if the row is absent.
    pub fn place_of(&self, id: u64) -> Option<usize> {
        self.ids.binary_search(&id).ok()
    }

    /// Returns the row at a place.
    ///
    /// # Panics
    /// If there is no row at that place.
    pub fn row(&self, place: usize) -> &[f32] {
        &self.values[place * self.width..(place + 1) * self.width]
    }

    /// Returns the row at a place, for changes.
    ///
    /// # Panics
    /// If there is no row at that place.
    pub fn row_mut(&mut self, place: usize) -> &mut [f32] {
        &mut self.values[place * self.width..(place + 1) * self.width]
    }

    /// Appends a row behind all others.
    ///
    /// # Panics
    /// If the id does not follow the last one, or the row has another width.
    pub fn push(&mut self, id: u64, row: &[f32]) {
        assert!(self.ids.last().is_none_or(|last| *last < id), "ids ascend");
        assert_eq!(row.len(), self.width, "width of a row");
        self.ids.push(id);
        self.values.extend_from_slice(row);
    }

    /// Returns the rows with these ids, which ascend and are all present.
    ///
    /// # Panics
    /// If a row is absent, or the ids do not ascend.
    pub fn select(&self, ids: Vec<u64>) -> Self {
        let mut values = Vec::with_capacity(self.width * ids.len());
        let mut place = 0;
        for id in &ids {
            // Both ascend, so the search goes on where it stopped.
            place += self.ids[place..].partition_point(|it| it < id);
            assert_eq!(self.ids.get(place), Some(id), "a selected row is here");
            values.extend_from_slice(self.row(place));
        }
        Self::of(self.width, ids, values)
    }

    /// Adds other rows of the same table, with the arithmetic of [`Codec::Plain`]. A row of only one side stays
    /// as it is.
    pub fn add(&mut self, other: &Self) {
        debug_assert_eq!(self.width, other.width, "rows of one table");
        if self.ids == other.ids {
            Codec::Plain.add(&mut self.values, &other.values);
            return;
        }
        let most = self.len() + other.len();
        let mut sum = Self {
            width: self.width,
            ids: Vec::with_capacity(most),
            values: Vec::with_capacity(most * self.width),
        };
        let (mut left, mut right) = (0, 0);
        while left < self.len() || right < other.len() {
            let order = match (self.ids.get(left), other.ids.get(right)) {
                (Some(left), Some(right)) => left.cmp(right),
                (Some(_), None) => Ordering::Less,
                (None, _) => Ordering::Greater,
            };
            let (of, place) =
                if order == Ordering::Greater { (other, right) } else { (&*self, left) };
            sum.ids.push(of.ids[place]);
            sum.values.extend_from_slice(of.row(place));
            if order == Ordering::Equal {
                let from = sum.values.len() - self.width;
                Codec::Plain.add(&mut sum.values[from..], other.row(right));
            }
            left += usize::from(order != Ordering::Greater);
            right += usize::from(order != Ordering::Less);
        }
        *self = sum;
    }

    /// Divides the rows among parts; `part_of` says to which part, below `parts`, the rows of a range belong.
    pub fn divided(&self, parts: usize, part_of: impl Fn(u32) -> usize) -> Vec<Self> {
        let mut divided = vec![Self::new(self.width); parts];
        for (id, row) in self.iter() {
            let part = &mut divided[part_of(range_of(id))];
            part.ids.push(id);
            part.values.extend_from_slice(row);
        }
        divided
    }

    /// Appends rows behind all others.
    ///
    /// # Errors
    /// If their ids do not follow the last one.
    pub fn append(&mut self, other: Self) -> Result<(), RowsError> {
        if let (Some(before), Some(id)) = (self.ids.last(), other.ids.first())
            && id <= before
        {
            return Err(RowsError::Order { before: *before, id: *id });
        }
        self.ids.extend(other.ids);
        self.values.extend(other.values);
        Ok(())
    }

    /// Joins rows of different ranges into one set of rows.
    ///
    /// # Panics
    /// If a row is in two of the parts.
    pub fn joined<'a>(width: usize, parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all: Vec<(u64, &[f32])> = parts.into_iter().flat_map(Self::iter).collect();
        // A stable sort merges parts that are in order.
        all.sort_by_key(|(id, _)| *id);
        let ids = all.iter().map(|(id, _)| *id).collect();
        Self::of(width, ids, all.into_iter().flat_map(|(_, row)| row).copied().collect())
    }

    /// Returns the SHA-256 over the number of rows, and over the id and the values of each row, little-endian.
    pub fn digest(&self) -> RangeDigest {
        let mut hash = Sha256::new();
        hash.update((self.len() as u64).to_le_bytes());
        for (id, row) in self.iter() {
            hash.update(id.to_le_bytes());
            hash.update(bytemuck::cast_slice::<f32, u8>(row));
        }
        hash.finalize().into()
    }

    /// Returns the rows at `places` as bytes: all ids, then all values, little-endian.
    pub fn encode(&self, places: Range<usize>) -> Vec<u8> {
        let values = places.start * self.width..places.end * self.width;
        let mut bytes = encode_ids(&self.ids[places]);
        bytes.extend_from_slice(bytemuck::cast_slice(&self.values[values]));
        bytes
    }

    /// Reads rows with finite values from bytes as [`Rows::encode`] writes them; all rows belong to `ranges`.
    ///
    /// # Errors
    /// See [`RowsError`].
    pub fn decode(width: usize, ranges: &Range<u32>, bytes: &[u8]) -> Result<Self, RowsError> {
        let rows = Self::decode_any(width, ranges, bytes)?;
        // The check of all values is many times faster than a search for one.
        if are_finite(&rows.values) {
            return Ok(rows);
        }
        let place = rows.values.iter().position(|value| !value.is_finite()).unwrap_or(0);
        Err(RowsError::NotFinite { id: rows.ids[place / width] })
    }

    /// Reads rows as [`Rows::decode`] does, but accepts values that are infinite or NaN.
    ///
    /// # Errors
    /// See [`RowsError`].
    pub fn decode_any(width: usize, ranges: &Range<u32>, bytes: &[u8]) -> Result<Self, RowsError> {
        let row_bytes = ID_BYTES + width * size_of::<f32>();
        if !bytes.len().is_multiple_of(row_bytes) {
            return Err(RowsError::Length { found: bytes.len(), width });
        }
        let (ids, values) = bytes.split_at(bytes.len() / row_bytes * ID_BYTES);
        let ids = decode_ids(ranges, ids)?;
        let values: Vec<f32> =
            values.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        Ok(Self { width, ids, values })
    }
}

/// Returns ids as bytes, little-endian.
pub fn encode_ids(ids: &[u64]) -> Vec<u8> {
    bytemuck::cast_slice(ids).to_vec()
}

/// Reads ids that ascend and belong to `ranges` from bytes.
///
/// # Errors
/// If the bytes are not whole ids, the ids do not ascend, or one belongs to another range.
pub fn decode_ids(ranges: &Range<u32>, bytes: &[u8]) -> Result<Vec<u64>, RowsError> {
    let (ids, []) = bytes.as_chunks() else {
        return Err(RowsError::Length { found: bytes.len(), width: 0 });
    };
    let ids: Vec<u64> = ids.iter().map(|id| u64::from_le_bytes(*id)).collect();
    check_ids(&ids, ranges).map(|()| ids)
}

/// Checks that ids ascend and belong to `ranges`.
///
/// # Errors
/// If an id does not; the error names it.
pub fn check_ids(ids: &[u64], ranges: &Range<u32>) -> Result<(), RowsError> {
    if let Some(pair) = ids.windows(2).find(|pair| pair[1] <= pair[0]) {
        return Err(RowsError::Order { before: pair[0], id: pair[1] });
    }
    match ids.iter().find(|id| !ranges.contains(&range_of(**id))) {
        Some(id) => Err(RowsError::Range { id: *id }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(of: &[(u64, f32)]) -> Rows {
        let (ids, values) = of.iter().copied().unzip();
        Rows::of(1, ids, values)
    }

    #[test]
    fn ids_are_spread_evenly_over_the_ranges() {
        for step in [1, 2, 128, 1 << 20, 1 << 40] {
            let mut counts = [0_u32; RANGES as usize];
            (0..128_000).for_each(|index: u64| counts[range_of(index * step) as usize] += 1);
            assert!(counts.iter().all(|count| (850..1150).contains(count)), "{step}: {counts:?}");
        }
    }

    #[test]
    fn an_id_has_the_same_range_on_every_machine() {
        assert_eq!([0, 1, 2, u64::MAX].map(range_of), [0, 43, 109, 90]);
    }

    #[test]
    fn added_rows_are_merged_by_id() {
        let mut sum = rows(&[(1, 1.0), (5, 2.0), (9, 3.0)]);
        sum.add(&rows(&[(0, 10.0), (5, 20.0), (12, 30.0)]));
        assert_eq!(sum, rows(&[(0, 10.0), (1, 1.0), (5, 22.0), (9, 3.0), (12, 30.0)]));
        sum.add(&Rows::new(1));
        assert_eq!(sum.len(), 5);
        let mut none = Rows::new(1);
        none.add(&sum);
        assert_eq!(none, sum);
        none.add(&sum);
        assert_eq!(none.values(), [20.0, 2.0, 44.0, 6.0, 60.0]);
    }

    #[test]
    fn a_sum_that_is_too_large_saturates() {
        for other in [&[(1, f32::MAX)][..], &[(0, 1.0), (1, f32::MAX)]] {
            let mut sum = rows(&[(1, f32::MAX)]);
            sum.add(&rows(other));
            assert_eq!(sum.row(sum.place_of(1).unwrap()), [f32::MAX]);
        }
    }

    #[test]
    fn rows_are_read_as_they_are_written() {
        let all = Rows::of(2, (0..300).collect(), (0..600).map(|it| it as f32).collect());
        let parts = all.divided(RANGES as usize, |range| range as usize);
        for (range, part) in (0..).zip(&parts) {
            let range: u32 = range;
            assert_eq!(
                Rows::decode(2, &(range..range + 1), &part.encode(0..part.len())).as_ref(),
                Ok(part)
            );
        }
        assert_eq!(Rows::joined(2, &parts), all);
        assert_eq!(all.select(vec![7, 8, 299]).values(), [14.0, 15.0, 16.0, 17.0, 598.0, 599.0]);
        assert_eq!(Rows::decode(2, &(0..1), &[]), Ok(Rows::new(2)));
    }

    /// Hostile bytes are refused by the name of the row.
    #[test]
    fn bytes_that_are_not_rows_of_the_range_are_refused() {
        let of_range = |range| (0..).filter(move |id| range_of(*id) == range);
        let ids: Vec<u64> = of_range(3).take(3).collect();
        let of = |ids: [u64; 2], value: f32| {
            let values: Vec<u8> = [value; 2].iter().flat_map(|it| it.to_le_bytes()).collect();
            Rows::decode(1, &(3..4), &[encode_ids(&ids), values].concat())
        };
        assert!(of([ids[0], ids[1]], 1.0).is_ok());
        let (before, id) = (ids[1], ids[0]);
        assert_eq!(of([before, id], 1.0), Err(RowsError::Order { before, id }));
        assert_eq!(of([id, id], 1.0), Err(RowsError::Order { before: id, id }));
        let other = of_range(4).find(|it| id < *it).unwrap();
        assert_eq!(of([id, other], 1.0), Err(RowsError::Range { id: other }));
        assert_eq!(of([id, before], f32::NAN), Err(RowsError::NotFinite { id }));
        let length = Err(RowsError::Length { found: 13, width: 1 });
        assert_eq!(Rows::decode(1, &(3..4), &[0; 13]), length);
    }

    #[test]
    fn a_row_begins_with_the_same_values_in_every_process() {
        let begin = |initial: Initial, seed, table, id| {
            let mut row = [9.0; 3];
            initial.fill(seed, table, id, &mut row);
            row
        };
        let uniform = Initial::Uniform(0.5);
        assert_eq!(begin(uniform, 1, 2, 3), begin(uniform, 1, 2, 3));
        for other in [(2, 2, 3), (1, 3, 3), (1, 2, 4)] {
            assert_ne!(begin(uniform, other.0, other.1, other.2), begin(uniform, 1, 2, 3));
        }
        assert!(begin(uniform, 1, 2, 3).iter().all(|value| value.abs() <= 0.5));
        assert_eq!(begin(Initial::Zeros, 1, 2, 3), [0.0; 3]);
        assert_ne!(begin(Initial::Normal(1.0), 1, 2, 3), begin(Initial::Normal(2.0), 1, 2, 3));
    }
}
