//! A shard as a safetensors object: parameters, optimizer state, and what they reflect.
//!
//! A block of parameter `w` that begins at value 10 of all is the tensor `w@10`; its optimizer state
//! is `m/w@10` and so on. What is no tensor stands in the file's metadata as JSON.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use steadfast_common::dataset::hex;
use steadfast_common::ids::{Incarnation, Lane, Slot, TrainerId, Version};
use steadfast_common::layout::{Block, Layout};
use steadfast_common::records::{CheckpointRecord, PositionRecord, ShardRecord};
use steadfast_common::spec::OptimizerSpec;
use steadfast_pserver_core::contribution::floats;
use steadfast_pserver_core::optimizer::Optimizer;
use steadfast_pserver_core::shard::{Cut, CutBlock, Position, Shard};
use steadfast_store::{Location, StoreError};
use uuid::Uuid;

/// Key of our JSON in a shard's metadata.
const META: &str = "steadfast";

/// Why a shard could not be saved or loaded.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{object} is damaged: {reason}")]
    Damaged { object: String, reason: String },
    #[error("no shard of the checkpoint holds `{tensor}`")]
    Missing { tensor: String },
}

#[derive(Debug, Serialize, Deserialize)]
struct Meta {
    updates: u64,
    examples: u64,
    version: Version,
    loss: Option<f64>,
    applied: BTreeMap<TrainerId, u64>,
}

/// Where the shards of a job lie.
#[derive(Clone, Debug)]
pub struct ShardStore {
    store: Location,
    states: &'static [&'static str],
}

impl ShardStore {
    /// Shards below `store`, for the job's optimizer.
    pub fn new(store: Location, optimizer: &OptimizerSpec) -> Self {
        let states = Optimizer::new(optimizer).state_names();
        Self { store, states }
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
        let object = format!("shards/{}.safetensors", Uuid::new_v4());
        let place = self.store.child(&object)?;
        let (states, version) = (self.states, cut.position.version);
        let position = position_record(&cut);
        let bytes = tokio::task::block_in_place(|| encode(layout, states, &cut));
        drop(cut);
        let sha256 = tokio::task::block_in_place(|| hex(&Sha256::digest(&bytes)));
        let size_bytes = bytes.len() as u64;
        place.create(bytes).await?;
        let shard = ShardRecord { slot, incarnation, object, sha256, size_bytes, version };
        Ok((shard, position))
    }

    /// Loads the blocks of `slot` out of `slots` from a checkpoint, however many slots it had.
    ///
    /// # Errors
    /// If an object is missing or damaged.
    pub async fn load(
        &self,
        checkpoint: &CheckpointRecord,
        slot: Slot,
        slots: u32,
    ) -> Result<(Arc<Layout>, Cut), ShardError> {
        let layout = Arc::new(Layout::new(checkpoint.params.clone()));
        let blocks = Shard::blocks_of(&layout, slot, slots);
        let mut cut = Cut {
            position: position(&checkpoint.position),
            updates: 0,
            ended: checkpoint.position.dry.iter().copied().collect(),
            applied: BTreeMap::new(),
            blocks: Vec::new(),
        };
        let mut found = BTreeMap::new();
        for shard in &checkpoint.shards {
            let bytes = self.fetch(shard).await?;
            let meta = self.collect(&layout, &blocks, shard, &bytes, &mut found)?;
            cut.updates = cut.updates.max(meta.updates);
            cut.position.loss = meta.loss.or(cut.position.loss);
            for (trainer, sequence) in meta.applied {
                let last = cut.applied.entry(trainer).or_default();
                *last = sequence.max(*last);
            }
        }
        for (number, block) in &blocks {
            let missing = || ShardError::Missing { tensor: tensor_name(&layout, block) };
            cut.blocks.push(found.remove(number).ok_or_else(missing)?);
        }
        Ok((layout, cut))
    }

    async fn fetch(&self, shard: &ShardRecord) -> Result<Bytes, ShardError> {
        let bytes = self.store.child(&shard.object)?.read().await?;
        let sha256 = tokio::task::block_in_place(|| hex(&Sha256::digest(&bytes)));
        if sha256 == shard.sha256 {
            return Ok(bytes);
        }
        let reason = format!("its SHA-256 is {sha256}, not {}", shard.sha256);
        Err(ShardError::Damaged { object: shard.object.clone(), reason })
    }

    fn collect(
        &self,
        layout: &Layout,
        blocks: &[(u32, Block)],
        shard: &ShardRecord,
        bytes: &[u8],
        found: &mut BTreeMap<u32, CutBlock>,
    ) -> Result<Meta, ShardError> {
        let damaged = |reason: String| ShardError::Damaged { object: shard.object.clone(), reason };
        let (_, header) =
            SafeTensors::read_metadata(bytes).map_err(|error| damaged(error.to_string()))?;
        let file = SafeTensors::deserialize(bytes).map_err(|error| damaged(error.to_string()))?;
        let meta = header.metadata().as_ref().and_then(|it| it.get(META));
        let meta = meta.ok_or_else(|| damaged("it has no metadata of ours".to_owned()))?;
        let meta: Meta = serde_json::from_str(meta).map_err(|error| damaged(error.to_string()))?;
        for (number, block) in blocks {
            let name = tensor_name(layout, block);
            let Ok(values) = file.tensor(&name) else { continue };
            let read = |view: &TensorView<'_>| -> Result<Vec<f32>, ShardError> {
                if view.dtype() != Dtype::F32 || view.data().len() != block.len * 4 {
                    return Err(damaged(format!("`{name}` has another type or length")));
                }
                Ok(floats(view.data()).collect())
            };
            let mut state = Vec::new();
            for of in self.states {
                let view = file.tensor(&format!("{of}/{name}"));
                state.push(read(&view.map_err(|error| damaged(error.to_string()))?)?);
            }
            let values = Arc::new(read(&values)?);
            let block = CutBlock { number: *number, values, state: Arc::new(state) };
            found.insert(*number, block);
        }
        Ok(meta)
    }
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

fn tensor_name(layout: &Layout, block: &Block) -> String {
    let param = block.param as usize;
    let start = block.start - layout.range_of(param).start;
    format!("{}@{start}", layout.params()[param].name)
}

fn encode(layout: &Layout, states: &[&str], cut: &Cut) -> Bytes {
    let mut tensors: Vec<(String, &[f32])> = Vec::new();
    for block in &cut.blocks {
        let name = tensor_name(layout, &layout.blocks()[block.number as usize]);
        for (of, state) in states.iter().zip(block.state.iter()) {
            tensors.push((format!("{of}/{name}"), state));
        }
        tensors.push((name, &block.values));
    }
    let views = tensors.iter().map(|(name, values)| {
        let view = TensorView::new(Dtype::F32, vec![values.len()], bytemuck::cast_slice(values));
        (name, view.expect("a vector's bytes fit its length"))
    });
    let meta = Meta {
        updates: cut.updates,
        examples: cut.position.examples,
        version: cut.position.version,
        loss: cut.position.loss,
        applied: cut.applied.clone(),
    };
    let meta = serde_json::to_string(&meta).expect("metadata are plain data");
    let meta = std::collections::HashMap::from([(META.to_owned(), meta)]);
    safetensors::serialize(views, Some(meta)).expect("names are unique").into()
}
