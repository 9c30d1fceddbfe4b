//! The agent's service for the workers of its node. Workers that use it are told of changes, and go on in the next
//! round in the same process; others are restarted.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Pass, Phase, Round};
use steadfast_common::records::commits::{
    BegunState, CommitId, DataPosition, Progress, RecordOrder,
};
use steadfast_elastic_client::{Change, DealtRecords, RecordsWish};
use steadfast_host::random;
use steadfast_host::task::Task;
use steadfast_host::time::{Instant, timeout};
use steadfast_net::{Port, TlsIdentity};
use steadfast_process::Failure;
use steadfast_proto::v1::decide_commit_reply::Outcome;
use steadfast_proto::v1::worker_server::{Worker, WorkerServer};
use steadfast_proto::v1::{
    BeginCommitReply, BeginCommitRequest, ChangesReply, ChangesRequest, DecideCommitReply,
    DecideCommitRequest, EndCommitReply, EndCommitRequest, FetchRecordsReply, FetchRecordsRequest,
    LastCommitReply, LastCommitRequest, MemberChange, NextRoundReply, NextRoundRequest,
    ProgressReply, ProgressRequest, RecordRange, SuspectReply, SuspectRequest, WorkerAssignment,
    next_round_reply, suspect_reply,
};
use steadfast_proto::{WorkerToken, access, status};
use subtle::ConstantTimeEq;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use crate::commits::{Commit, CommitBuffer, Commits};
use crate::environment::RoundPlacement;
use crate::record_lists::{Fetch, Fetched, RecordLists};

/// Maximum time that a call may block. Workers repeat it.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Changes of one round that are kept. Members need to know only that there are some.
const CHANGES_MAX: usize = 64;

/// The served calls of workers. Serving ends when this is dropped.
#[derive(Debug)]
pub(crate) struct WorkerService {
    shared: Arc<Shared>,
    /// `host:port name token`: where workers connect, and what they show in each call.
    pub address: String,
    stop: CancellationToken,
    _serving: Task<Result<(), tonic::transport::Error>>,
}

impl Drop for WorkerService {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[derive(Debug)]
struct Shared {
    /// The mutex guards a few lines at a time.
    state: Mutex<State>,
    /// Changes with the state.
    changed: watch::Sender<u64>,
    /// What the node waits for, for users.
    reason: watch::Receiver<String>,
}

#[derive(Debug)]
struct State {
    placement: Option<RoundPlacement>,
    revision: i64,
    changes: Vec<MemberChange>,
    /// Workers that have asked for something in this life, by local rank.
    connected: BTreeSet<u32>,
    /// Workers that are ready to leave a round: which, by local rank.
    ready: BTreeMap<u32, u64>,
    /// Workers that suspect that the round is over, by local rank.
    suspicions: BTreeMap<u32, Suspicion>,
    progress: Reports,
    commits: Commits,
    commit: Deciding,
    records: RecordLists,
    /// Says why the node gets no records, if the master refuses them.
    no_records: Option<(ErrorKind, String)>,
}

/// The reports of progress in a round, of all workers of the node.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reports {
    pub last: Option<Instant>,
    /// The longest time between two reports.
    pub pause_max: Option<Duration>,
    /// By local rank.
    busy: BTreeMap<u32, Busy>,
    /// The last call of each worker that waits for others, by local rank. Such calls are repeated.
    waits: BTreeMap<u32, Instant>,
}

/// A worker waits for others for so long after its last call that does.
const WAITS: Duration = Duration::from_secs(15);

/// Counts how long a worker has computed, in µs, for how many of its last updates.
#[derive(Clone, Copy, Debug, Default)]
struct Busy {
    us: u64,
    updates: u64,
}

/// A worker's time for an update is the mean of about so many.
const UPDATES_KEPT: u64 = 64;

impl Reports {
    fn note(&mut self, now: Instant, report: &ProgressRequest) {
        let pause = self.last.replace(now).map(|last| now.since(last));
        self.pause_max = self.pause_max.max(pause);
        if report.updates == 0 {
            return;
        }
        let busy = self.busy.entry(report.local_rank).or_default();
        busy.us = busy.us.saturating_add(report.busy_us);
        busy.updates += u64::from(report.updates);
        while UPDATES_KEPT < busy.updates {
            let mean = busy.us / busy.updates;
            busy.updates /= 2;
            busy.us = mean * busy.updates;
        }
    }

    /// Returns whether all of this many workers wait for others, or for the master.
    pub fn all_wait(&self, workers: u32, now: Instant) -> bool {
        let waits =
            |local_rank| self.waits.get(&local_rank).is_some_and(|it| now.since(*it) < WAITS);
        (0..workers).all(waits)
    }

    /// Returns how long the slowest worker computes for an update, in µs; 0 if that is unknown.
    pub fn busy_us(&self) -> u64 {
        let means = self.busy.values().map(|it| it.us.checked_div(it.updates).unwrap_or(0));
        means.max().unwrap_or(0)
    }
}

/// A worker's question whether another worker explains a failed operation.
#[derive(Clone, Copy, Debug)]
struct Suspicion {
    since: Instant,
    /// The answer is that the round goes on.
    is_refuted: bool,
}

impl WorkerService {
    /// Serves workers of this machine and user. `buffers` keep their commits, and `reason` is what the node waits for.
    ///
    /// # Errors
    /// If no port is free.
    pub async fn serve(
        buffers: [CommitBuffer; 2],
        reason: watch::Receiver<String>,
    ) -> Result<Self, Failure> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                placement: None,
                revision: 0,
                changes: Vec::new(),
                connected: BTreeSet::new(),
                ready: BTreeMap::new(),
                suspicions: BTreeMap::new(),
                progress: Reports::default(),
                commits: Commits::new(buffers),
                commit: Deciding::default(),
                records: RecordLists::default(),
                no_records: None,
            }),
            changed: watch::Sender::new(0),
            reason,
        });
        let port = |error| Failure::io("cannot listen for the workers of this node", &error);
        let mut bound = Port::bind(([127, 0, 0, 1], 0).into()).await.map_err(port)?;
        let name = format!("steadfast-agent-{}", random::uuid());
        bound.also_unix(&name);
        let token = random::uuid().simple().to_string();
        let address = format!("{} {name} {token}", bound.local_addr().map_err(port)?);
        let stop = CancellationToken::new();
        let service = Service(shared.clone());
        let check = move |request| check_token(&token, request);
        let routes = Routes::new(WorkerServer::with_interceptor(service, check));
        let _serving = bound.serve(routes, access, &TlsIdentity::default(), stop.clone());
        Ok(Self { shared, address, stop, _serving })
    }

    /// Begins a round: answers the workers that wait for it.
    pub fn begin(&self, placement: &RoundPlacement) {
        self.change(|state| {
            if let Some(data) = placement.record.data {
                let last = data.commit.unwrap_or_default().number();
                state.commits.settle(last, Bytes::new());
            }
            state.commit = Deciding::default();
            (state.records, state.no_records) = (RecordLists::default(), None);
            state.placement = Some(placement.clone());
            state.changes.clear();
            state.ready.clear();
            state.suspicions.clear();
            state.progress = Reports::default();
        });
    }

    /// Tells the workers how the members of their round change.
    pub fn note(&self, change: &Change) {
        self.change(|state| {
            // A worker that has failed is replaced.
            let (removed, added) = (change.nodes <= 0, 0 < change.nodes);
            state.revision = state.revision.max(change.revision);
            if state.changes.len() < CHANGES_MAX {
                let revision = change.revision;
                state.changes.push(MemberChange { revision, removed, added });
            }
        });
    }

    /// Tells the workers that their round is over for a reason of this node: it has lost its registration or a worker,
    /// or leaves.
    pub fn note_own_change(&self) {
        let revision = self.shared.lock().revision + 1;
        let (lost, failed) = (String::new(), String::new());
        self.note(&Change { nodes: -1, surplus: 0, lost, revision, failed });
    }

    /// Forgets what a worker has said. It is called when the worker has ended.
    pub fn forget(&self, local_rank: u32) {
        self.change(|state| {
            state.connected.remove(&local_rank);
            state.commit.entered.remove(&local_rank);
            state.ready.remove(&local_rank);
            state.suspicions.remove(&local_rank);
        });
    }

    /// Returns the local ranks of the workers that have asked for something.
    pub fn connected(&self) -> BTreeSet<u32> {
        self.shared.lock().connected.clone()
    }

    /// Returns the local ranks of the workers that are ready to leave `round`.
    pub fn ready(&self, round: Round) -> BTreeSet<u32> {
        let state = self.shared.lock();
        let ready = state.ready.iter().filter(|(_, after)| **after == round.0);
        ready.map(|(local_rank, _)| *local_rank).collect()
    }

    /// Waits until the oldest suspicion of a worker that the round is over has this age.
    pub async fn until_suspected(&self, age: Duration) {
        let mut changes = self.subscribe();
        loop {
            changes.mark_unchanged();
            let oldest = self.shared.lock().oldest_suspicion();
            match oldest {
                None => drop(changes.changed().await),
                Some(since) => {
                    if timeout((since + age).remaining(), changes.changed()).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Answers the workers whose suspicion has at least this age that the round goes on.
    pub fn refute_suspicions(&self, age: Duration) {
        let now = Instant::now();
        self.change(|state| {
            for suspicion in state.suspicions.values_mut() {
                suspicion.is_refuted |= suspicion.since + age <= now;
            }
        });
    }

    /// Waits until all workers of this node have a copy of their state for the next commit of the round; returns which
    /// one that is, and what the node passes to its barrier.
    pub async fn until_proposed(&self) -> (CommitId, Vec<u8>) {
        self.until(State::proposed).await
    }

    /// Returns whether the master deals records as nodes ask for them.
    pub fn is_dynamic(&self) -> bool {
        self.shared.lock().is_dynamic()
    }

    /// Waits until the workers of this node need records; returns how many it was given, and how many it asks for.
    pub async fn until_wanted(&self) -> (u64, RecordsWish) {
        self.until(|state| state.records.wish()).await
    }

    /// Gives the workers what the master has dealt to the node in a round, or tells them why it does not.
    pub fn deal(&self, round: Round, dealt: Result<DealtRecords, (ErrorKind, String)>) {
        self.change(|state| match dealt {
            _ if state.round() != round => {}
            Ok(dealt) => state.records.add(&dealt),
            Err(refused) => state.no_records = Some(refused),
        });
    }

    /// Waits until `look` finds something in the state.
    async fn until<T>(&self, look: impl Fn(&State) -> Option<T>) -> T {
        let mut changes = self.subscribe();
        loop {
            changes.mark_unchanged();
            if let Some(found) = look(&self.shared.lock()) {
                return found;
            }
            // Not an error: `self` has the sender.
            let _ = changes.changed().await;
        }
    }

    /// Tells the workers what became of a commit.
    pub fn conclude(&self, id: CommitId, outcome: CommitOutcome) {
        self.change(|state| {
            if let CommitOutcome::Decided(record) = &outcome {
                state.commits.settle(id.number(), record.clone());
                state.records.settle(&state.commit.places(id));
            }
            state.commit.concluded = Some((id, outcome));
        });
    }

    /// Returns the reports of progress in this round.
    pub fn progress(&self) -> Reports {
        self.shared.lock().progress.clone()
    }

    /// Returns a receiver that is notified of every change.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.shared.changed.subscribe()
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        self.shared.change(change);
    }
}

/// The commit that the workers of a node take part in.
#[derive(Debug, Default)]
struct Deciding {
    /// Holds, by local rank, the commit for which a worker has a copy of its state, and what this has seen.
    entered: BTreeMap<u32, (CommitId, Reached)>,
    /// The last commit of the round of which the outcome is known.
    concluded: Option<(CommitId, CommitOutcome)>,
}

/// Tells what the state of a worker has seen.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reached {
    Position(DataPosition),
    /// If the order is dynamic: the state with which the worker begins the round.
    State(BegunState),
    /// If the order is dynamic: the worker's list of records, up to this place.
    Place(u64),
}

impl Reached {
    /// Returns why the states of two workers of a node are not the same one, if they are not.
    fn differs_from(&self, other: &Self) -> Option<String> {
        match (self, other) {
            (Self::Position(own), Self::Position(other)) if own != other => Some(format!(
                "the state of a worker is at record {} of pass {}, and that of another one of its node at record {} \
                 of pass {}: all workers commit after the same update",
                own.used, own.pass, other.used, other.pass
            )),
            (Self::State(own), Self::State(other)) if own.number != other.number => Some(format!(
                "a worker begins with the state of number {}, and another one of its node with that of {}: all begin \
                 with the same",
                own.number, other.number
            )),
            (Self::Position(_) | Self::State(_) | Self::Place(_), _) => None,
        }
    }
}

impl Deciding {
    /// Notes that a worker has a copy of its state. All workers commit after the same update.
    fn enter(&mut self, local_rank: u32, id: CommitId, reached: Reached) {
        let mut others = self.entered.values().filter(|(other, _)| *other == id);
        if let Some(message) = others.find_map(|(_, other)| reached.differs_from(other)) {
            let refused = CommitOutcome::Refused { kind: ErrorKind::Conflict, message };
            self.concluded = Some((id, refused));
        }
        self.entered.insert(local_rank, (id, reached));
    }

    /// Returns the places that the states of a commit have reached in the lists of their workers, by local rank.
    fn places(&self, id: CommitId) -> BTreeMap<u32, u64> {
        let places = self.entered.iter().filter_map(|(local_rank, entered)| match entered {
            (of, Reached::Place(place)) if *of == id => Some((*local_rank, *place)),
            (_, Reached::Position(_) | Reached::State(_) | Reached::Place(_)) => None,
        });
        places.collect()
    }
}

/// The outcome of a commit, as far as this node knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CommitOutcome {
    /// The bytes are the record of the commit as JSON, if the order of records is dynamic.
    Decided(Bytes),
    /// The round is over. The next one says whether it was decided.
    Over,
    /// The master refuses it.
    Refused { kind: ErrorKind, message: String },
}

impl State {
    /// Returns how many workers the node has in the round.
    fn slots(&self) -> u32 {
        self.placement.as_ref().map_or(0, |placement| placement.own().slots)
    }

    /// Returns the commit for which each worker of this node has entered, with what the node passes to its barrier, unless
    /// its outcome is known.
    fn proposed(&self) -> Option<(CommitId, Vec<u8>)> {
        let slots = self.placement.as_ref()?.own().slots;
        let mut entered = self.commit.entered.values();
        let first = entered.next()?;
        let is_known = self.commit.concluded.as_ref().is_some_and(|(id, _)| first.0 <= *id);
        let is_complete = self.commit.entered.len() == slots as usize;
        (is_complete && !is_known && entered.all(|other| other.0 == first.0))
            .then(|| (first.0, self.passed(first.0, &first.1)))
    }

    /// Returns what the node passes to the barrier of a commit.
    fn passed(&self, id: CommitId, reached: &Reached) -> Vec<u8> {
        match reached {
            Reached::Position(position) => position.to_json(),
            Reached::State(state) => Progress::State(state.clone()).to_json(),
            Reached::Place(_) => {
                Progress::Used(self.records.used(&self.commit.places(id))).to_json()
            }
        }
    }

    fn is_dynamic(&self) -> bool {
        let data = self.placement.as_ref().and_then(|placement| placement.record.data);
        data.is_some_and(|data| data.order == RecordOrder::Dynamic)
    }

    /// Returns the outcome of a commit, if it is known. A worker of this node that has failed or left the round takes
    /// part in none.
    fn outcome(&self, id: CommitId) -> Option<CommitOutcome> {
        if self.round() != id.round {
            return Some(CommitOutcome::Over);
        }
        match &self.commit.concluded {
            Some((last, _)) if id < *last => return Some(CommitOutcome::Decided(Bytes::new())),
            Some((last, outcome)) if id == *last => return Some(outcome.clone()),
            Some(_) | None => {}
        }
        let is_lacking = self.proposed().is_none()
            && (!self.ready.is_empty() || self.changes.iter().any(|change| change.removed));
        is_lacking.then_some(CommitOutcome::Over)
    }

    fn round(&self) -> Round {
        self.placement.as_ref().map_or(Round(0), |placement| placement.record.round)
    }

    fn oldest_suspicion(&self) -> Option<Instant> {
        let open = self.suspicions.values().filter(|suspicion| !suspicion.is_refuted);
        open.map(|suspicion| suspicion.since).min()
    }

    /// Returns the answer to a worker that suspects that `round` is over, if there is one yet.
    fn verdict(&self, local_rank: u32, round: u64) -> Option<suspect_reply::Verdict> {
        if self.round().0 != round || !self.changes.is_empty() {
            return Some(suspect_reply::Verdict::Over);
        }
        let is_refuted = self.suspicions.get(&local_rank)?.is_refuted;
        is_refuted.then_some(suspect_reply::Verdict::GoesOn)
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.send_modify(|changes| *changes += 1);
    }

    /// Returns the first value that `answer` finds in the state, or the value of `late` after `wait_ms`.
    async fn until<T>(
        &self,
        wait_ms: u32,
        answer: impl Fn(&State) -> Option<T>,
        late: impl FnOnce(&State) -> T,
    ) -> T {
        let deadline = Instant::now() + Duration::from_millis(wait_ms.into()).min(WAIT_MAX);
        let mut changes = self.changed.subscribe();
        loop {
            changes.mark_unchanged();
            if let Some(answer) = answer(&self.lock()) {
                return answer;
            }
            if timeout(deadline.remaining(), changes.changed()).await.is_err() {
                return late(&self.lock());
            }
        }
    }
}

struct Service(Arc<Shared>);

impl Service {
    /// Notes that a worker waits for others: it does not hang as long as it asks again.
    fn waits(&self, local_rank: u32) {
        let mut state = self.0.lock();
        if local_rank < state.slots() {
            state.progress.waits.insert(local_rank, Instant::now());
        }
    }

    fn connected(&self, local_rank: u32) {
        let mut state = self.0.lock();
        if local_rank < state.slots() {
            state.connected.insert(local_rank);
        }
    }
}

/// Refuses the calls of other processes of this machine. The environment of a worker is readable by its user alone.
fn check_token(token: &str, request: Request<()>) -> Result<Request<()>, Status> {
    match token.as_bytes().ct_eq(WorkerToken::of(&request)).into() {
        true => Ok(request),
        false => Err(status(ErrorKind::Denied, "the call lacks the token of this agent")),
    }
}

fn assignment(placement: &RoundPlacement, local_rank: u32) -> WorkerAssignment {
    let (host, port) = placement.master();
    let (own, data) = (placement.own(), placement.record.data);
    WorkerAssignment {
        round: placement.record.round.0,
        rank: own.first_rank + local_rank,
        local_rank,
        world_size: placement.record.world_size,
        local_world_size: own.slots,
        group_rank: placement.rank as u32,
        group_world_size: placement.record.members.len() as u32,
        master_addr: host.to_owned(),
        master_port: port.into(),
        records: data.map_or(0, |data| data.records),
        is_dynamic: data.is_some_and(|data| data.order == RecordOrder::Dynamic),
        commit: data.and_then(|data| data.commit).unwrap_or_default().number(),
    }
}

#[tonic::async_trait]
impl Worker for Service {
    async fn changes(
        &self,
        request: Request<ChangesRequest>,
    ) -> Result<Response<ChangesReply>, Status> {
        let ChangesRequest { local_rank, revision, wait_ms } = request.into_inner();
        self.connected(local_rank);
        let all = |state: &State| ChangesReply {
            revision: state.revision,
            changes: state.changes.clone(),
            round: state.round().0,
        };
        let newer = |state: &State| (revision < state.revision).then(|| all(state));
        Ok(Response::new(self.0.until(wait_ms, newer, all).await))
    }

    async fn next_round(
        &self,
        request: Request<NextRoundRequest>,
    ) -> Result<Response<NextRoundReply>, Status> {
        let NextRoundRequest { local_rank, after, wait_ms } = request.into_inner();
        self.connected(local_rank);
        {
            let mut state = self.0.lock();
            if state.placement.as_ref().is_some_and(|placement| placement.record.round.0 == after) {
                state.ready.insert(local_rank, after);
            }
        }
        self.0.changed.send_modify(|changes| *changes += 1);
        let later = |state: &State| {
            let placement =
                state.placement.as_ref().filter(|placement| after < placement.record.round.0)?;
            Some(next_round_reply::Next::Assignment(assignment(placement, local_rank)))
        };
        let waits = |_: &State| next_round_reply::Next::Wait(self.0.reason.borrow().clone());
        let next = self.0.until(wait_ms, later, waits).await;
        Ok(Response::new(NextRoundReply { next: Some(next) }))
    }

    async fn suspect(
        &self,
        request: Request<SuspectRequest>,
    ) -> Result<Response<SuspectReply>, Status> {
        let SuspectRequest { local_rank, round, wait_ms } = request.into_inner();
        self.connected(local_rank);
        self.waits(local_rank);
        self.0.change(|state| {
            if local_rank < state.slots() {
                let suspicion = Suspicion { since: Instant::now(), is_refuted: false };
                state.suspicions.entry(local_rank).or_insert(suspicion);
            }
        });
        let verdict = |state: &State| state.verdict(local_rank, round);
        let unknown = |_: &State| suspect_reply::Verdict::Unknown;
        let verdict = self.0.until(wait_ms, verdict, unknown).await;
        if verdict == suspect_reply::Verdict::GoesOn {
            self.0.lock().suspicions.remove(&local_rank);
        }
        Ok(Response::new(SuspectReply { verdict: verdict.into() }))
    }

    async fn begin_commit(
        &self,
        _: Request<BeginCommitRequest>,
    ) -> Result<Response<BeginCommitReply>, Status> {
        let path = self.0.lock().commits.begin();
        Ok(Response::new(BeginCommitReply { path }))
    }

    async fn end_commit(
        &self,
        request: Request<EndCommitRequest>,
    ) -> Result<Response<EndCommitReply>, Status> {
        let EndCommitRequest { path, number, bytes } = request.into_inner();
        let mut state = self.0.lock();
        let commit = Commit { path, number, bytes, record: Bytes::new() };
        let is_counted = state.placement.as_ref().is_some_and(|it| it.record.data.is_some());
        match is_counted {
            true => state.commits.propose(commit),
            false => state.commits.end(commit),
        }
        Ok(Response::new(EndCommitReply {}))
    }

    async fn last_commit(
        &self,
        _: Request<LastCommitRequest>,
    ) -> Result<Response<LastCommitReply>, Status> {
        let last = self.0.lock().commits.last().cloned();
        Ok(Response::new(last.map_or_else(LastCommitReply::default, |commit| LastCommitReply {
            path: commit.path,
            number: commit.number,
            bytes: commit.bytes,
            commit: commit.record,
        })))
    }

    async fn decide_commit(
        &self,
        request: Request<DecideCommitRequest>,
    ) -> Result<Response<DecideCommitReply>, Status> {
        let request = request.into_inner();
        let DecideCommitRequest { local_rank, round, phase, pass, used, seen, wait_ms, .. } =
            request;
        self.connected(local_rank);
        self.waits(local_rank);
        let id = CommitId { round: Round(round), phase: Phase(phase) };
        let reached = match (self.0.lock().is_dynamic(), phase) {
            (false, _) => Reached::Position(DataPosition { pass: Pass(pass), used, seen }),
            (true, 0) => {
                let commit = serde_json::from_slice(&request.commit).ok();
                Reached::State(BegunState { number: request.state, commit })
            }
            (true, _) => Reached::Place(request.place),
        };
        self.0.change(|state| {
            if local_rank < state.slots() && state.round() == id.round {
                state.commit.enter(local_rank, id, reached);
            }
        });
        let outcome = |state: &State| state.outcome(id).map(Some);
        let (outcome, commit) = match self.0.until(wait_ms, outcome, |_| None).await {
            None => (Outcome::Waiting, Bytes::new()),
            Some(CommitOutcome::Decided(record)) => (Outcome::Decided, record),
            Some(CommitOutcome::Over) => (Outcome::Over, Bytes::new()),
            Some(CommitOutcome::Refused { kind, message }) => return Err(status(kind, message)),
        };
        Ok(Response::new(DecideCommitReply { outcome: outcome.into(), commit }))
    }

    async fn fetch_records(
        &self,
        request: Request<FetchRecordsRequest>,
    ) -> Result<Response<FetchRecordsReply>, Status> {
        let FetchRecordsRequest { local_rank, round, place, wanted, least, end, wait_ms } =
            request.into_inner();
        self.waits(local_rank);
        let fetch = Fetch { place, wanted, least, end };
        let answer = |state: &mut State| {
            let present = state.round().0;
            let slots = state.slots();
            if round != 0 && round != present {
                return Ok(Some((present, Fetched { ranges: Vec::new(), is_end: false })));
            }
            if slots <= local_rank {
                let message =
                    format!("the node has {slots} workers, and none of rank {local_rank}");
                return Err(status(ErrorKind::Invalid, message));
            }
            if let Some((kind, message)) = state.no_records.clone() {
                return Err(status(kind, message));
            }
            Ok(state.records.fetch(local_rank, fetch).map(|fetched| (present, fetched)))
        };
        let deadline = Instant::now() + Duration::from_millis(wait_ms.into()).min(WAIT_MAX);
        let mut changes = self.0.changed.subscribe();
        let (round, fetched) = loop {
            changes.mark_unchanged();
            let (found, wishes) = {
                let mut state = self.0.lock();
                let before = state.records.wish();
                (answer(&mut state)?, before != state.records.wish())
            };
            if wishes {
                self.0.changed.send_modify(|changes| *changes += 1);
            }
            match found {
                Some(found) => break found,
                None if timeout(deadline.remaining(), changes.changed()).await.is_err() => {
                    let round = self.0.lock().round().0;
                    break (round, Fetched { ranges: Vec::new(), is_end: false });
                }
                None => {}
            }
        };
        let range = |range: &Range<u64>| RecordRange { start: range.start, end: range.end };
        let ranges = fetched.ranges.iter().map(range).collect();
        Ok(Response::new(FetchRecordsReply { round, ranges, is_end: fetched.is_end }))
    }

    async fn progress(
        &self,
        request: Request<ProgressRequest>,
    ) -> Result<Response<ProgressReply>, Status> {
        let report = request.into_inner();
        let mut state = self.0.lock();
        if report.local_rank < state.slots() {
            state.progress.note(Instant::now(), &report);
        }
        drop(state);
        Ok(Response::new(ProgressReply {}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(local_rank: u32, busy_us: u64, updates: u32) -> ProgressRequest {
        ProgressRequest { local_rank, busy_us, updates }
    }

    /// S002-11: workers that wait for others, or for a master that is away, do not hang, unless one of the node does not
    /// even wait.
    #[test]
    fn a_node_waits_for_others_only_if_all_of_its_workers_do() {
        let (mut reports, now) = (Reports::default(), Instant::now());
        reports.waits.insert(0, now);
        assert!(reports.all_wait(1, now) && !reports.all_wait(2, now));
        reports.waits.insert(1, now);
        assert!(reports.all_wait(2, now + WAITS / 2));
        assert!(!reports.all_wait(2, now + WAITS), "they ask no more");
    }

    /// S002-11: the time of a node's update is that of its slowest worker, and follows a change within some updates.
    #[test]
    fn the_time_of_an_update_is_that_of_the_slowest_worker_of_late() {
        let (mut reports, now) = (Reports::default(), Instant::now());
        reports.note(now, &progress(0, 0, 0));
        assert_eq!((reports.busy_us(), reports.pause_max), (0, None));
        let second = Duration::from_secs(1);
        for (at, busy_us) in (1..).zip([1000; 100]) {
            reports.note(now + second * at, &progress(0, busy_us, 1));
            reports.note(now + second * at, &progress(1, 3 * busy_us, 1));
        }
        assert_eq!((reports.busy_us(), reports.pause_max), (3000, Some(second)));
        for _ in 0..4 {
            reports.note(now, &progress(1, 64 * 1000, 64));
        }
        assert!((1000..1200).contains(&reports.busy_us()), "{}", reports.busy_us());
    }
}
