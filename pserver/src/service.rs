//! The gRPC service: checks the target of each call and forwards it to the event loop.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use steadfast_checkpoint::EncodeError;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Slot, Version};
use steadfast_common::records::ShardRecord;
use steadfast_common::tensor::layout::{Layout, ParamSpec, invalid_tables};
use steadfast_common::tensor::placement::Placement;
use steadfast_host::task::{Broken, low_priority};
use steadfast_host::time::{Instant, sleep, timeout};
use steadfast_proto::status;
use steadfast_proto::v1::pserver_server::Pserver;
use steadfast_proto::v1::{
    AppliedReply, AppliedRequest, InitReply, InitRequest, NormsReply, NormsRequest, Param,
    ReportDigestReply, ReportDigestRequest, SnapshotReply, SnapshotRequest, TableRowCount,
    TableUsageReply, TableUsageRequest, Target, TaskRange, snapshot_reply,
};
use steadfast_pserver_core::block_store::InitialStates;
use tonic::{Request, Response, Status, Streaming};
use tracing::{error, warn};
use uuid::Uuid;

use crate::event::{
    Event, EventError, FollowerReport, InitialValues, Keeper, OfFollower, SlotSnapshot,
    SnapshotAnswer,
};
use crate::event_loop::{EventLoopHandle, Published};
use crate::metrics::Metrics;
use crate::shard_file::{SavedShard, ShardError, ShardStore};
use crate::slot_lease::SlotLease;

/// Longest time that a call may wait for a version.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(30);

/// A checkpoint waits this long for the digest of a follower's state, and a second more for each so many bytes.
const DIGEST_MAX: Duration = Duration::from_secs(10);
const DIGEST_BYTES_PER_SECOND: f64 = (256 << 20) as f64;

/// The slot saves a shard itself if its follower has not done so after this time, and a second more for each so many
/// bytes.
const SAVE_MAX: Duration = Duration::from_secs(30);
const SAVE_BYTES_PER_SECOND: f64 = (16 << 20) as f64;

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

    async fn report_digest(
        &self,
        request: Request<ReportDigestRequest>,
    ) -> Result<Response<ReportDigestReply>, Status> {
        let ReportDigestRequest { target, follower, comparison, digest, shard } =
            request.into_inner();
        self.check(target.as_ref())?;
        let follower = follower_id(&follower)?;
        let saved = (!shard.is_empty()).then(|| serde_json::from_slice(&shard)).transpose();
        let saved = saved.map_err(|error| invalid(format!("the record of a shard: {error}")))?;
        let digest = (!digest.is_empty()).then_some(digest);
        let report = FollowerReport { digest, saved };
        self.event_loop.send(Event::Report { follower, comparison, report }).await;
        Ok(Response::new(ReportDigestReply {}))
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
        let upload_after = Duration::from_millis(request.upload_after_ms).min(WAIT_MAX);
        let keeper = match request.hand_over {
            true => Keeper::Slot,
            false => Keeper::Checkpoint { upload_after },
        };
        let snapshot = |reply| Event::Snapshot { generation, version, keeper, reply };
        let answer = self.event_loop.call(snapshot);
        let answer = timeout(wait, answer).await;
        self.check_lease()?;
        let answer = match answer {
            Ok(answer) => answer.map_err(|error| refuse(&error))?,
            Err(_) => return Ok(Response::new(SnapshotReply::default())),
        };
        let (snapshot, of_follower) = match answer {
            SnapshotAnswer::Snapshot { snapshot, of_follower } => (*snapshot, of_follower),
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
        let record = if request.hand_over {
            let holder = (self.event_loop.slot, self.event_loop.incarnation);
            ShardRecord::in_memory(holder.0, holder.1, version)
        } else {
            // The snapshot only holds references; training continues meanwhile.
            match self.save(generation, snapshot, of_follower, upload_after, request.newest).await {
                Ok((record, written)) => {
                    self.check_lease()?;
                    self.metrics.checkpoint(written);
                    record
                }
                Err(NotSaved::Failed(status)) => return Err(status),
                Err(NotSaved::Diverged(diverged)) => {
                    error!(%version, diverged, "the state of the slot is not what it should be");
                    return Ok(Response::new(SnapshotReply {
                        answer: snapshot_reply::Answer::Diverged.into(),
                        version: version.0,
                        diverged,
                        ..SnapshotReply::default()
                    }));
                }
            }
        };
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

/// Says why a shard of a checkpoint was not saved.
enum NotSaved {
    Failed(Status),
    /// The state is not what it should be.
    Diverged(String),
}

impl Service {
    /// Saves a snapshot as the shard of a checkpoint; returns its record, and the bytes that were written. The follower
    /// does so in place of the slot, if it was asked to and can; in any case its state is compared.
    async fn save(
        &self,
        generation: Generation,
        snapshot: SlotSnapshot,
        mut of_follower: Option<OfFollower>,
        upload_after: Duration,
        newest: String,
    ) -> Result<(ShardRecord, u64), NotSaved> {
        let broken =
            |error: Broken| NotSaved::Failed(status(ErrorKind::Internal, error.to_string()));
        if let Some(of_follower) = of_follower.take_if(|it| it.saves) {
            let SlotSnapshot { layout, shard, tables, .. } = snapshot.clone();
            let shards = self.shards.clone();
            let values = shard.blocks.iter().map(|block| size_of_val(&block.values[..]));
            let bytes = values.sum::<usize>() * (1 + shards.states.len());
            let more = Duration::from_secs_f64(bytes as f64 / SAVE_BYTES_PER_SECOND);
            let until = Instant::now() + upload_after + SAVE_MAX + more;
            let ours = async move { shards.state_digest(&layout, shard, &tables) };
            let ours = low_priority(ours).await.map_err(broken)?;
            if let Ok(ours) = ours
                && let Some(record) = self.saved_by_follower(&ours, of_follower, until).await?
            {
                let written = record.size_bytes;
                return Ok((record, written));
            }
        } else {
            sleep(upload_after).await;
        }
        let holder = (self.event_loop.slot, self.event_loop.incarnation);
        let shards = self.shards.clone();
        let saving = async move { shards.save(holder, snapshot, &newest).await };
        let saved = low_priority(saving).await.map_err(broken)?;
        if let Err(ShardError::Encode(error @ EncodeError::NotFinite { .. })) = &saved {
            return Err(NotSaved::Diverged(error.to_string()));
        }
        if let Err(ShardError::Storage(error)) = &saved {
            self.event_loop.send(Event::StorageFailed { error: error.clone() }).await;
        }
        let SavedShard { record, state, obsolete, written } = saved.map_err(|error| {
            let reason = format!("the shard was not saved: {error}");
            NotSaved::Failed(status(ErrorKind::Unavailable, reason))
        })?;
        if let (Some(state), Some(of_follower)) = (state, of_follower) {
            compare(&state, of_follower, written).await?;
        }
        for obsolete in obsolete.in_parts() {
            self.event_loop.send(Event::Forget { generation, obsolete }).await;
        }
        Ok((record, written))
    }

    /// Waits until the follower has saved the state with the digest `ours`; returns `None` if it could not, has not by
    /// then, or does not follow the slot any more.
    async fn saved_by_follower(
        &self,
        ours: &str,
        of_follower: OfFollower,
        until: Instant,
    ) -> Result<Option<ShardRecord>, NotSaved> {
        let OfFollower { follower, report, .. } = of_follower;
        let report = match timeout(until.remaining(), report).await {
            Ok(Ok(report)) => report,
            Ok(Err(_)) => return Ok(None),
            Err(_) => {
                warn!(%follower, "the follower has not saved the shard in time");
                return Ok(None);
            }
        };
        check_same(ours, follower, report.digest.as_deref())?;
        let holder = (self.event_loop.slot, self.event_loop.incarnation);
        // The SHA-256 of the object says that it has this state, and so this version.
        let is_ours = |it: &ShardRecord| (it.slot, it.incarnation) == holder && it.sha256 == ours;
        Ok(report.saved.filter(is_ours))
    }

    pub(crate) fn published_now(&self) -> Arc<Published> {
        self.event_loop.published().borrow().clone()
    }

    /// Returns the published state, if the shard is in generation `found`.
    pub(crate) fn published(&self, found: Generation) -> Result<Arc<Published>, Status> {
        let published = self.published_now();
        let present = published.generation;
        if found == present {
            Ok(published)
        } else {
            Err(refuse(&EventError::OtherGeneration { found, present }))
        }
    }
}

/// Compares the state of the follower with that of the slot, given the digest of the latter and the size of what it was
/// computed from. A follower that does not answer in time is not compared.
async fn compare(ours: &str, of_follower: OfFollower, bytes: u64) -> Result<(), NotSaved> {
    let OfFollower { follower, report, .. } = of_follower;
    let more = Duration::from_secs_f64(bytes as f64 / DIGEST_BYTES_PER_SECOND);
    match timeout(DIGEST_MAX + more, report).await {
        Ok(Ok(report)) => check_same(ours, follower, report.digest.as_deref()),
        // It does not follow the slot any more.
        Ok(Err(_)) => Ok(()),
        Err(_) => {
            warn!(%follower, "the follower did not report the digest of its state in time");
            Ok(())
        }
    }
}

/// Checks that the slot and its follower have the same digest, if the follower could compute its own.
fn check_same(ours: &str, follower: Uuid, theirs: Option<&str>) -> Result<(), NotSaved> {
    let Some(theirs) = theirs.filter(|theirs| *theirs != ours) else { return Ok(()) };
    Err(NotSaved::Diverged(format!(
        "the follower {follower} has applied the same steps, and its state has the SHA-256 {theirs}, that of the slot \
         has {ours}: the memory of one of the two machines, or a program, is faulty"
    )))
}

/// Parses the id of a follower.
///
/// # Errors
/// If it is none.
pub(crate) fn follower_id(text: &str) -> Result<Uuid, Status> {
    text.parse().map_err(|_| invalid(format!("`{text}` is not the id of a pserver")))
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

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    /// I7: two copies of one state that differ are a defect, which names both digests.
    #[tokio::test]
    async fn a_follower_with_another_state_is_named_with_both_digests() {
        let of_follower = || {
            let (report, received) = oneshot::channel();
            let follower = Uuid::from_u128(7);
            (report, OfFollower { follower, saves: false, report: received })
        };
        let report = |digest: &str| FollowerReport { digest: Some(digest.to_owned()), saved: None };
        let (reports, same) = of_follower();
        reports.send(report("ours")).unwrap();
        assert!(compare("ours", same, 1).await.is_ok());
        let (reports, other) = of_follower();
        reports.send(report("theirs")).unwrap();
        let Err(NotSaved::Diverged(text)) = compare("ours", other, 1).await else {
            panic!("the states are not the same");
        };
        for part in ["00000000-0000-0000-0000-000000000007", "SHA-256 theirs", "slot has ours"] {
            assert!(text.contains(part), "{text}");
        }
        let (reports, left) = of_follower();
        drop(reports);
        assert!(compare("ours", left, 1).await.is_ok());
    }
}
