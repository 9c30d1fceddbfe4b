//! Writes the rows of tables to the row files of checkpoints, and reads them.

use std::sync::{Arc, Mutex};

use steadfast_checkpoint::row_file::{
    RangeTensors, RowFile, RowFileMeta, RowFileRecord, RowsMeta, encode_rows, table_of,
};
use steadfast_checkpoint::{BlockNames, Checkpoint, CheckpointError, ShardMeta};
use steadfast_common::ids::Version;
use steadfast_common::records::{RowFilesRecord, ShardRecord};
use steadfast_common::tensor::layout::Layout;
use steadfast_host::task::in_place;
use steadfast_pserver_core::tables::{
    HeldRange, Obsolete, RowKind, RowsPiece, StoredRows, TableRows, TablesSnapshot,
};
use steadfast_pserver_storage::{RowCounts, StorageError};

use crate::shard_file::{ShardError, ShardStore};

/// Bytes of the rows of a file. A pserver has a few files in memory while it writes or reads a checkpoint.
pub(crate) const ROW_FILE_BYTES: usize = 32 << 20;

/// The most layers of changed rows. Each restore reads them all, and each reader of the model.
const CHANGES_MAX: usize = 8;

/// The rows that earlier checkpoints of a shard have, so that a new checkpoint holds only the rows that changed since.
/// The mutexes guard only their fields.
#[derive(Debug, Default)]
pub struct SavedRows {
    saved: Mutex<Vec<Saved>>,
    /// Attempts that have not ended. One without another owner was aborted.
    attempts: Mutex<Vec<Arc<Attempt>>>,
}

/// An attempt to save a shard.
#[derive(Debug)]
pub struct Attempt {
    /// The beginning of the names of its objects.
    pub name: String,
    /// The row files that the attempt has written.
    files: Mutex<Vec<RowFileRecord>>,
}

impl Attempt {
    /// Returns the row files that the attempt has written so far.
    pub fn files(&self) -> Vec<RowFileRecord> {
        self.files.lock().expect("no holder panics").clone()
    }

    pub(crate) fn add(&self, file: RowFileRecord) {
        self.files.lock().expect("no holder panics").push(file);
    }
}

/// The rows of a shard in a checkpoint.
#[derive(Clone, Debug)]
pub struct Saved {
    /// The object of the shard.
    pub object: String,
    /// [`TablesSnapshot::number`] of the snapshot with the same rows.
    pub number: u32,
    pub layers: Layers,
}

/// Row files by layer.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    pub records: Vec<RowFilesRecord>,
    pub files: Vec<Vec<RowFileRecord>>,
}

impl SavedRows {
    /// Creates the state of a shard that was just restored; `saved` is the checkpoint with the same rows, if there is
    /// one.
    pub fn restored(saved: Option<Saved>) -> Self {
        Self { saved: Mutex::new(saved.into_iter().collect()), ..Self::default() }
    }

    /// Begins an attempt to save, whose objects have names that begin with `name`.
    pub(crate) fn begin(&self, name: &str) -> Arc<Attempt> {
        let attempt = Arc::new(Attempt { name: name.to_owned(), files: Mutex::default() });
        self.attempts.lock().expect("no holder panics").push(attempt.clone());
        attempt
    }

    /// Removes an attempt that has ended from the attempts in progress.
    pub(crate) fn end(&self, ended: &Arc<Attempt>) {
        let mut all = self.attempts.lock().expect("no holder panics");
        all.retain(|attempt| !Arc::ptr_eq(attempt, ended));
    }

    /// Removes and returns attempts whose tasks were aborted.
    pub(crate) fn aborted(&self) -> Vec<Arc<Attempt>> {
        let mut all = self.attempts.lock().expect("no holder panics");
        let (aborted, running) = all.drain(..).partition(|it| Arc::strong_count(it) == 1);
        *all = running;
        aborted
    }

    /// Adds a checkpoint that may be committed. Keeps the `newest` committed one, which may stay the newest, and
    /// forgets the others.
    pub(crate) fn add(&self, newest: &str, saved: Saved) {
        let mut all = self.saved.lock().expect("no holder panics");
        all.retain(|it| it.object == newest);
        all.push(saved);
    }

    /// Returns the checkpoint to which the next one adds a layer: `newest`, unless its layers of changes are too many
    /// or as large as all rows.
    pub(crate) fn before(&self, newest: &str) -> Option<Saved> {
        let all = self.saved.lock().expect("no holder panics");
        let saved = all.iter().find(|it| it.object == newest)?;
        let (first, changes) = saved.layers.records.split_first()?;
        let changed = changes.iter().map(|it| it.size_bytes).fold(0, u64::saturating_add);
        let is_short = changes.len() < CHANGES_MAX && changed < first.size_bytes;
        is_short.then(|| saved.clone())
    }
}

impl Layers {
    /// Adds a layer, unless it is empty.
    pub fn add(&mut self, name: &str, files: &[RowFileRecord]) {
        if !files.is_empty() {
            let size_bytes = files.iter().map(|file| file.size_bytes).sum();
            let (name, number) = (name.to_owned(), files.len() as u32);
            self.records.push(RowFilesRecord { name, files: number, size_bytes });
            self.files.push(files.to_vec());
        }
    }
}

/// Reads the rows of a snapshot in portions, one for each row file.
#[derive(Debug, Default)]
pub(crate) struct RowReader {
    /// Index of the next range, which kind of its rows is next, and from which id on.
    range: usize,
    is_candidates: bool,
    from: u64,
    /// The ascending numbers of the ranges that are read, if not all are.
    only: Option<Vec<u32>>,
}

impl RowReader {
    /// Reads only ranges with these numbers, which ascend.
    pub fn of(ranges: Vec<u32>) -> Self {
        Self { only: Some(ranges), ..Self::default() }
    }

    /// Returns the rows of the next file, of about `bytes_max` bytes: all, or those that changed since a snapshot. Adds
    /// rows that are obsolete to `obsolete`.
    ///
    /// # Errors
    /// If rows cannot be read.
    pub fn next(
        &mut self,
        (layout, states): (&Layout, &[Vec<String>]),
        tables: &TablesSnapshot,
        since: Option<u32>,
        bytes_max: usize,
        obsolete: &mut Obsolete,
    ) -> Result<Option<Vec<RangeTensors>>, StorageError> {
        let (mut ranges, mut bytes) = (Vec::<RangeTensors>::new(), 0);
        while bytes < bytes_max
            && let Some(held) = tables.ranges().get(self.range)
        {
            let number = layout.number_of_range(held.table as usize, held.range);
            if self.only.as_ref().is_some_and(|only| only.binary_search(&number).is_err()) {
                self.range += 1;
                continue;
            }
            let kind = if self.is_candidates { RowKind::Candidates } else { RowKind::Rows };
            let piece = tables.read(held, kind, self.from, since, bytes_max - bytes)?;
            let RowsPiece { rows, obsolete: found, next } = piece;
            obsolete.append(found);
            if !rows.ids.is_empty() {
                bytes += rows.bytes();
                let part = tensors_of(layout, held, kind, rows, &states[held.table as usize]);
                match ranges.last_mut() {
                    Some(last) if last.number == part.number => last.append(part),
                    Some(_) | None => ranges.push(part),
                }
            }
            self.from = next.unwrap_or(0);
            if next.is_none() {
                self.range += usize::from(self.is_candidates);
                self.is_candidates = !self.is_candidates;
            }
        }
        Ok((!ranges.is_empty()).then_some(ranges))
    }
}

impl ShardStore {
    /// Writes the rows of a shard, all or those that changed since a snapshot, to the files of an attempt. Returns
    /// rows that are obsolete.
    ///
    /// # Errors
    /// If a value is not finite, rows cannot be read, or the store refuses the write.
    pub(crate) async fn save_rows(
        &self,
        attempt: &Attempt,
        layout: &Layout,
        version: Version,
        tables: &TablesSnapshot,
        since: Option<u32>,
    ) -> Result<Obsolete, ShardError> {
        let (states, meta) = (self.row_states(layout), RowFileMeta { version });
        let (mut reader, mut obsolete) = (RowReader::default(), Obsolete::default());
        let (parts, bytes_max) = ((layout, &*states), self.row_file_bytes);
        while let Some(ranges) =
            in_place(|| reader.next(parts, tables, since, bytes_max, &mut obsolete))?
        {
            let numbers = [ranges[0].number, ranges[ranges.len() - 1].number];
            let segments = in_place(|| encode_rows(layout, &meta, ranges))?;
            let object = RowFilesRecord::object(&attempt.name, attempt.files().len() as u32);
            let (sha256, size_bytes) = self.create(&object, segments).await?;
            attempt.add(RowFileRecord { sha256, size_bytes, ranges: numbers });
        }
        Ok(obsolete)
    }

    /// Adds those rows of a checkpoint's shard whose ranges are `wanted` to the tables of a slot.
    ///
    /// # Errors
    /// See [`ShardError`].
    pub(crate) async fn load_rows(
        &self,
        checkpoint: &Checkpoint<'_>,
        shard: &ShardRecord,
        meta: &ShardMeta,
        wanted: &(dyn Fn(u32) -> bool + Sync),
        tables: &mut TableRows,
    ) -> Result<(), ShardError> {
        let layout = checkpoint.layout();
        let states = self.row_states(layout);
        for (object, file) in checkpoint.row_files(shard, meta)?.into_iter().flatten() {
            let [first, last] = file.ranges;
            if !(first..=last).any(wanted) {
                continue;
            }
            let read = checkpoint.read_rows(&object, &file, wanted).await?;
            in_place(|| add_rows(checkpoint.names(), &states, &object, read, tables))?;
        }
        Ok(())
    }

    /// Returns the state names of each table.
    pub(crate) fn row_states(&self, layout: &Layout) -> Vec<Vec<String>> {
        let tables = layout.tables().iter();
        tables.map(|table| self.rules.optimizer_of(&table.name).state_names()).collect()
    }
}

/// Adds the rows of a file to the tables of a slot.
///
/// # Errors
/// If a row lacks a part, or there is no space for it.
pub(crate) fn add_rows(
    names: &BlockNames,
    states: &[Vec<String>],
    object: &str,
    file: RowFile,
    tables: &mut TableRows,
) -> Result<(), ShardError> {
    for (number, range) in file.into_ranges() {
        let (table, param, place) = table_of(names.layout(), number);
        let rows = rows_of(&range, param.width, &states[table]).map_err(|reason| {
            let (object, reason) =
                (object.to_owned(), format!("`{}` {reason}", names.name(number)));
            CheckpointError::Damaged { object, reason }
        });
        let (rows, candidates) = rows?;
        tables.add(table, place, &rows, &candidates)?;
    }
    Ok(())
}

/// Returns the metadata of the rows of a shard; `None` if the model has no tables.
pub(crate) fn rows_meta(tables: &TablesSnapshot, layers: &Layers) -> Option<RowsMeta> {
    let held = tables.held();
    let rows = || RowsMeta {
        pass: tables.pass(),
        ranges: [held.start, held.end],
        expire_after: tables.expire_after(),
        layers: layers.files.clone(),
    };
    (!tables.expire_after().is_empty()).then(rows)
}

/// Divides stored rows into one tensor for each part.
fn tensors_of(
    layout: &Layout,
    held: &HeldRange,
    kind: RowKind,
    rows: StoredRows,
    states: &[String],
) -> RangeTensors {
    let table = held.table as usize;
    let width = layout.tables()[table].width;
    let stride = width * (1 + states.len());
    let part = |part: usize| -> Vec<f32> {
        let rows = rows.values.chunks_exact(stride);
        rows.flat_map(|row| &row[part * width..(part + 1) * width]).copied().collect()
    };
    let counts = rows.counts.iter().map(|it| [it.updates, it.pass]).collect();
    let states = (1..).zip(states).map(|(index, name)| (name.clone(), part(index))).collect();
    let number = layout.number_of_range(table, held.range);
    let empty = RangeTensors { number, states, ..RangeTensors::default() };
    match kind {
        RowKind::Rows => RangeTensors { values: part(0), ids: rows.ids, counts, ..empty },
        RowKind::Candidates => {
            RangeTensors { candidate_ids: rows.ids, candidate_counts: counts, ..empty }
        }
    }
}

/// Joins the parts of a range to stored rows: those that exist, and those that are not admitted yet.
fn rows_of(
    read: &RangeTensors,
    width: usize,
    states: &[String],
) -> Result<(StoredRows, StoredRows), String> {
    let mut parts = vec![&read.values];
    for state in states {
        let lacks = || format!("lacks the optimizer state `{state}`");
        parts.push(read.states.get(state).ok_or_else(lacks)?);
    }
    let counts = |pairs: &[[u32; 2]]| {
        pairs.iter().map(|[updates, pass]| RowCounts { updates: *updates, pass: *pass }).collect()
    };
    let mut values = Vec::with_capacity(read.values.len() * parts.len());
    for row in 0..read.ids.len() {
        for part in &parts {
            values.extend_from_slice(&part[row * width..(row + 1) * width]);
        }
    }
    let rows = StoredRows { ids: read.ids.clone(), counts: counts(&read.counts), values };
    let candidates = StoredRows {
        ids: read.candidate_ids.clone(),
        counts: counts(&read.candidate_counts),
        values: Vec::new(),
    };
    Ok((rows, candidates))
}
