//! Reads the shards of a checkpoint from its store and checks each against the manifest.

use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use sha2::{Digest, Sha256};
use steadfast_common::job::dataset::{Manifest, hex};
use steadfast_common::records::{CheckpointRecord, JobRecord, ShardRecord};
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::placement::Placement;
use steadfast_host::task::in_place;
use steadfast_store::{Location, StoreError};

use crate::decode::Decoder;
use crate::encode::WORD;
use crate::error::CheckpointError;
use crate::names::BlockNames;
use crate::row_file::{RowFile, RowFileRecord};
use crate::shard_file::{FileMeta, ShardFile, ShardMeta, TensorFile};

/// The longest header that is parsed before the file's hash is verified; enough for some gigabytes of
/// values.
const HEADER_UNSEEN_MAX: u64 = 1 << 20;

/// Computes the SHA-256 of an object, in hexadecimal. This is slow for large objects.
pub fn digest(segments: &[Bytes]) -> String {
    let mut hash = Sha256::new();
    segments.iter().for_each(|segment| hash.update(segment));
    hex(&hash.finalize())
}

/// Returns whether `store` has the job's dataset manifest, which is written at the start and never deleted. A store
/// without it is unavailable (a directory that is not mounted) or another one; missing objects then do not mean that a
/// checkpoint is damaged.
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
    placement: Placement,
}

/// An object as a record describes it.
#[derive(Clone, Copy)]
struct Described<'a> {
    object: &'a str,
    sha256: &'a str,
    size_bytes: u64,
}

impl<'a> Described<'a> {
    fn of(shard: &'a ShardRecord) -> Self {
        let ShardRecord { object, sha256, size_bytes, .. } = shard;
        Self { object, sha256, size_bytes: *size_bytes }
    }

    fn place(&self, store: &Location) -> Result<Location, CheckpointError> {
        store.child(self.object).map_err(|error| CheckpointError::of_store(self.object, error))
    }

    fn damaged(&self, reason: String) -> CheckpointError {
        CheckpointError::Damaged { object: self.object.to_owned(), reason }
    }

    /// Checks that the object exists and has the described size.
    async fn check_size(&self, store: &Location) -> Result<(), CheckpointError> {
        let size = self.place(store)?.size().await;
        match size.map_err(|error| CheckpointError::of_store(self.object, error))? {
            None => Err(CheckpointError::Missing { object: self.object.to_owned() }),
            Some(size) if size == self.size_bytes => Ok(()),
            Some(size) => {
                Err(self.damaged(format!("it has {size} bytes, not {}", self.size_bytes)))
            }
        }
    }
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
            Described::of(shard).check_size(store).await?;
        }
        let layout = Arc::new(Layout::new(record.params.clone()));
        let placement = Placement::of(&layout, &record.placement);
        Ok(Self { store, names: BlockNames::new(layout), placement })
    }

    pub fn layout(&self) -> &Arc<Layout> {
        self.names.layout()
    }

    pub fn names(&self) -> &BlockNames {
        &self.names
    }

    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Returns the numbers of the ranges of a shard with `meta`, ascending.
    ///
    /// # Errors
    /// If there are no such ranges.
    pub fn ranges(
        &self,
        shard: &ShardRecord,
        meta: &ShardMeta,
    ) -> Result<Vec<u32>, CheckpointError> {
        self.names.ranges(meta).map_err(|reason| Described::of(shard).damaged(reason))
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
        let described = Described::of(shard);
        let file: ShardFile = self.decode(described, wanted).await?;
        let (found, wanted) = (file.meta().version, shard.version);
        if found != wanted {
            return Err(described.damaged(format!("it has version {found}, not {wanted}")));
        }
        Ok(file)
    }

    /// Returns the row files of a shard with `meta`, by layer, with the names of their objects.
    ///
    /// # Errors
    /// If the manifest names other ones.
    pub fn row_files(
        &self,
        shard: &ShardRecord,
        meta: &ShardMeta,
    ) -> Result<Vec<Vec<(String, RowFileRecord)>>, CheckpointError> {
        let layers = meta.rows.as_ref().map_or(&[][..], |rows| &rows.layers);
        let bytes = |files: &Vec<RowFileRecord>| {
            files.iter().map(|file| file.size_bytes).fold(0, u64::saturating_add)
        };
        let known = layers.iter().map(|files| (files.len(), bytes(files)));
        if !known.eq(shard.rows.iter().map(|it| (it.files as usize, it.size_bytes))) {
            let reason = "it has other row files than the manifest".to_owned();
            return Err(Described::of(shard).damaged(reason));
        }
        let ascend = |files: &Vec<RowFileRecord>| {
            files.is_sorted_by(|left, right| left.ranges[1] <= right.ranges[0])
        };
        if !layers.iter().all(ascend) {
            let reason = "its row files are not in the order of their ranges".to_owned();
            return Err(Described::of(shard).damaged(reason));
        }
        let named = shard.rows.iter().zip(layers);
        Ok(named
            .map(|(record, files)| record.objects().zip(files.iter().cloned()).collect())
            .collect())
    }

    /// Reads a row file and keeps the `wanted` ranges, whose rows belong to them.
    ///
    /// # Errors
    /// See [`CheckpointError`].
    ///
    /// # Panics
    /// Outside of a multi-threaded runtime.
    pub async fn read_rows(
        &self,
        object: &str,
        file: &RowFileRecord,
        wanted: &(dyn Fn(u32) -> bool + Sync),
    ) -> Result<RowFile, CheckpointError> {
        let RowFileRecord { sha256, size_bytes, ranges: [first, last] } = file;
        let described = Described { object, sha256, size_bytes: *size_bytes };
        described.check_size(self.store).await?;
        let read: RowFile = self.decode(described, wanted).await?;
        let name = |number| self.names.name(number);
        if let Some(number) = read.numbers().find(|number| !(*first..=*last).contains(number)) {
            return Err(described.damaged(format!("it has rows of `{}`", name(number))));
        }
        for (number, range) in &read.ranges {
            let checked = in_place(|| range.check(self.layout()));
            checked.map_err(|reason| described.damaged(format!("`{}` {reason}", name(*number))))?;
        }
        Ok(read)
    }

    async fn decode<M: FileMeta>(
        &self,
        described: Described<'_>,
        wanted: &(dyn Fn(u32) -> bool + Sync),
    ) -> Result<TensorFile<M>, CheckpointError> {
        let place = described.place(self.store)?;
        let first = place.read_range(0..described.size_bytes.min(WORD as u64)).await;
        let first = first.map_err(|error| CheckpointError::of_store(described.object, error))?;
        let header_len = first.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        if HEADER_UNSEEN_MAX < header_len {
            // Parsing takes many times the memory of a header: verify the hash of a long one first.
            check_hash(&place, described, |_| {}).await?;
        }
        let mut decoder = Decoder::new(&self.names, described.size_bytes, header_len, wanted);
        let mut form = Ok(());
        // A malformed file most likely has another hash, too, which is the better message.
        check_hash(&place, described, |segment| {
            if form.is_ok() {
                form = decoder.push(segment);
            }
        })
        .await?;
        form.and_then(|()| decoder.finish()).map_err(|reason| described.damaged(reason))
    }
}

/// Passes all segments of an object to `show` and compares their hash with the described one.
async fn check_hash(
    place: &Location,
    described: Described<'_>,
    mut show: impl FnMut(Bytes),
) -> Result<(), CheckpointError> {
    let mut hash = Sha256::new();
    let mut segments = place.read_in_chunks(described.size_bytes);
    while let Some(segment) = segments.next().await {
        let segment =
            segment.map_err(|error| CheckpointError::of_store(described.object, error))?;
        in_place(|| {
            hash.update(&segment);
            show(segment);
        });
    }
    let sha256 = hex(&hash.finalize());
    if sha256 == described.sha256 {
        return Ok(());
    }
    Err(described.damaged(format!("its SHA-256 is {sha256}, not {}", described.sha256)))
}
