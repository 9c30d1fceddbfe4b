//! The state of a slot on its way to a pserver that follows it, or to the slots of the next generation: the files of a
//! checkpoint of this slot alone, as blocks of a stream. The first block is the manifest, with the size of the shard
//! file; then follow the shard file and the row files, of which only one is in memory at a time.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{self, Stream};
use steadfast_checkpoint::row_file::{RowFileMeta, encode_rows, range_numbers};
use steadfast_checkpoint::{BlockNames, CheckpointError, RowFileDecoder, ShardDecoder};
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Slot};
use steadfast_common::records::CheckpointRecord;
use steadfast_common::tensor::byte_segments::ByteSegments;
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::placement::{Placement, PlacementRecord};
use steadfast_host::task::in_place;
use steadfast_proto::tensor::CHUNK_BYTES;
use steadfast_proto::v1::BlockData;
use steadfast_proto::{Decoder, encode, next, status};
use steadfast_pserver_core::tables::{Obsolete, TablesSnapshot};
use tonic::Status;
use tonic::body::Body;

use crate::event::{FollowStart, SlotSnapshot};
use crate::row_files::{Layers, RowReader, add_rows};
use crate::shard_file::{Assembly, LoadedShard, ShardError, ShardStore, encode as encode_shard};

/// The numbers of the blocks of a stream; each row file has a number of its own.
const MANIFEST: u32 = 0;
const SHARD: u32 = 1;

/// The state that is sent.
struct Sending {
    shards: ShardStore,
    layout: Arc<Layout>,
    tables: Arc<TablesSnapshot>,
    rows: RowReader,
    /// The number of the next row file.
    number: u32,
    meta: RowFileMeta,
    /// Bytes to send next.
    segments: VecDeque<Bytes>,
    /// As long as it exists, the snapshot is being sent.
    _token: Arc<()>,
    /// Runs once all was sent.
    sent: Option<BoxFuture<'static, ()>>,
}

/// Names what one slot needs of the state of another.
pub(crate) struct Part<'a> {
    pub slot: Slot,
    /// The placement of the slots that need the state.
    pub placement: &'a PlacementRecord,
    /// Awaited once all was sent.
    pub sent: BoxFuture<'static, ()>,
}

/// Returns the messages of the stream.
///
/// # Errors
/// If a value is not finite.
pub(crate) fn send(
    shards: &ShardStore,
    generation: Generation,
    start: FollowStart,
) -> Result<impl Stream<Item = Result<Bytes, Status>> + use<>, ShardError> {
    let FollowStart { snapshot, placement, token } = start;
    send_part(shards, generation, snapshot, (placement, token), None)
}

/// Returns the messages of the stream with a part of the state, or all of it.
///
/// # Errors
/// If a value is not finite.
pub(crate) fn send_part(
    shards: &ShardStore,
    generation: Generation,
    snapshot: SlotSnapshot,
    (placement, token): (PlacementRecord, Arc<()>),
    part: Option<Part<'_>>,
) -> Result<impl Stream<Item = Result<Bytes, Status>> + use<>, ShardError> {
    let SlotSnapshot { layout, mut shard, tables, .. } = snapshot;
    let mut rows = RowReader::default();
    let mut sent = None;
    if let Some(part) = part {
        let placement = Placement::of(&layout, part.placement);
        let blocks = placement.blocks_of(part.slot);
        shard.blocks.retain(|block| blocks.binary_search(&block.number).is_ok());
        rows = RowReader::of(range_numbers(&layout, placement.ranges_of(part.slot)).collect());
        sent = Some(part.sent);
    }
    let version = shard.position.version;
    let (position, exhausted) = (shard.position, shard.exhausted.iter().copied().collect());
    let layers = Layers::default();
    let file = in_place(|| encode_shard(&layout, &shards.states, shard, &tables, &layers))?;
    // The receiver decodes the file while it arrives, for which it has to know the size.
    let size_bytes: u64 = file.iter().map(|segment| segment.len() as u64).sum();
    let manifest = CheckpointRecord {
        generation,
        params: layout.params().to_vec(),
        placement,
        position,
        exhausted,
        ..CheckpointRecord::default()
    };
    let meta = RowFileMeta { version };
    let manifest = serde_json::to_vec(&(manifest, size_bytes)).expect("records are plain data");
    let manifest = Bytes::from(manifest);
    let mut segments = Vec::new();
    add_file(MANIFEST, vec![manifest], &mut segments);
    add_file(SHARD, file, &mut segments);
    let sending = Sending {
        shards: shards.clone(),
        layout,
        tables,
        rows,
        number: SHARD + 1,
        meta,
        segments: segments.into(),
        _token: token,
        sent,
    };
    Ok(stream::try_unfold(sending, Sending::next))
}

/// Appends a file, divided into blocks of one number.
fn add_file(number: u32, file: Vec<Bytes>, segments: &mut Vec<Bytes>) {
    for mut rest in file {
        while !rest.is_empty() {
            let data = rest.split_to(rest.len().min(CHUNK_BYTES));
            encode(None::<&()>, &[BlockData { block: number, data }], segments);
        }
    }
}

impl Sending {
    /// Returns the next bytes and the rest of the stream.
    async fn next(mut self) -> Result<Option<(Bytes, Self)>, Status> {
        if self.segments.is_empty() {
            self.read_rows().map_err(|error| unavailable(&error))?;
        }
        if self.segments.is_empty()
            && let Some(sent) = self.sent.take()
        {
            sent.await;
        }
        Ok(self.segments.pop_front().map(|segment| (segment, self)))
    }

    fn read_rows(&mut self) -> Result<(), ShardError> {
        let states = self.shards.row_states(&self.layout);
        let (parts, bytes_max) = ((&*self.layout, &*states), self.shards.row_file_bytes);
        let mut obsolete = Obsolete::default();
        let next =
            in_place(|| self.rows.next(parts, &self.tables, None, bytes_max, &mut obsolete))?;
        let Some(ranges) = next else { return Ok(()) };
        let file = in_place(|| encode_rows(&self.layout, &self.meta, ranges))?;
        let mut segments = Vec::new();
        add_file(self.number, file, &mut segments);
        self.number += 1;
        self.segments = segments.into();
        Ok(())
    }
}

/// Receives the state of `slot`, and the generation that it is of. Decodes the shard as it arrives.
///
/// # Errors
/// If the stream ends early, or its files are malformed, or there is no space for rows.
pub(crate) async fn receive(
    shards: &ShardStore,
    slot: Slot,
    body: &mut Body,
) -> Result<(Generation, LoadedShard), Status> {
    let mut pieces = Pieces::of(body);
    let (manifest, size_bytes) = pieces.manifest().await?;
    let names = BlockNames::new(Arc::new(Layout::new(manifest.params.clone())));
    let shard = shards.begin(&names, &manifest, slot, &manifest.placement);
    let mut shard = shard.map_err(|error| unavailable(&error.into()))?;
    pieces.add_to(&mut shard, size_bytes).await?;
    Ok((manifest.generation, end(shard)?))
}

/// Receives what a slot needs of a state that another slot hands over, at the version of `handover`.
///
/// # Errors
/// As [`receive`].
pub(crate) async fn receive_part(
    handover: &CheckpointRecord,
    shard: &mut Assembly<'_>,
    body: &mut Body,
) -> Result<(), Status> {
    let mut pieces = Pieces::of(body);
    let (manifest, size_bytes) = pieces.manifest().await?;
    if manifest.generation != handover.generation
        || manifest.position.version != handover.position.version
        || manifest.params != handover.params
    {
        return Err(malformed("it is that of another version".to_owned()));
    }
    pieces.add_to(shard, size_bytes).await
}

/// Ends a shard that was received.
///
/// # Errors
/// If a part of it is missing, or there is no space for rows.
pub(crate) fn end(shard: Assembly<'_>) -> Result<LoadedShard, Status> {
    let mut loaded = shard.end().map_err(|error: CheckpointError| malformed(error.to_string()))?;
    in_place(|| loaded.tables.added()).map_err(|error| unavailable(&error.into()))?;
    Ok(loaded)
}

/// The pieces of files that are being received.
struct Pieces<'a> {
    body: &'a mut Body,
    decoder: Decoder<()>,
    /// Pieces with the numbers of their files.
    received: VecDeque<(u32, Bytes)>,
}

impl<'a> Pieces<'a> {
    fn of(body: &'a mut Body) -> Self {
        Self { body, decoder: Decoder::default(), received: VecDeque::new() }
    }

    /// Receives the manifest, and the size of the shard file.
    async fn manifest(&mut self) -> Result<(CheckpointRecord, u64), Status> {
        let manifest = self.file(MANIFEST).await?;
        serde_json::from_slice(&manifest.joined()).map_err(|error| malformed(error.to_string()))
    }

    /// Receives the shard file and the row files, and adds their parts to a shard.
    async fn add_to(mut self, shard: &mut Assembly<'_>, size_bytes: u64) -> Result<(), Status> {
        let (names, is_wanted) = (shard.names, shard.wanted());
        let states = shard.store.row_states(names.layout());
        let object = "state";
        let mut decoder = ShardDecoder::new(names, size_bytes, u64::MAX, &is_wanted);
        while let Some(segment) = self.next_of(SHARD).await? {
            in_place(|| decoder.push(segment)).map_err(malformed)?;
        }
        let mut file = decoder.finish().map_err(malformed)?;
        let held = names.ranges(file.meta()).map_err(malformed)?;
        shard.add(object, &mut file, &held).map_err(|error| malformed(error.to_string()))?;
        drop(file);
        let mut number = SHARD + 1;
        while self.has(number).await? {
            let file = self.file(number).await?;
            let mut decoder = RowFileDecoder::new(names, file.len() as u64, u64::MAX, &is_wanted);
            let decoded = in_place(|| {
                file.iter().cloned().try_for_each(|segment| decoder.push(segment))?;
                decoder.finish()
            });
            let file = decoded.map_err(malformed)?;
            in_place(|| add_rows(names, &states, object, file, &mut shard.tables))
                .map_err(|error| unavailable(&error))?;
            number += 1;
        }
        self.end()
    }

    /// Returns whether the next piece is one of file `number`.
    async fn has(&mut self, number: u32) -> Result<bool, Status> {
        while self.received.is_empty() {
            let Some(bytes) = next(self.body).await? else { break };
            self.decoder.feed(bytes, |_, number, data| {
                self.received.extend(data.iter().map(|segment| (number, segment.clone())));
                Ok(())
            })?;
        }
        Ok(self.received.front().is_some_and(|(of, _)| *of == number))
    }

    /// Returns the next piece of file `number`; `None` after the last one.
    async fn next_of(&mut self, number: u32) -> Result<Option<Bytes>, Status> {
        Ok(match self.has(number).await? {
            true => self.received.pop_front().map(|(_, piece)| piece),
            false => None,
        })
    }

    /// Receives a whole file.
    async fn file(&mut self, number: u32) -> Result<ByteSegments, Status> {
        let mut file = ByteSegments::default();
        while let Some(piece) = self.next_of(number).await? {
            file.push(piece);
        }
        Ok(file)
    }

    /// Checks that the stream is complete, and that nothing follows.
    fn end(self) -> Result<(), Status> {
        self.decoder.end()?;
        match self.received.front() {
            Some((number, _)) => Err(malformed(format!("it has a file {number} after the last"))),
            None => Ok(()),
        }
    }
}

fn malformed(reason: String) -> Status {
    status(ErrorKind::Invalid, format!("the state of the slot is malformed: {reason}"))
}

fn unavailable(error: &ShardError) -> Status {
    status(ErrorKind::Unavailable, error.to_string())
}
