//! Rows in memory: an index of keys, and slabs of rows, which snapshots share.
//!
//! Each row takes, beside its values, 24 bytes for its key, counts and last change, 6 to 12 bytes of the index, whose
//! tables have 5 bytes for each place and are between 7/16 and 7/8 full, and 2 bytes of its slab.

use std::hash::BuildHasher;
use std::ops::Range;
use std::sync::Arc;

use foldhash::fast::FixedState;
use hashbrown::HashTable;

use crate::disk::Key;
use crate::{RowCounts, SnapshotRow, StorageError};

/// Rows of a slab; each has a bit in a [`Mask`]. A slab never moves, so that memory grows by one slab at a time
/// and not by half of all rows. A change of a row copies its slab while a snapshot shares it.
pub(crate) const SLAB_ROWS: usize = u32::BITS as usize;

/// A bit for each row of a slab.
pub(crate) type Mask = u32;

/// The words of a row: id, space, counts, last change, values. Those from the counts on are its content.
const SPACE: usize = 2;
const CONTENT: usize = 3;
const CHANGED: usize = 5;
const VALUES: usize = 6;

/// The most rows in memory.
const ROWS_MAX: usize = u32::MAX as usize;

/// The words of the rows of a slab.
#[derive(Debug)]
enum Slab {
    /// There are no rows.
    Absent,
    Own(Box<[u32]>),
    /// Words that a snapshot shares, or has shared: a test of that for each access would cost more than the access.
    Shared(Arc<Box<[u32]>>),
}

impl Slab {
    fn words(&self) -> &[u32] {
        match self {
            Self::Absent => &[],
            Self::Own(words) => words,
            Self::Shared(words) => words,
        }
    }

    /// Returns the words for changes; copies them first if a snapshot shares them.
    fn words_mut(&mut self) -> &mut [u32] {
        if let Self::Shared(shared) = self {
            let own = match Arc::get_mut(shared) {
                Some(own) => std::mem::take(own),
                None => (**shared).clone(),
            };
            *self = Self::Own(own);
        }
        match self {
            Self::Own(words) => words,
            Self::Absent | Self::Shared(_) => &mut [],
        }
    }

    /// Shares the words with a snapshot.
    fn share(&mut self) -> Option<Arc<Box<[u32]>>> {
        if let Self::Own(own) = self {
            *self = Self::Shared(Arc::new(std::mem::take(own)));
        }
        match self {
            Self::Shared(shared) => Some(shared.clone()),
            Self::Absent | Self::Own(_) => None,
        }
    }
}

/// Rows of one length. They are numbered by their places in the slabs.
#[derive(Debug)]
pub(crate) struct Slabs {
    stride: usize,
    /// Numbers of the rows.
    index: HashTable<u32>,
    slabs: Vec<Slab>,
    live: Vec<Mask>,
    /// Slabs with free places. Some may have none any more, or be absent.
    open: Vec<usize>,
    /// Whether a slab is among the open ones.
    is_open: Vec<bool>,
    /// Absent slabs.
    absent: Vec<usize>,
}

/// Some rows of [`Slabs`] at one moment.
#[derive(Debug)]
pub(crate) struct SlabsSnapshot {
    stride: usize,
    /// The slabs by their places; `None` for a slab without rows in the snapshot.
    slabs: Vec<Option<Arc<Box<[u32]>>>>,
    masks: Vec<Mask>,
}

impl Slabs {
    /// Creates an empty collection of rows of `stride` values each.
    pub fn new(stride: usize) -> Self {
        Self {
            stride,
            index: HashTable::new(),
            slabs: Vec::new(),
            live: Vec::new(),
            open: Vec::new(),
            is_open: Vec::new(),
            absent: Vec::new(),
        }
    }

    /// Returns the number of values of each row.
    pub fn stride(&self) -> usize {
        self.stride
    }

    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Returns the size in bytes of all slabs and of the index, without slabs that only a snapshot still has.
    pub fn bytes(&self) -> usize {
        (self.slabs.len() - self.absent.len()) * self.slab_bytes() + self.index_bytes()
    }

    pub fn index_bytes(&self) -> usize {
        self.index.allocation_size()
    }

    /// Returns the size in bytes of a slab, with its entries in the lists of slabs and masks.
    pub fn slab_bytes(&self) -> usize {
        SLAB_ROWS * row_words(self.stride) * size_of::<u32>() + size_of::<(Slab, Mask)>()
    }

    /// Returns the number of places for slabs, including those of absent slabs.
    pub fn places(&self) -> usize {
        self.slabs.len()
    }

    /// Returns the mask of the rows that exist in the slab at a place.
    pub fn live(&self, place: usize) -> Mask {
        self.live[place]
    }

    /// Returns the number of the row with a key, if it is in memory.
    pub fn find(&self, key: Key) -> Option<u32> {
        let Self { index, slabs, stride, .. } = self;
        index.find(hash_of(key), |number| key_of(slabs, *stride, *number) == key).copied()
    }

    /// Returns whether the next row needs another slab. Removes slabs without free places from the open ones.
    pub fn is_full(&mut self) -> bool {
        while let Some(place) = self.open.last().copied() {
            if !matches!(self.slabs[place], Slab::Absent) && self.live[place] != Mask::MAX {
                return false;
            }
            self.open.pop();
            self.is_open[place] = false;
        }
        true
    }

    /// Adds a row of zeros that is not here yet.
    ///
    /// # Errors
    /// If there are too many rows.
    pub fn insert(&mut self, key: Key) -> Result<u32, StorageError> {
        if self.is_full() {
            self.add_slab()?;
        }
        let place = *self.open.last().expect("a slab with a free place was added");
        let free = self.live[place].trailing_ones();
        self.live[place] |= 1 << free;
        let number = (place * SLAB_ROWS) as u32 + free;
        let row = self.words_mut(number);
        row.fill(0);
        row[..CONTENT].copy_from_slice(&[key.id as u32, (key.id >> 32) as u32, key.space]);
        let Self { index, slabs, stride, .. } = self;
        let hash = |number: &u32| hash_of(key_of(slabs, *stride, *number));
        index.insert_unique(hash_of(key), number, hash);
        Ok(number)
    }

    fn add_slab(&mut self) -> Result<(), StorageError> {
        let place = match self.absent.pop() {
            Some(place) => place,
            None if ROWS_MAX <= (self.slabs.len() + 1) * SLAB_ROWS => {
                return Err(StorageError::TooMany { most: ROWS_MAX });
            }
            None => {
                self.slabs.push(Slab::Absent);
                self.live.push(0);
                self.is_open.push(false);
                self.slabs.len() - 1
            }
        };
        self.slabs[place] = Slab::Own(vec![0; SLAB_ROWS * row_words(self.stride)].into());
        self.reopen(place);
        Ok(())
    }

    fn reopen(&mut self, place: usize) {
        if !std::mem::replace(&mut self.is_open[place], true) {
            self.open.push(place);
        }
    }

    /// Removes a row. A slab without rows is freed.
    pub fn remove(&mut self, number: u32) {
        let Self { index, slabs, stride, .. } = self;
        let hash = hash_of(key_of(slabs, *stride, number));
        if let Ok(found) = index.find_entry(hash, |it| *it == number) {
            found.remove();
        }
        let (place, bit) = place_of(number);
        self.live[place] &= !bit;
        self.reopen(place);
        if self.live[place] == 0 {
            self.slabs[place] = Slab::Absent;
            self.absent.push(place);
        }
    }

    pub fn key(&self, number: u32) -> Key {
        key_of(&self.slabs, self.stride, number)
    }

    /// Returns the counts and values of a row.
    pub fn row(&self, number: u32) -> (RowCounts, &[f32]) {
        row_of(words_of(&self.slabs, self.stride, number))
    }

    /// Returns the counts and values of a row for changes, and notes that the row changed after `snapshots` snapshots.
    pub fn row_mut(&mut self, number: u32, snapshots: u32) -> (&mut RowCounts, &mut [f32]) {
        let row = self.words_mut(number);
        row[CHANGED] = snapshots;
        let (counts, values) = row[CONTENT..].split_at_mut(VALUES - CONTENT);
        let counts = bytemuck::cast_slice_mut::<u32, RowCounts>(&mut counts[..CHANGED - CONTENT]);
        (&mut counts[0], bytemuck::cast_slice_mut(values))
    }

    /// Returns the content of a row as bytes: its counts, its last change and its values.
    pub fn content(&self, number: u32) -> &[u8] {
        bytemuck::cast_slice(&words_of(&self.slabs, self.stride, number)[CONTENT..])
    }

    /// Returns the content of a row as bytes, for changes.
    pub fn content_mut(&mut self, number: u32) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.words_mut(number)[CONTENT..])
    }

    fn words_mut(&mut self, number: u32) -> &mut [u32] {
        let (place, words) = row_range(self.stride, number);
        &mut self.slabs[place].words_mut()[words]
    }

    /// Returns a snapshot of some rows; `chosen` returns which rows of the slab at a place it includes.
    pub fn snapshot(&mut self, chosen: impl Fn(usize) -> Mask) -> SlabsSnapshot {
        let masks = self.live.iter().enumerate().map(|(place, live)| live & chosen(place));
        let masks: Vec<Mask> = masks.collect();
        let share = |(slab, mask): (&mut Slab, &Mask)| (*mask != 0).then(|| slab.share()).flatten();
        let slabs = self.slabs.iter_mut().zip(&masks).map(share).collect();
        SlabsSnapshot { stride: self.stride, slabs, masks }
    }
}

impl SlabsSnapshot {
    /// Returns the numbers of all rows of the snapshot, ascending.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.masks
            .iter()
            .enumerate()
            .flat_map(|(place, mask)| bits(*mask).map(move |bit| (place * SLAB_ROWS) as u32 + bit))
    }

    pub fn key(&self, number: u32) -> Key {
        key(self.words(number))
    }

    /// Returns the ids and numbers of some rows of one space, by ascending id beginning at `from`.
    pub fn sorted(&self, numbers: impl Iterator<Item = u32>, from: u64) -> Vec<(u64, u32)> {
        let keyed = numbers.map(|number| (self.key(number).id, number));
        let mut sorted: Vec<(u64, u32)> = keyed.filter(|(id, _)| from <= *id).collect();
        sorted.sort_unstable();
        sorted
    }

    pub fn row(&self, number: u32) -> SnapshotRow<'_> {
        let words = self.words(number);
        let (counts, values) = row_of(words);
        SnapshotRow { id: key(words).id, counts, changed: words[CHANGED], values }
    }

    fn words(&self, number: u32) -> &[u32] {
        let (place, words) = row_range(self.stride, number);
        self.slabs[place].as_ref().map_or(&[][..], |slab| &slab[words])
    }
}

/// Returns the place of a row's slab, and the mask with the row's bit.
pub(crate) fn place_of(number: u32) -> (usize, Mask) {
    (number as usize / SLAB_ROWS, 1 << (number as usize % SLAB_ROWS))
}

/// Returns the numbers of the bits that are set in a mask, ascending.
pub(crate) fn bits(mut mask: Mask) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (mask != 0).then(|| mask.trailing_zeros())?;
        mask &= mask - 1;
        Some(bit)
    })
}

/// Reads a row from the bytes of [`Slabs::content`].
pub(crate) fn decode<'a>(id: u64, content: &[u8], values: &'a mut Vec<f32>) -> SnapshotRow<'a> {
    let (first, rest) = content.split_at(content_bytes(0));
    values.clear();
    values.extend(rest.as_chunks().0.iter().map(|it| f32::from_ne_bytes(*it)));
    let changed = bytemuck::pod_read_unaligned(&first[size_of::<RowCounts>()..]);
    SnapshotRow { id, counts: counts_of(content), changed, values }
}

/// Reads the counts from the bytes of [`Slabs::content`].
pub(crate) fn counts_of(content: &[u8]) -> RowCounts {
    bytemuck::pod_read_unaligned(&content[..size_of::<RowCounts>()])
}

/// Returns the size in bytes of the content of a row of `stride` values.
pub(crate) fn content_bytes(stride: usize) -> usize {
    (VALUES - CONTENT + stride) * size_of::<u32>()
}

fn row_words(stride: usize) -> usize {
    VALUES + stride
}

/// Returns the place of a row's slab, and the row's words there.
fn row_range(stride: usize, number: u32) -> (usize, Range<usize>) {
    let (words, number) = (row_words(stride), number as usize);
    let from = number % SLAB_ROWS * words;
    (number / SLAB_ROWS, from..from + words)
}

fn words_of(slabs: &[Slab], stride: usize, number: u32) -> &[u32] {
    let (place, words) = row_range(stride, number);
    &slabs[place].words()[words]
}

fn row_of(words: &[u32]) -> (RowCounts, &[f32]) {
    let counts = RowCounts { updates: words[CONTENT], pass: words[CONTENT + 1] };
    (counts, bytemuck::cast_slice(&words[VALUES..]))
}

fn key_of(slabs: &[Slab], stride: usize, number: u32) -> Key {
    key(words_of(slabs, stride, number))
}

fn key(words: &[u32]) -> Key {
    Key { space: words[SPACE], id: u64::from(words[0]) | u64::from(words[1]) << 32 }
}

/// Hashes a key to the same value in every process: an order of rows that differs from run to run would be hard to
/// debug.
fn hash_of(key: Key) -> u64 {
    FixedState::default().hash_one(key)
}
