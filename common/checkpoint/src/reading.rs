//! Reads the shards of a checkpoint from its store and checks each against the manifest.

use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use sha2::{Digest, Sha256};
use steadfast_common::dataset::{Manifest, hex};
use steadfast_common::layout::Layout;
use steadfast_common::records::{CheckpointRecord, JobRecord, ShardRecord};
use steadfast_host::task::in_place;
use steadfast_store::{Location, StoreError};

use crate::decode::ShardDecoder;
use crate::encode::WORD;
use crate::error::CheckpointError;
use crate::names::BlockNames;
use crate::shard_file::ShardFile;

/// The longest header that is parsed before the file's hash is verified; enough for some gigabytes of
/// values.
const HEADER_UNSEEN_MAX: u64 = 1 << 20;

/// SHA-256 of an object, in hexadecimal. Slow for large objects.
pub fn digest(segments: &[Bytes]) -> String {
    let mut hash = Sha256::new();
    segments.iter().for_each(|segment| hash.update(segment));
    hex(&hash.finalize())
}

/// Whether `store` has the job's dataset manifest, which is written at the start and never deleted. If
/// not, the store is unavailable (a directory that is not mounted) or another one, and missing objects do
/// not mean that a checkpoint is damaged.
///
/// # Errors
/// If the store does not answer.
pub async fn is_in_place(store: &Location, job: &JobRecord) -> Result<bool, StoreError> {
    let manifest = store.child(&Manifest::object_name(&job.manifest))?;
    Ok(manifest.size().await?.is_some())
}

/// A checkpoint with a valid manifest and with objects of the sizes that it states.
#[derive(Debug)]
pub struct Checkpoint<'a> {
    store: &'a Location,
    names: BlockNames,
}

impl<'a> Checkpoint<'a> {
    /// Checks the manifest and the sizes of all objects below `store`, before memory is allocated by
    /// sizes from the manifest: it may be forged.
    ///
    /// # Errors
    /// See [`CheckpointError`].
    pub async fn open(
        store: &'a Location,
        record: &CheckpointRecord,
    ) -> Result<Self, CheckpointError> {
        if let Some(reason) = record.invalid_reason() {
            return Err(CheckpointError::Manifest { reason });
        }
        for shard in &record.shards {
            let place = place(store, shard)?;
            let size = place
                .size()
                .await
                .map_err(|error| CheckpointError::of_store(&shard.object, error))?;
            match size {
                None => return Err(CheckpointError::Missing { object: shard.object.clone() }),
                Some(size) => check_size(shard, size)?,
            }
        }
        let layout = Arc::new(Layout::new(record.params.clone()));
        Ok(Self { store, names: BlockNames::new(layout) })
    }

    /// The layout of all parameters.
    pub fn layout(&self) -> &Arc<Layout> {
        self.names.layout()
    }

    /// The names of all blocks.
    pub fn names(&self) -> &BlockNames {
        &self.names
    }

    /// Reads one shard and keeps the values of the `wanted` blocks. Beside them, only a few segments of
    /// the file are in memory at a time.
    ///
    /// # Errors
    /// See [`CheckpointError`].
    ///
    /// # Panics
    /// Outside of a multi-threaded runtime: hashing blocks a thread.
    pub async fn read(
        &self,
        shard: &ShardRecord,
        wanted: &(dyn Fn(u32) -> bool + Sync),
    ) -> Result<ShardFile, CheckpointError> {
        let damaged = |reason| CheckpointError::Damaged { object: shard.object.clone(), reason };
        let place = place(self.store, shard)?;
        let first = place.read_range(0..shard.size_bytes.min(WORD as u64)).await;
        let first = first.map_err(|error| CheckpointError::of_store(&shard.object, error))?;
        let header_len = first.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        if HEADER_UNSEEN_MAX < header_len {
            // Parsing takes many times the memory of a header: verify the hash of a long one first.
            check_hash(&place, shard, |_| {}).await?;
        }
        let mut decoder = ShardDecoder::new(&self.names, shard.size_bytes, header_len, wanted);
        let mut form = Ok(());
        // A malformed file most likely has another hash, too, which is the better message.
        check_hash(&place, shard, |segment| {
            if form.is_ok() {
                form = decoder.push(segment);
            }
        })
        .await?;
        let file = form.and_then(|()| decoder.finish()).map_err(damaged)?;
        let (found, wanted) = (file.meta().version, shard.version);
        if found != wanted {
            return Err(damaged(format!("it has version {found}, not {wanted}")));
        }
        Ok(file)
    }
}

fn place(store: &Location, shard: &ShardRecord) -> Result<Location, CheckpointError> {
    store.child(&shard.object).map_err(|error| CheckpointError::of_store(&shard.object, error))
}

/// Passes all segments of a shard to `show` and compares their hash with that of the manifest.
async fn check_hash(
    place: &Location,
    shard: &ShardRecord,
    mut show: impl FnMut(Bytes),
) -> Result<(), CheckpointError> {
    let mut hash = Sha256::new();
    let mut segments = place.read_in_chunks(shard.size_bytes);
    while let Some(segment) = segments.next().await {
        let segment = segment.map_err(|error| CheckpointError::of_store(&shard.object, error))?;
        in_place(|| {
            hash.update(&segment);
            show(segment);
        });
    }
    let sha256 = hex(&hash.finalize());
    if sha256 == shard.sha256 {
        return Ok(());
    }
    let reason = format!("its SHA-256 is {sha256}, not {}", shard.sha256);
    Err(CheckpointError::Damaged { object: shard.object.clone(), reason })
}

fn check_size(shard: &ShardRecord, found: u64) -> Result<(), CheckpointError> {
    if found == shard.size_bytes {
        return Ok(());
    }
    let reason = format!("it has {found} bytes, not {}", shard.size_bytes);
    Err(CheckpointError::Damaged { object: shard.object.clone(), reason })
}
