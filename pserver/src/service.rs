//! The gRPC face: checks who is meant, gathers streams into whole contributions, sends references.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use steadfast_checkpoint::EncodeError;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Lane, Pass, Slot, TaskId, Version};
use steadfast_common::layout::{Layout, ParamSpec};
use steadfast_common::tally::TaskPiece;
use steadfast_host::time::timeout;
use steadfast_proto::status;
use steadfast_proto::tensor::{in_chunks, shared_bytes};
use steadfast_proto::v1::pserver_server::Pserver;
use steadfast_proto::v1::push_header::Name;
use steadfast_proto::v1::{
    BlockData, InitReply, InitRequest, NormsReply, NormsRequest, Param, PullHeader, PullReply,
    PullRequest, PushHeader, PushReply, PushRequest, SnapshotReply, SnapshotRequest, Target,
    snapshot_reply,
};
use steadfast_pserver_core::contribution::{Contributed, Contribution, LaneEnd, floats};
use steadfast_pserver_core::shard::Shard;
use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use crate::engine::{
    CutAnswer, Engine, EngineError, Event, FirstValues, Published, PushName, Which,
};
use crate::metrics::Metrics;
use crate::shard_file::{ShardError, ShardStore};
use crate::tenure::Tenure;

/// The longest that a call may wait for a version.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// Most parameters in a model.
const PARAMS_MAX: usize = 1 << 20;

/// Most values in a model: 16 GiB of `f32`.
const VALUES_MAX: usize = 1 << 32;

/// Serves one slot.
pub struct Service {
    pub engine: Engine,
    /// Every answer is given only while the slot is ours beyond doubt.
    pub tenure: Tenure,
    pub shards: ShardStore,
    pub metrics: Metrics,
}

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn refuse(error: &EngineError) -> Status {
    status(error.kind(), error.to_string())
}

fn invalid(message: impl Into<String>) -> Status {
    status(ErrorKind::Invalid, message)
}

impl Service {
    /// The generation meant, if the call means this life of this slot.
    fn check(&self, target: Option<&Target>) -> Result<Generation, Status> {
        let target = target.ok_or_else(|| invalid("the call names no target"))?;
        let is_us =
            target.slot == self.engine.slot.0 && target.incarnation == self.engine.incarnation.0;
        if !is_us {
            let message = format!(
                "slot {} of incarnation {} was meant; this is slot {} of incarnation {}",
                target.slot, target.incarnation, self.engine.slot, self.engine.incarnation
            );
            return Err(status(ErrorKind::Stale, message));
        }
        self.check_lease()?;
        Ok(Generation(target.generation))
    }

    /// A pserver whose lease may be over says nothing: its slot may be another's.
    fn check_lease(&self) -> Result<(), Status> {
        if self.tenure.is_ours() {
            Ok(())
        } else {
            Err(status(ErrorKind::Unavailable, "the lease of this pserver is over"))
        }
    }
}

#[tonic::async_trait]
impl Pserver for Service {
    async fn init(
        &self,
        request: Request<Streaming<InitRequest>>,
    ) -> Result<Response<InitReply>, Status> {
        let mut messages = request.into_inner();
        let first = messages.message().await?.ok_or_else(|| invalid("the call is empty"))?;
        let header = first.header.ok_or_else(|| invalid("the first message has no header"))?;
        let generation = self.check(header.target.as_ref())?;
        let layout = Arc::new(layout(header.params)?);
        let slots = self.published(generation)?.slots;
        let mut values: Vec<(u32, Vec<f32>)> = Shard::blocks_of(&layout, self.engine.slot, slots)
            .into_iter()
            .map(|(number, _)| (number, Vec::new()))
            .collect();
        let mut blocks = first.blocks;
        loop {
            for block in blocks {
                let place = values.binary_search_by_key(&block.block, |(number, _)| *number);
                let place = place.map_err(|_| {
                    invalid(format!("block {} does not belong to this slot", block.block))
                })?;
                values[place].1 = floats(&block.data).collect();
            }
            match messages.message().await? {
                Some(message) => blocks = message.blocks,
                None => break,
            }
        }
        let values = values.into_iter().map(|(_, values)| values).collect();
        let first = FirstValues { layout, values };
        let attempt = header.attempt;
        self.engine
            .ask(|reply| Event::Init { generation, attempt, first, reply })
            .await
            .map_err(|error| refuse(&error))?;
        self.check_lease()?;
        Ok(Response::new(InitReply {}))
    }

    async fn push(
        &self,
        request: Request<Streaming<PushRequest>>,
    ) -> Result<Response<PushReply>, Status> {
        let mut messages = request.into_inner();
        let first = messages.message().await?.ok_or_else(|| invalid("the call is empty"))?;
        let header = first.header.ok_or_else(|| invalid("the first message has no header"))?;
        let generation = self.check(header.target.as_ref())?;
        let name = push_name(&header)?;
        let wanted = self.wanted_blocks(generation)?;
        let mut gathered = Gathered::new(wanted);
        gathered.take(first.blocks)?;
        while let Some(message) = messages.message().await? {
            gathered.take(message.blocks)?;
        }
        let (blocks, size_bytes) = gathered.finish()?;
        let contribution = Contribution {
            records: header.records,
            loss_sum: header.loss_sum,
            checksum: header.checksum,
            blocks,
        };
        let pushed = self
            .engine
            .ask(|reply| Event::Push { generation, name, contribution, reply })
            .await
            .map_err(|error| refuse(&error))?;
        self.check_lease()?;
        self.metrics.push(pushed.outcome, size_bytes);
        Ok(Response::new(PushReply {
            version: pushed.version.0,
            duplicate: pushed.outcome == Contributed::Duplicate,
        }))
    }

    type PullStream = Replies<PullReply>;

    async fn pull(
        &self,
        request: Request<PullRequest>,
    ) -> Result<Response<Self::PullStream>, Status> {
        let request = request.into_inner();
        let generation = self.check(request.target.as_ref())?;
        let wait = Duration::from_millis(request.wait_ms).min(WAIT_MAX);
        let mut published = self.engine.published();
        let reached = published.wait_for(|now| {
            now.generation != generation
                || now
                    .shard
                    .as_ref()
                    .is_some_and(|it| Version(request.version) <= it.position.version)
        });
        let seen = match timeout(wait, reached).await {
            Ok(Ok(seen)) => seen.clone(),
            Ok(Err(_)) => return Err(refuse(&EngineError::Ending)),
            Err(_) => self.engine.published().borrow().clone(),
        };
        self.check_lease()?;
        if seen.generation != generation {
            let (found, present) = (generation, seen.generation);
            return Err(refuse(&EngineError::OtherGeneration { found, present }));
        }
        let which = if request.exact { Which::Exactly } else { Which::AtLeast };
        let Some(shard) = seen.at(Version(request.version), which) else {
            let version = seen.shard.as_ref().map_or(0, |it| it.position.version.0);
            let header = PullHeader { ready: false, version, ..PullHeader::default() };
            let reply = PullReply { header: Some(header), blocks: Vec::new() };
            return Ok(Response::new(Box::pin(tokio_stream::iter([Ok(reply)]))));
        };
        let header = PullHeader {
            ready: true,
            version: shard.position.version.0,
            pass: shard.position.pass.0,
            pass_start: shard.position.pass_start.0,
            examples: shard.position.examples,
            loss: shard.position.loss,
        };
        let blocks = shard.blocks.iter().zip(&shard.values).map(|((block, _), values)| BlockData {
            block: *block,
            data: shared_bytes(values.clone()),
        });
        self.metrics.pull(shard.blocks.iter().map(|(_, block)| block.len * 4).sum());
        let mut header = Some(header);
        let replies = in_chunks(blocks)
            .into_iter()
            .map(move |blocks| Ok(PullReply { header: header.take(), blocks }));
        Ok(Response::new(Box::pin(tokio_stream::iter(replies))))
    }

    async fn norms(&self, request: Request<NormsRequest>) -> Result<Response<NormsReply>, Status> {
        let request = request.into_inner();
        self.check_lease()?;
        let wait = Duration::from_millis(request.wait_ms).min(WAIT_MAX);
        let mut published = self.engine.published();
        let reached = published.wait_for(|now| {
            now.generation.0 != request.generation
                || now.squares.as_ref().is_some_and(|it| it.version.0 == request.version)
        });
        let reached = timeout(wait, reached).await;
        self.check_lease()?;
        let Ok(Ok(seen)) = reached else {
            return Ok(Response::new(NormsReply::default()));
        };
        if seen.generation.0 != request.generation {
            let (found, present) = (Generation(request.generation), seen.generation);
            return Err(refuse(&EngineError::OtherGeneration { found, present }));
        }
        let Some(squares) = &seen.squares else {
            return Ok(Response::new(NormsReply::default()));
        };
        let (blocks, squares) = squares.of.iter().copied().unzip();
        Ok(Response::new(NormsReply { ready: true, blocks, squares }))
    }

    async fn snapshot(
        &self,
        request: Request<SnapshotRequest>,
    ) -> Result<Response<SnapshotReply>, Status> {
        let request = request.into_inner();
        let generation = self.check(request.target.as_ref())?;
        let version = request.version.map(Version);
        let wait = Duration::from_millis(request.wait_ms).min(WAIT_MAX);
        let answer = self.engine.ask(|reply| Event::Cut { generation, version, reply });
        let answer = timeout(wait, answer).await;
        self.check_lease()?;
        let answer = match answer {
            Ok(answer) => answer.map_err(|error| refuse(&error))?,
            Err(_) => return Ok(Response::new(SnapshotReply::default())),
        };
        let (layout, cut) = match answer {
            CutAnswer::Cut { layout, cut } => (layout, cut),
            CutAnswer::Past { present } => {
                return Ok(Response::new(SnapshotReply {
                    answer: snapshot_reply::Answer::Past.into(),
                    version: present.0,
                    ..SnapshotReply::default()
                }));
            }
        };
        let version = cut.position.version;
        let (slot, incarnation) = (self.engine.slot, self.engine.incarnation);
        let saved = self.shards.save(&layout, slot, incarnation, cut).await;
        if let Err(ShardError::Encode(error @ EncodeError::NotFinite { .. })) = &saved {
            return Ok(Response::new(SnapshotReply {
                answer: snapshot_reply::Answer::Diverged.into(),
                version: version.0,
                diverged: error.to_string(),
                ..SnapshotReply::default()
            }));
        }
        let (shard, position) = saved.map_err(|error| {
            status(ErrorKind::Unavailable, format!("the shard was not saved: {error}"))
        })?;
        self.check_lease()?;
        self.metrics.checkpoint(shard.size_bytes);
        Ok(Response::new(SnapshotReply {
            answer: snapshot_reply::Answer::Saved.into(),
            version: version.0,
            shard: json(&shard),
            position: json(&position),
            params: layout.params().iter().map(param).collect(),
            diverged: String::new(),
        }))
    }
}

impl Service {
    /// What the shard shows, if it is in the generation that the caller means.
    fn published(&self, found: Generation) -> Result<Arc<Published>, Status> {
        let published = self.engine.published().borrow().clone();
        let present = published.generation;
        if found == present {
            Ok(published)
        } else {
            Err(refuse(&EngineError::OtherGeneration { found, present }))
        }
    }

    fn wanted_blocks(
        &self,
        generation: Generation,
    ) -> Result<Arc<Vec<(u32, steadfast_common::layout::Block)>>, Status> {
        match &self.published(generation)?.shard {
            Some(shard) => Ok(shard.blocks.clone()),
            None => Err(refuse(&EngineError::NotInitialised)),
        }
    }
}

fn json<T: serde::Serialize>(value: &T) -> Bytes {
    serde_json::to_vec(value).expect("records are plain data").into()
}

fn param(spec: &ParamSpec) -> Param {
    Param { name: spec.name.clone(), shape: spec.shape.iter().map(|side| *side as u64).collect() }
}

/// Builds the layout that an initialiser names, unless it is absurd.
fn layout(params: Vec<Param>) -> Result<Layout, Status> {
    if PARAMS_MAX < params.len() {
        return Err(invalid(format!("{} parameters are too many", params.len())));
    }
    let side = |side: u64| usize::try_from(side).unwrap_or(usize::MAX);
    let specs: Vec<ParamSpec> = params
        .into_iter()
        .map(|param| ParamSpec {
            name: param.name,
            shape: param.shape.into_iter().map(side).collect(),
        })
        .collect();
    let total = specs.iter().fold(0_usize, |sum, spec| sum.saturating_add(spec.len()));
    if VALUES_MAX < total {
        return Err(invalid(format!("a model of {total} values is too large")));
    }
    Ok(Layout::new(specs))
}

fn push_name(header: &PushHeader) -> Result<PushName, Status> {
    match header.name.as_ref().ok_or_else(|| invalid("the contribution has no name"))? {
        Name::Lane(lane) => Ok(PushName::Lane {
            version: Version(lane.version),
            lane: Lane(lane.lane),
            end: if lane.last { LaneEnd::LastOfPass } else { LaneEnd::MoreToCome },
        }),
        Name::Task(name) => Ok(PushName::Piece(TaskPiece {
            pass: Pass(name.pass),
            task: TaskId(name.task),
            from: name.from,
            to: name.to,
            last: name.last,
        })),
    }
}

/// Blocks of one contribution, as they come in.
struct Gathered {
    wanted: Arc<Vec<(u32, steadfast_common::layout::Block)>>,
    blocks: Vec<Option<Bytes>>,
    size_bytes: usize,
}

impl Gathered {
    fn new(wanted: Arc<Vec<(u32, steadfast_common::layout::Block)>>) -> Self {
        let blocks = vec![None; wanted.len()];
        Self { wanted, blocks, size_bytes: 0 }
    }

    fn take(&mut self, blocks: Vec<BlockData>) -> Result<(), Status> {
        for block in blocks {
            let place = self.wanted.binary_search_by_key(&block.block, |(number, _)| *number);
            let place = place.map_err(|_| {
                invalid(format!("block {} does not belong to this slot", block.block))
            })?;
            let wanted = self.wanted[place].1.len * size_of::<f32>();
            if block.data.len() != wanted {
                let found = block.data.len();
                let number = block.block;
                return Err(invalid(format!(
                    "block {number} has {found} bytes; {wanted} are wanted"
                )));
            }
            if self.blocks[place].is_some() {
                return Err(invalid(format!("block {} was sent twice", block.block)));
            }
            self.size_bytes += wanted;
            self.blocks[place] = Some(block.data);
        }
        Ok(())
    }

    /// All blocks, or none at all.
    fn finish(self) -> Result<(Vec<Bytes>, usize), Status> {
        let found = self.blocks.iter().flatten().count();
        if found != 0 && found != self.wanted.len() {
            let wanted = self.wanted.len();
            return Err(invalid(format!("{found} of {wanted} blocks were sent")));
        }
        Ok((self.blocks.into_iter().flatten().collect(), self.size_bytes))
    }
}

/// The slot that a service stands for, for logs.
impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let slot: Slot = self.engine.slot;
        write!(f, "Service(slot {slot})")
    }
}
