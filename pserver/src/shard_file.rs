//! Saves shards to the shard files of checkpoints and loads them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use steadfast_checkpoint::row_file::{RowFileMeta, RowsMeta, encode_rows, range_numbers, table_of};
use steadfast_checkpoint::{
    BlockNames, BlockTensors, Checkpoint, CheckpointError, EncodeError, ShardFile, ShardMeta,
    digest, encode_shard, is_in_place,
};
use steadfast_common::ids::{Incarnation, Slot};
use steadfast_common::records::applied_records::AppliedRecords;
use steadfast_common::records::{CheckpointRecord, JobRecord, RowFilesRecord, ShardRecord};
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::placement::{Placement, PlacementRecord};
use steadfast_common::tensor::table::range_of;
use steadfast_host::random;
use steadfast_host::task::in_place;
use steadfast_pserver_core::block_store::{ShardSnapshot, SnapshotBlock};
use steadfast_pserver_core::rules::Rules;
use steadfast_pserver_core::tables::{HeldRange, Obsolete, TableRows, TablesSnapshot};
use steadfast_pserver_storage::StorageError;
use steadfast_store::{Location, PutPayload, StoreError};

use crate::event::SlotSnapshot;
use crate::row_files::{Attempt, Layers, ROW_FILE_BYTES, RowReader, Saved, SavedRows, rows_meta};

#[cfg(test)]
mod tests;

/// The reason why a shard could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error(transparent)]
    CheckpointError(#[from] CheckpointError),
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error("the store is unavailable or not mounted: it also lacks the job's dataset manifest")]
    StoreUnavailable,
}

impl ShardError {
    /// Returns whether every other attempt would fail as well, on any machine: an object of the checkpoint is missing,
    /// damaged or has other content. A store that is unreachable or denies access is not an error of the checkpoint.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Store(_) | Self::Storage(_) | Self::StoreUnavailable => false,
            Self::Encode(_) => true,
            Self::CheckpointError(error) => error.is_permanent(),
        }
    }
}

/// The store for the shards of a job.
#[derive(Clone, Debug)]
pub struct ShardStore {
    store: Location,
    job: Arc<JobRecord>,
    /// Names of the state vectors of each block.
    pub(crate) states: Arc<[String]>,
    pub(crate) rules: Rules,
    /// Bytes of the rows of a row file.
    pub(crate) row_file_bytes: usize,
}

/// A shard that was saved.
#[derive(Debug)]
pub struct SavedShard {
    pub record: ShardRecord,
    /// See [`ShardStore::state_digest`]; computed only for jobs whose slots are followed.
    pub state: Option<String>,
    /// The rows of the snapshot that no reader needs any more.
    pub obsolete: Obsolete,
    /// Bytes of the new objects.
    pub written: u64,
}

/// A shard that was loaded from a checkpoint.
#[derive(Debug)]
pub struct LoadedShard {
    pub layout: Arc<Layout>,
    pub snapshot: ShardSnapshot,
    pub tables: TableRows,
    pub saved: SavedRows,
}

impl ShardStore {
    /// Creates the store for the shards of `job` below `store`.
    pub fn new(store: Location, job: JobRecord, rules: Rules) -> Self {
        let states = rules.state_names().into();
        Self { store, job: Arc::new(job), states, rules, row_file_bytes: ROW_FILE_BYTES }
    }

    /// Uploads a snapshot under a new name. If the `newest` committed checkpoint of the shard is known, uploads only
    /// the rows of tables that changed since that checkpoint.
    ///
    /// # Errors
    /// If a value is not finite, rows cannot be read, or the store refuses the write.
    pub async fn save(
        &self,
        holder: (Slot, Incarnation),
        snapshot: SlotSnapshot,
        newest: &str,
    ) -> Result<SavedShard, ShardError> {
        let name = format!("{}/{}", self.job.spec.shards_directory(), random::uuid());
        let saved_rows = snapshot.saved.clone();
        for attempt in saved_rows.aborted() {
            self.discard(&attempt).await;
        }
        let attempt = saved_rows.begin(&name);
        let saved = self.write(&name, &attempt, holder, snapshot, newest).await;
        if saved.is_err() {
            self.discard(&attempt).await;
        }
        saved_rows.end(&attempt);
        saved
    }

    /// Deletes the row files of a failed attempt, because each attempt would leave some files behind in a store that is
    /// full. Stops at the first file that the store does not delete; the master deletes the rest a day later.
    async fn discard(&self, attempt: &Attempt) {
        // The last one may be there although its upload failed.
        for index in 0..=attempt.files().len() as u32 {
            let Ok(place) = self.store.child(&RowFilesRecord::object(&attempt.name, index)) else {
                return;
            };
            if place.delete().await.is_err() {
                return;
            }
        }
    }

    /// Returns whether the store has all objects of a checkpoint's shard. The store may have been lost and created
    /// anew.
    async fn has(&self, saved: &Saved) -> Result<bool, StoreError> {
        let directory = self.job.spec.shards_directory();
        let listed: BTreeMap<String, u64> =
            self.store.child(&directory)?.list().await?.into_iter().collect();
        let size = |object: &str| {
            let name = object.strip_prefix(&directory)?.strip_prefix('/')?;
            listed.get(name).copied()
        };
        let layers = saved.layers.records.iter().zip(&saved.layers.files);
        let mut files = layers.flat_map(|(record, files)| record.objects().zip(files));
        Ok(size(&saved.object).is_some()
            && files.all(|(object, file)| size(&object) == Some(file.size_bytes)))
    }

    /// Writes the objects of a shard, whose names begin with `name`.
    async fn write(
        &self,
        name: &str,
        attempt: &Attempt,
        (slot, incarnation): (Slot, Incarnation),
        snapshot: SlotSnapshot,
        newest: &str,
    ) -> Result<SavedShard, ShardError> {
        let SlotSnapshot { layout, shard, tables, saved } = snapshot;
        let (object, version) = (format!("{name}.safetensors"), shard.position.version);
        let before = match saved.before(newest) {
            Some(saved) if self.has(&saved).await? => Some(saved),
            Some(_) | None => None,
        };
        let since = before.as_ref().map(|saved| saved.number);
        let obsolete = self.save_rows(attempt, &layout, version, &tables, since).await?;
        let mut layers = before.map(|saved| saved.layers).unwrap_or_default();
        let files = attempt.files();
        layers.add(name, &files);
        let is_compared = 0 < self.job.spec.warm_spares;
        let with_tables = is_compared && tables.has_tables();
        let state = with_tables
            .then(|| in_place(|| self.state_digest(&layout, shard.clone(), &tables)))
            .transpose()?;
        let segments = in_place(|| encode(&layout, &self.states, shard, &tables, &layers))?;
        let number = tables.number();
        // While it exists, changes of rows take more memory.
        drop(tables);
        let (sha256, size_bytes) = self.create(&object, segments).await?;
        let rows = layers.records.clone();
        saved.add(newest, Saved { object: object.clone(), number, layers });
        let written = files.iter().map(|file| file.size_bytes).sum::<u64>() + size_bytes;
        // Without tables, the file is the state.
        let state = state.or_else(|| is_compared.then(|| sha256.clone()));
        let record = ShardRecord { slot, incarnation, object, sha256, size_bytes, version, rows };
        Ok(SavedShard { record, state, obsolete, written })
    }

    /// Writes a new object; returns its SHA-256 and its size in bytes.
    pub(crate) async fn create(
        &self,
        object: &str,
        segments: Vec<Bytes>,
    ) -> Result<(String, u64), ShardError> {
        let place = self.store.child(object)?;
        let size_bytes = segments.iter().map(|segment| segment.len() as u64).sum();
        // Polls the store first: the hash is computed while it writes.
        let written = place.create(segments.iter().cloned().collect::<PutPayload>());
        let hashed = async { in_place(|| digest(&segments)) };
        let (written, sha256) = tokio::join!(biased; written, hashed);
        written?;
        Ok((sha256, size_bytes))
    }

    /// Returns the SHA-256 of a snapshot and of some rows of its tables, in hexadecimal. Snapshots of the same state
    /// have the same one, on whatever pserver they were taken. The rows, as many as a row file has, begin at another
    /// range of ids in each version: those of a table that is larger are compared in the course of time.
    ///
    /// # Errors
    /// If a value is not finite, or rows cannot be read.
    pub(crate) fn state_digest(
        &self,
        layout: &Layout,
        snapshot: ShardSnapshot,
        tables: &TablesSnapshot,
    ) -> Result<String, ShardError> {
        let version = snapshot.position.version;
        let mut segments = encode_with(layout, &self.states, snapshot, tables, None)?;
        let (states, meta) = (self.row_states(layout), RowFileMeta { version });
        let ranges: Vec<u32> = tables
            .ranges()
            .iter()
            .map(|held| layout.number_of_range(held.table as usize, held.range))
            .collect();
        let first = range_of(version.0) as usize % ranges.len().max(1);
        let mut left = self.row_file_bytes;
        for ranges in [&ranges[first..], &ranges[..first]] {
            let (mut reader, mut obsolete) = (RowReader::of(ranges.to_vec()), Obsolete::default());
            while 0 < left
                && let Some(rows) =
                    reader.next((layout, &*states), tables, None, left, &mut obsolete)?
            {
                let rows = encode_rows(layout, &meta, rows)?;
                left = left.saturating_sub(rows.iter().map(Bytes::len).sum());
                segments.extend(rows);
            }
        }
        Ok(digest(&segments))
    }

    /// Loads the blocks of `slot` under `placement` from a checkpoint of any other placement.
    ///
    /// # Errors
    /// If an object is missing or damaged, or the store refuses the read.
    pub async fn load(
        &self,
        checkpoint: &CheckpointRecord,
        slot: Slot,
        placement: &PlacementRecord,
    ) -> Result<LoadedShard, ShardError> {
        match self.read(checkpoint, slot, placement).await {
            // A directory that is not mounted lacks every object.
            Err(error) if error.is_permanent() && !is_in_place(&self.store, &self.job).await? => {
                Err(ShardError::StoreUnavailable)
            }
            read => read,
        }
    }

    async fn read(
        &self,
        checkpoint: &CheckpointRecord,
        slot: Slot,
        placement: &PlacementRecord,
    ) -> Result<LoadedShard, ShardError> {
        let files = Checkpoint::open(&self.store, checkpoint).await?;
        let mut shard = self.begin(files.names(), checkpoint, slot, placement)?;
        let mut same = None;
        let is_wanted = shard.wanted();
        for source in sources(checkpoint, &files, &is_wanted) {
            if shard.is_complete() {
                break;
            }
            let mut file = files.read(source, &is_wanted).await?;
            let held = files.ranges(source, file.meta())?;
            shard.add(&source.object, &mut file, &held)?;
            let is_here = |number: u32| is_wanted(number) && held.binary_search(&number).is_ok();
            self.load_rows(&files, source, file.meta(), &is_here, &mut shard.tables).await?;
            if held == shard.ranges {
                same = Some((source, file.meta().rows.clone().unwrap_or_default()));
            }
        }
        let mut loaded = shard.end()?;
        let number = in_place(|| loaded.tables.added())?;
        let saved = same.map(|(shard, RowsMeta { layers: files, .. })| {
            let layers = Layers { records: shard.rows.clone(), files };
            Saved { object: shard.object.clone(), number, layers }
        });
        loaded.saved = SavedRows::restored(saved);
        Ok(loaded)
    }

    /// Begins a shard of `slot` that shard files are added to.
    ///
    /// # Errors
    /// If there is no space for rows.
    pub(crate) fn begin<'a>(
        &'a self,
        names: &'a BlockNames,
        checkpoint: &CheckpointRecord,
        slot: Slot,
        placement: &PlacementRecord,
    ) -> Result<Assembly<'a>, StorageError> {
        let layout = names.layout();
        let placement = Placement::of(layout, placement);
        let of_slot = placement.ranges_of(slot);
        Ok(Assembly {
            store: self,
            names,
            blocks: placement.blocks_of(slot).to_vec(),
            ranges: range_numbers(layout, of_slot.clone()).collect(),
            snapshot: ShardSnapshot {
                position: checkpoint.position,
                updates: 0,
                exhausted: checkpoint.exhausted.iter().copied().collect(),
                applied: Vec::new(),
                blocks: Vec::new(),
            },
            tables: in_place(|| TableRows::new(layout, of_slot, &self.rules))?,
            found: BTreeMap::new(),
            found_ranges: BTreeSet::new(),
            largest: AppliedRecords::default(),
        })
    }

    /// Takes a block from a shard file, if it is there.
    fn block(
        &self,
        file: &mut ShardFile,
        number: u32,
        applied: &mut Vec<AppliedRecords>,
    ) -> Option<Result<SnapshotBlock, String>> {
        let mut read = file.take(number)?;
        let applied = index_of(applied, file.meta().counted(number)?);
        let mut state: Vec<Vec<f32>> = Vec::new();
        for name in &*self.states {
            match read.states.remove(name) {
                Some(values) => state.push(values),
                None => return Some(Err(format!("lacks the optimizer state `{name}`"))),
            }
        }
        let (values, state) = (Arc::new(read.values), Arc::new(state));
        Some(Ok(SnapshotBlock { number, applied, values, state }))
    }
}

/// A shard of a slot that is put together from the shard files of one version.
pub(crate) struct Assembly<'a> {
    pub store: &'a ShardStore,
    pub names: &'a BlockNames,
    /// The numbers of the blocks of the slot, and of its ranges.
    blocks: Vec<u32>,
    ranges: Vec<u32>,
    snapshot: ShardSnapshot,
    pub tables: TableRows,
    found: BTreeMap<u32, SnapshotBlock>,
    found_ranges: BTreeSet<u32>,
    /// The applied records of most records.
    largest: AppliedRecords,
}

impl Assembly<'_> {
    /// Returns a function that says whether the slot has a block or range.
    pub fn wanted(&self) -> impl Fn(u32) -> bool + Sync + Send + 'static {
        let (blocks, ranges) = (self.blocks.clone(), self.ranges.clone());
        move |number| blocks.binary_search(&number).is_ok() || ranges.binary_search(&number).is_ok()
    }

    fn is_complete(&self) -> bool {
        let (found, wanted) = (self.found.len(), self.blocks.len());
        let (found_ranges, ranges) = (self.found_ranges.len(), self.ranges.len());
        // A slot of a small model may have no blocks; it reads all shards.
        wanted + ranges != 0 && found + found_ranges == wanted + ranges
    }

    /// Adds the blocks of a shard file with the ranges `held`, whose rows are added to the tables apart.
    ///
    /// # Errors
    /// If a part is in another file as well, or lacks its state or applied records.
    pub fn add(
        &mut self,
        object: &str,
        file: &mut ShardFile,
        held: &[u32],
    ) -> Result<(), CheckpointError> {
        let damaged = |number: u32, reason: &str| CheckpointError::Damaged {
            object: object.to_owned(),
            reason: format!("`{}` {reason}", self.names.name(number)),
        };
        let largest = std::mem::take(&mut self.largest);
        self.largest = file.meta().counts.iter().fold(largest, |known, it| {
            if known.records() < it.records() { it.clone() } else { known }
        });
        let snapshot = &mut self.snapshot;
        snapshot.updates = snapshot.updates.max(file.meta().updates);
        snapshot.position.loss = file.meta().loss.or(snapshot.position.loss);
        for number in &self.blocks {
            let Some(block) = self.store.block(file, *number, &mut snapshot.applied) else {
                continue;
            };
            let block = block.map_err(|reason| damaged(*number, &reason))?;
            if self.found.insert(*number, block).is_some() {
                return Err(damaged(*number, "is in another shard as well"));
            }
        }
        let is_ours = |number: &u32| self.ranges.binary_search(number).is_ok();
        for number in held.iter().copied().filter(is_ours) {
            let uncounted = || damaged(number, "has no applied records");
            let counted = file.meta().counted(number).ok_or_else(uncounted)?;
            let applied = index_of(&mut snapshot.applied, counted);
            let (table, _, range) = table_of(self.names.layout(), number);
            self.tables.set_applied(HeldRange { table: table as u32, range, applied });
            if !self.found_ranges.insert(number) {
                return Err(damaged(number, "is in another shard as well"));
            }
        }
        Ok(())
    }

    /// Takes blocks of a snapshot by reference, in place of a shard file without tables.
    ///
    /// # Errors
    /// The number of a block that is there already.
    pub fn take(&mut self, snapshot: &ShardSnapshot) -> Result<(), u32> {
        let largest = snapshot.applied.iter().max_by_key(|it| it.records());
        if let Some(largest) = largest.filter(|it| self.largest.records() < it.records()) {
            self.largest.clone_from(largest);
        }
        let own = &mut self.snapshot;
        own.updates = own.updates.max(snapshot.updates);
        for block in &snapshot.blocks {
            if self.blocks.binary_search(&block.number).is_err() {
                continue;
            }
            let applied = index_of(&mut own.applied, &snapshot.applied[block.applied]);
            if self.found.insert(block.number, SnapshotBlock { applied, ..block.clone() }).is_some()
            {
                return Err(block.number);
            }
        }
        Ok(())
    }

    /// Returns the shard, of which no rows are in a checkpoint.
    ///
    /// # Errors
    /// If a block or range is missing.
    pub fn end(mut self) -> Result<LoadedShard, CheckpointError> {
        for number in &self.blocks {
            let missing = || CheckpointError::NotHeld { tensor: self.names.name(*number) };
            self.snapshot.blocks.push(self.found.remove(number).ok_or_else(missing)?);
        }
        if let Some(number) = self.ranges.iter().find(|number| !self.found_ranges.contains(*number))
        {
            return Err(CheckpointError::NotHeld { tensor: self.names.name(*number) });
        }
        // A slot without blocks must not hold the others back.
        if self.snapshot.applied.is_empty() {
            self.snapshot.applied.push(self.largest);
        }
        let (layout, saved) = (self.names.layout().clone(), SavedRows::default());
        Ok(LoadedShard { layout, snapshot: self.snapshot, tables: self.tables, saved })
    }
}

/// Returns the shards of a checkpoint, beginning with those that hold any of the wanted blocks or ranges under
/// the checkpoint's placement.
fn sources<'a>(
    checkpoint: &'a CheckpointRecord,
    files: &Checkpoint<'_>,
    is_wanted: &dyn Fn(u32) -> bool,
) -> Vec<&'a ShardRecord> {
    let holds = |shard: &ShardRecord| {
        let blocks = files.placement().blocks_of(shard.slot).iter().copied();
        let ranges = files.placement().ranges_of(shard.slot);
        blocks.chain(range_numbers(files.layout(), ranges)).any(is_wanted)
    };
    let (first, others): (Vec<_>, Vec<_>) = checkpoint.shards.iter().partition(|it| holds(it));
    [first, others].concat()
}

/// Returns the index of `records` in `applied`, appending them if they are new.
fn index_of(applied: &mut Vec<AppliedRecords>, records: &AppliedRecords) -> usize {
    if let Some(index) = applied.iter().position(|known| known == records) {
        return index;
    }
    applied.push(records.clone());
    applied.len() - 1
}

/// Returns the shard file of a snapshot, whose rows are in `layers`.
///
/// # Errors
/// If a value is not finite.
pub(crate) fn encode(
    layout: &Layout,
    states: &[String],
    snapshot: ShardSnapshot,
    tables: &TablesSnapshot,
    layers: &Layers,
) -> Result<Vec<Bytes>, EncodeError> {
    encode_with(layout, states, snapshot, tables, rows_meta(tables, layers))
}

fn encode_with(
    layout: &Layout,
    states: &[String],
    snapshot: ShardSnapshot,
    tables: &TablesSnapshot,
    rows: Option<RowsMeta>,
) -> Result<Vec<Bytes>, EncodeError> {
    let number_of = |range: &HeldRange| layout.number_of_range(range.table as usize, range.range);
    let blocks = snapshot.blocks.iter().map(|block| (block.number, block.applied));
    let ranges = tables.ranges().iter().map(|range| (number_of(range), range.applied));
    // In the order of their use, so that the file does not depend on where the entries came from.
    let mut counts = Vec::new();
    let mut count_of = BTreeMap::new();
    for (number, applied) in blocks.chain(ranges) {
        let index = index_of(&mut counts, &snapshot.applied[applied]);
        if 0 < index {
            count_of.insert(number, index);
        }
    }
    if counts.is_empty() {
        counts = snapshot.applied;
    }
    let meta = ShardMeta {
        updates: snapshot.updates,
        examples: snapshot.position.examples,
        version: snapshot.position.version,
        loss: snapshot.position.loss,
        counts,
        count_of,
        rows,
    };
    let tensors = snapshot.blocks.into_iter().map(|block| BlockTensors {
        number: block.number,
        values: block.values,
        states: block.state,
    });
    encode_shard(layout, states, &meta, tensors)
}
