//! Saves shards to the shard files of checkpoints and loads them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use steadfast_checkpoint::{
    BlockTensors, Checkpoint, CheckpointError, EncodeError, RangeTensors, ShardFile, ShardMeta,
    digest, encode_shard, is_in_place,
};
use steadfast_common::applied_records::AppliedRecords;
use steadfast_common::ids::{Incarnation, Slot};
use steadfast_common::layout::{Layout, TableParam};
use steadfast_common::placement::{Placement, PlacementRecord};
use steadfast_common::records::{CheckpointRecord, JobRecord, ShardRecord};
use steadfast_common::table::RANGES;
use steadfast_host::random;
use steadfast_host::task::in_place;
use steadfast_pserver_core::block_store::{ShardSnapshot, SnapshotBlock};
use steadfast_pserver_core::optimizer::Optimizer;
use steadfast_pserver_core::rules::Rules;
use steadfast_pserver_core::tables::{
    HeldRange, Obsolete, RangeRows, StoredRows, TableRows, TablesSnapshot,
};
use steadfast_pserver_storage::{RowCounts, StorageError};
use steadfast_store::{Location, PutPayload, StoreError};

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
    /// Whether any other attempt would fail as well, on any machine: an object of the checkpoint is missing,
    /// damaged or has other content. A store that is unreachable or denies access is not an error of the
    /// checkpoint.
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
    states: &'static [&'static str],
    rules: Rules,
}

impl ShardStore {
    /// Creates the store for the shards of `job` below `store`.
    pub fn new(store: Location, job: JobRecord, rules: Rules) -> Self {
        let states = Optimizer::new(&job.spec.optimizer).state_names();
        Self { store, job: Arc::new(job), states, rules }
    }

    /// Uploads a snapshot under a new name; returns also the rows that are obsolete.
    ///
    /// # Errors
    /// If a value is not finite, rows cannot be read, or the store refuses the write.
    pub async fn save(
        &self,
        layout: &Layout,
        slot: Slot,
        incarnation: Incarnation,
        snapshot: ShardSnapshot,
        tables: TablesSnapshot,
    ) -> Result<(ShardRecord, Obsolete), ShardError> {
        let object = format!("{}/{}.safetensors", self.job.spec.shards_directory(), random::uuid());
        let place = self.store.child(&object)?;
        let (states, version) = (self.states, snapshot.position.version);
        let row_states = self.row_states(layout);
        let (segments, obsolete) =
            in_place(|| encode(layout, states, &row_states, snapshot, &tables))?;
        drop(tables);
        let size_bytes = segments.iter().map(|segment| segment.len() as u64).sum();
        // Polls the store first: the hash is computed while it writes.
        let written = place.create(segments.iter().cloned().collect::<PutPayload>());
        let hashed = async { in_place(|| digest(&segments)) };
        let (written, sha256) = tokio::join!(biased; written, hashed);
        written?;
        let record = ShardRecord { slot, incarnation, object, sha256, size_bytes, version };
        Ok((record, obsolete))
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
    ) -> Result<(Arc<Layout>, ShardSnapshot, TableRows), ShardError> {
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
    ) -> Result<(Arc<Layout>, ShardSnapshot, TableRows), ShardError> {
        let files = Checkpoint::open(&self.store, checkpoint).await?;
        let layout = Arc::clone(files.layout());
        let placement = Placement::of(&layout, placement);
        let wanted = &wanted_of(&layout, &placement, slot)[..];
        let blocks = placement.blocks_of(slot);
        let row_states = self.row_states(&layout);
        let mut snapshot = ShardSnapshot {
            position: checkpoint.position,
            updates: 0,
            exhausted: checkpoint.exhausted.iter().copied().collect(),
            applied: Vec::new(),
            blocks: Vec::new(),
        };
        let ranges = placement.ranges_of(slot);
        let mut tables = in_place(|| TableRows::new(&layout, ranges, &self.rules))?;
        let (mut found, mut found_ranges) = (BTreeMap::new(), BTreeSet::new());
        let mut largest = AppliedRecords::default();
        for shard in sources(checkpoint, &layout, wanted) {
            // A slot of a small model may have no blocks; it reads all shards.
            if !wanted.is_empty() && found.len() + found_ranges.len() == wanted.len() {
                break;
            }
            let mut file = files.read(shard, &|it| wanted.binary_search(&it).is_ok()).await?;
            let counts = file.meta().counts.iter();
            largest = counts
                .cloned()
                .fold(largest, |known, it| if known.records() < it.records() { it } else { known });
            snapshot.updates = snapshot.updates.max(file.meta().updates);
            snapshot.position.loss = file.meta().loss.or(snapshot.position.loss);
            for number in wanted {
                let damaged = |reason: String| CheckpointError::Damaged {
                    object: shard.object.clone(),
                    reason: format!("`{}` {reason}", files.names().name(*number)),
                };
                let applied = &mut snapshot.applied;
                let is_twice = match blocks.binary_search(number) {
                    Ok(_) => match self.block(&mut file, *number, applied) {
                        Some(block) => found.insert(*number, block.map_err(damaged)?).is_some(),
                        None => false,
                    },
                    Err(_) => match range(&mut file, *number, &layout, &row_states, applied) {
                        Some(range) => {
                            let (held, rows, candidates) = range.map_err(damaged)?;
                            let is_new = found_ranges.insert(*number);
                            if is_new {
                                in_place(|| tables.add(held, &rows, &candidates))?;
                            }
                            !is_new
                        }
                        None => false,
                    },
                };
                if is_twice {
                    return Err(damaged("is in another shard as well".to_owned()).into());
                }
            }
        }
        for number in wanted {
            let missing = || CheckpointError::NotHeld { tensor: files.names().name(*number) };
            match blocks.binary_search(number) {
                Ok(_) => snapshot.blocks.push(found.remove(number).ok_or_else(missing)?),
                Err(_) if found_ranges.contains(number) => {}
                Err(_) => return Err(missing().into()),
            }
        }
        // A slot without blocks must not hold the others back.
        if snapshot.applied.is_empty() {
            snapshot.applied.push(largest);
        }
        Ok((layout, snapshot, tables))
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
        for name in self.states {
            match read.states.remove(*name) {
                Some(values) => state.push(values),
                None => return Some(Err(format!("lacks the optimizer state `{name}`"))),
            }
        }
        let (values, state) = (Arc::new(read.values), Arc::new(state));
        Some(Ok(SnapshotBlock { number, applied, values, state }))
    }
}

impl ShardStore {
    /// Returns the state names of each table.
    fn row_states(&self, layout: &Layout) -> Vec<&'static [&'static str]> {
        let of_table = |table: &TableParam| self.rules.optimizer_of(&table.name).state_names();
        layout.tables().iter().map(of_table).collect()
    }
}

/// Returns the numbers of the blocks and ranges of a slot, ascending.
fn wanted_of(layout: &Layout, placement: &Placement, slot: Slot) -> Vec<u32> {
    let ranges = placement.ranges_of(slot);
    let tables = 0..layout.tables().len();
    let of_table = |table| ranges.clone().map(move |range| layout.number_of_range(table, range));
    placement.blocks_of(slot).iter().copied().chain(tables.flat_map(of_table)).collect()
}

/// Takes a range from a shard file, if it is there: its rows, and the ids that are not admitted yet.
fn range(
    file: &mut ShardFile,
    number: u32,
    layout: &Layout,
    states: &[&[&str]],
    applied: &mut Vec<AppliedRecords>,
) -> Option<Result<(HeldRange, StoredRows, StoredRows), String>> {
    let read = file.take_range(number)?;
    let applied = index_of(applied, file.meta().counted(number)?);
    let index = number - layout.blocks().len() as u32;
    let (table, range) = (index / RANGES, index % RANGES);
    let width = layout.tables()[table as usize].width;
    let rows = rows_of(&read, layout, width, states[table as usize]);
    let held = HeldRange { table, range, applied };
    Some(rows.map(|(rows, candidates)| (held, rows, candidates)))
}

/// Returns the shards of a checkpoint, beginning with those that hold any of the `wanted` blocks under
/// the checkpoint's placement.
fn sources<'a>(
    checkpoint: &'a CheckpointRecord,
    layout: &Layout,
    wanted: &[u32],
) -> Vec<&'a ShardRecord> {
    let placement = Placement::of(layout, &checkpoint.placement);
    let holds = |shard: &ShardRecord| {
        let held = wanted_of(layout, &placement, shard.slot);
        held.iter().any(|it| wanted.binary_search(it).is_ok())
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

fn encode(
    layout: &Layout,
    states: &[&str],
    row_states: &[&[&str]],
    snapshot: ShardSnapshot,
    tables: &TablesSnapshot,
) -> Result<(Vec<Bytes>, Obsolete), ShardError> {
    let number_of = |range: &HeldRange| layout.number_of_range(range.table as usize, range.range);
    let blocks = snapshot.blocks.iter().map(|block| (block.number, block.applied));
    let ranges = tables.ranges().iter().map(|range| (number_of(range), range.applied));
    let not_first = blocks.chain(ranges).filter(|(_, applied)| 0 < *applied).collect();
    let meta = ShardMeta {
        updates: snapshot.updates,
        examples: snapshot.position.examples,
        version: snapshot.position.version,
        loss: snapshot.position.loss,
        counts: snapshot.applied,
        count_of: not_first,
    };
    let (mut ranges, mut obsolete) = (Vec::new(), Obsolete::default());
    for held in tables.ranges() {
        let (table, range) = (held.table as usize, tables.read(held)?);
        let width = layout.tables()[table].width;
        ranges.push(tensors_of(&range, number_of(held), width, row_states[table]));
        obsolete.append(range.obsolete);
    }
    let tensors = snapshot.blocks.into_iter().map(|block| BlockTensors {
        number: block.number,
        values: block.values,
        states: block.state,
    });
    Ok((encode_shard(layout, states, &meta, tensors, ranges.into_iter())?, obsolete))
}

/// Divides stored rows into one tensor for each part.
fn tensors_of(range: &RangeRows, number: u32, width: usize, states: &[&str]) -> RangeTensors {
    let stride = width * (1 + states.len());
    let part = |part: usize| -> Vec<f32> {
        let rows = range.rows.values.chunks_exact(stride);
        rows.flat_map(|row| &row[part * width..(part + 1) * width]).copied().collect()
    };
    let counts = |rows: &StoredRows| rows.counts.iter().map(|it| [it.updates, it.pass]).collect();
    RangeTensors {
        number,
        ids: range.rows.ids.clone(),
        counts: counts(&range.rows),
        values: part(0),
        states: (1..).zip(states).map(|(index, name)| ((*name).to_owned(), part(index))).collect(),
        candidate_ids: range.candidates.ids.clone(),
        candidate_counts: counts(&range.candidates),
    }
}

/// Joins the parts of a range to stored rows: those that exist, and those that are not admitted yet.
fn rows_of(
    read: &RangeTensors,
    layout: &Layout,
    width: usize,
    states: &[&str],
) -> Result<(StoredRows, StoredRows), String> {
    read.check(layout)?;
    let mut parts = vec![&read.values];
    for state in states {
        let lacks = || format!("lacks the optimizer state `{state}`");
        parts.push(read.states.get(*state).ok_or_else(lacks)?);
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
