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
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Lane, Pass, TaskId, Version};
use steadfast_common::layout::Block;
use steadfast_common::pieces::Pieces;
use steadfast_common::tally::TaskPiece;
use steadfast_host::time::timeout;
use steadfast_proto::tensor::{in_chunks, shared_bytes};
use steadfast_proto::v1::pserver_server::PserverServer;
use steadfast_proto::v1::push_header::Name;
use steadfast_proto::v1::{BlockData, PullHeader, PullRequest, PushHeader, PushReply};
use steadfast_proto::{Decoder, MESSAGE_BYTES_MAX, answer, encode, framed, next, read_one, status};
use steadfast_pserver_core::contribution::{Contributed, Contribution, LaneEnd};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;

use crate::engine::{EngineError, Event, PushName, Which};
use crate::service::{Service, WAIT_MAX, invalid, refuse};

/// Serves one slot.
#[derive(Clone)]
pub struct Exchange {
    service: Arc<Service>,
    others: PserverServer<Service>,
}

impl Exchange {
    /// Serves the slot of `service`.
    pub fn new(service: Service) -> Self {
        let service = Arc::new(service);
        let others = PserverServer::from_arc(service.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        Self { service, others }
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
                async move { Ok(answer(push(&service, request.into_body()).await)) }.boxed()
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
        Ok(Self { generation, name, gathered: Gathered::new(shard.blocks.clone()) })
    }
}

async fn push(service: &Service, mut body: Body) -> Result<Vec<Bytes>, Status> {
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
    let pushed = service
        .engine
        .ask(|reply| Event::Push { generation, name, contribution, reply })
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
    let mut published = service.engine.published();
    let reached = published.wait_for(|now| {
        now.generation != generation
            || now.shard.as_ref().is_some_and(|it| Version(request.version) <= it.position.version)
    });
    let seen = match timeout(wait, reached).await {
        Ok(Ok(seen)) => seen.clone(),
        Ok(Err(_)) => return Err(refuse(&EngineError::Ending)),
        Err(_) => service.engine.published().borrow().clone(),
    };
    service.check_lease()?;
    if seen.generation != generation {
        let (found, present) = (generation, seen.generation);
        return Err(refuse(&EngineError::OtherGeneration { found, present }));
    }
    let which = if request.exact { Which::Exactly } else { Which::AtLeast };
    let mut pieces = Vec::new();
    let Some(shard) = seen.at(Version(request.version), which) else {
        let version = seen.shard.as_ref().map_or(0, |it| it.position.version.0);
        let header = PullHeader { ready: false, version, ..PullHeader::default() };
        encode(Some(&header), &[], &mut pieces);
        return Ok(pieces);
    };
    let mut header = Some(PullHeader {
        ready: true,
        version: shard.position.version.0,
        pass: shard.position.pass.0,
        pass_start: shard.position.pass_start.0,
        examples: shard.position.examples,
        loss: shard.position.loss,
    });
    let blocks = shard.blocks.iter().zip(&shard.values).map(|((block, _), values)| BlockData {
        block: *block,
        data: shared_bytes(values.clone()),
    });
    for blocks in in_chunks(blocks) {
        encode(header.take().as_ref(), &blocks, &mut pieces);
    }
    service.metrics.pull(shard.blocks.iter().map(|(_, block)| block.len * 4).sum());
    Ok(pieces)
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
    wanted: Arc<Vec<(u32, Block)>>,
    blocks: Vec<Option<Pieces>>,
    size_bytes: usize,
}

impl Gathered {
    fn new(wanted: Arc<Vec<(u32, Block)>>) -> Self {
        let blocks = vec![None; wanted.len()];
        Self { wanted, blocks, size_bytes: 0 }
    }

    fn take(&mut self, number: u32, data: Pieces) -> Result<(), Status> {
        let place = self.wanted.binary_search_by_key(&number, |(number, _)| *number);
        let place =
            place.map_err(|_| invalid(format!("block {number} does not belong to this slot")))?;
        let (found, wanted) = (data.len(), self.wanted[place].1.len * size_of::<f32>());
        if found != wanted {
            let message = format!("block {number} has {found} bytes; {wanted} are wanted");
            return Err(invalid(message));
        }
        if self.blocks[place].is_some() {
            return Err(invalid(format!("block {number} was sent twice")));
        }
        self.size_bytes += wanted;
        self.blocks[place] = Some(data);
        Ok(())
    }

    /// All blocks, or none at all.
    fn finish(self) -> Result<(Vec<Pieces>, usize), Status> {
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
