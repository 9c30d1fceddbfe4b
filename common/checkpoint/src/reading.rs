//! Reads the shards of a checkpoint from its store, each checked against its manifest.

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
use crate::fault::Fault;
use crate::names::BlockNames;
use crate::shard_file::ShardFile;

/// The longest header that is parsed before the hash of its file is known: of some gigabytes of values.
const HEADER_UNSEEN_MAX: u64 = 1 << 20;

/// SHA-256 of an object, in hexadecimal. Takes a while for a large one.
pub fn digest(pieces: &[Bytes]) -> String {
    let mut hash = Sha256::new();
    pieces.iter().for_each(|piece| hash.update(piece));
    hex(&hash.finalize())
}

/// Whether `store` has the job's dataset manifest, which is there from the start and which nobody
/// deletes. If not, the store is away (a folder that is not mounted) or another one, and objects
/// that are missing say nothing about a checkpoint.
///
/// # Errors
/// If the store does not answer.
pub async fn is_in_place(store: &Location, job: &JobRecord) -> Result<bool, StoreError> {
    let manifest = store.child(&Manifest::object_name(&job.manifest))?;
    Ok(manifest.size().await?.is_some())
}

/// A checkpoint whose manifest is sound and whose objects have the sizes that it says.
#[derive(Debug)]
pub struct Checkpoint<'a> {
    store: &'a Location,
    names: BlockNames,
}

impl<'a> Checkpoint<'a> {
    /// Checks the manifest and the sizes of all objects below `store`. Only then the manifest's
    /// sizes count: a forged one makes nobody set memory aside.
    ///
    /// # Errors
    /// See [`Fault`].
    pub async fn open(store: &'a Location, record: &CheckpointRecord) -> Result<Self, Fault> {
        if let Some(reason) = record.fault() {
            return Err(Fault::Manifest { reason });
        }
        for shard in &record.shards {
            let place = place(store, shard)?;
            let size = place.size().await.map_err(|error| Fault::of_store(&shard.object, error))?;
            match size {
                None => return Err(Fault::Missing { object: shard.object.clone() }),
                Some(size) => check_size(shard, size)?,
            }
        }
        let layout = Arc::new(Layout::new(record.params.clone()));
        Ok(Self { store, names: BlockNames::new(layout) })
    }

    /// All parameters.
    pub fn layout(&self) -> &Arc<Layout> {
        self.names.layout()
    }

    /// The names of all blocks.
    pub fn names(&self) -> &BlockNames {
        &self.names
    }

    /// Reads one shard, and keeps the values of the blocks that are `wanted`. Holds a few pieces of
    /// the file in memory beside them.
    ///
    /// # Errors
    /// See [`Fault`].
    ///
    /// # Panics
    /// Outside of a runtime with several threads: hashing keeps a thread busy.
    pub async fn read(
        &self,
        shard: &ShardRecord,
        wanted: &(dyn Fn(u32) -> bool + Sync),
    ) -> Result<ShardFile, Fault> {
        let damaged = |reason| Fault::Damaged { object: shard.object.clone(), reason };
        let place = place(self.store, shard)?;
        let first = place.read_range(0..shard.size_bytes.min(WORD as u64)).await;
        let first = first.map_err(|error| Fault::of_store(&shard.object, error))?;
        let header_len = first.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        if HEADER_UNSEEN_MAX < header_len {
            // Parsing takes many times the memory of a header, so somebody has to vouch for a long one.
            check_hash(&place, shard, |_| {}).await?;
        }
        let mut decoder = ShardDecoder::new(&self.names, shard.size_bytes, header_len, wanted);
        let mut form = Ok(());
        // A file whose form is wrong has most likely another hash, which says more.
        check_hash(&place, shard, |piece| {
            if form.is_ok() {
                form = decoder.push(piece);
            }
        })
        .await?;
        let file = form.and_then(|()| decoder.finish()).map_err(damaged)?;
        let (found, wanted) = (file.meta().version, shard.version);
        if found != wanted {
            return Err(damaged(format!("it is of version {found}, not {wanted}")));
        }
        Ok(file)
    }
}

fn place(store: &Location, shard: &ShardRecord) -> Result<Location, Fault> {
    store.child(&shard.object).map_err(|error| Fault::of_store(&shard.object, error))
}

/// Shows all pieces of a shard, and says whether they have the hash of the manifest.
async fn check_hash(
    place: &Location,
    shard: &ShardRecord,
    mut show: impl FnMut(Bytes),
) -> Result<(), Fault> {
    let mut hash = Sha256::new();
    let mut pieces = place.read_in_pieces(shard.size_bytes);
    while let Some(piece) = pieces.next().await {
        let piece = piece.map_err(|error| Fault::of_store(&shard.object, error))?;
        in_place(|| {
            hash.update(&piece);
            show(piece);
        });
    }
    let sha256 = hex(&hash.finalize());
    if sha256 == shard.sha256 {
        return Ok(());
    }
    let reason = format!("its SHA-256 is {sha256}, not {}", shard.sha256);
    Err(Fault::Damaged { object: shard.object.clone(), reason })
}

fn check_size(shard: &ShardRecord, found: u64) -> Result<(), Fault> {
    if found == shard.size_bytes {
        return Ok(());
    }
    let reason = format!("it has {found} bytes, not {}", shard.size_bytes);
    Err(Fault::Damaged { object: shard.object.clone(), reason })
}
