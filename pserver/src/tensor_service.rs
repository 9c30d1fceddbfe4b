//! Serves the calls that carry tensors. Values move from the socket into the sum, and from the shard into the
//! socket, without an intermediate copy. All other calls go to the generated server.

use std::collections::{BTreeSet, VecDeque};
use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{self, Stream, StreamExt, TryStreamExt};
use http_body::Body as _;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Slot, Version};
use steadfast_common::records::contribution::{ContributionName, LanesName};
use steadfast_common::tensor::byte_segments::{ByteSegments, shared_bytes};
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::layout::Block;
use steadfast_common::tensor::placement::PlacementRecord;
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::{ID_BYTES, RowsError};
use steadfast_host::task::in_place;
use steadfast_host::time::{Instant, sleep_until, timeout};
use steadfast_net::traces::TRACE;
use steadfast_proto::tensor::{CHUNK_BYTES, in_chunks, row_blocks};
use steadfast_proto::v1::pserver_server::PserverServer;
use steadfast_proto::v1::push_header::Name;
use steadfast_proto::v1::{
    BlockData, FollowSlotRequest, FollowStepHeader, FollowStepRequest, PullHeader, PullRequest,
    PushHeader, PushReply, ReadHandoverRequest, ReadRangeRequest,
};
use steadfast_proto::{
    Decoder, MESSAGE_BYTES_MAX, PullAnswer, TensorMethod, answer, answer_as_it_comes, encode,
    encode_chunks, framed, kind, next, read_one, status,
};
use steadfast_pserver_core::block_store::Parameters;
use steadfast_pserver_core::contribution::{Contributed, check_records};
use steadfast_pserver_core::sync_shard::EarlyBlock;
use steadfast_pserver_core::tables::TablesHeld;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tracing::{Instrument, info_span};

use crate::event::{Event, EventError, Handed, WaitMode};
use crate::follower::{Applicant, StepEnd, StepPart, StepRequest};
use crate::push_assembler::{PushAssembler, check_rows_bytes};
use crate::service::{Service, WAIT_MAX, follower_id, invalid, refuse};
use crate::state::{self, Part};

/// KiB of gradients, or else one push, that may be received at once; more would only occupy memory.
/// Waiting pushes stay with their senders.
const INCOMING_KIB: u32 = 512 << 10;

/// The most slots of a job.
const SLOTS_MAX: u32 = 1000;

/// Bytes of rows in one call.
const ROWS_BYTES_MAX: usize = 64 << 20;

/// The gRPC service of one slot.
#[derive(Clone)]
pub struct TensorService {
    service: Arc<Service>,
    incoming: Arc<Semaphore>,
    others: PserverServer<Service>,
}

impl TensorService {
    /// Creates the service of one slot.
    pub fn new(service: Service) -> Self {
        let service = Arc::new(service);
        let others = PserverServer::from_arc(service.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let incoming = Arc::new(Semaphore::new(INCOMING_KIB as usize));
        Self { service, incoming, others }
    }
}

impl NamedService for TensorService {
    const NAME: &'static str = <PserverServer<Service> as NamedService>::NAME;
}

impl tower::Service<http::Request<Body>> for TensorService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Some(method) = TensorMethod::of_path(request.uri().path()) else {
            return self.others.call(request);
        };
        let (service, body) = (self.service.clone(), request.into_body());
        match method {
            TensorMethod::Push => {
                let incoming = self.incoming.clone();
                async move {
                    let pushed = push(&service, &incoming, body).await;
                    Ok(answer(pushed.inspect_err(|error| service.metrics.refuse(kind(error)))))
                }
                .boxed()
            }
            TensorMethod::Pull => async move {
                let pulled = pull(service, body).await;
                Ok(pulled.map_or_else(Status::into_http, answer_as_it_comes))
            }
            .boxed(),
            TensorMethod::PullRows => {
                async move { Ok(answer(pull_rows(&service, body).await)) }.boxed()
            }
            TensorMethod::ReadRange => {
                async move { Ok(answer(read_range(&service, body).await)) }.boxed()
            }
            TensorMethod::FollowSlot => async move {
                let state = follow_slot(&service, body).await;
                Ok(state.map_or_else(Status::into_http, answer_as_it_comes))
            }
            .boxed(),
            TensorMethod::ReadHandover => async move {
                let state = read_handover(&service, body).await;
                Ok(state.map_or_else(Status::into_http, answer_as_it_comes))
            }
            .boxed(),
            TensorMethod::FollowStep => async move {
                let step = follow_step(service, body).await;
                Ok(step.map_or_else(Status::into_http, answer_as_it_comes))
            }
            .boxed(),
        }
    }
}

/// A push in progress.
struct Incoming {
    generation: Generation,
    name: ContributionName,
    assembler: PushAssembler,
}

impl Incoming {
    fn begin(service: &Service, header: Option<&PushHeader>) -> Result<Self, Status> {
        let header = header.ok_or_else(|| invalid("the first message has no header"))?;
        let generation = service.check(header.target.as_ref())?;
        let name = push_name(header)?;
        let published = service.published(generation)?;
        let not_yet = || refuse(&EventError::NotInitialized);
        let shard = published.shard.as_ref().ok_or_else(not_yet)?;
        let assembler = PushAssembler::new(shard, ROWS_BYTES_MAX);
        Ok(Self { generation, name, assembler })
    }

    /// Returns the blocks received since the last part. Returns `None` if there are none, or if the push does not name
    /// lanes.
    fn part(&mut self) -> Option<Event> {
        let ContributionName::Lanes(lanes) = &self.name else { return None };
        let blocks = self.assembler.take_blocks();
        let (generation, lanes) = (self.generation, lanes.clone());
        (!blocks.is_empty()).then_some(Event::Part { generation, lanes, blocks })
    }
}

/// Waits until there is memory for a push.
async fn reserve_memory<'a>(
    service: &Service,
    incoming: &'a Semaphore,
) -> Result<SemaphorePermit<'a>, Status> {
    let published = service.event_loop.published().borrow().clone();
    let bytes = published.shard.as_ref().map_or(0, |it| {
        let rows = if it.tables.widths.is_empty() { 0 } else { ROWS_BYTES_MAX };
        size_bytes(&it.blocks) + rows
    });
    let kib = u32::try_from(bytes >> 10).unwrap_or(u32::MAX).min(INCOMING_KIB);
    incoming.acquire_many(kib).await.map_err(|_| refuse(&EventError::ShuttingDown))
}

async fn push(
    service: &Service,
    incoming: &Semaphore,
    mut body: Body,
) -> Result<Vec<Bytes>, Status> {
    let _reserved = reserve_memory(service, incoming).await?;
    let (mut decoder, mut incoming) = (Decoder::<PushHeader>::default(), None);
    while let Some(bytes) = next(&mut body).await? {
        decoder.feed(bytes, |header, block, data| {
            let incoming = match &mut incoming {
                Some(incoming) => incoming,
                none => none.insert(Incoming::begin(service, header)?),
            };
            incoming.assembler.take(block, &data)
        })?;
        // The last blocks are sent with the end of the push.
        let part = incoming.as_mut().filter(|_| !body.is_end_stream()).and_then(Incoming::part);
        if let Some(part) = part {
            service.event_loop.send(part).await;
        }
    }
    let header = decoder.end()?;
    let incoming = match incoming {
        Some(incoming) => incoming,
        None => Incoming::begin(service, header.as_ref())?,
    };
    let header = header.unwrap_or_default();
    let Incoming { generation, name, assembler } = incoming;
    let (contribution, size_bytes) = assembler.finish(&header)?;
    let apply = info_span!(target: TRACE, "apply");
    let pushed = service
        .event_loop
        .call(|reply| Event::Push { generation, name, contribution, reply })
        .instrument(apply)
        .await
        .map_err(|error| refuse(&error))?;
    service.check_lease()?;
    service.metrics.push(pushed.outcome, size_bytes);
    let reply = PushReply {
        version: pushed.version.0,
        duplicate: pushed.outcome == Contributed::Duplicate,
    };
    Ok(vec![framed(&reply)])
}

/// Waits until there is something to send; the rest is streamed.
async fn pull(
    service: Arc<Service>,
    mut body: Body,
) -> Result<impl Stream<Item = Result<Bytes, Status>>, Status> {
    let request: PullRequest = read_one(&mut body).await?;
    let generation = service.check(request.target.as_ref())?;
    let wait = Duration::from_millis(request.wait_ms).min(WAIT_MAX);
    let (versions, values) = (request.versions(), request.values());
    let (early, early_blocks) = mpsc::unbounded_channel();
    let call = |wait_mode| {
        let (event_loop, early) = (service.event_loop.clone(), early.clone());
        async move {
            event_loop
                .call(move |reply| Event::Pull {
                    generation,
                    versions,
                    values,
                    wait_mode,
                    early,
                    reply,
                })
                .await
        }
        .boxed()
    };
    let (outcome, at_once) = (Some(call(WaitMode::UntilReady)), Some(call(WaitMode::Immediate)));
    let until = Instant::now() + wait;
    let (sent, segments) = (BTreeSet::new(), VecDeque::new());
    let answer =
        PullStream { service, wait, until, early_blocks, outcome, at_once, sent, segments };
    let mut rest = Box::pin(stream::try_unfold(answer, PullStream::next));
    let first = rest.try_next().await?;
    Ok(stream::iter(first.map(Ok)).chain(rest))
}

/// The event loop's answer to a pull.
type Outcome = BoxFuture<'static, Result<PullAnswer<Parameters>, EventError>>;

/// The streamed answer to a pull.
struct PullStream {
    service: Arc<Service>,
    early_blocks: mpsc::UnboundedReceiver<EarlyBlock>,
    /// Longest time without progress, and when it ends.
    wait: Duration,
    until: Instant,
    /// The pending outcome.
    outcome: Option<Outcome>,
    /// The outcome without waiting: used after the timeout, so even the shortest wait returns available
    /// values.
    at_once: Option<Outcome>,
    /// Blocks that were sent early.
    sent: BTreeSet<u32>,
    /// Bytes to send next.
    segments: VecDeque<Bytes>,
}

impl PullStream {
    /// Returns the next bytes and the rest of the stream.
    async fn next(mut self) -> Result<Option<(Bytes, Self)>, Status> {
        loop {
            if let Some(segment) = self.segments.pop_front() {
                return Ok(Some((segment, self)));
            }
            let Some(outcome) = &mut self.outcome else { return Ok(None) };
            let mut segments = Vec::new();
            tokio::select! {
                biased;
                Some((block, values)) = self.early_blocks.recv() => {
                    let data = shared_bytes(values);
                    encode(None::<&PullHeader>, &[BlockData { block, data }], &mut segments);
                    self.sent.insert(block);
                    self.until = Instant::now() + self.wait;
                }
                pulled = outcome => {
                    self.outcome = None;
                    // The reply is valid only with a header, which is sent only while this process holds
                    // the slot.
                    self.service.check_lease()?;
                    self.end(pulled.map_err(|error| refuse(&error))?, &mut segments);
                }
                () = sleep_until(self.until), if self.at_once.is_some() => {
                    self.outcome = self.at_once.take();
                }
            }
            self.segments.extend(segments);
        }
    }

    /// Encodes the header and the blocks that were not sent early.
    fn end(&self, pulled: PullAnswer<Parameters>, segments: &mut Vec<Bytes>) {
        let parameters = match pulled {
            PullAnswer::Ready(parameters) => parameters,
            PullAnswer::NotYet { present } | PullAnswer::Past { present } => {
                return encode(Some(&PullHeader::without_values(present)), &[], segments);
            }
        };
        let header = PullHeader::at(parameters.position);
        let blocks = parameters.blocks.iter().zip(&parameters.values);
        let blocks = blocks.filter(|((block, _), _)| !self.sent.contains(block));
        let blocks = blocks.map(|((block, _), values)| BlockData {
            block: *block,
            data: shared_bytes(values.clone()),
        });
        segments.extend(encode_chunks(&header, &in_chunks(blocks)));
        self.service.metrics.pull(size_bytes(&parameters.blocks));
    }
}

/// Returns the size of all values of some blocks.
fn size_bytes(blocks: &[(u32, Block)]) -> usize {
    blocks.iter().map(|(_, block)| block.len * size_of::<f32>()).sum()
}

pub(crate) fn push_name(header: &PushHeader) -> Result<ContributionName, Status> {
    let name = header.name.as_ref().ok_or_else(|| invalid("the contribution has no name"))?;
    let name = ContributionName::from(name);
    if let ContributionName::Lanes(LanesName { shares, .. }) = &name {
        // Checked before any block is passed on.
        check_records(shares, header.records, header.checksum)
            .map_err(|refusal| refuse(&refusal.into()))?;
    }
    Ok(name)
}

/// Returns rows of tables once their version is reached.
async fn pull_rows(service: &Service, mut body: Body) -> Result<Vec<Bytes>, Status> {
    let (mut decoder, mut ids) = (Decoder::<PullRequest>::default(), RequestedIds::default());
    while let Some(bytes) = next(&mut body).await? {
        decoder.feed(bytes, |header, number, data| {
            let header = header.ok_or_else(|| invalid("the first message has no header"))?;
            ids.take(service, header, number, &data)
        })?;
    }
    let header = decoder.end()?.ok_or_else(|| invalid("the first message has no header"))?;
    let generation = service.check(header.target.as_ref())?;
    let wait = Duration::from_millis(header.wait_ms).min(WAIT_MAX);
    let (versions, tables, ids) = (header.versions(), ids.tables, ids.ids);
    let call =
        service.event_loop.call(|reply| Event::PullRows { generation, versions, ids, reply });
    let pulled = match timeout(wait, call).await {
        Ok(pulled) => pulled.map_err(|error| refuse(&error))?,
        // Whether the version is past, only the event loop knows; it may be at work.
        Err(_) => PullAnswer::NotYet { present: versions.version() },
    };
    service.check_lease()?;
    let (position, rows) = match pulled {
        PullAnswer::Ready(found) => found,
        PullAnswer::NotYet { present } | PullAnswer::Past { present } => {
            return Ok(encode_chunks(&PullHeader::without_values(present), &[Vec::new()]));
        }
    };
    let first = tables.map_or(0, |tables| tables.first_number);
    let blocks = (first..).zip(rows).flat_map(|(number, rows)| {
        let data = shared_bytes(Arc::new(rows.into_values()));
        let starts = (0..data.len()).step_by(CHUNK_BYTES);
        starts.map(move |from| {
            let data = data.slice(from..data.len().min(from + CHUNK_BYTES));
            BlockData { block: number, data }
        })
    });
    let segments = encode_chunks(&PullHeader::at(position), &in_chunks(blocks));
    service.metrics.pull(segments.iter().map(Bytes::len).sum());
    Ok(segments)
}

/// Collects the ids of a request for rows.
#[derive(Default)]
struct RequestedIds {
    tables: Option<Arc<TablesHeld>>,
    /// The requested ids of each table.
    ids: Vec<RowIds>,
    /// Bytes of the reply.
    rows_bytes: usize,
}

impl RequestedIds {
    fn take(
        &mut self,
        service: &Service,
        header: &PullRequest,
        number: u32,
        data: &ByteSegments,
    ) -> Result<(), Status> {
        let tables = match &self.tables {
            Some(tables) => tables,
            None => {
                let published = service.published(service.check(header.target.as_ref())?)?;
                let not_yet = || refuse(&EventError::NotInitialized);
                let tables = published.shard.as_ref().ok_or_else(not_yet)?.tables.clone();
                self.ids = vec![RowIds::default(); tables.widths.len()];
                self.tables.insert(tables)
            }
        };
        let unknown = || invalid(format!("block {number} is no table"));
        let (table, width) = tables.table_of(number).ok_or_else(unknown)?;
        let refused = |error: RowsError| invalid(format!("table {table}: {error}"));
        let ids = RowIds::decode(&tables.ranges, &data.joined()).map_err(refused)?;
        self.rows_bytes += ids.len() * (ID_BYTES + width * size_of::<f32>());
        check_rows_bytes(self.rows_bytes, ROWS_BYTES_MAX)?;
        self.ids[table].append(ids).map_err(refused)
    }
}

/// Returns all rows of one range of a table.
async fn read_range(service: &Service, mut body: Body) -> Result<Vec<Bytes>, Status> {
    let request: ReadRangeRequest = read_one(&mut body).await?;
    let generation = service.check(request.target.as_ref())?;
    let (table, range) = (request.table as usize, request.range);
    let (position, tables) = service
        .event_loop
        .call(|reply| Event::ReadTables { generation, reply })
        .await
        .map_err(|error| refuse(&error))?;
    let rows = in_place(|| tables.rows_of(table, range));
    let rows = match rows {
        Ok(rows) => rows,
        Err(error) => {
            let answer = status(ErrorKind::Unavailable, error.to_string());
            service.event_loop.send(Event::StorageFailed { error }).await;
            return Err(answer);
        }
    };
    let rows = rows.ok_or_else(|| {
        invalid(format!("this slot does not have range {range} of table {table}"))
    })?;
    service.check_lease()?;
    Ok(encode_chunks(&PullHeader::at(position), &in_chunks(row_blocks(request.table, &rows))))
}

/// Returns the state of the slot, for a pserver that follows it.
async fn follow_slot(
    service: &Service,
    mut body: Body,
) -> Result<impl Stream<Item = Result<Bytes, Status>> + use<>, Status> {
    let request: FollowSlotRequest = read_one(&mut body).await?;
    let generation = service.check(request.target.as_ref())?;
    let applicant = Applicant {
        id: follower_id(&request.follower)?,
        address: request.address,
        admin: request.admin,
        lease: request.lease,
    };
    let apply = service.event_loop.call(|reply| Event::Follow { generation, applicant, reply });
    let start = timeout(WAIT_MAX, apply).await;
    let late = |_| status(ErrorKind::Unavailable, "the slot is in the middle of a step");
    let start = start.map_err(late)?.map_err(|error| refuse(&error))?;
    let sent = state::send(&service.shards, generation, start);
    sent.map_err(|error| status(ErrorKind::Unavailable, error.to_string()))
}

/// Returns what a slot of the next generation needs of the state that this slot hands over.
async fn read_handover(
    service: &Service,
    mut body: Body,
) -> Result<impl Stream<Item = Result<Bytes, Status>> + use<>, Status> {
    let request: ReadHandoverRequest = read_one(&mut body).await?;
    let (slot, present) = (Slot(request.slot), service.event_loop.incarnation);
    let placement: PlacementRecord = serde_json::from_slice(&request.placement)
        .map_err(|error| invalid(format!("the placement cannot be read: {error}")))?;
    let slots = placement.slots();
    if slots <= slot.0 || SLOTS_MAX < slots {
        return Err(invalid(format!("a placement on {slots} slots has no slot {slot}")));
    }
    if request.incarnation != present.0 {
        let found = request.incarnation;
        let message = format!("the call is for incarnation {found}; this is incarnation {present}");
        return Err(status(ErrorKind::Stale, message));
    }
    service.check_lease()?;
    let version = Version(request.version);
    let state = service.event_loop.call(|reply| Event::ReadHandover { version, reply }).await;
    let Handed { of, snapshot } = state.map_err(|error| refuse(&error))?;
    let event_loop = service.event_loop.clone();
    let sent = async move { event_loop.send(Event::HandoverSent { reader: slot, slots }).await };
    let part = Part { slot, placement: &placement, sent: sent.boxed() };
    let whole = (PlacementRecord::default(), Arc::new(()));
    let sent = state::send_part(&service.shards, of, snapshot, whole, Some(part));
    sent.map_err(|error| status(ErrorKind::Unavailable, error.to_string()))
}

/// Returns a step of the slot, for its follower.
async fn follow_step(
    service: Arc<Service>,
    mut body: Body,
) -> Result<impl Stream<Item = Result<Bytes, Status>>, Status> {
    let request: FollowStepRequest = read_one(&mut body).await?;
    service.check(request.target.as_ref())?;
    let follower = follower_id(&request.follower)?;
    let (parts, received) = mpsc::unbounded_channel();
    let (version, comparison) = (Version(request.version), request.comparison);
    let request = StepRequest { version, comparison, parts };
    let asked =
        service.event_loop.call(|reply| Event::FollowStep { follower, request, reply }).await;
    asked.map_err(|error| refuse(&error))?;
    let published = service.published_now();
    let shard = published.shard.as_ref().ok_or_else(|| refuse(&EventError::NotInitialized))?;
    let (codec, tables) = (shard.codec, shard.tables.clone());
    let step = StepStream { received, codec, tables, segments: VecDeque::new(), is_over: false };
    Ok(stream::try_unfold(step, StepStream::next))
}

/// The streamed parts of a step.
struct StepStream {
    received: mpsc::UnboundedReceiver<StepPart>,
    codec: Codec,
    tables: Arc<TablesHeld>,
    /// Bytes to send next.
    segments: VecDeque<Bytes>,
    is_over: bool,
}

impl StepStream {
    /// Returns the next bytes and the rest of the stream.
    async fn next(mut self) -> Result<Option<(Bytes, Self)>, Status> {
        loop {
            if let Some(segment) = self.segments.pop_front() {
                return Ok(Some((segment, self)));
            }
            if self.is_over {
                return Ok(None);
            }
            let part = self.received.recv().await;
            let over =
                || status(ErrorKind::Unavailable, "the slot is no longer followed, or asked again");
            let mut segments = Vec::new();
            match part.ok_or_else(over)? {
                StepPart::Blocks(blocks) => in_place(|| {
                    let blocks = blocks.iter().map(|block| BlockData {
                        block: block.block(),
                        data: block.encode(self.codec),
                    });
                    for blocks in in_chunks(blocks) {
                        encode(None::<&FollowStepHeader>, &blocks, &mut segments);
                    }
                }),
                StepPart::End(end) => {
                    self.is_over = true;
                    let numbered = (self.tables.first_number..).zip(&end.rows);
                    for block in numbered.flat_map(|(number, rows)| row_blocks(number, rows)) {
                        encode(None::<&FollowStepHeader>, &[block], &mut segments);
                    }
                    encode(Some(&step_header(&end)), &[], &mut segments);
                }
                StepPart::Compare { number, save_after } => {
                    self.is_over = true;
                    let save_after_ms = save_after.map(|it| it.as_millis() as u64);
                    let (push, norm) = (None, None);
                    let header = FollowStepHeader { push, norm, comparison: number, save_after_ms };
                    encode(Some(&header), &[], &mut segments);
                }
            }
            self.segments.extend(segments);
        }
    }
}

fn step_header(end: &StepEnd) -> FollowStepHeader {
    let push = PushHeader {
        target: None,
        records: end.records,
        loss_sum: end.loss_sum,
        name: Some(Name::from(&end.name)),
        checksum: end.checksum,
        rows: end.rows.iter().map(|rows| rows.len() as u64).sum(),
        weight: end.weight,
    };
    FollowStepHeader { push: Some(push), norm: end.norm, ..FollowStepHeader::default() }
}
