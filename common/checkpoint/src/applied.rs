//! The applied records of a checkpoint, slot by slot.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::ids::Slot;
use steadfast_common::records::CheckpointRecord;
use steadfast_store::Location;

use crate::error::CheckpointError;
use crate::reading::Checkpoint;
use crate::shard_file::ShardMeta;
use crate::verify::AppliedToBlocks;

/// Reads the applied records of each slot's blocks and ranges from the shard files, and checks that every one of them
/// is in exactly one shard.
///
/// # Errors
/// See [`CheckpointError`].
pub async fn applied_by_slot(
    store: &Location,
    record: &CheckpointRecord,
) -> Result<Vec<(Slot, Vec<AppliedToBlocks>)>, CheckpointError> {
    let checkpoint = Checkpoint::open(store, record).await?;
    let (mut slots, mut seen) = (Vec::new(), BTreeSet::new());
    for shard in &record.shards {
        let file = checkpoint.read(shard, &|_| false).await?;
        let ranges = checkpoint.ranges(shard, file.meta())?;
        let numbers: Vec<u32> = file.numbers().chain(ranges).collect();
        if let Some(number) = numbers.iter().copied().find(|number| !seen.insert(*number)) {
            let name = checkpoint.names().name(number);
            let reason = format!("it holds `{name}`, which another shard also holds");
            return Err(CheckpointError::Damaged { object: shard.object.clone(), reason });
        }
        slots.push((shard.slot, applied_to(file.meta(), &numbers)));
    }
    let all = (checkpoint.layout().blocks().len() + checkpoint.layout().ranges()) as u32;
    match (0..all).find(|number| !seen.contains(number)) {
        Some(number) => Err(CheckpointError::NotHeld { tensor: checkpoint.names().name(number) }),
        None => Ok(slots),
    }
}

/// Divides the blocks and ranges of a shard by their applied records.
fn applied_to(meta: &ShardMeta, numbers: &[u32]) -> Vec<AppliedToBlocks> {
    let mut blocks: BTreeMap<usize, usize> = BTreeMap::new();
    for number in numbers {
        let count = meta.count_of.get(number).copied().unwrap_or(0);
        *blocks.entry(count).or_default() += 1;
    }
    let of = |at: usize| blocks.get(&at).copied().unwrap_or(0);
    let all = meta.counts.iter().enumerate();
    all.map(|(at, counted)| AppliedToBlocks { counted: counted.clone(), blocks: of(at) }).collect()
}
