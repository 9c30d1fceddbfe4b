//! Pushes gradients to, and pulls parameters from, all pservers of a generation at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use steadfast_common::applied_records::RecordRange;
use steadfast_common::byte_segments::shared_bytes;
use steadfast_common::compression::Codec;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Lane, Pass, Version};
use steadfast_common::layout::Layout;
use steadfast_common::records::PserverRecord;
use steadfast_coord::{CoordError, Deadline, pauses};
use steadfast_host::net::{Channel, dial, dial_unix_or_tcp};
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

use crate::cluster::PserverSet;
use crate::pulls::{Places, PulledShard, Which, least, next_wanted, pull_one};
use crate::{ClientError, Cluster};

/// Timeout of a call, in addition to the time that the request asks the pserver to wait.
const TIMEOUT: Duration = Duration::from_secs(30);

const PUSH: &str = "/steadfast.v1.Pserver/Push";

/// The pservers of one generation.
#[derive(Clone, Debug)]
pub struct Pservers {
    cluster: Arc<Cluster>,
    /// The end of the caller's own lease; no calls are made after it.
    deadline: Arc<Deadline>,
    generation: Generation,
    layout: Arc<Layout>,
    /// Encoding of gradients.
    codec: Codec,
    slots: Arc<Vec<SlotClient>>,
}

#[derive(Clone, Debug)]
pub(crate) struct SlotClient {
    pub target: Target,
    pub channel: Channel,
    /// Numbers of the blocks that the slot holds.
    blocks: Vec<u32>,
}

/// The name of a contribution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    /// The sum of a node of the lane tree, with the share of each of its lanes.
    Lanes {
        version: Version,
        first: Lane,
        shares: Vec<LaneShare>,
    },
    Range {
        range: RecordRange,
        version: Version,
    },
}

/// The sum of the gradients of some records, flat; empty without records.
#[derive(Clone, Debug, Default)]
pub struct Gradient {
    pub records: u64,
    pub loss_sum: f64,
    /// Sum of the records' checksums.
    pub checksum: u64,
    pub values: Arc<Vec<f32>>,
}

/// The position of pulled parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pulled {
    pub version: Version,
    pub pass: Pass,
    pub pass_start: Version,
    pub examples: u64,
    pub loss: Option<f64>,
    /// Transfer time of the slowest slot, without the time spent waiting for pushes.
    pub transfer: Duration,
    /// Bytes received from all pservers.
    pub bytes: u64,
}

impl Pservers {
    /// Creates clients of the members of a pserver set; they connect on first use.
    ///
    /// # Errors
    /// If an address is invalid.
    pub fn new(
        cluster: Arc<Cluster>,
        pserver_set: &PserverSet,
        layout: Arc<Layout>,
        codec: Codec,
        deadline: Arc<Deadline>,
    ) -> Result<Self, ClientError> {
        let placed = layout.place(pserver_set.holders.len() as u32);
        let members =
            pserver_set.holders.iter().zip(&pserver_set.record.slots).zip(placed).enumerate();
        let slots = members.map(|(slot, ((holder, incarnation), blocks))| {
            let target = Target {
                generation: pserver_set.record.generation.0,
                slot: slot as u32,
                incarnation: incarnation.0,
            };
            Ok(SlotClient { target, channel: connect(holder)?, blocks })
        });
        let slots: Result<Vec<SlotClient>, ClientError> = slots.collect();
        let generation = pserver_set.record.generation;
        Ok(Self { cluster, deadline, generation, layout, codec, slots: Arc::new(slots?) })
    }

    /// Returns the generation of these pservers.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Sets the initial value of every block.
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
            let mut retries = self.retries();
            loop {
                let mut client = PserverClient::new(slot.channel.clone());
                let init = client.init(tokio_stream::iter(messages.clone()));
                if retries.attempt(in_time(init)).await?.is_some() {
                    return Ok(());
                }
            }
        });
        try_join_all(sent).await.map(|_| ())
    }

    /// Adds two gradients, neither empty and both rounded, in the arithmetic of pservers.
    pub fn add(&self, sum: &mut Gradient, other: Gradient) {
        sum.records += other.records;
        sum.loss_sum += other.loss_sum;
        sum.checksum = sum.checksum.wrapping_add(other.checksum);
        let sums: &mut Vec<f32> = Arc::make_mut(&mut sum.values);
        for block in self.layout.blocks() {
            self.codec.add(&mut sums[block.range()], &other.values[block.range()]);
        }
    }

    /// Rounds a gradient to values that its encoding represents exactly.
    pub fn round(&self, values: &mut [f32]) {
        for block in self.layout.blocks() {
            self.codec.round(&mut values[block.range()]);
        }
    }

    /// Pushes a rounded contribution to every slot; returns the bytes sent once all slots have acknowledged
    /// it.
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
                name: Some(proto_name(name.clone())),
            });
            let chunks = in_place(|| self.gradient_chunks(slot, &gradient.values));
            let mut segments = Vec::new();
            for blocks in chunks {
                encode(header.take().as_ref(), &blocks, &mut segments);
            }
            self.push_one(slot, segments)
        });
        try_join_all(sent).await.map(|sent| sent.into_iter().sum())
    }

    async fn push_one(&self, slot: &SlotClient, segments: Vec<Bytes>) -> Result<u64, ClientError> {
        let bytes = segments.iter().map(|it| it.len() as u64).sum();
        let mut retries = self.retries();
        loop {
            let push = async {
                let mut channel = slot.channel.clone();
                let mut body = call(&mut channel, PUSH, segments.clone()).await?;
                read_one::<PushReply>(&mut body).await
            };
            if retries.attempt(in_time(push)).await?.is_some() {
                return Ok(bytes);
            }
        }
    }

    /// Asynchronous mode: writes the current blocks of every slot into `values`, which is as long as the
    /// layout. Slots may be at different versions; returns the position of the smallest.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job; some blocks may have been written then.
    pub async fn pull(&self, values: &mut [f32]) -> Result<Pulled, ClientError> {
        let answers = self.pull_all(Version(0), Which::AtLeast, values).await?;
        Ok(least(&answers))
    }

    /// Synchronous mode: waits for `version` in every slot, or the first later version that all slots have,
    /// and writes all blocks into `values`. All blocks have the returned version: a mix of two versions would
    /// give a gradient that no other trainer computes.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job; some blocks may have been written then.
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
    ) -> Result<Vec<PulledShard>, ClientError> {
        let places = self.places(values)?;
        let pulls = self.slots.iter().zip(places).map(|(slot, mut places)| async move {
            let mut retries = self.retries();
            loop {
                let pull = pull_one(slot, version, which, &mut places);
                if let Some(answer) = retries.attempt(pull).await? {
                    return Ok(answer);
                }
            }
        });
        try_join_all(pulls).await
    }

    /// Splits `values` into the blocks of each slot, by block number.
    fn places<'a>(&self, values: &'a mut [f32]) -> Result<Vec<Places<'a>>, ClientError> {
        let mut of_block = BTreeMap::new();
        let mut rest = values;
        for (number, block) in self.layout.blocks().iter().enumerate() {
            let (place, after) = rest.split_at_mut_checked(block.len).ok_or_else(|| {
                let message = "the buffer has fewer values than the model";
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

    /// Returns one chunk without blocks if there are no values.
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

    /// Creates the retry state of one call, which is repeated until it succeeds or the generation ends.
    fn retries(&self) -> Retries<'_> {
        Retries { of: self, pauses: Box::new(pauses()) }
    }
}

/// The retry state of one call.
struct Retries<'a> {
    of: &'a Pservers,
    pauses: Box<dyn Iterator<Item = Duration> + Send>,
}

impl Retries<'_> {
    /// Runs one attempt; returns `None`, after a pause, if the call should be repeated.
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

/// Runs `work` with the timeout of pserver calls.
pub(crate) async fn in_time<T>(work: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = |_| Err(Status::unavailable("call to a pserver timed out"));
    timeout(TIMEOUT, work).await.unwrap_or_else(late)
}

/// Decides whether to repeat the call: a pserver that is stale or dead is replaced by a new generation,
/// which ends the repetition.
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

fn proto_name(name: Name) -> push_header::Name {
    match name {
        Name::Lanes { version, first, shares } => {
            push_header::Name::Lanes(LaneContribution { version: version.0, lane: first.0, shares })
        }
        Name::Range { range, version } => push_header::Name::Task(TaskContribution {
            pass: range.pass.0,
            task: range.task.0,
            from: range.from,
            to: range.to,
            last: range.last,
            version: version.0,
        }),
    }
}

fn param(spec: &steadfast_common::layout::ParamSpec) -> Param {
    Param { name: spec.name.clone(), shape: spec.shape.iter().map(|side| *side as u64).collect() }
}

fn connect(holder: &PserverRecord) -> Result<Channel, ClientError> {
    let channel = match &holder.unix {
        Some(name) => dial_unix_or_tcp(&holder.address, name, Role::Pserver),
        None => dial(&holder.address, Role::Pserver),
    };
    channel.map_err(|message| ClientError::Refused {
        what: "a pserver's address",
        kind: ErrorKind::Invalid,
        message,
    })
}
