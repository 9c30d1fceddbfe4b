//! Verifies a whole checkpoint.

use std::sync::Arc;

use steadfast_common::applied_records::AppliedRecords;
use steadfast_common::layout::Layout;
use steadfast_common::records::CheckpointRecord;
use steadfast_host::task::in_place;
use steadfast_store::Location;

use crate::error::CheckpointError;
use crate::names::BlockNames;
use crate::reading::Checkpoint;
use crate::shard_file::{ReadBlock, ShardFile};

/// The content of a valid checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified {
    /// [`Layout::digest`] of the parameters.
    pub parameters_sha256: String,
    /// Total number of values of all parameters.
    pub values: usize,
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
/// states. Holds the parameters and one shard in memory.
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
    let found = assemble(store, record).await?;
    Ok(Verified {
        parameters_sha256: in_place(|| found.layout.digest(&found.values)),
        values: found.values.len(),
        states: found.states.unwrap_or_default(),
        counted: found.counted,
    })
}

/// Reads the parameters of a checkpoint and verifies it.
///
/// # Errors
/// The first [`CheckpointError`].
///
/// # Panics
/// Outside of a multi-threaded runtime.
pub async fn parameters(
    store: &Location,
    record: &CheckpointRecord,
) -> Result<(Arc<Layout>, Vec<f32>), CheckpointError> {
    let found = assemble(store, record).await?;
    Ok((found.layout, found.values))
}

async fn assemble(
    store: &Location,
    record: &CheckpointRecord,
) -> Result<Assembly, CheckpointError> {
    let checkpoint = Checkpoint::open(store, record).await?;
    let mut assembly = Assembly::new(checkpoint.layout());
    for shard in &record.shards {
        let file = checkpoint.read(shard, &|_| true).await?;
        let add = || assembly.add(checkpoint.names(), &shard.object, &file);
        in_place(add)
            .map_err(|reason| CheckpointError::Damaged { object: shard.object.clone(), reason })?;
    }
    match assembly.holders.iter().position(Option::is_none) {
        Some(number) => {
            Err(CheckpointError::NotHeld { tensor: checkpoint.names().block(number as u32).1 })
        }
        None => Ok(assembly),
    }
}

/// The parameters of the shards read so far.
struct Assembly {
    layout: Arc<Layout>,
    values: Vec<f32>,
    /// The object that holds each block.
    holders: Vec<Option<Arc<str>>>,
    /// Names of the first block's optimizer states.
    states: Option<Vec<String>>,
    counted: Vec<AppliedToBlocks>,
}

impl Assembly {
    fn new(layout: &Arc<Layout>) -> Self {
        Self {
            values: vec![0.0; layout.len()],
            holders: vec![None; layout.blocks().len()],
            states: None,
            counted: Vec::new(),
            layout: Arc::clone(layout),
        }
    }

    fn add(&mut self, names: &BlockNames, object: &str, file: &ShardFile) -> Result<(), String> {
        let object: Arc<str> = object.into();
        for (number, read) in file.blocks() {
            let (block, name) = names.block(*number);
            if let Some(other) = self.holders[*number as usize].replace(Arc::clone(&object)) {
                return Err(format!("it holds `{name}`, which {other} also holds"));
            }
            check_finite(&name, &read.values)?;
            self.values[block.range()].copy_from_slice(&read.values);
            self.add_states(read, &name)?;
            self.count(file, *number);
        }
        Ok(())
    }

    fn add_states(&mut self, read: &ReadBlock, name: &str) -> Result<(), String> {
        for (state, values) in &read.states {
            check_finite(&format!("{state}/{name}"), values)?;
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
