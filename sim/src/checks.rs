//! Invariants checked on every reply: each pull reply of a pserver shows the updates that it has applied.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http_body::Frame;
use prost::Message;
use steadfast_common::ids::{Generation, Incarnation, Pass, Phase, Round, Slot, Version};
use steadfast_common::job::spec::Mode;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::{EXIT_TAG, ReleaseRecord, RoundRecord};
use steadfast_common::records::{GenerationRecord, PserverRecord};
use steadfast_common::status::{JobPhase, JobStatus, Queues};
use steadfast_proto::TensorMethod;
use steadfast_proto::v1::{
    AdvanceReply, BlockData, ElasticRound, EnterReply, EnterRequest, GiveUpRequest, JoinReply,
    PullReply, PullRequest, PullRowsRequest, PushReply, PushRequest, ReadRangeRequest,
    SnapshotRequest, StatusReply, Target, WatchRequest, enter_reply, join_reply,
};

use crate::etcd::EtcdServer;
use crate::job::{COUNTED_ROWS, Job};
use crate::net::Observer;
use crate::worker_checks::WorkersSeen;
use crate::world::{ProcessId, World};

/// Hash of a row of a table, given by its number and id, at each version.
type RowHashes = BTreeMap<(u64, u32, u64), u64>;

/// Expected values, taken from the undisturbed run.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    /// Hash of each block at each version.
    pub blocks: BTreeMap<(u64, u32), u64>,
    pub rows: RowHashes,
    pub parameters_sha256: String,
    pub examples: u64,
}

/// Observations of one run.
#[derive(Debug, Default)]
pub struct Observed {
    pub blocks: BTreeMap<(u64, u32), u64>,
    pub rows: RowHashes,
    /// The rows of the table of counts, as they were last read as a whole.
    pub counted_rows: BTreeMap<u64, f32>,
    /// Violated invariants.
    pub broken: Vec<String>,
    /// The process that has replied for a slot in a generation.
    holders: BTreeMap<(u64, u32), ProcessId>,
    /// The last generation in which each slot has shown parameters, or in asynchronous mode acknowledged pushes, and the
    /// newest version of these.
    shown: BTreeMap<u32, (u64, u64)>,
    /// Number of checked pull replies.
    pub pulls: u64,
    /// What the workers of an elastic job have done.
    pub workers: WorkersSeen,
    /// The last observed progress of the job, and when it was first observed.
    stands: Option<(ProgressMark, Duration)>,
}

/// State that changes when a job makes progress.
#[derive(Clone, Debug, PartialEq)]
struct ProgressMark {
    state: JobPhase,
    epoch: i64,
    generation: Generation,
    version: Version,
    pass: Pass,
    queues: Queues,
    checkpoint: Option<String>,
    failures: u32,
}

/// Longest time without progress for which the status may name no reason.
const STILL_MAX: Duration = Duration::from_secs(30);

/// Blocks of the counting model that hold counts.
const COUNTS: [u32; 2] = [1, 3];

/// Returns an observer that checks every reply; a synchronous job is compared with `reference`.
pub fn observer(
    job: &Job,
    reference: Option<Arc<Reference>>,
    etcd: &EtcdServer,
    world: &World,
    observed: Arc<Mutex<Observed>>,
) -> Observer {
    let (job, etcd, world) = (job.clone(), etcd.clone(), world.clone());
    let keys = Keys::of_job(&job.spec.name);
    Box::new(move |process, path, request, response| {
        let mut observed = observed.lock().expect("one thread");
        // An error reply has no message.
        let is_error = response.iter().all(|frame| !frame.is_data());
        let target = if is_error { None } else { target(path, request) };
        if let Some(target) = target {
            match job.spec.mode {
                Mode::Sync => observed.replied_for(&target, process),
                Mode::Async => {
                    observed.broken.extend(is_not_its_own(&etcd, &keys, target));
                }
            }
        }
        match TensorMethod::of_path(path) {
            Some(TensorMethod::Pull) => {
                let messages: Vec<PullReply> = messages(response);
                observed.pulls += 1;
                observed.pull(&job, reference.as_deref(), &messages);
                let version = version_of(&messages).filter(|_| job.spec.mode == Mode::Sync);
                if let Some((target, version)) = target.zip(version) {
                    // A pserver also has the version before, for slots that are one step apart.
                    observed.shown(target, version + 1, version, generation(&etcd, &keys).as_ref());
                }
            }
            Some(TensorMethod::PullRows) => {
                let (request, messages) = (messages(request), messages(response));
                observed.pull_rows(&job, reference.as_deref(), &request, &messages);
            }
            Some(TensorMethod::ReadRange) => {
                let Some(request) = messages::<ReadRangeRequest>(request).pop() else { return };
                let messages: Vec<PullReply> = messages(response);
                observed.read_range(&request, &messages);
            }
            Some(TensorMethod::Push) => {
                let version = messages::<PushReply>(response).pop().map(|it| it.version);
                let version = version.filter(|_| job.spec.mode == Mode::Async);
                if let Some((target, version)) = target.zip(version) {
                    observed.shown(target, version, version, generation(&etcd, &keys).as_ref());
                }
            }
            Some(
                TensorMethod::FollowSlot | TensorMethod::FollowStep | TensorMethod::ReadHandover,
            )
            | None => {}
        }
        match path {
            "/steadfast.v1.Master/Advance" => {
                for AdvanceReply { go, ahead } in messages(response) {
                    let bound = job.spec.asynchronous.max_staleness.map_or(u64::MAX, u64::from);
                    if go && bound < ahead {
                        observed.broken.push(format!(
                            "I8: a trainer was admitted {ahead} pushes ahead; the bound is {bound}"
                        ));
                    }
                }
            }
            "/steadfast.v1.Master/Status" => {
                for StatusReply { json } in messages(response) {
                    if let Ok(status) = serde_json::from_slice::<JobStatus>(&json) {
                        observed.stand(&status, world.now());
                    }
                }
            }
            _ => {}
        }
    })
}

/// Returns an observer of an elastic job: what an answer tells a node is committed, and what a node reports is true.
pub fn elastic_observer(
    keys: &Keys,
    etcd: &EtcdServer,
    observed: Arc<Mutex<Observed>>,
) -> Observer {
    let (keys, etcd) = (keys.clone(), etcd.clone());
    Box::new(move |_, path, request, response| {
        let Some(server) = etcd.server() else { return };
        let stored = |key: String| server.get(key.as_bytes()).and_then(|entry| entry.value);
        let record = stored(keys.formed_round());
        let record = record.and_then(|it| serde_json::from_slice::<RoundRecord>(&it).ok());
        let formed = record.as_ref().map_or(Round(0), |record| record.round);
        let stored_round = record.clone();
        let mut broken = Vec::new();
        match path {
            "/steadfast.v1.Elastic/Join" => {
                for reply in messages::<JoinReply>(response) {
                    let Some(join_reply::Next::Start(round)) = reply.next else { continue };
                    let Ok(round) = ElasticRound::decode(round) else { continue };
                    if formed < Round(round.round) {
                        broken.push(format!("a node joined round {}, not {formed}", round.round));
                    }
                    if formed == Round(round.round)
                        && !record.as_ref().is_some_and(|it| is_of(&round, it))
                    {
                        broken.push(format!("a node joined round {formed} with other members"));
                    }
                }
            }
            "/steadfast.v1.Elastic/Enter" => {
                let Some(entry) = messages::<EnterRequest>(request).pop() else { return };
                let replies = messages::<EnterReply>(response);
                let is_released =
                    replies.iter().any(|it| it.outcome() == enter_reply::Outcome::Released);
                let round = Round(entry.round);
                let (tag, phase) = (&entry.tag, Phase(entry.phase));
                let released = match tag == EXIT_TAG {
                    // The entries of all members are the success of the job.
                    true => record.is_some_and(|formed| {
                        let members = formed.members.iter().map(|member| member.node);
                        members
                            .map(|node| keys.entry(round, tag, phase, node))
                            .all(|it| stored(it).is_some())
                    }),
                    false => stored(keys.released(round, tag))
                        .and_then(|it| serde_json::from_slice::<ReleaseRecord>(&it).ok())
                        .is_some_and(|it| phase <= it.phase),
                };
                if is_released && formed <= round && !released {
                    let EnterRequest { tag, phase, .. } = &entry;
                    broken.push(format!("phase {phase} of {tag} in round {round} is not released"));
                }
                if entry.tag == EXIT_TAG && formed == round {
                    let node = entry.node.unwrap_or_default().id;
                    let members = stored_round.iter().flat_map(|it| &it.members);
                    let member = members.into_iter().find(|it| it.node.to_string() == node);
                    let observed = observed.lock().expect("one thread");
                    broken.extend(
                        member.and_then(|it| observed.workers.unfounded_success(round, it)),
                    );
                }
            }
            "/steadfast.v1.Elastic/Watch" => {
                let reports = messages::<WatchRequest>(request).into_iter();
                for report in reports.filter_map(|it| it.report) {
                    if report.restarts_max < report.restarts {
                        broken.push(format!("workers are restarted too often: {report:?}"));
                    }
                }
            }
            "/steadfast.v1.Elastic/GiveUp" => {
                let reports = messages::<GiveUpRequest>(request).into_iter();
                for report in reports.filter_map(|it| it.report) {
                    if report.restarts_max + 1 != report.restarts {
                        broken.push(format!("a node gave up too early or too late: {report:?}"));
                    }
                }
            }
            _ => {}
        }
        observed.lock().expect("one thread").broken.append(&mut broken);
    })
}

/// Returns whether a round that was sent to a node has the members that are stored.
fn is_of(round: &ElasticRound, record: &RoundRecord) -> bool {
    let told = round.members.iter().map(|it| (it.node.clone(), it.incarnation));
    told.eq(record.members.iter().map(|it| (it.node.to_string(), it.incarnation.0)))
}

/// Returns the incarnation of a slot that a call addresses.
fn target(path: &str, request: &[Frame<Bytes>]) -> Option<Target> {
    match TensorMethod::of_path(path) {
        Some(TensorMethod::Pull) => messages::<PullRequest>(request).first()?.target,
        Some(TensorMethod::PullRows) => {
            messages::<PullRowsRequest>(request).first()?.header.as_ref()?.target
        }
        Some(TensorMethod::ReadRange) => messages::<ReadRangeRequest>(request).first()?.target,
        Some(TensorMethod::Push) => {
            messages::<PushRequest>(request).first()?.header.as_ref()?.target
        }
        // A follower has what the holder had last, however late that comes. What a pserver hands over is of the
        // generation before.
        Some(TensorMethod::FollowSlot | TensorMethod::FollowStep | TensorMethod::ReadHandover) => {
            None
        }
        None if path == "/steadfast.v1.Pserver/Snapshot" => {
            messages::<SnapshotRequest>(request).first()?.target
        }
        None => None,
    }
}

/// Returns the version in a reply to a pull; `None` if it has no parameters.
fn version_of(reply: &[PullReply]) -> Option<u64> {
    let header = reply.iter().find_map(|it| it.header.as_ref()).filter(|it| it.ready)?;
    Some(header.position.as_ref().map_or(0, |it| it.version))
}

/// Returns the present generation.
fn generation(etcd: &EtcdServer, keys: &Keys) -> Option<GenerationRecord> {
    let entry = etcd.server()?.get(keys.generation().as_bytes())?;
    serde_json::from_slice(&entry.value?).ok()
}

/// Returns an error if a pserver of an asynchronous job has replied for a slot that it no longer holds.
fn is_not_its_own(etcd: &EtcdServer, keys: &Keys, target: Target) -> Option<String> {
    let server = etcd.server()?;
    let slot = Slot(target.slot);
    let held = server.get(keys.ps(slot).as_bytes()).and_then(|entry| {
        let record: PserverRecord = serde_json::from_slice(&entry.value?).ok()?;
        Some(record.incarnation(entry.create_revision))
    });
    (held != Some(Incarnation(target.incarnation))).then(|| {
        format!("I5: {} replied for slot {slot}, which {held:?} holds", target.incarnation)
    })
}

/// Decodes the messages in the frames of a gRPC body.
fn messages<M: Message + Default>(frames: &[Frame<Bytes>]) -> Vec<M> {
    const PREFIX: usize = 5;
    let mut bytes: Vec<u8> = Vec::new();
    frames.iter().filter_map(Frame::data_ref).for_each(|data| bytes.extend_from_slice(data));
    let (mut rest, mut found) = (&bytes[..], Vec::new());
    while PREFIX <= rest.len() {
        rest.advance(1);
        let len = rest.get_u32() as usize;
        let Some(message) = rest.get(..len) else { break };
        found.extend(M::decode(message));
        rest.advance(len);
    }
    found
}

impl Observed {
    /// Checks I12: a job without progress names what it is waiting for.
    fn stand(&mut self, status: &JobStatus, now: Duration) {
        let standing = ProgressMark {
            state: status.state,
            epoch: status.master.epoch,
            generation: status.generation,
            version: status.version,
            pass: status.pass,
            queues: status.queues,
            checkpoint: status.checkpoint.clone(),
            failures: status.saving.failures,
        };
        let is_over = matches!(status.state, JobPhase::Finished | JobPhase::Failed);
        let since = match &self.stands {
            Some((known, since)) if *known == standing => *since,
            Some(_) | None => now,
        };
        if !is_over && status.waiting.is_empty() && STILL_MAX <= now.saturating_sub(since) {
            let state = status.state;
            self.broken
                .push(format!("I12: the job is {state:?} since {since:?} and names no reason"));
        }
        self.stands = Some((standing, since));
    }

    /// Checks I5 in a synchronous job, where pservers outlast their leases: in one generation, one process replies for a
    /// slot.
    fn replied_for(&mut self, target: &Target, process: ProcessId) {
        let Target { generation, slot, .. } = *target;
        let first = *self.holders.entry((generation, slot)).or_insert(process);
        if first != process {
            self.broken.push(format!(
                "I5: {first:?} and {process:?} replied for slot {slot} in generation {generation}"
            ));
        }
    }

    /// Checks that a slot that keeps its memory in a generation, or whose follower has taken it over, goes on with all that
    /// it has shown, or acknowledged, in the generation before.
    ///
    /// The slot showed `version`, and may be at `newest`.
    fn shown(
        &mut self,
        target: Target,
        newest: u64,
        version: u64,
        present: Option<&GenerationRecord>,
    ) {
        let Target { generation, slot, .. } = target;
        let is_kept = present.is_some_and(|record| {
            record.generation == Generation(generation) && record.kept.contains(&Slot(slot))
        });
        let (before, most) = *self.shown.entry(slot).or_insert((generation, version));
        if is_kept && before + 1 == generation && newest < most {
            self.broken.push(format!(
                "slot {slot} keeps its memory in generation {generation}, but goes on at version {version}, and not at \
                 {most}, which it has shown or acknowledged"
            ));
        }
        if before <= generation {
            let most = if before == generation { most.max(version) } else { version };
            self.shown.insert(slot, (generation, most));
        }
    }

    /// Checks rows, which were requested by their ids.
    fn pull_rows(
        &mut self,
        job: &Job,
        reference: Option<&Reference>,
        request: &[PullRowsRequest],
        reply: &[PullReply],
    ) {
        let Some(header) = reply.iter().find_map(|it| it.header.as_ref()) else { return };
        if !header.ready {
            return;
        }
        self.pulls += 1;
        let version = header.position.as_ref().map_or(0, |it| it.version);
        let ids = by_number(request.iter().flat_map(|it| it.blocks.clone()));
        let values = by_number(reply.iter().flat_map(|it| it.blocks.clone()));
        for (number, ids) in &ids {
            let values = values.get(number).map_or(&[][..], Vec::as_slice);
            let row_bytes = (values.len() * size_of::<u64>()).checked_div(ids.len()).unwrap_or(0);
            let rows = values.chunks(row_bytes.max(1));
            for (id, row) in ids.as_chunks::<8>().0.iter().zip(rows) {
                let id = u64::from_le_bytes(*id);
                match job.spec.mode {
                    Mode::Sync => self.check_row((version, *number, id), hash(row), reference),
                    // Of the two tables, that of counts has rows of one value.
                    Mode::Async if row.len() == size_of::<f32>() => {
                        let value =
                            row.first_chunk().map_or(f32::NAN, |it| f32::from_le_bytes(*it));
                        self.broken.extend(count_mismatch(job, &[value]));
                    }
                    Mode::Async => {}
                }
            }
        }
    }

    /// Checks I7: a row at a version has the same bits as in the undisturbed run, if it was read there as well.
    fn check_row(&mut self, key: (u64, u32, u64), hash: u64, reference: Option<&Reference>) {
        let known = match reference {
            Some(reference) => reference.rows.get(&key).copied(),
            None => self.rows.insert(key, hash),
        };
        if known.is_some_and(|known| known != hash) {
            let (version, table, id) = key;
            self.broken.push(format!(
                "I7: row {id} of table {table} at version {version} differs from the undisturbed run"
            ));
        }
    }

    fn read_range(&mut self, request: &ReadRangeRequest, reply: &[PullReply]) {
        if request.table as usize != COUNTED_ROWS {
            return;
        }
        for block in reply.iter().flat_map(|it| &it.blocks) {
            let (ids, values) = block.data.split_at(block.data.len() / 12 * 8);
            let values = values.as_chunks().0.iter().map(|it| f32::from_le_bytes(*it));
            let ids = ids.as_chunks().0.iter().map(|it| u64::from_le_bytes(*it));
            self.counted_rows.extend(ids.zip(values));
        }
    }

    fn pull(&mut self, job: &Job, reference: Option<&Reference>, messages: &[PullReply]) {
        let Some(header) = messages.iter().find_map(|it| it.header.as_ref()) else { return };
        if !header.ready {
            return;
        }
        let version = header.position.as_ref().map_or(0, |it| it.version);
        for block in messages.iter().flat_map(|message| &message.blocks) {
            match job.spec.mode {
                Mode::Sync => {
                    let key = (version, block.block);
                    let hash = hash(&block.data);
                    let known = match reference {
                        Some(reference) => reference.blocks.get(&key).copied(),
                        None => self.blocks.insert(key, hash),
                    };
                    if known.map_or(reference.is_some(), |known| known != hash) {
                        self.broken.push(format!(
                            "I7: block {} at version {} differs from the undisturbed run",
                            block.block, version
                        ));
                    }
                }
                Mode::Async if COUNTS.contains(&block.block) && !job.diverges => {
                    let floats = block.data.chunks_exact(4);
                    let values: Vec<f32> = floats
                        .map(|it| f32::from_le_bytes(it.try_into().expect("four bytes")))
                        .collect();
                    self.broken.extend(count_mismatch(job, &values));
                }
                Mode::Async => {}
            }
        }
    }
}

/// Returns the bytes of all blocks by number, joined.
fn by_number(blocks: impl Iterator<Item = BlockData>) -> BTreeMap<u32, Vec<u8>> {
    let mut all: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    blocks.for_each(|block| all.entry(block.block).or_default().extend_from_slice(&block.data));
    all
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Returns an error if the count of a record exceeds the number of passes or is not an integer.
fn count_mismatch(job: &Job, values: &[f32]) -> Option<String> {
    let passes = job.spec.passes.unwrap_or(1);
    values.iter().enumerate().find_map(|(record, value)| {
        let count = -value / job.one;
        let is_sound = count.fract() == 0.0 && 0.0 <= count && count <= passes as f32;
        (!is_sound)
            .then(|| format!("I6: record {record} was applied {count} times in {passes} passes"))
    })
}

/// Checks that each record was applied once per pass in the final parameters, except for passes in which
/// its task was given up. `due` has the minimum and the maximum for each record.
pub fn final_count_mismatch(job: &Job, due: &[(u32, u32)], values: &[f32]) -> Option<String> {
    values.iter().zip(due).enumerate().find_map(|(record, (value, (least, most)))| {
        let count = -value / job.one;
        let is_due = *least as f32 <= count && count <= *most as f32;
        (!is_due).then(|| {
            format!("record {record} was applied {count} times; expected {least} to {most}")
        })
    })
}
