//! What a pserver holds to and from the shard files of checkpoints.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use steadfast_checkpoint::{
    BlockTensors, Checkpoint, EncodeError, Fault, ShardFile, ShardMeta, digest, encode_shard,
    is_in_place,
};
use steadfast_common::ids::{Incarnation, Lane, Slot};
use steadfast_common::layout::Layout;
use steadfast_common::records::{CheckpointRecord, JobRecord, PositionRecord, ShardRecord};
use steadfast_common::tally::Counted;
use steadfast_host::chance;
use steadfast_host::task::in_place;
use steadfast_pserver_core::optimizer::Optimizer;
use steadfast_pserver_core::shard::{Cut, CutBlock, Position};
use steadfast_store::{Location, PutPayload, StoreError};

#[cfg(test)]
mod tests;

/// Why a shard could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error(transparent)]
    Fault(#[from] Fault),
    #[error("the store is not in place: it lacks the job's dataset manifest as well")]
    StoreAway,
}

impl ShardError {
    /// Whether any other attempt would fail as well, on any machine: an object of the checkpoint is
    /// missing, damaged or holds something else. A store that does not answer, or refuses us, is no
    /// fault of the checkpoint.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Store(_) | Self::StoreAway => false,
            Self::Encode(_) => true,
            Self::Fault(fault) => fault.is_permanent(),
        }
    }
}

/// Where the shards of a job lie.
#[derive(Clone, Debug)]
pub struct ShardStore {
    store: Location,
    job: Arc<JobRecord>,
    states: &'static [&'static str],
}

impl ShardStore {
    /// Shards of `job` below `store`.
    pub fn new(store: Location, job: JobRecord) -> Self {
        let states = Optimizer::new(&job.spec.optimizer).state_names();
        Self { store, job: Arc::new(job), states }
    }

    /// Uploads a cut under a new name.
    ///
    /// # Errors
    /// If the store does not take it.
    pub async fn save(
        &self,
        layout: &Layout,
        slot: Slot,
        incarnation: Incarnation,
        cut: Cut,
    ) -> Result<(ShardRecord, PositionRecord), ShardError> {
        let object = format!("{}/{}.safetensors", self.job.spec.shards_folder(), chance::uuid());
        let place = self.store.child(&object)?;
        let (states, version) = (self.states, cut.position.version);
        let position = position_record(&cut);
        let pieces = in_place(|| encode(layout, states, cut))?;
        let size_bytes = pieces.iter().map(|piece| piece.len() as u64).sum();
        // The store is asked first: while it writes, the hash is taken.
        let written = place.create(pieces.iter().cloned().collect::<PutPayload>());
        let hashed = async { in_place(|| digest(&pieces)) };
        let (written, sha256) = tokio::join!(biased; written, hashed);
        written?;
        let shard = ShardRecord { slot, incarnation, object, sha256, size_bytes, version };
        Ok((shard, position))
    }

    /// Loads the blocks of `slot` out of `slots` from a checkpoint, however many slots it had.
    ///
    /// # Errors
    /// If an object is missing or damaged, or the store does not give it.
    pub async fn load(
        &self,
        checkpoint: &CheckpointRecord,
        slot: Slot,
        slots: u32,
    ) -> Result<(Arc<Layout>, Cut), ShardError> {
        match self.read(checkpoint, slot, slots).await {
            // A folder that is not mounted lacks every object.
            Err(error) if error.is_permanent() && !is_in_place(&self.store, &self.job).await? => {
                Err(ShardError::StoreAway)
            }
            read => read,
        }
    }

    async fn read(
        &self,
        checkpoint: &CheckpointRecord,
        slot: Slot,
        slots: u32,
    ) -> Result<(Arc<Layout>, Cut), ShardError> {
        let files = Checkpoint::open(&self.store, checkpoint).await?;
        let layout = Arc::clone(files.layout());
        let wanted = layout.blocks_of(slot, slots);
        let mut cut = Cut {
            position: position(&checkpoint.position),
            updates: 0,
            ended: checkpoint.position.dry.iter().copied().collect(),
            counts: Vec::new(),
            blocks: Vec::new(),
        };
        let mut found = BTreeMap::new();
        let mut most = Counted::default();
        for shard in sources(checkpoint, &layout, &wanted) {
            // A slot of a small model may have no block, and looks at all shards.
            if !wanted.is_empty() && found.len() == wanted.len() {
                break;
            }
            let mut file = files.read(shard, &|it| wanted.binary_search(&it).is_ok()).await?;
            let counts = file.meta().counts.iter();
            most = counts
                .cloned()
                .fold(most, |most, it| if most.records() < it.records() { it } else { most });
            cut.updates = cut.updates.max(file.meta().updates);
            cut.position.loss = file.meta().loss.or(cut.position.loss);
            for number in &wanted {
                let Some(block) = self.block(&mut file, *number, &mut cut.counts) else { continue };
                let damaged = |reason: String| Fault::Damaged {
                    object: shard.object.clone(),
                    reason: format!("`{}` {reason}", files.names().block(*number).1),
                };
                if found.insert(*number, block.map_err(damaged)?).is_some() {
                    return Err(damaged("is in another shard as well".to_owned()).into());
                }
            }
        }
        for number in &wanted {
            let missing = || Fault::NotHeld { tensor: files.names().block(*number).1 };
            cut.blocks.push(found.remove(number).ok_or_else(missing)?);
        }
        // A slot without blocks reflects nothing, and holds nobody up.
        if cut.counts.is_empty() {
            cut.counts.push(most);
        }
        Ok((layout, cut))
    }

    /// A block from a shard, if it is there.
    fn block(
        &self,
        file: &mut ShardFile,
        number: u32,
        counts: &mut Vec<Counted>,
    ) -> Option<Result<CutBlock, String>> {
        let mut read = file.take(number)?;
        let count = place_of(counts, file.meta().counted(number)?);
        let mut state: Vec<Vec<f32>> = Vec::new();
        for name in self.states {
            match read.states.remove(*name) {
                Some(values) => state.push(values),
                None => return Some(Err(format!("lacks the optimizer state `{name}`"))),
            }
        }
        let (values, state) = (Arc::new(read.values), Arc::new(state));
        Some(Ok(CutBlock { number, count, values, state }))
    }
}

/// The shards of a checkpoint, those first that hold any of the `wanted` blocks if they were placed
/// as we place them now.
fn sources<'a>(
    checkpoint: &'a CheckpointRecord,
    layout: &Layout,
    wanted: &[u32],
) -> Vec<&'a ShardRecord> {
    let placed = layout.place(checkpoint.shards.len() as u32);
    let holds = |shard: &ShardRecord| {
        let numbers = placed.get(shard.slot.0 as usize);
        numbers.is_some_and(|it| it.iter().any(|it| wanted.binary_search(it).is_ok()))
    };
    let (first, others): (Vec<_>, Vec<_>) = checkpoint.shards.iter().partition(|it| holds(it));
    [first, others].concat()
}

/// Where `counted` stands in `counts`; puts it there first if it is new.
fn place_of(counts: &mut Vec<Counted>, counted: &Counted) -> usize {
    if let Some(place) = counts.iter().position(|known| known == counted) {
        return place;
    }
    counts.push(counted.clone());
    counts.len() - 1
}

/// How far a checkpoint is, as a shard sees it.
fn position(record: &PositionRecord) -> Position {
    Position {
        version: record.version,
        pass: record.pass,
        pass_start: record.pass_start,
        examples: record.examples,
        loss: None,
    }
}

fn position_record(cut: &Cut) -> PositionRecord {
    PositionRecord {
        version: cut.position.version,
        pass: cut.position.pass,
        pass_start: cut.position.pass_start,
        examples: cut.position.examples,
        dry: cut.ended.iter().copied().collect::<Vec<Lane>>(),
    }
}

fn encode(layout: &Layout, states: &[&str], cut: Cut) -> Result<Vec<Bytes>, EncodeError> {
    let by_other_count = cut.blocks.iter().filter(|block| 0 < block.count);
    let meta = ShardMeta {
        updates: cut.updates,
        examples: cut.position.examples,
        version: cut.position.version,
        loss: cut.position.loss,
        counts: cut.counts,
        count_of: by_other_count.map(|block| (block.number, block.count)).collect(),
    };
    let tensors = cut.blocks.into_iter().map(|block| BlockTensors {
        number: block.number,
        values: block.values,
        states: block.state,
    });
    encode_shard(layout, states, &meta, tensors)
}
