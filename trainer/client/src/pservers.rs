//! Gradients out, parameters in: to all pservers of a generation at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use steadfast_common::compression::Codec;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Lane, Pass, Version};
use steadfast_common::layout::Layout;
use steadfast_common::pieces::shared_bytes;
use steadfast_common::records::PserverRecord;
use steadfast_common::tally::TaskPiece;
use steadfast_coord::{CoordError, Deadline, pauses};
use steadfast_host::net::{Wire, dial, dial_unix_or_tcp};
use steadfast_host::role::Role;
use steadfast_host::task::in_place;
use steadfast_host::time::{sleep, timeout};
use steadfast_proto::tensor::in_chunks;
use steadfast_proto::v1::pserver_client::PserverClient;
use steadfast_proto::v1::push_header;
use steadfast_proto::v1::{
    BlockData, InitHeader, InitRequest, LaneContribution, LaneShare, Param, PushHeader, PushReply,
    Target, TaskContribution,
};
use steadfast_proto::{call, encode, read_one};
use tonic::Status;
use tracing::debug;

use crate::cluster::Crew;
use crate::pulls::{Answer, Places, Which, least, next_wanted, pull_one};
use crate::{ClientError, Cluster};

/// Longest wait for an answer, beyond what the call itself asks the pserver to wait.
const TIMEOUT: Duration = Duration::from_secs(30);

const PUSH: &str = "/steadfast.v1.Pserver/Push";

/// The pservers of one generation.
#[derive(Clone, Debug)]
pub struct Pservers {
    cluster: Arc<Cluster>,
    /// The end of our own lease: whoever is past it says nothing any more.
    deadline: Arc<Deadline>,
    generation: Generation,
    layout: Arc<Layout>,
    /// How gradients travel.
    codec: Codec,
    slots: Arc<Vec<SlotClient>>,
}

#[derive(Clone, Debug)]
pub(crate) struct SlotClient {
    pub target: Target,
    pub wire: Wire,
    /// Numbers of the blocks that the slot holds.
    blocks: Vec<u32>,
}

/// What a contribution is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    /// The sum of a node of the lane tree, with the share of each of its lanes.
    Lanes {
        version: Version,
        first: Lane,
        shares: Vec<LaneShare>,
    },
    Piece {
        piece: TaskPiece,
        version: Version,
    },
}

/// The sum of some records' gradients, flat; empty when there was no record.
#[derive(Clone, Debug, Default)]
pub struct Gradient {
    pub records: u64,
    pub loss_sum: f64,
    /// Sum of the records' checksums.
    pub checksum: u64,
    pub values: Arc<Vec<f32>>,
}

/// How far the parameters are that a pull brought.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pulled {
    pub version: Version,
    pub pass: Pass,
    pub pass_start: Version,
    pub examples: u64,
    pub loss: Option<f64>,
    /// From when all that was waited for had come to the end of the last answer.
    pub transfer: Duration,
    /// Received from all pservers.
    pub bytes: u64,
}

impl Pservers {
    /// Clients of a crew's members; connects when first used.
    ///
    /// # Errors
    /// If an address is none.
    pub fn new(
        cluster: Arc<Cluster>,
        crew: &Crew,
        layout: Arc<Layout>,
        codec: Codec,
        deadline: Arc<Deadline>,
    ) -> Result<Self, ClientError> {
        let placed = layout.place(crew.holders.len() as u32);
        let members = crew.holders.iter().zip(&crew.record.slots).zip(placed).enumerate();
        let slots = members.map(|(slot, ((holder, incarnation), blocks))| {
            let target = Target {
                generation: crew.record.generation.0,
                slot: slot as u32,
                incarnation: incarnation.0,
            };
            Ok(SlotClient { target, wire: connect(holder)?, blocks })
        });
        let slots: Result<Vec<SlotClient>, ClientError> = slots.collect();
        let generation = crew.record.generation;
        Ok(Self { cluster, deadline, generation, layout, codec, slots: Arc::new(slots?) })
    }

    /// The generation that these pservers are of.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Gives every block its first value.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job.
    pub async fn init(&self, attempt: u64, values: Arc<Vec<f32>>) -> Result<(), ClientError> {
        let bytes = shared_bytes(values);
        let params: Vec<Param> = self.layout.params().iter().map(param).collect();
        let sent = self.slots.iter().map(async |slot| {
            let target = Some(slot.target);
            let mut header = Some(InitHeader { target, attempt, params: params.clone() });
            let chunks = self.chunks(slot, &bytes).into_iter();
            let messages: Vec<InitRequest> =
                chunks.map(|blocks| InitRequest { header: header.take(), blocks }).collect();
            let mut patience = self.patience();
            loop {
                let mut client = PserverClient::new(slot.wire.clone());
                let init = client.init(tokio_stream::iter(messages.clone()));
                if patience.attempt(in_time(init)).await?.is_some() {
                    return Ok(());
                }
            }
        });
        try_join_all(sent).await.map(|_| ())
    }

    /// Adds the gradient of other records to one, as pservers do; neither is empty, both were rounded.
    pub fn add(&self, sum: &mut Gradient, other: Gradient) {
        sum.records += other.records;
        sum.loss_sum += other.loss_sum;
        sum.checksum = sum.checksum.wrapping_add(other.checksum);
        let sums: &mut Vec<f32> = Arc::make_mut(&mut sum.values);
        for block in self.layout.blocks() {
            self.codec.add(&mut sums[block.range()], &other.values[block.range()]);
        }
    }

    /// Rounds a gradient to what travels.
    pub fn round(&self, values: &mut [f32]) {
        for block in self.layout.blocks() {
            self.codec.round(&mut values[block.range()]);
        }
    }

    /// Sends a contribution, which was rounded, to every slot; returns when all have it, and how many bytes
    /// it took.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job.
    pub async fn push(&self, name: Name, gradient: Gradient) -> Result<u64, ClientError> {
        let sent = self.slots.iter().map(|slot| {
            let mut header = Some(PushHeader {
                target: Some(slot.target),
                records: gradient.records,
                loss_sum: gradient.loss_sum,
                checksum: gradient.checksum,
                name: Some(wire_name(name.clone())),
            });
            let chunks = in_place(|| self.gradient_chunks(slot, &gradient.values));
            let mut pieces = Vec::new();
            for blocks in chunks {
                encode(header.take().as_ref(), &blocks, &mut pieces);
            }
            self.push_one(slot, pieces)
        });
        try_join_all(sent).await.map(|sent| sent.into_iter().sum())
    }

    async fn push_one(&self, slot: &SlotClient, pieces: Vec<Bytes>) -> Result<u64, ClientError> {
        let bytes = pieces.iter().map(|it| it.len() as u64).sum();
        let mut patience = self.patience();
        loop {
            let push = async {
                let mut wire = slot.wire.clone();
                let mut body = call(&mut wire, PUSH, pieces.clone()).await?;
                read_one::<PushReply>(&mut body).await
            };
            if patience.attempt(in_time(push)).await?.is_some() {
                return Ok(bytes);
            }
        }
    }

    /// Asynchronous mode: writes the present blocks of every slot into `values`, which is as long as
    /// the layout. Slots may be at different versions; the smallest one, which all reflect, is told.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job. Blocks may have been written then.
    pub async fn pull(&self, values: &mut [f32]) -> Result<Pulled, ClientError> {
        let answers = self.pull_all(Version(0), Which::AtLeast, values).await?;
        Ok(least(&answers))
    }

    /// Synchronous mode: waits for `version` of every slot, or the first later one that all of them
    /// have, and writes all blocks into `values`. All of them reflect the version that is told: values
    /// of two steps would make for a gradient that nobody else computes.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job. Blocks may have been written then.
    pub async fn pull_step(
        &self,
        version: Version,
        values: &mut [f32],
    ) -> Result<Pulled, ClientError> {
        let mut wanted = version;
        loop {
            let answers = self.pull_all(wanted, Which::Exactly, values).await?;
            let past = answers.iter().filter(|it| !it.header.ready).map(|it| it.header.version);
            let past: Vec<u64> = past.collect();
            let Some(next) = next_wanted(wanted.0, &past, answers.len()) else {
                return Ok(least(&answers));
            };
            wanted = Version(next);
        }
    }

    async fn pull_all(
        &self,
        version: Version,
        which: Which,
        values: &mut [f32],
    ) -> Result<Vec<Answer>, ClientError> {
        let places = self.places(values)?;
        let pulls = self.slots.iter().zip(places).map(|(slot, mut places)| async move {
            let mut patience = self.patience();
            loop {
                let pull = pull_one(slot, version, which, &mut places);
                if let Some(answer) = patience.attempt(pull).await? {
                    return Ok(answer);
                }
            }
        });
        try_join_all(pulls).await
    }

    /// Where each slot's blocks go, by their numbers.
    fn places<'a>(&self, values: &'a mut [f32]) -> Result<Vec<Places<'a>>, ClientError> {
        let mut of_block = BTreeMap::new();
        let mut rest = values;
        for (number, block) in self.layout.blocks().iter().enumerate() {
            let (place, after) = rest.split_at_mut_checked(block.len).ok_or_else(|| {
                let message = "the values are fewer than those of the model";
                refused(ErrorKind::Internal, message.to_owned())
            })?;
            of_block.insert(number as u32, place);
            rest = after;
        }
        let of_slot = |slot: &SlotClient| {
            slot.blocks.iter().filter_map(|it| Some((*it, of_block.remove(it)?))).collect()
        };
        Ok(self.slots.iter().map(of_slot).collect())
    }

    /// One without blocks if there are no values.
    fn gradient_chunks(&self, slot: &SlotClient, values: &Arc<Vec<f32>>) -> Vec<Vec<BlockData>> {
        if values.is_empty() {
            return vec![Vec::new()];
        }
        if self.codec == Codec::Plain {
            return self.chunks(slot, &shared_bytes(values.clone()));
        }
        in_chunks(slot.blocks.iter().map(|number| {
            let range = self.layout.blocks()[*number as usize].range();
            BlockData { block: *number, data: self.codec.encode(&values[range]).into() }
        }))
    }

    fn chunks(&self, slot: &SlotClient, bytes: &Bytes) -> Vec<Vec<BlockData>> {
        let blocks = slot.blocks.iter().map(|number| {
            let range = self.layout.blocks()[*number as usize].range();
            let data = bytes.slice(range.start * size_of::<f32>()..range.end * size_of::<f32>());
            BlockData { block: *number, data }
        });
        in_chunks(blocks)
    }

    /// For one call that is repeated until the pserver answers or the generation is over.
    fn patience(&self) -> Patience<'_> {
        Patience { of: self, pauses: Box::new(pauses()) }
    }
}

/// Repeats of one call.
struct Patience<'a> {
    of: &'a Pservers,
    pauses: Box<dyn Iterator<Item = Duration> + Send>,
}

impl Patience<'_> {
    /// One attempt; nothing, after a pause, if another one is worth it.
    async fn attempt<T>(
        &mut self,
        attempt: impl Future<Output = Result<T, Status>>,
    ) -> Result<Option<T>, ClientError> {
        let Pservers { cluster, deadline, generation, .. } = self.of;
        let work = async {
            if !deadline.is_ahead() {
                return Err(CoordError::LeaseLost.into());
            }
            match attempt.await {
                Ok(answer) => return Ok(Some(answer)),
                Err(status) => judge(&status)?,
            }
            sleep(self.pauses.next().unwrap_or(TIMEOUT)).await;
            Ok(None)
        };
        tokio::select! {
            biased;
            answer = work => answer,
            () = cluster.generation_after(*generation) => Err(ClientError::NewGeneration),
            () = cluster.over() => Err(ClientError::JobOver),
        }
    }
}

/// Waits no longer than a pserver may take.
pub(crate) async fn in_time<T>(work: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = |_| Err(Status::unavailable("a pserver does not answer"));
    timeout(TIMEOUT, work).await.unwrap_or_else(late)
}

/// Whether the call is worth repeating: a pserver that is stale or gone is replaced by another
/// generation, which ends the repetition.
fn judge(status: &Status) -> Result<(), ClientError> {
    let kind = steadfast_proto::kind(status);
    match kind {
        ErrorKind::Unavailable | ErrorKind::NotYet | ErrorKind::Stale => {
            debug!(message = status.message(), "a pserver is not ready");
            Ok(())
        }
        ErrorKind::Invalid
        | ErrorKind::NotFound
        | ErrorKind::Conflict
        | ErrorKind::TooLarge
        | ErrorKind::Denied
        | ErrorKind::Internal => Err(refused(kind, status.message().to_owned())),
    }
}

fn refused(kind: ErrorKind, message: String) -> ClientError {
    ClientError::Refused { what: "a pserver", kind, message }
}

fn wire_name(name: Name) -> push_header::Name {
    match name {
        Name::Lanes { version, first, shares } => {
            push_header::Name::Lanes(LaneContribution { version: version.0, lane: first.0, shares })
        }
        Name::Piece { piece, version } => push_header::Name::Task(TaskContribution {
            pass: piece.pass.0,
            task: piece.task.0,
            from: piece.from,
            to: piece.to,
            last: piece.last,
            version: version.0,
        }),
    }
}

fn param(spec: &steadfast_common::layout::ParamSpec) -> Param {
    Param { name: spec.name.clone(), shape: spec.shape.iter().map(|side| *side as u64).collect() }
}

fn connect(holder: &PserverRecord) -> Result<Wire, ClientError> {
    let wire = match &holder.unix {
        Some(name) => dial_unix_or_tcp(&holder.address, name, Role::Pserver),
        None => dial(&holder.address, Role::Pserver),
    };
    wire.map_err(|message| ClientError::Refused {
        what: "a pserver's address",
        kind: ErrorKind::Invalid,
        message,
    })
}
