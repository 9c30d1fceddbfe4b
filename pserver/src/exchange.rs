//! The two calls that carry tensors: gradients in, parameters out. Values go from the socket into the
//! sum, and from the shard into the socket, without being copied together on the way; all other calls
//! go to the generated server.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use steadfast_common::compression::Codec;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Lane, Pass, TaskId, Version};
use steadfast_common::layout::Block;
use steadfast_common::pieces::{Pieces, shared_bytes};
use steadfast_common::tally::TaskPiece;
use steadfast_host::time::timeout;
use steadfast_host::traces::TRACE;
use steadfast_proto::tensor::in_chunks;
use steadfast_proto::v1;
use steadfast_proto::v1::pserver_server::PserverServer;
use steadfast_proto::v1::push_header::Name;
use steadfast_proto::v1::{BlockData, PullHeader, PullRequest, PushHeader, PushReply};
use steadfast_proto::{
    Decoder, MESSAGE_BYTES_MAX, answer, encode, framed, kind, next, read_one, status,
};
use steadfast_pserver_core::contribution::{Contributed, Contribution, Finite, LaneEnd, LaneShare};
use steadfast_pserver_core::memory::Memory;
use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tracing::{Instrument, info_span};

use crate::engine::PublishedShard;
use crate::event::{EngineError, Event, Patience, Pulled, PushName, Which};
use crate::service::{Service, WAIT_MAX, invalid, refuse};

/// KiB of gradients that may be coming in at once, or else one push: more would only be memory. Whoever
/// waits keeps its gradient, and sends when it is its turn.
const INCOMING_KIB: u32 = 512 << 10;

/// Serves one slot.
#[derive(Clone)]
pub struct Exchange {
    service: Arc<Service>,
    incoming: Arc<Semaphore>,
    others: PserverServer<Service>,
}

impl Exchange {
    /// Serves the slot of `service`.
    pub fn new(service: Service) -> Self {
        let service = Arc::new(service);
        let others = PserverServer::from_arc(service.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let incoming = Arc::new(Semaphore::new(INCOMING_KIB as usize));
        Self { service, incoming, others }
    }
}

impl NamedService for Exchange {
    const NAME: &'static str = <PserverServer<Service> as NamedService>::NAME;
}

impl tower::Service<http::Request<Body>> for Exchange {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.service.clone();
        match request.uri().path() {
            "/steadfast.v1.Pserver/Push" => {
                let incoming = self.incoming.clone();
                async move {
                    let pushed = push(&service, &incoming, request.into_body()).await;
                    Ok(answer(pushed.inspect_err(|error| service.metrics.refuse(kind(error)))))
                }
                .boxed()
            }
            "/steadfast.v1.Pserver/Pull" => {
                async move { Ok(answer(pull(&service, request.into_body()).await)) }.boxed()
            }
            _ => self.others.call(request),
        }
    }
}

/// A push that comes in.
struct Incoming {
    generation: Generation,
    name: PushName,
    gathered: Gathered,
}

impl Incoming {
    fn begin(service: &Service, header: Option<&PushHeader>) -> Result<Self, Status> {
        let header = header.ok_or_else(|| invalid("the first message has no header"))?;
        let generation = service.check(header.target.as_ref())?;
        let name = push_name(header)?;
        let published = service.published(generation)?;
        let not_yet = || refuse(&EngineError::NotInitialised);
        let shard = published.shard.as_ref().ok_or_else(not_yet)?;
        let gathered = Gathered::new(shard);
        Ok(Self { generation, name, gathered })
    }
}

/// Waits until there is room for a push.
async fn room<'a>(
    service: &Service,
    incoming: &'a Semaphore,
) -> Result<SemaphorePermit<'a>, Status> {
    let published = service.engine.published().borrow().clone();
    let bytes = published.shard.as_ref().map_or(0, |it| size_bytes(&it.blocks));
    let kib = u32::try_from(bytes >> 10).unwrap_or(u32::MAX).min(INCOMING_KIB);
    incoming.acquire_many(kib).await.map_err(|_| refuse(&EngineError::Ending))
}

async fn push(
    service: &Service,
    incoming: &Semaphore,
    mut body: Body,
) -> Result<Vec<Bytes>, Status> {
    let _room = room(service, incoming).await?;
    let (mut decoder, mut incoming) = (Decoder::<PushHeader>::default(), None);
    while let Some(bytes) = next(&mut body).await? {
        decoder.feed(bytes, |header, block, data| {
            let incoming = match &mut incoming {
                Some(incoming) => incoming,
                none => none.insert(Incoming::begin(service, header)?),
            };
            incoming.gathered.take(block, data)
        })?;
    }
    let header = decoder.end()?;
    let incoming = match incoming {
        Some(incoming) => incoming,
        None => Incoming::begin(service, header.as_ref())?,
    };
    let header = header.unwrap_or_default();
    let Incoming { generation, name, gathered } = incoming;
    let (blocks, size_bytes) = gathered.finish()?;
    let contribution = Contribution {
        records: header.records,
        loss_sum: header.loss_sum,
        checksum: header.checksum,
        blocks,
    };
    let apply = info_span!(target: TRACE, "apply");
    let pushed = service
        .engine
        .ask(|reply| Event::Push { generation, name, contribution, reply })
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

async fn pull(service: &Service, mut body: Body) -> Result<Vec<Bytes>, Status> {
    let request: PullRequest = read_one(&mut body).await?;
    let generation = service.check(request.target.as_ref())?;
    let wait = Duration::from_millis(request.wait_ms).min(WAIT_MAX);
    let (version, which) = match request.exact {
        true => (Version(request.version), Which::Exactly),
        false => (Version(request.version), Which::AtLeast),
    };
    let ask = |patience| {
        service.engine.ask(move |reply| Event::Pull { generation, version, which, patience, reply })
    };
    let answer = match timeout(wait, ask(Patience::Waits)).await {
        Ok(answer) => answer,
        // However short the wait is, what is there is given.
        Err(_) => ask(Patience::None).await,
    };
    service.check_lease()?;
    let mut pieces = Vec::new();
    let parameters = match answer.map_err(|error| refuse(&error))? {
        Pulled::Parameters(parameters) => parameters,
        Pulled::NotThere { present } => {
            let version = present.0;
            let header = PullHeader { ready: false, version, ..PullHeader::default() };
            encode(Some(&header), &[], &mut pieces);
            return Ok(pieces);
        }
    };
    let mut header = Some(PullHeader {
        ready: true,
        version: parameters.position.version.0,
        pass: parameters.position.pass.0,
        pass_start: parameters.position.pass_start.0,
        examples: parameters.position.examples,
        loss: parameters.position.loss,
    });
    let blocks = parameters.blocks.iter().zip(&parameters.values).map(|((block, _), values)| {
        BlockData { block: *block, data: shared_bytes(values.clone()) }
    });
    for blocks in in_chunks(blocks) {
        encode(header.take().as_ref(), &blocks, &mut pieces);
    }
    service.metrics.pull(size_bytes(&parameters.blocks));
    Ok(pieces)
}

/// Bytes of all values of some blocks.
fn size_bytes(blocks: &[(u32, Block)]) -> usize {
    blocks.iter().map(|(_, block)| block.len * size_of::<f32>()).sum()
}

fn push_name(header: &PushHeader) -> Result<PushName, Status> {
    match header.name.as_ref().ok_or_else(|| invalid("the contribution has no name"))? {
        Name::Lanes(name) => {
            let share = |it: &v1::LaneShare| LaneShare {
                records: it.records.into(),
                end: if it.last { LaneEnd::LastOfPass } else { LaneEnd::MoreToCome },
            };
            let shares = name.shares.iter().map(share).collect();
            Ok(PushName::Lanes { version: Version(name.version), first: Lane(name.lane), shares })
        }
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
    memory: Memory,
    codec: Codec,
    wanted: Arc<Vec<(u32, Block)>>,
    blocks: Vec<Option<Finite>>,
    size_bytes: usize,
}

impl Gathered {
    fn new(shard: &PublishedShard) -> Self {
        let (wanted, memory, codec) = (shard.blocks.clone(), shard.memory.clone(), shard.codec);
        let blocks = vec![None; wanted.len()];
        Self { memory, codec, wanted, blocks, size_bytes: 0 }
    }

    fn take(&mut self, number: u32, data: Pieces) -> Result<(), Status> {
        let place = self.wanted.binary_search_by_key(&number, |(number, _)| *number);
        let place =
            place.map_err(|_| invalid(format!("block {number} does not belong to this slot")))?;
        if self.blocks[place].is_some() {
            return Err(invalid(format!("block {number} was sent twice")));
        }
        let memory = self.memory.lend(self.wanted[place].1.len);
        let values = Finite::decode(self.codec, number, &data, memory);
        self.blocks[place] = Some(values.map_err(|refusal| refuse(&refusal.into()))?);
        self.size_bytes += data.len();
        Ok(())
    }

    /// All blocks, or none at all.
    fn finish(self) -> Result<(Vec<Finite>, usize), Status> {
        let found = self.blocks.iter().flatten().count();
        if found != 0 && found != self.wanted.len() {
            let wanted = self.wanted.len();
            return Err(status(
                ErrorKind::Invalid,
                format!("{found} of {wanted} blocks were sent"),
            ));
        }
        Ok((self.blocks.into_iter().flatten().collect(), self.size_bytes))
    }
}
