//! Reads a whole checkpoint and finds whatever is wrong with it.

use std::sync::Arc;

use steadfast_common::layout::Layout;
use steadfast_common::records::CheckpointRecord;
use steadfast_common::tally::Counted;
use steadfast_host::task::in_place;
use steadfast_store::Location;

use crate::fault::Fault;
use crate::names::BlockNames;
use crate::reading::Checkpoint;
use crate::shard_file::{ReadBlock, ShardFile};

/// What a checkpoint holds in which nothing is wrong.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified {
    /// [`Layout::digest`] of the parameters.
    pub parameters_sha256: String,
    /// Number of values of all parameters together.
    pub values: usize,
    /// Names of the optimizer's state, ascending.
    pub states: Vec<String>,
    /// What the blocks reflect; several only after asynchronous training.
    pub counted: Vec<CountedBlocks>,
}

/// What some blocks reflect, and how many they are.
#[derive(Clone, Debug, PartialEq)]
pub struct CountedBlocks {
    pub counted: Counted,
    pub blocks: usize,
}

/// Verifies everything that can be known of a checkpoint: every object is there with the size and
/// the SHA-256 of the manifest, all values are finite, and together the shards hold every block
/// exactly once, with the same optimizer state. Holds the parameters and one shard in memory.
///
/// # Errors
/// The first [`Fault`].
///
/// # Panics
/// Outside of a runtime with several threads.
pub async fn verify(store: &Location, record: &CheckpointRecord) -> Result<Verified, Fault> {
    let found = assemble(store, record).await?;
    Ok(Verified {
        parameters_sha256: in_place(|| found.layout.digest(&found.values)),
        values: found.values.len(),
        states: found.states.unwrap_or_default(),
        counted: found.counted,
    })
}

/// Reads the parameters of a checkpoint, and verifies it on the way.
///
/// # Errors
/// The first [`Fault`].
///
/// # Panics
/// Outside of a runtime with several threads.
pub async fn parameters(
    store: &Location,
    record: &CheckpointRecord,
) -> Result<(Arc<Layout>, Vec<f32>), Fault> {
    let found = assemble(store, record).await?;
    Ok((found.layout, found.values))
}

async fn assemble(store: &Location, record: &CheckpointRecord) -> Result<Assembly, Fault> {
    let checkpoint = Checkpoint::open(store, record).await?;
    let mut assembly = Assembly::new(checkpoint.layout());
    for shard in &record.shards {
        let file = checkpoint.read(shard, &|_| true).await?;
        let add = || assembly.add(checkpoint.names(), &shard.object, &file);
        in_place(add).map_err(|reason| Fault::Damaged { object: shard.object.clone(), reason })?;
    }
    match assembly.holders.iter().position(Option::is_none) {
        Some(number) => Err(Fault::NotHeld { tensor: checkpoint.names().block(number as u32).1 }),
        None => Ok(assembly),
    }
}

/// The parameters as far as shards were read.
struct Assembly {
    layout: Arc<Layout>,
    values: Vec<f32>,
    /// The object that holds each block.
    holders: Vec<Option<Arc<str>>>,
    /// Names of the state that the first block has.
    states: Option<Vec<String>>,
    counted: Vec<CountedBlocks>,
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
                return Err(format!("it holds `{name}`, which {other} holds as well"));
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
                "`{name}` has the optimizer state {states:?} where others have {known:?}"
            ));
        }
        Ok(())
    }

    fn count(&mut self, file: &ShardFile, number: u32) {
        let Some(counted) = file.meta().counted(number) else { return };
        match self.counted.iter_mut().find(|known| known.counted == *counted) {
            Some(known) => known.blocks += 1,
            None => self.counted.push(CountedBlocks { counted: counted.clone(), blocks: 1 }),
        }
    }
}

fn check_finite(name: &str, values: &[f32]) -> Result<(), String> {
    match values.iter().position(|value| !value.is_finite()) {
        Some(place) => Err(format!("value {place} of `{name}` is not a finite number")),
        None => Ok(()),
    }
}
