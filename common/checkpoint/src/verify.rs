//! Verifies a whole checkpoint.

use std::sync::Arc;

use parquet::errors::ParquetError;
use steadfast_common::records::applied_records::AppliedRecords;
use steadfast_common::records::{CheckpointRecord, ShardRecord};
use steadfast_common::tensor::layout::{Block, Layout};
use steadfast_common::tensor::table::RangeDigest;
use steadfast_host::task::in_place;
use steadfast_store::{Location, ObjectWriter, StoreError};

use crate::error::CheckpointError;
use crate::names::BlockNames;
use crate::optimizer_file::OptimizerState;
use crate::range_reader::RangeReader;
use crate::reading::Checkpoint;
use crate::row_file::table_of;
use crate::shard_file::{ReadBlock, ShardFile};
use crate::table_file::TableFile;

/// The content of a valid checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified {
    /// [`Layout::digest`] of the parameters.
    pub parameters_sha256: String,
    /// Total number of values of all parameters.
    pub values: usize,
    /// Number of rows of each table, with its name.
    pub rows: Vec<(String, u64)>,
    /// Names of the optimizer's states, ascending.
    pub states: Vec<String>,
    /// The applied records of the blocks; more than one entry only after asynchronous training.
    pub counted: Vec<AppliedToBlocks>,
}

/// Applied records, and the number of blocks that share them.
#[derive(Clone, Debug, PartialEq)]
pub struct AppliedToBlocks {
    pub counted: AppliedRecords,
    pub blocks: usize,
}

/// Verifies a checkpoint: every object exists with the size and SHA-256 that the manifest states, all
/// values are finite, and the shards together hold every block exactly once, with the same optimizer
/// states. Holds the parameters, the blocks of one shard, a row file of each layer and the rows of one range in
/// memory.
///
/// # Errors
/// The first [`CheckpointError`].
///
/// # Panics
/// Outside of a multi-threaded runtime.
pub async fn verify(
    store: &Location,
    record: &CheckpointRecord,
) -> Result<Verified, CheckpointError> {
    let found = assemble(store, record, Wanted::Parameters).await?;
    Ok(Verified {
        parameters_sha256: in_place(|| found.layout.digest(&found.values, &found.ranges)),
        values: found.values.len(),
        rows: found.layout.tables().iter().map(|it| it.name.clone()).zip(found.rows).collect(),
        states: found.states.unwrap_or_default(),
        counted: found.counted,
    })
}

/// What of a checkpoint is exported.
#[derive(Clone, Debug, PartialEq)]
pub struct Contents {
    pub layout: Arc<Layout>,
    /// The values of all parameters, flat.
    pub values: Vec<f32>,
    /// [`Layout::digest`] of the whole model.
    pub parameters_sha256: String,
    /// The state of the optimizer, if it was asked for.
    pub optimizer: Option<OptimizerState>,
}

/// What is read of a checkpoint beside the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    Parameters,
    WithOptimizer,
}

/// Reads the parameters of a checkpoint, and what else is wanted, and verifies all of it.
///
/// # Errors
/// The first [`CheckpointError`].
///
/// # Panics
/// Outside of a multi-threaded runtime.
pub async fn contents(
    store: &Location,
    record: &CheckpointRecord,
    wanted: Wanted,
) -> Result<Contents, CheckpointError> {
    let Assembly { layout, values, ranges, optimizer, .. } =
        assemble(store, record, wanted).await?;
    let parameters_sha256 = in_place(|| layout.digest(&values, &ranges));
    Ok(Contents { layout, values, parameters_sha256, optimizer })
}

/// Why tables were not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteTablesError {
    /// The tables cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The files of the tables cannot be written.
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("table `{table}`: {error}")]
    File { table: String, error: ParquetError },
}

/// Writes each table of a checkpoint as a [`TableFile`] to its writer, in the order of the layout; `about` is for the
/// metadata. The checkpoint is one that was verified. Holds a row file of each layer, the rows of one range and a row
/// group of each table in memory.
///
/// # Errors
/// See [`WriteTablesError`].
///
/// # Panics
/// Outside of a multi-threaded runtime, or if a table has no writer.
pub async fn write_tables(
    store: &Location,
    record: &CheckpointRecord,
    about: &[(&str, &str)],
    writers: &mut [ObjectWriter],
) -> Result<(), WriteTablesError> {
    let checkpoint = Checkpoint::open(store, record).await?;
    let tables = checkpoint.layout().tables();
    let failed = |table: usize| {
        let table = tables[table].name.clone();
        |error| WriteTablesError::File { table, error }
    };
    let mut files = Vec::new();
    for (index, table) in tables.iter().enumerate() {
        files.push(TableFile::new(table.width, about).map_err(failed(index))?);
    }
    let mut shards: Vec<&ShardRecord> = record.shards.iter().collect();
    // Their ranges ascend with their slots.
    shards.sort_by_key(|shard| shard.slot);
    let mut reader = RangeReader::new(&checkpoint);
    for shard in shards {
        let file = checkpoint.read(shard, &|_| false).await?;
        for number in reader.begin(shard, file.meta())? {
            let rows = reader.rows(number).await?;
            let (table, ..) = table_of(checkpoint.layout(), number);
            let file = &mut files[table];
            let pushed = in_place(|| file.push(&rows).and_then(|()| file.take()));
            writers[table].push(&pushed.map_err(failed(table))?).await?;
        }
    }
    for (table, file) in files.into_iter().enumerate() {
        let rest = in_place(|| file.finish()).map_err(failed(table))?;
        writers[table].push(&rest).await?;
    }
    Ok(())
}

async fn assemble(
    store: &Location,
    record: &CheckpointRecord,
    wanted: Wanted,
) -> Result<Assembly, CheckpointError> {
    let checkpoint = Checkpoint::open(store, record).await?;
    let mut assembly = Assembly::new(checkpoint.layout(), wanted);
    let mut reader = RangeReader::new(&checkpoint);
    for shard in &record.shards {
        let damaged = |reason| CheckpointError::Damaged { object: shard.object.clone(), reason };
        let file = checkpoint.read(shard, &|_| true).await?;
        in_place(|| assembly.add(checkpoint.names(), &shard.object, &file)).map_err(damaged)?;
        for number in reader.begin(shard, file.meta())? {
            assembly.hold(checkpoint.names(), &shard.object, number).map_err(damaged)?;
            let rows = reader.rows(number).await?;
            let (table, ..) = table_of(&assembly.layout, number);
            assembly.rows[table] += rows.len() as u64;
            let index = number as usize - assembly.layout.blocks().len();
            assembly.ranges[index] = in_place(|| rows.digest());
            assembly.count(&file, number);
        }
    }
    match assembly.holders.iter().position(Option::is_none) {
        Some(number) => {
            Err(CheckpointError::NotHeld { tensor: checkpoint.names().name(number as u32) })
        }
        None => Ok(assembly),
    }
}

/// The parameters of the shards read so far.
struct Assembly {
    layout: Arc<Layout>,
    values: Vec<f32>,
    /// The digest of each range of the tables.
    ranges: Vec<RangeDigest>,
    /// Number of rows of each table.
    rows: Vec<u64>,
    /// The object that holds each block or range.
    holders: Vec<Option<String>>,
    /// Names of the first block's optimizer states.
    states: Option<Vec<String>>,
    counted: Vec<AppliedToBlocks>,
    /// The state of the optimizer, if it is wanted.
    optimizer: Option<OptimizerState>,
}

impl Assembly {
    fn new(layout: &Arc<Layout>, wanted: Wanted) -> Self {
        let optimizer = match wanted {
            Wanted::Parameters => None,
            Wanted::WithOptimizer => Some(OptimizerState::default()),
        };
        Self {
            optimizer,
            values: vec![0.0; layout.len()],
            ranges: vec![RangeDigest::default(); layout.ranges()],
            rows: vec![0; layout.tables().len()],
            holders: vec![None; layout.blocks().len() + layout.ranges()],
            states: None,
            counted: Vec::new(),
            layout: Arc::clone(layout),
        }
    }

    fn add(&mut self, names: &BlockNames, object: &str, file: &ShardFile) -> Result<(), String> {
        if let Some(optimizer) = &mut self.optimizer {
            optimizer.updates = optimizer.updates.max(file.meta().updates);
        }
        for (number, read) in file.blocks() {
            let (block, name) = names.block(*number);
            self.hold(names, object, *number)?;
            check_finite(&name, &read.values)?;
            self.values[block.range()].copy_from_slice(&read.values);
            self.add_states(read, &block, &name)?;
            self.count(file, *number);
        }
        Ok(())
    }

    /// Notes which object holds a block or range.
    fn hold(&mut self, names: &BlockNames, object: &str, number: u32) -> Result<(), String> {
        match self.holders[number as usize].replace(object.to_owned()) {
            Some(other) => {
                let name = names.name(number);
                Err(format!("it holds `{name}`, which {other} also holds"))
            }
            None => Ok(()),
        }
    }

    fn add_states(&mut self, read: &ReadBlock, block: &Block, name: &str) -> Result<(), String> {
        for (state, values) in &read.states {
            check_finite(&format!("{state}/{name}"), values)?;
            let Some(optimizer) = &mut self.optimizer else { continue };
            let whole = optimizer.states.entry(state.clone());
            let whole = whole.or_insert_with(|| vec![0.0; self.layout.len()]);
            whole[block.range()].copy_from_slice(values);
        }
        let states: Vec<String> = read.states.keys().cloned().collect();
        let known = self.states.get_or_insert_with(|| states.clone());
        if *known != states {
            return Err(format!(
                "`{name}` has the optimizer state {states:?}, other blocks have {known:?}"
            ));
        }
        Ok(())
    }

    fn count(&mut self, file: &ShardFile, number: u32) {
        let Some(counted) = file.meta().counted(number) else { return };
        match self.counted.iter_mut().find(|known| known.counted == *counted) {
            Some(known) => known.blocks += 1,
            None => self.counted.push(AppliedToBlocks { counted: counted.clone(), blocks: 1 }),
        }
    }
}

fn check_finite(name: &str, values: &[f32]) -> Result<(), String> {
    match values.iter().position(|value| !value.is_finite()) {
        Some(place) => Err(format!("value {place} of `{name}` is not finite")),
        None => Ok(()),
    }
}
