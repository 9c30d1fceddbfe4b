//! The gRPC service: checks the target of each call and forwards it to the event loop.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use steadfast_checkpoint::EncodeError;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Slot, Version};
use steadfast_common::tensor::layout::{Layout, ParamSpec, invalid_tables};
use steadfast_common::tensor::placement::Placement;
use steadfast_host::task::low_priority;
use steadfast_host::time::{sleep, timeout};
use steadfast_proto::status;
use steadfast_proto::v1::pserver_server::Pserver;
use steadfast_proto::v1::{
    AppliedReply, AppliedRequest, InitReply, InitRequest, NormsReply, NormsRequest, Param,
    SnapshotReply, SnapshotRequest, TableRowCount, TableUsageReply, TableUsageRequest, Target,
    TaskRange, snapshot_reply,
};
use steadfast_pserver_core::block_store::InitialStates;
use tonic::{Request, Response, Status, Streaming};

use crate::event::{Event, EventError, InitialValues, SlotSnapshot, SnapshotAnswer};
use crate::event_loop::{EventLoopHandle, Published};
use crate::metrics::Metrics;
use crate::shard_file::{SavedShard, ShardError, ShardStore};
use crate::slot_lease::SlotLease;

/// Longest time that a call may wait for a version.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(30);

/// Maximum number of vectors that the optimizer of a job starts from.
const STATES_MAX: usize = 16;

/// Maximum number of parameters in a model.
const PARAMS_MAX: usize = 1 << 20;

/// Maximum number of values in a model: 16 GiB of `f32`.
const VALUES_MAX: usize = 1 << 32;

/// Serves one slot.
pub struct Service {
    pub event_loop: EventLoopHandle,
    /// Checked before every reply: the service replies only while it holds the slot.
    pub slot_lease: SlotLease,
    pub shards: ShardStore,
    pub metrics: Metrics,
}

pub(crate) fn refuse(error: &EventError) -> Status {
    status(error.kind(), error.to_string())
}

pub(crate) fn invalid(message: impl Into<String>) -> Status {
    status(ErrorKind::Invalid, message)
}

impl Service {
    /// Returns the target generation, if the target is this incarnation of this slot.
    pub(crate) fn check(&self, target: Option<&Target>) -> Result<Generation, Status> {
        let target = target.ok_or_else(|| invalid("the call names no target"))?;
        let is_us = target.slot == self.event_loop.slot.0
            && target.incarnation == self.event_loop.incarnation.0;
        if !is_us {
            let message = format!(
                "the call is for slot {} of incarnation {}; this is slot {} of incarnation {}",
                target.slot, target.incarnation, self.event_loop.slot, self.event_loop.incarnation
            );
            return Err(status(ErrorKind::Stale, message));
        }
        self.check_lease()?;
        Ok(Generation(target.generation))
    }

    /// Checks that the lease is still valid; without it another pserver may hold the slot.
    pub(crate) fn check_lease(&self) -> Result<(), Status> {
        if self.slot_lease.is_ours() {
            Ok(())
        } else {
            Err(status(ErrorKind::Unavailable, "the lease of this pserver has expired"))
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
        let placement = Placement::of(&layout, &self.published(generation)?.placement);
        let numbers = placement.blocks_of(self.event_loop.slot);
        let mut values: Vec<(u32, Vec<f32>)> =
            numbers.iter().map(|number| (*number, Vec::new())).collect();
        let names = header.states;
        if STATES_MAX < names.len() {
            return Err(invalid(format!(
                "{} vectors exceed the maximum of {STATES_MAX}",
                names.len()
            )));
        }
        let mut states = InitialStates { names, ..InitialStates::default() };
        let (mut blocks, mut of_blocks) = (first.blocks, first.states);
        loop {
            for block in blocks {
                let place = values.binary_search_by_key(&block.block, |(number, _)| *number);
                let place = place.map_err(|_| {
                    invalid(format!("block {} does not belong to this slot", block.block))
                })?;
                values[place].1 = values_of(&block.data);
            }
            for block in of_blocks {
                if numbers.binary_search(&block.block).is_err() {
                    let number = block.block;
                    return Err(invalid(format!("block {number} does not belong to this slot")));
                }
                states.blocks.insert(block.block, values_of(&block.data));
            }
            match messages.message().await? {
                Some(message) => (blocks, of_blocks) = (message.blocks, message.states),
                None => break,
            }
        }
        let values = values.into_iter().map(|(_, values)| values).collect();
        let first = InitialValues { layout, values, states };
        let attempt = header.attempt;
        self.event_loop
            .call(|reply| Event::Init { generation, attempt, first, reply })
            .await
            .map_err(|error| refuse(&error))?;
        self.check_lease()?;
        Ok(Response::new(InitReply {}))
    }

    async fn table_usage(
        &self,
        request: Request<TableUsageRequest>,
    ) -> Result<Response<TableUsageReply>, Status> {
        self.check(request.into_inner().target.as_ref())?;
        let published = self.event_loop.published().borrow().clone();
        let Some(shard) = &published.shard else {
            return Err(status(ErrorKind::NotYet, "the slot has no values yet"));
        };
        let counted = shard.tables.names.iter().zip(&shard.rows);
        Ok(Response::new(TableUsageReply {
            tables: counted
                .map(|(name, rows)| TableRowCount { name: name.clone(), rows: *rows })
                .collect(),
            rows_in_memory: shard.usage.rows_in_memory as u64,
            memory_bytes: shard.usage.memory_bytes as u64,
            disk_bytes: shard.usage.disk_bytes,
            hits: shard.usage.hits,
            misses: shard.usage.misses,
        }))
    }

    async fn applied(
        &self,
        request: Request<AppliedRequest>,
    ) -> Result<Response<AppliedReply>, Status> {
        let generation = self.check(request.into_inner().target.as_ref())?;
        let applied = self.event_loop.call(|reply| Event::Applied { generation, reply }).await;
        self.check_lease()?;
        let (applied, layout) = applied.map_err(|error| refuse(&error))?;
        let tasks = Vec::from(applied).into_iter();
        let tasks = tasks.map(|(first, last)| TaskRange { first, last }).collect();
        let params = layout.params().iter().map(Param::from).collect();
        Ok(Response::new(AppliedReply { tasks, params }))
    }

    async fn norms(&self, request: Request<NormsRequest>) -> Result<Response<NormsReply>, Status> {
        let request = request.into_inner();
        self.check_lease()?;
        let wait = Duration::from_millis(request.wait_ms).min(WAIT_MAX);
        let mut published = self.event_loop.published();
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
            return Err(refuse(&EventError::OtherGeneration { found, present }));
        }
        let Some(squares) = &seen.squares else {
            return Ok(Response::new(NormsReply::default()));
        };
        let (blocks, squares) = squares.by_block.iter().copied().unzip();
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
        let answer = self.event_loop.call(|reply| Event::Snapshot { generation, version, reply });
        let answer = timeout(wait, answer).await;
        self.check_lease()?;
        let answer = match answer {
            Ok(answer) => answer.map_err(|error| refuse(&error))?,
            Err(_) => return Ok(Response::new(SnapshotReply::default())),
        };
        let snapshot = match answer {
            SnapshotAnswer::Snapshot(snapshot) => *snapshot,
            SnapshotAnswer::Past { present } => {
                return Ok(Response::new(SnapshotReply {
                    answer: snapshot_reply::Answer::Past.into(),
                    version: present.0,
                    ..SnapshotReply::default()
                }));
            }
        };
        let SlotSnapshot { layout, shard, .. } = &snapshot;
        let (position, version) = (shard.position, shard.position.version);
        let exhausted = shard.exhausted.iter().map(|lane| lane.0).collect();
        let checksum = shard.applied.iter().fold(0_u64, |sum, it| sum.wrapping_add(it.checksum()));
        let params = layout.params().iter().map(Param::from).collect();
        let holder = (self.event_loop.slot, self.event_loop.incarnation);
        let (shards, newest) = (self.shards.clone(), request.newest);
        // The snapshot only holds references; training continues meanwhile.
        sleep(Duration::from_millis(request.upload_after_ms).min(WAIT_MAX)).await;
        let saving = async move { shards.save(holder, snapshot, &newest).await };
        let saved = low_priority(saving).await;
        let saved = saved.map_err(|error| status(ErrorKind::Internal, error.to_string()))?;
        if let Err(ShardError::Encode(error @ EncodeError::NotFinite { .. })) = &saved {
            return Ok(Response::new(SnapshotReply {
                answer: snapshot_reply::Answer::Diverged.into(),
                version: version.0,
                diverged: error.to_string(),
                ..SnapshotReply::default()
            }));
        }
        if let Err(ShardError::Storage(error)) = &saved {
            self.event_loop.send(Event::StorageFailed { error: error.clone() }).await;
        }
        let SavedShard { record, obsolete, written } = saved.map_err(|error| {
            status(ErrorKind::Unavailable, format!("the shard was not saved: {error}"))
        })?;
        for obsolete in obsolete.in_parts() {
            self.event_loop.send(Event::Forget { generation, obsolete }).await;
        }
        self.check_lease()?;
        self.metrics.checkpoint(written);
        Ok(Response::new(SnapshotReply {
            answer: snapshot_reply::Answer::Saved.into(),
            version: version.0,
            shard: json(&record),
            position: Some(position.into()),
            exhausted,
            params,
            diverged: String::new(),
            checksum,
        }))
    }
}

impl Service {
    /// Returns the published state, if the shard is in generation `found`.
    pub(crate) fn published(&self, found: Generation) -> Result<Arc<Published>, Status> {
        let published = self.event_loop.published().borrow().clone();
        let present = published.generation;
        if found == present {
            Ok(published)
        } else {
            Err(refuse(&EventError::OtherGeneration { found, present }))
        }
    }
}

/// Decodes values from little-endian bytes.
fn values_of(data: &[u8]) -> Vec<f32> {
    data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn json<T: serde::Serialize>(value: &T) -> Bytes {
    serde_json::to_vec(value).expect("records are plain data").into()
}

/// Builds the layout of an initialization, within the limits on its size.
fn layout(params: Vec<Param>) -> Result<Layout, Status> {
    if PARAMS_MAX < params.len() {
        return Err(invalid(format!(
            "{} parameters exceed the maximum of {PARAMS_MAX}",
            params.len()
        )));
    }
    let specs: Vec<ParamSpec> = params.into_iter().map(ParamSpec::from).collect();
    let total = specs.iter().fold(0_usize, |sum, spec| sum.saturating_add(spec.len()));
    if VALUES_MAX < total {
        return Err(invalid(format!(
            "a model of {total} values exceeds the maximum of {VALUES_MAX}"
        )));
    }
    if let Some(reason) = invalid_tables(&specs) {
        return Err(invalid(reason));
    }
    Ok(Layout::new(specs))
}

/// Shows the slot, for logs.
impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let slot: Slot = self.event_loop.slot;
        write!(f, "Service(slot {slot})")
    }
}
