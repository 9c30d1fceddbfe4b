//! Pushes gradients to, and pulls parameters from, all pservers of a generation at once.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Slot, Version};
use steadfast_common::records::PserverRecord;
use steadfast_common::records::contribution::ContributionName;
use steadfast_common::records::position::Position;
use steadfast_common::role::Role;
use steadfast_common::tensor::byte_segments::shared_bytes;
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::layout::{Block, Layout};
use steadfast_common::tensor::placement::Placement;
use steadfast_common::tensor::table::{RANGES, Rows};
use steadfast_coord::{CoordError, Deadline, backoff};
use steadfast_host::task::in_place;
use steadfast_host::time::{sleep, timeout};
use steadfast_net::{Channel, TlsIdentity};
use steadfast_proto::tensor::{in_chunks, row_blocks};
use steadfast_proto::v1::pserver_client::PserverClient;
use steadfast_proto::v1::push_header::Name;
use steadfast_proto::v1::{
    BlockData, InitHeader, InitRequest, Param, PushHeader, PushReply, Target,
};
use steadfast_proto::{
    PullValues, TensorMethod, VersionMatch, call, encode, encode_chunks, read_one,
};
use tonic::Status;
use tracing::debug;

use crate::cluster::PserverSet;
use crate::pulls::{BlockBuffers, PulledShard, common_version, oldest_position, pull_one};
use crate::{ClientError, Cluster};

/// Timeout of a call, in addition to the time that the request asks the pserver to wait.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The pservers of one generation.
#[derive(Clone, Debug)]
pub struct Pservers {
    pub(crate) cluster: Arc<Cluster>,
    /// The end of the caller's own lease; no calls are made after it.
    deadline: Arc<Deadline>,
    generation: Generation,
    pub(crate) layout: Arc<Layout>,
    /// Encoding of gradients.
    codec: Codec,
    pub(crate) slots: Arc<Vec<SlotClient>>,
}

#[derive(Clone, Debug)]
pub(crate) struct SlotClient {
    pub target: Target,
    pub channel: Channel,
    /// Numbers of the blocks that the slot holds.
    blocks: Vec<u32>,
    /// The ranges of each table that the slot holds.
    pub ranges: Range<u32>,
}

/// What training begins with.
#[derive(Clone, Debug, Default)]
pub struct InitialValues {
    /// The values of all parameters, flat.
    pub values: Vec<f32>,
    pub state: InitialState,
}

impl From<Vec<f32>> for InitialValues {
    /// Takes the values of all parameters, whose optimizer begins anew.
    fn from(values: Vec<f32>) -> Self {
        Self { values, state: InitialState::default() }
    }
}

/// The state of the optimizer that parameters begin with, where it does not begin anew.
#[derive(Clone, Debug, Default)]
pub struct InitialState {
    /// The vectors by name, each with a value for each value of the parameters.
    pub vectors: BTreeMap<String, Vec<f32>>,
    /// Whether each parameter begins with it.
    pub params: Vec<bool>,
}

/// The sum of the gradients of some records; empty without records.
#[derive(Clone, Debug, Default)]
pub struct Gradient {
    pub records: u64,
    pub loss_sum: f64,
    /// Asynchronous mode: what the records count in the mean, if that is not their number. In synchronous mode the
    /// shares of the lanes say it.
    pub weight: Option<f64>,
    /// Sum of the records' checksums.
    pub checksum: u64,
    /// The values of all blocks, flat.
    pub values: Arc<Vec<f32>>,
    /// The rows of each table.
    pub rows: Vec<Rows>,
}

/// The outcome of a pull.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pulled {
    pub position: Position,
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
        let placement = Placement::of(&layout, &pserver_set.record.placement);
        let members = (0..).zip(pserver_set.holders.iter().zip(&pserver_set.record.slots));
        let slots = members.map(|(slot, (holder, incarnation))| {
            let target = Target {
                generation: pserver_set.record.generation.0,
                slot,
                incarnation: incarnation.0,
            };
            let channel = connect(holder, cluster.tls())?;
            let blocks = placement.blocks_of(Slot(slot)).to_vec();
            Ok(SlotClient { target, channel, blocks, ranges: placement.ranges_of(Slot(slot)) })
        });
        let slots: Result<Vec<SlotClient>, ClientError> = slots.collect();
        let generation = pserver_set.record.generation;
        Ok(Self { cluster, deadline, generation, layout, codec, slots: Arc::new(slots?) })
    }

    /// Returns whether no further calls are made, because another generation began or the caller's lease ended.
    pub fn is_over(&self) -> bool {
        let newest = self.cluster.generation();
        !self.deadline.is_ahead() || newest.is_some_and(|it| self.generation < it.generation)
    }

    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Sets the initial value of every block, and the state of the optimizer that it begins with.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn init(&self, attempt: u64, first: InitialValues) -> Result<(), ClientError> {
        let bytes = shared_bytes(Arc::new(first.values));
        let states: Vec<String> = first.state.vectors.keys().cloned().collect();
        let params: Vec<Param> = self.layout.params().iter().map(Param::from).collect();
        let sent = self.slots.iter().map(async |slot| {
            let target = Some(slot.target);
            let (params, states) = (params.clone(), states.clone());
            let mut header = Some(InitHeader { target, attempt, params, states });
            let chunks = self.chunks(slot, &bytes).into_iter();
            let values = chunks.map(|blocks| InitRequest {
                header: header.take(),
                blocks,
                ..InitRequest::default()
            });
            let mut messages: Vec<InitRequest> = values.collect();
            let of_blocks = self.state_chunks(slot, &first.state).into_iter();
            messages
                .extend(of_blocks.map(|states| InitRequest { states, ..InitRequest::default() }));
            let mut retries = self.retries();
            loop {
                let mut client = PserverClient::new(slot.channel.clone());
                let init = client.init(tokio_stream::iter(messages.clone()));
                if retries.attempt(with_timeout(init)).await?.is_some() {
                    return Ok(());
                }
            }
        });
        try_join_all(sent).await.map(|_| ())
    }

    /// Adds `other` to `sum` in the arithmetic of pservers. Neither gradient is empty, and both are rounded.
    pub fn add(&self, sum: &mut Gradient, other: Gradient) {
        sum.records += other.records;
        sum.loss_sum += other.loss_sum;
        sum.checksum = sum.checksum.wrapping_add(other.checksum);
        let sums: &mut Vec<f32> = Arc::make_mut(&mut sum.values);
        for block in self.layout.blocks() {
            self.codec.add(&mut sums[block.range()], &other.values[block.range()]);
        }
        sum.rows.iter_mut().zip(&other.rows).for_each(|(sum, rows)| sum.add(rows));
    }

    /// Returns whether gradients must be rounded before they are added.
    pub fn rounds(&self) -> bool {
        self.codec != Codec::Plain
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
    /// A rejection, another generation, or the end of the job.
    pub async fn push(
        &self,
        name: ContributionName,
        gradient: Gradient,
    ) -> Result<u64, ClientError> {
        let mut rows = self.rows_of_slots(&gradient.rows).into_iter();
        let sent = self.slots.iter().map(|slot| {
            let rows = rows.next().unwrap_or_default();
            let header = PushHeader {
                rows: rows.iter().map(|rows| rows.len() as u64).sum(),
                target: Some(slot.target),
                records: gradient.records,
                loss_sum: gradient.loss_sum,
                weight: gradient.weight,
                checksum: gradient.checksum,
                name: Some(Name::from(&name)),
            };
            let chunks = match self.rounds() {
                true => in_place(|| self.gradient_chunks(slot, &gradient.values)),
                // References to the values.
                false => self.gradient_chunks(slot, &gradient.values),
            };
            let mut segments = encode_chunks(&header, &chunks);
            for (table, rows) in rows.iter().enumerate() {
                for block in row_blocks(self.layout.number_of_table(table), rows) {
                    encode(None::<&PushHeader>, &[block], &mut segments);
                }
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
                let mut body = call(&mut channel, TensorMethod::Push, segments.clone()).await?;
                read_one::<PushReply>(&mut body).await
            };
            if retries.attempt(with_timeout(push)).await?.is_some() {
                return Ok(bytes);
            }
        }
    }

    /// Divides rows of each table among the slots.
    fn rows_of_slots(&self, rows: &[Rows]) -> Vec<Vec<Rows>> {
        let slots = self.slots.len();
        if rows.is_empty() {
            return vec![Vec::new(); slots];
        }
        let slot_of = self.slots_of_ranges();
        by_slot(slots, rows.iter().map(|it| it.divided(slots, |range| slot_of[range as usize])))
    }

    /// Returns the index of the slot that holds each range.
    pub(crate) fn slots_of_ranges(&self) -> Vec<usize> {
        // A range that the placement gives to no slot is refused by the first one, by name.
        let slot_of = |range| {
            let place = self.slots.iter().position(|slot| slot.ranges.contains(&range));
            place.unwrap_or(0)
        };
        (0..RANGES).map(slot_of).collect()
    }

    /// Writes the current blocks of every slot into `values`, which is as long as the layout, in asynchronous mode.
    /// Slots may be at different versions; returns the position of the slot with the smallest version.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job; some blocks may have been written then.
    pub async fn pull(&self, values: &mut [f32]) -> Result<Pulled, ClientError> {
        let answers = self
            .pull_all(VersionMatch::AtLeast(Version(0)), PullValues::Parameters, values)
            .await?;
        Ok(oldest_position(&answers))
    }

    /// Waits, in synchronous mode, for `version` in every slot, or for the first later version that all slots have, and
    /// writes all blocks into `values`. All blocks have the returned version: a mix of two versions would give a
    /// gradient that no other trainer computes.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job; some blocks may have been written then.
    pub async fn pull_step(
        &self,
        version: Version,
        values: &mut [f32],
    ) -> Result<Pulled, ClientError> {
        let mut next = version;
        loop {
            let answers =
                self.pull_all(VersionMatch::Exactly(next), PullValues::Parameters, values).await?;
            let past = answers.iter().filter_map(|it| it.position.err());
            let past: Vec<u64> = past.map(|version| version.0).collect();
            let Some(common) = common_version(next.0, &past, answers.len()) else {
                return Ok(oldest_position(&answers));
            };
            next = Version(common);
        }
    }

    /// Writes the averages of the parameters at `version` into `values`, or in asynchronous mode the current ones; they
    /// are as long as the layout. Returns whether all slots had them: a slot has none of an earlier version.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job; some blocks may have been written then.
    pub async fn pull_averages(
        &self,
        version: Option<Version>,
        values: &mut [f32],
    ) -> Result<bool, ClientError> {
        let versions = version.map_or(VersionMatch::AtLeast(Version(0)), VersionMatch::Exactly);
        let answers = self.pull_all(versions, PullValues::Averages, values).await?;
        Ok(answers.iter().all(|answer| answer.position.is_ok()))
    }

    async fn pull_all(
        &self,
        versions: VersionMatch,
        wanted: PullValues,
        values: &mut [f32],
    ) -> Result<Vec<PulledShard>, ClientError> {
        let buffers = self.block_buffers(values)?;
        let pulls = self.slots.iter().zip(buffers).map(|(slot, mut buffers)| async move {
            let mut retries = self.retries();
            loop {
                let pull = pull_one(slot, versions, wanted, &mut buffers);
                if let Some(answer) = retries.attempt(pull).await? {
                    return Ok(answer);
                }
            }
        });
        try_join_all(pulls).await
    }

    /// Splits `values` into the blocks of each slot, by block number.
    fn block_buffers<'a>(
        &self,
        values: &'a mut [f32],
    ) -> Result<Vec<BlockBuffers<'a>>, ClientError> {
        let mut of_block = BTreeMap::new();
        let found = values.len();
        let mut rest = values;
        for (number, block) in self.layout.blocks().iter().enumerate() {
            let (buffer, after) = rest
                .split_at_mut_checked(block.len)
                .ok_or(ClientError::WrongLength { expected: self.layout.len(), found })?;
            of_block.insert(number as u32, buffer);
            rest = after;
        }
        let of_slot = |slot: &SlotClient| {
            slot.blocks.iter().filter_map(|it| Some((*it, of_block.remove(it)?))).collect()
        };
        Ok(self.slots.iter().map(of_slot).collect())
    }

    /// Divides the values of a slot's blocks into the chunks of a push. Returns one chunk without blocks if there are
    /// no values.
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

    /// Returns the state that the blocks of a slot begin with: of each the vectors in the order of their names.
    fn state_chunks(&self, slot: &SlotClient, state: &InitialState) -> Vec<Vec<BlockData>> {
        if state.vectors.is_empty() {
            return Vec::new();
        }
        let has_state = |block: &Block| state.params.get(block.param as usize) == Some(&true);
        let blocks =
            slot.blocks.iter().map(|number| (*number, self.layout.blocks()[*number as usize]));
        in_chunks(blocks.filter(|(_, block)| has_state(block)).map(|(number, block)| {
            let values = state.vectors.values().flat_map(|it| &it[block.range()]);
            BlockData { block: number, data: values.flat_map(|it| it.to_le_bytes()).collect() }
        }))
    }

    /// Creates the retry state of one call, which is repeated until it succeeds or the generation ends.
    pub(crate) fn retries(&self) -> Retries<'_> {
        Retries { of: self, pauses: None }
    }
}

/// The retry state of one call.
pub(crate) struct Retries<'a> {
    of: &'a Pservers,
    /// The backoff, created once an attempt has failed: drawing its seed takes longer than a small push.
    pauses: Option<Box<dyn Iterator<Item = Duration> + Send>>,
}

impl Retries<'_> {
    /// Runs one attempt; returns `None`, after a pause, if the call should be repeated.
    pub async fn attempt<T>(
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
                Err(status) => check_retryable(&status)?,
            }
            let pauses = self.pauses.get_or_insert_with(|| Box::new(backoff()));
            sleep(pauses.next().unwrap_or(TIMEOUT)).await;
            Ok(None)
        };
        tokio::select! {
            biased;
            answer = work => answer,
            () = cluster.generation_after(*generation) => Err(ClientError::NewGeneration),
            () = cluster.job_ended() => Err(ClientError::JobEnded),
        }
    }
}

/// Collects the parts of each slot, given those of each table. `T` is rows, or their ids.
pub(crate) fn by_slot<T>(slots: usize, tables: impl Iterator<Item = Vec<T>>) -> Vec<Vec<T>> {
    let mut of_slots: Vec<Vec<T>> = (0..slots).map(|_| Vec::new()).collect();
    for parts in tables {
        of_slots.iter_mut().zip(parts).for_each(|(of_slot, part)| of_slot.push(part));
    }
    of_slots
}

/// Runs `work` with the timeout of pserver calls.
pub(crate) async fn with_timeout<T>(
    work: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    let late = |_| Err(Status::unavailable("call to a pserver timed out"));
    timeout(TIMEOUT, work).await.unwrap_or_else(late)
}

/// Returns the error of a call that must not be repeated. A pserver that is stale or dead is replaced by a
/// new generation, which ends the repetition.
fn check_retryable(status: &Status) -> Result<(), ClientError> {
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
        | ErrorKind::Internal => {
            let message = status.message().to_owned();
            Err(ClientError::Rejected { peer: "a pserver", kind, message })
        }
    }
}

fn connect(holder: &PserverRecord, tls: &TlsIdentity) -> Result<Channel, ClientError> {
    let channel = match &holder.unix {
        Some(name) => tls.dial_unix_or_tcp(&holder.address, name, Role::Pserver),
        None => tls.dial(&holder.address, Role::Pserver),
    };
    channel.map_err(ClientError::BadAddress)
}
