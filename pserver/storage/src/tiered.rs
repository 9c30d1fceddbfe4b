//! A limited amount of memory above a disk.
//!
//! Rows are read into memory when they are accessed. When there is no memory for another one, a clock hand goes
//! around the slabs of all rows: a row that was accessed since the hand last passed stays, another one leaves
//! memory, and is written if it has changed ("second chance", Corbató 1968).

use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use crate::disk::{Disk, DiskSnapshot, Disks, Key};
use crate::memory::MemoryStores;
use crate::slabs::{Mask, SLAB_ROWS, Slabs, SlabsSnapshot, bits, counts_of, decode, place_of};
use crate::{
    RowCounts, RowMut, RowStore, RowStores, RowsSnapshot, SnapshotRow, StorageError, Usage,
};

/// Rows that leave memory together, in the order of their keys, which makes their write cheaper; of less memory,
/// an eighth.
const EVICTED_TOGETHER: usize = 1024;

/// Keeps a limited number of rows in memory, and the others on a disk.
#[derive(Debug)]
pub struct TieredStores {
    memory_bytes: usize,
    disks: Arc<dyn Disks>,
}

impl TieredStores {
    /// Creates stores whose rows in memory take at most `memory_bytes`. Beyond that, one slab of rows of each length
    /// may be partly unused.
    pub fn new(memory_bytes: usize, disks: Arc<dyn Disks>) -> Self {
        Self { memory_bytes, disks }
    }
}

impl RowStores for TieredStores {
    fn open(&self, strides: &[usize]) -> Result<Box<dyn RowStore>, StorageError> {
        // A job without tables needs no disk.
        if strides.is_empty() {
            return MemoryStores.open(strides);
        }
        let mut pools: Vec<Pool> = Vec::new();
        let mut space = |stride: &usize| {
            let known = pools.iter().position(|pool| pool.slabs.stride() == *stride);
            let pool = known.unwrap_or_else(|| {
                pools.push(Pool::new(*stride));
                pools.len() - 1
            });
            Space { pool, len: 0, in_memory: 0 }
        };
        let spaces = strides.iter().map(&mut space).collect();
        Ok(Box::new(TieredRows {
            memory_bytes: self.memory_bytes,
            spaces,
            pools,
            disk: self.disks.open()?,
            absent: Vec::new(),
            hand: (0, 0),
            snapshots: 0,
            accesses: 0,
            misses: 0,
        }))
    }
}

/// A key space.
#[derive(Clone, Copy, Debug)]
struct Space {
    /// Index of the pool with the rows that are in memory.
    pool: usize,
    /// Number of rows, in memory and on the disk.
    len: usize,
    /// Number of rows in memory.
    in_memory: usize,
}

/// The rows in memory that have the same number of values, of all spaces.
struct Pool {
    slabs: Slabs,
    /// For each slab, the rows that the disk does not have as they are.
    changed: Vec<Mask>,
    /// The rows of which the disk has this or an older content.
    stored: Vec<Mask>,
    /// The rows that were accessed since the hand passed.
    accessed: Vec<Mask>,
}

impl Pool {
    fn new(stride: usize) -> Self {
        let (changed, stored, accessed) = Default::default();
        Self { slabs: Slabs::new(stride), changed, stored, accessed }
    }

    fn bytes(&self) -> usize {
        self.slabs.bytes()
            + (self.changed.len() + self.stored.len() + self.accessed.len()) * size_of::<Mask>()
    }

    /// Adds a row of zeros.
    fn insert(&mut self, key: Key) -> Result<u32, StorageError> {
        let number = self.slabs.insert(key)?;
        let (place, bit) = place_of(number);
        for masks in [&mut self.changed, &mut self.stored, &mut self.accessed] {
            masks.resize(self.slabs.places(), 0);
            masks[place] &= !bit;
        }
        self.accessed[place] |= bit;
        Ok(number)
    }

    /// Returns the rows of a slab that leave memory next: those that were not accessed since the hand last passed.
    fn victims(&self, place: usize) -> Mask {
        self.slabs.live(place) & !self.accessed[place]
    }
}

/// Shows numbers, not rows.
impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} rows of {} values)", self.slabs.len(), self.slabs.stride())
    }
}

#[derive(Debug)]
struct TieredRows {
    memory_bytes: usize,
    spaces: Vec<Space>,
    pools: Vec<Pool>,
    disk: Box<dyn Disk>,
    /// Rows that are neither in memory nor on the disk, as far as that is known, by ascending key.
    absent: Vec<Key>,
    /// Pool and slab that the hand points to.
    hand: (usize, usize),
    /// Number of snapshots so far.
    snapshots: u32,
    accesses: u64,
    misses: u64,
}

impl TieredRows {
    fn bytes(&self) -> usize {
        self.pools.iter().map(Pool::bytes).sum()
    }

    /// Returns the number of a row in its pool; reads it from the disk if it is not in memory.
    fn load(&mut self, space: usize, id: u64) -> Result<Option<u32>, StorageError> {
        let key = Key { space: space as u32, id };
        self.accesses += 1;
        let number = match self.find(key) {
            None if self.may_be_on_disk(key) => {
                self.read(&[key])?;
                self.find(key)
            }
            found => found,
        };
        if let Some(number) = number {
            let (place, bit) = place_of(number);
            self.pools[self.spaces[space].pool].accessed[place] |= bit;
        }
        Ok(number)
    }

    /// Returns the number of a row in its pool, if the row is in memory.
    fn find(&self, key: Key) -> Option<u32> {
        self.pools[self.spaces[key.space as usize].pool].slabs.find(key)
    }

    /// Returns whether the disk may have a row that is not in memory.
    fn may_be_on_disk(&self, Key { space, id }: Key) -> bool {
        let Space { len, in_memory, .. } = self.spaces[space as usize];
        in_memory < len && self.absent.binary_search(&Key { space, id }).is_err()
    }

    /// Reads rows that are not in memory, by ascending keys; returns the indices of the keys whose rows exist.
    fn read(&mut self, keys: &[Key]) -> Result<Vec<usize>, StorageError> {
        let (mut found, mut content) = (Vec::new(), Vec::new());
        self.disk.read(keys, &mut |index, row| {
            found.push((index, content.len()..content.len() + row.len()));
            content.extend_from_slice(row);
        })?;
        for (index, row) in &found {
            let key = keys[*index];
            let number = self.insert(key)?;
            let pool = &mut self.pools[self.spaces[key.space as usize].pool];
            pool.slabs.content_mut(number).copy_from_slice(&content[row.clone()]);
            let (place, bit) = place_of(number);
            pool.stored[place] |= bit;
        }
        self.misses += found.len() as u64;
        Ok(found.into_iter().map(|(index, _)| index).collect())
    }

    /// Adds a row of zeros to those in memory.
    fn insert(&mut self, key: Key) -> Result<u32, StorageError> {
        let Space { pool, .. } = self.spaces[key.space as usize];
        self.make_room(pool)?;
        let number = self.pools[pool].insert(key)?;
        self.spaces[key.space as usize].in_memory += 1;
        Ok(number)
    }

    /// Moves rows to the disk until there is memory for another row of a pool.
    fn make_room(&mut self, pool: usize) -> Result<(), StorageError> {
        // The hand passes each row twice at most: then all have left.
        let mut steps = 2 * self.round();
        while 0 < steps && !self.has_room(pool) {
            match self.evict(steps)? {
                // There are no rows.
                0 => break,
                taken => steps -= taken,
            }
        }
        Ok(())
    }

    fn has_room(&mut self, pool: usize) -> bool {
        let rows = &mut self.pools[pool].slabs;
        // Places of slabs may be free, of one that is larger than the memory most are; the index has grown.
        let bytes = (rows.len() + 1) * rows.slab_bytes() / SLAB_ROWS + rows.index_bytes();
        let is_too_much = self.memory_bytes < bytes;
        if is_too_much || !rows.is_full() {
            return !is_too_much;
        }
        let slab = rows.slab_bytes();
        self.bytes() + slab <= self.memory_bytes
    }

    /// Returns the number of steps after which the hand reaches the same slab again: one over each slab, and one to
    /// each pool.
    fn round(&self) -> usize {
        self.pools.iter().map(|pool| pool.slabs.places() + 1).sum()
    }

    /// Moves the next rows to the disk; returns how many steps the hand took, at most `steps`.
    fn evict(&mut self, steps: usize) -> Result<usize, StorageError> {
        let (mut victims, mut rows, mut taken) = (Vec::new(), 0, 0);
        let in_memory: usize = self.pools.iter().map(|pool| pool.slabs.len()).sum();
        let wanted = EVICTED_TOGETHER.min(in_memory.div_ceil(8));
        // One round at most: no slab is passed twice.
        while rows < wanted && taken < steps.min(self.round()) {
            taken += 1;
            let (pool, place) = self.hand;
            if self.pools[pool].slabs.places() <= place {
                self.hand = ((pool + 1) % self.pools.len(), 0);
                continue;
            }
            self.hand = (pool, place + 1);
            let leaving = self.pools[pool].victims(place);
            self.pools[pool].accessed[place] = 0;
            if leaving != 0 {
                victims.push((pool, place, leaving));
                rows += leaving.count_ones() as usize;
            }
        }
        let mut written: Vec<(Key, &[u8])> = Vec::new();
        for (pool, place, leaving) in &victims {
            let Pool { slabs, changed, .. } = &self.pools[*pool];
            let numbers = bits(leaving & changed[*place]).map(|bit| number_of(*place, bit));
            written.extend(numbers.map(|number| (slabs.key(number), slabs.content(number))));
        }
        written.sort_unstable_by_key(|(key, _)| *key);
        if !written.is_empty() {
            self.disk.write(&written)?;
            self.absent.clear();
        }
        for (pool, place, leaving) in victims {
            let slabs = &mut self.pools[pool].slabs;
            for number in bits(leaving).map(|bit| number_of(place, bit)) {
                self.spaces[slabs.key(number).space as usize].in_memory -= 1;
                slabs.remove(number);
            }
        }
        Ok(taken)
    }
}

fn number_of(place: usize, bit: u32) -> u32 {
    (place * SLAB_ROWS) as u32 + bit
}

impl RowStore for TieredRows {
    fn len(&self, space: usize) -> usize {
        self.spaces[space].len
    }

    fn get(&mut self, space: usize, id: u64) -> Result<Option<(RowCounts, &[f32])>, StorageError> {
        let number = self.load(space, id)?;
        let pool = &self.pools[self.spaces[space].pool];
        Ok(number.map(|number| pool.slabs.row(number)))
    }

    fn fetch(&mut self, rows: &mut dyn Iterator<Item = (usize, u64)>) -> Result<(), StorageError> {
        let keys = rows.map(|(space, id)| Key { space: space as u32, id });
        let is_missing = |key: &Key| self.find(*key).is_none() && self.may_be_on_disk(*key);
        let mut missing: Vec<Key> = keys.filter(is_missing).collect();
        missing.sort_unstable();
        missing.dedup();
        if missing.is_empty() {
            return Ok(());
        }
        let mut found = self.read(&missing)?.into_iter().peekable();
        // The disk has no more rows until some leave memory.
        let absent = missing.into_iter().enumerate();
        let absent = absent.filter(|(index, _)| found.next_if_eq(index).is_none());
        self.absent = absent.map(|(_, key)| key).collect();
        Ok(())
    }

    fn entry(&mut self, space: usize, id: u64) -> Result<RowMut<'_>, StorageError> {
        let found = self.load(space, id)?;
        let Space { pool, .. } = self.spaces[space];
        let number = match found {
            Some(number) => number,
            None => {
                let number = self.insert(Key { space: space as u32, id })?;
                self.spaces[space].len += 1;
                number
            }
        };
        let (place, bit) = place_of(number);
        let pool = &mut self.pools[pool];
        pool.changed[place] |= bit;
        let (counts, values) = pool.slabs.row_mut(number, self.snapshots);
        Ok(RowMut { is_new: found.is_none(), counts, values })
    }

    fn retain(
        &mut self,
        space: usize,
        id: u64,
        is_wanted: &dyn Fn(RowCounts) -> bool,
    ) -> Result<(), StorageError> {
        let key = Key { space: space as u32, id };
        match self.find(key) {
            Some(number) => {
                let pool = &mut self.pools[self.spaces[space].pool];
                if is_wanted(pool.slabs.row(number).0) {
                    return Ok(());
                }
                let (place, bit) = place_of(number);
                pool.slabs.remove(number);
                self.spaces[space].in_memory -= 1;
                if pool.stored[place] & bit != 0 {
                    self.disk.remove(key)?;
                }
            }
            // A row that leaves must not push another one out of memory.
            None => {
                let mut counts = None;
                if self.may_be_on_disk(key) {
                    self.disk.read(&[key], &mut |_, row| counts = Some(counts_of(row)))?;
                }
                if counts.is_none_or(is_wanted) {
                    return Ok(());
                }
                self.disk.remove(key)?;
            }
        }
        self.spaces[space].len -= 1;
        Ok(())
    }

    fn snapshot(&mut self) -> Result<Box<dyn RowsSnapshot>, StorageError> {
        let changed =
            |Pool { slabs, changed, .. }: &mut Pool| slabs.snapshot(|place| changed[place]);
        let number = self.snapshots;
        self.snapshots += 1;
        Ok(Box::new(TieredSnapshot {
            number,
            spaces: self.spaces.clone(),
            pools: self.pools.iter_mut().map(changed).collect(),
            by_space: OnceLock::new(),
            disk: self.disk.snapshot(),
        }))
    }

    fn usage(&self) -> Usage {
        Usage {
            rows_in_memory: self.pools.iter().map(|pool| pool.slabs.len()).sum(),
            memory_bytes: self.bytes(),
            disk_bytes: self.disk.bytes(),
            hits: self.accesses.saturating_sub(self.misses),
            misses: self.misses,
        }
    }
}

#[derive(Debug)]
struct TieredSnapshot {
    number: u32,
    spaces: Vec<Space>,
    /// The rows of each pool that the disk did not have as they were.
    pools: Vec<SlabsSnapshot>,
    /// Numbers of the rows in `pools`, for each space. They are determined on the first use, not while training waits.
    by_space: OnceLock<Vec<Vec<u32>>>,
    disk: Box<dyn DiskSnapshot>,
}

impl TieredSnapshot {
    fn by_space(&self) -> &[Vec<u32>] {
        self.by_space.get_or_init(|| {
            let mut by_space = vec![Vec::new(); self.spaces.len()];
            for rows in &self.pools {
                for number in rows.numbers() {
                    by_space[rows.key(number).space as usize].push(number);
                }
            }
            by_space
        })
    }
}

impl RowsSnapshot for TieredSnapshot {
    fn number(&self) -> u32 {
        self.number
    }

    fn scan(
        &self,
        space: usize,
        from: u64,
        each: &mut dyn FnMut(SnapshotRow<'_>) -> ControlFlow<()>,
    ) -> Result<(), StorageError> {
        let rows = &self.pools[self.spaces[space].pool];
        let in_memory = rows.sorted(self.by_space()[space].iter().copied(), from);
        let mut in_memory = in_memory.into_iter().peekable();
        let (mut decoded, mut flow) = (Vec::new(), ControlFlow::Continue(()));
        self.disk.scan(space as u32, from, &mut |id, content| {
            while let Some((_, number)) = in_memory.next_if(|(it, _)| *it < id) {
                flow = each(rows.row(number));
                flow?;
            }
            // That in memory is newer.
            if in_memory.peek().is_none_or(|(it, _)| *it != id) {
                flow = each(decode(id, content, &mut decoded));
            }
            flow
        })?;
        if flow.is_continue() {
            let _ = in_memory.try_for_each(|(_, number)| each(rows.row(number)));
        }
        Ok(())
    }
}
