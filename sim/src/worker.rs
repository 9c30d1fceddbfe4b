//! A worker of a simulated elastic job, which takes steps together with those of the other nodes.
//!
//! It stands for a program that uses `steadfast.elastic`, or for one that does not, whose worker ends when the round
//! is over. The workers of a node meet in its memory. A step is passed when those of all nodes have come to it: the first
//! worker of each node enters a barrier of the master, and then commits the step to the memory of its agent. At the
//! beginning of a round all members continue from the newest commit of any of them. In a job whose records are counted,
//! the workers of all nodes decide on each commit, also on the state that a round begins with.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use steadfast_agent::{WorkerExit, WorkerStart};
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{NodeId, Phase, Round};
use steadfast_common::records::commits::{CommitId, DataPosition};
use steadfast_common::records::rendezvous::RoundRecord;
use steadfast_common::role::Role;
use steadfast_host::random;
use steadfast_host::time::sleep;
use steadfast_net::{Channel, TlsIdentity};
use steadfast_proto::WorkerToken;
use steadfast_proto::v1::decide_commit_reply::Outcome;
use steadfast_proto::v1::suspect_reply::Verdict;
use steadfast_proto::v1::worker_client::WorkerClient;
use steadfast_proto::v1::{
    BeginCommitRequest, ChangesRequest, DecideCommitRequest, EndCommitRequest, FetchRecordsReply,
    FetchRecordsRequest, LastCommitRequest, NextRoundRequest, ProgressRequest, SuspectRequest,
    WorkerAssignment, next_round_reply,
};
use tonic::Status;
use tonic::service::interceptor::InterceptedService;

use crate::checks::Observed;
use crate::net::Machine;
use crate::node_memory::{BrokenUp, KnownCommit, LastCommit, NodeMemory};
use crate::worker_barriers::{Barriers, RoundLost};
use crate::workers::failed;
use crate::workload::ElasticJob;
use crate::world::ProcessId;

/// The tag of the barrier at the beginning of a round.
const BEGIN_TAG: &str = "begin";

/// The tag of the barrier of a step.
const STEP_TAG: &str = "step";

/// How long one call waits at the agent.
const WAIT_MS: u32 = 5000;

/// Longest time of a step before its barrier, in milliseconds.
const STEP_MS: u64 = 200;

/// Longest time from the last step of a worker to its end, in milliseconds.
const LAST_MS: u64 = 2000;

/// After each so many rounds steps fail less often, so that each job ends in the time that it has.
const ROUNDS: u64 = 8;

/// Longest time to write a commit, in milliseconds.
const WRITE_MS: u64 = 20;

type Client = WorkerClient<InterceptedService<Channel, WorkerToken>>;

/// How a round ends for a worker.
enum RoundEnd {
    Succeeded,
    /// It asks for another round.
    Left,
    Failed,
}

/// An operation of all workers has failed.
struct CollectiveFailed;

impl From<BrokenUp> for CollectiveFailed {
    fn from(BrokenUp: BrokenUp) -> Self {
        Self
    }
}

impl From<RoundLost> for CollectiveFailed {
    fn from(RoundLost: RoundLost) -> Self {
        Self
    }
}

/// The program of a worker.
pub struct Worker {
    job: ElasticJob,
    node: NodeId,
    process: ProcessId,
    machine: Machine,
    /// The address of etcd.
    etcd: String,
    memory: Arc<NodeMemory>,
    observed: Arc<Mutex<Observed>>,
}

impl Worker {
    /// Creates the program of a process.
    pub fn new(
        job: ElasticJob,
        node: NodeId,
        process: ProcessId,
        machine: Machine,
        etcd: String,
        memory: Arc<NodeMemory>,
        observed: Arc<Mutex<Observed>>,
    ) -> Self {
        Self { job, node, process, machine, etcd, memory, observed }
    }

    /// Runs until the worker has succeeded or failed.
    pub async fn run(self, start: WorkerStart) -> WorkerExit {
        let Some(agent) = self.agent(&start) else {
            self.broken(format!("the variables of a worker are {:?}", start.variables));
            return failed("exit code 2");
        };
        let begun = KnownCommit::default();
        let (commits, place, counted, used) = (0, 0, 0, Vec::new());
        let mut life =
            Life { worker: &self, agent, commits, begun, place, counted, used, barriers: None };
        match self.job.uses_agent {
            true => life.rounds(start.local_rank).await,
            false => match self.place(&start) {
                Some(place) => life.only_round(&place).await,
                None => {
                    self.broken(format!("the variables of a worker are {:?}", start.variables));
                    failed("exit code 2")
                }
            },
        }
    }

    /// Returns the client of the agent that the variables name.
    fn agent(&self, start: &WorkerStart) -> Option<Client> {
        let agent = variable(start, "STEADFAST_AGENT")?;
        let [address, _, token] = agent.split(' ').collect::<Vec<_>>()[..] else { return None };
        let channel = TlsIdentity::default().dial(address, Role::Trainer).ok()?;
        Some(WorkerClient::with_interceptor(channel, WorkerToken::new(token)?))
    }

    /// Returns the place of the worker that the variables name.
    fn place(&self, start: &WorkerStart) -> Option<WorkerAssignment> {
        let number = |name: &str| variable(start, name)?.parse().ok();
        Some(WorkerAssignment {
            round: u64::from(number("STEADFAST_ROUND")?),
            rank: number("RANK")?,
            local_rank: number("LOCAL_RANK")?,
            world_size: number("WORLD_SIZE")?,
            local_world_size: number("LOCAL_WORLD_SIZE")?,
            group_rank: number("GROUP_RANK")?,
            group_world_size: number("GROUP_WORLD_SIZE")?,
            master_addr: variable(start, "MASTER_ADDR")?.to_owned(),
            master_port: number("MASTER_PORT")?,
            ..WorkerAssignment::default()
        })
    }

    /// Draws whether this step of a round fails.
    fn fails(&self, round: u64) -> bool {
        let failures = self.job.failures.saturating_mul(1 + round / ROUNDS);
        random::seed().is_multiple_of(failures)
    }

    fn broken(&self, broken: String) {
        self.observed.lock().expect("one thread").broken.push(broken);
    }
}

fn variable<'s>(start: &'s WorkerStart, name: &str) -> Option<&'s str> {
    start.variables.iter().find(|(it, _)| it == name).map(|(_, value)| value.as_str())
}

/// A running worker.
struct Life<'w> {
    worker: &'w Worker,
    agent: Client,
    /// Commits that the round has decided.
    commits: u64,
    /// The commit that the round has begun with.
    begun: KnownCommit,
    /// The worker has used its list of records in the round up to here, and the last commit has counted it up to there.
    place: u64,
    counted: u64,
    /// The records of the list that were used in the round.
    used: Vec<u64>,
    /// Made by the first worker of a node.
    barriers: Option<Barriers>,
}

impl Life<'_> {
    /// Takes part in one round after the other.
    async fn rounds(&mut self, local_rank: u32) -> WorkerExit {
        let mut after = 0;
        loop {
            let Some(place) = self.next_round(local_rank, after).await else {
                return failed("exit code 1");
            };
            let is_watched = !random::seed().is_multiple_of(4);
            let mut agent = self.agent.clone();
            let end = tokio::select! {
                biased;
                // Some workers notice a change only when an operation of all fails.
                _ = until_changed(&mut agent, local_rank), if is_watched => RoundEnd::Left,
                end = self.round(&place) => end,
            };
            match end {
                RoundEnd::Succeeded => return self.succeed(&place),
                RoundEnd::Failed => return failed("exit code 1"),
                RoundEnd::Left => {}
            }
            after = place.round;
        }
    }

    /// Takes part in the only round of a worker that its agent has to restart.
    async fn only_round(&mut self, place: &WorkerAssignment) -> WorkerExit {
        match self.round(place).await {
            RoundEnd::Succeeded => self.succeed(place),
            RoundEnd::Left | RoundEnd::Failed => failed("exit code 1"),
        }
    }

    fn succeed(&self, place: &WorkerAssignment) -> WorkerExit {
        let Worker { process, node, observed, .. } = self.worker;
        let mut observed = observed.lock().expect("one thread");
        observed.workers.succeed(*process, Round(place.round), *node, place.local_rank);
        WorkerExit::Succeeded
    }

    /// Leaves a round, and waits for another one. Returns `None` if the worker fails before that.
    async fn next_round(&mut self, local_rank: u32, after: u64) -> Option<WorkerAssignment> {
        let Worker { process, memory, observed, .. } = self.worker;
        memory.leave(*process);
        observed.lock().expect("one thread").workers.left(*process);
        let fails = after != 0 && self.worker.fails(after);
        let failing = sleep(Duration::from_millis(random::seed() % LAST_MS));
        let request = NextRoundRequest { local_rank, after, wait_ms: WAIT_MS };
        let joining = async {
            loop {
                let reply = self.agent.next_round(request).await.ok()?.into_inner();
                if let Some(next_round_reply::Next::Assignment(place)) = reply.next {
                    return Some(place);
                }
            }
        };
        tokio::select! {
            biased;
            place = joining => place,
            () = failing, if fails => None,
        }
    }

    async fn round(&mut self, place: &WorkerAssignment) -> RoundEnd {
        let Worker { process, machine, memory, observed, .. } = self.worker;
        let round = Round(place.round);
        {
            let mut observed = observed.lock().expect("one thread");
            let broken = observed.workers.begin(*process, *machine, round, place.rank);
            observed.broken.extend(broken);
        }
        memory.join(round, *process);
        match self.steps(place).await {
            Ok(end) => end,
            Err(CollectiveFailed) if !self.worker.job.uses_agent => RoundEnd::Failed,
            // Most errors are known to be those of an operation of all workers.
            Err(CollectiveFailed) if !random::seed().is_multiple_of(4) => RoundEnd::Left,
            Err(CollectiveFailed) => match self.is_over(place).await {
                Ok(true) => RoundEnd::Left,
                Ok(false) | Err(_) => RoundEnd::Failed,
            },
        }
    }

    async fn steps(&mut self, place: &WorkerAssignment) -> Result<RoundEnd, CollectiveFailed> {
        let record = self.record(place).await?;
        let first = self.begin(place, record.as_ref()).await?;
        for step in first..self.worker.job.steps {
            if self.worker.fails(place.round) {
                return Ok(self.failure());
            }
            sleep(Duration::from_millis(random::seed() % STEP_MS)).await;
            self.use_records(place, step + 1).await?;
            self.step(place, record.as_ref(), first, step).await?;
        }
        // Workers end one after the other, such as after they have written a model; until then they can fail.
        sleep(Duration::from_millis(random::seed() % LAST_MS)).await;
        Ok(match self.worker.fails(place.round) {
            true => self.failure(),
            false => RoundEnd::Succeeded,
        })
    }

    /// Draws how a step fails: for this worker, or for all of them.
    fn failure(&self) -> RoundEnd {
        match random::seed().is_multiple_of(2) {
            true => RoundEnd::Failed,
            false => RoundEnd::Left,
        }
    }

    /// Returns the record of the round, for the first worker of a node.
    async fn record(
        &mut self,
        place: &WorkerAssignment,
    ) -> Result<Option<RoundRecord>, CollectiveFailed> {
        if place.local_rank != 0 {
            return Ok(None);
        }
        let Worker { job, node, etcd, observed, .. } = self.worker;
        let barriers = match self.barriers.take() {
            Some(barriers) => barriers,
            None => Barriers::connect(etcd, &job.spec.name, *node, observed.clone()).await,
        };
        let barriers = self.barriers.insert(barriers);
        let record = barriers.record(Round(place.round)).await?;
        let member = record.members.iter().position(|member| member.node == *node);
        let own = member.and_then(|it| Some((it, record.members.get(it)?)));
        let is_right = own.is_some_and(|(group_rank, own)| {
            group_rank == place.group_rank as usize
                && own.first_rank == place.rank
                && own.slots == place.local_world_size
                && record.world_size == place.world_size
                && record.members.len() == place.group_world_size as usize
        });
        if !is_right {
            barriers.broken(format!("a worker was told {place:?}; the round is {record:?}"));
        }
        Ok(Some(record))
    }

    /// Forms the group of the workers; returns the steps of the newest commit, or, if the order of records is dynamic, of
    /// the newest one of which it is known what it has seen.
    async fn begin(
        &mut self,
        place: &WorkerAssignment,
        record: Option<&RoundRecord>,
    ) -> Result<u64, CollectiveFailed> {
        let (round, memory) = (Round(place.round), &self.worker.memory);
        let newest = match record {
            None => memory.until_begun(round).await?.into(),
            Some(record) => {
                memory.until_come(round, place.local_world_size, 0).await?;
                let own = self.last_commit().await.map_err(|_| CollectiveFailed)?;
                let is_last = own.commit.number == place.commit;
                let is_known = !place.is_dynamic || is_last || !own.record.is_empty();
                let own = if is_known { own } else { KnownCommit::default() };
                let entries = self.enter(record, BEGIN_TAG, 0, own).await?;
                let newest = entries.iter().filter_map(KnownCommit::parse).max();
                let newest = newest.unwrap_or_default();
                memory.begin(round, newest.commit);
                newest
            }
        };
        let steps = newest.commit.steps;
        (self.commits, self.place, self.counted, self.begun) = (0, 0, 0, newest);
        self.used.clear();
        self.decide(place, steps).await?;
        Ok(steps)
    }

    /// Passes a step together with the workers of all nodes.
    async fn step(
        &mut self,
        place: &WorkerAssignment,
        record: Option<&RoundRecord>,
        first: u64,
        step: u64,
    ) -> Result<(), CollectiveFailed> {
        let Worker { process, memory, job, .. } = self.worker;
        let round = Round(place.round);
        memory.come(*process, step + 1);
        if job.uses_agent {
            self.agent.progress(ProgressRequest::default()).await.map_err(|_| CollectiveFailed)?;
        }
        let Some(record) = record else {
            memory.until_passed(round, step + 1).await?;
            return self.decide(place, step + 1).await;
        };
        memory.until_come(round, place.local_world_size, step + 1).await?;
        let entries = self.enter(record, STEP_TAG, step - first, step).await?;
        if entries.iter().any(|entry| number(entry) != Some(step)) {
            let text = format!("step {step} of round {round} was passed by {entries:?}");
            self.worker.broken(text);
        }
        if job.spec.records.is_none() {
            self.commit(step + 1, step + 1).await.map_err(|_| CollectiveFailed)?;
        }
        memory.pass(round, step + 1);
        self.decide(place, step + 1).await
    }

    /// Uses some records, and all that are left in the last step, if the order of records is dynamic.
    async fn use_records(
        &mut self,
        place: &WorkerAssignment,
        steps: u64,
    ) -> Result<(), CollectiveFailed> {
        let job = &self.worker.job;
        if !place.is_dynamic {
            return Ok(());
        }
        let is_last = steps == job.steps;
        let wanted = match is_last {
            true => u64::MAX,
            false => random::seed() % (job.records_of_step + 1),
        };
        if random::seed().is_multiple_of(4) {
            // A process of a loader reads what another one has read, and reads ahead.
            let again = self.counted + random::seed() % (self.place - self.counted + 1);
            let found = self.fetch(place, again, 2 * job.records_of_step).await?.0;
            let known = &self.used[again as usize..];
            if found.iter().zip(known).any(|(found, known)| found != known) {
                let text = format!("{found:?} are records from place {again} of {:?}", self.used);
                self.worker.broken(text);
            }
        }
        let mut left = wanted;
        while 0 < left {
            let (records, is_end) = self.fetch(place, self.place, left.min(4)).await?;
            let records = &records[..records.len().min(left as usize)];
            self.used.extend(records);
            self.place += records.len() as u64;
            left -= records.len() as u64;
            if is_end {
                break;
            }
        }
        Ok(())
    }

    /// Returns the records at a place of the worker's list, and whether it ends behind them.
    async fn fetch(
        &mut self,
        of: &WorkerAssignment,
        place: u64,
        wanted: u64,
    ) -> Result<(Vec<u64>, bool), CollectiveFailed> {
        let (local_rank, round, wait_ms) = (of.local_rank, of.round, WAIT_MS);
        let (least, end) = (1, self.worker.job.end());
        let request = FetchRecordsRequest { local_rank, round, place, wanted, least, end, wait_ms };
        loop {
            let reply = self.agent.fetch_records(request).await.map_err(|status| {
                if let ErrorKind::Conflict | ErrorKind::Invalid = steadfast_proto::kind(&status) {
                    self.worker.broken(format!("records are refused: {}", status.message()));
                }
                CollectiveFailed
            })?;
            let FetchRecordsReply { round: present, ranges, is_end } = reply.into_inner();
            if present != round {
                return Err(CollectiveFailed);
            }
            if !ranges.is_empty() || is_end {
                let records = ranges.iter().flat_map(|range| range.start..range.end);
                return Ok((records.collect(), is_end));
            }
        }
    }

    /// Commits a state together with all other workers, in a job whose records are counted.
    async fn decide(
        &mut self,
        place: &WorkerAssignment,
        steps: u64,
    ) -> Result<(), CollectiveFailed> {
        let job = &self.worker.job;
        let Some(DataPosition { pass, used, seen }) = job.position(steps) else { return Ok(()) };
        let is_first = self.commits == 0;
        if !is_first && !job.commits(steps) {
            return Ok(());
        }
        let WorkerAssignment { local_rank, round, .. } = *place;
        let id = CommitId { round: Round(round), phase: Phase(self.commits) };
        if local_rank == 0 {
            self.commit(id.number(), steps).await.map_err(|_| CollectiveFailed)?;
        }
        let request = DecideCommitRequest {
            local_rank,
            round,
            phase: id.phase.0,
            pass: pass.0,
            used,
            seen,
            wait_ms: WAIT_MS,
            place: self.place,
            state: self.begun.commit.number,
            commit: Bytes::from(self.begun.record.clone()),
        };
        loop {
            let reply = self.agent.decide_commit(request.clone()).await.map_err(|status| {
                if let ErrorKind::Conflict | ErrorKind::Invalid = steadfast_proto::kind(&status) {
                    self.worker.broken(format!("a commit is refused: {}", status.message()));
                }
                CollectiveFailed
            })?;
            match reply.into_inner().outcome() {
                Outcome::Decided => break,
                Outcome::Over => return Err(CollectiveFailed),
                Outcome::Waiting => {}
            }
        }
        self.commits += 1;
        self.counted = self.place;
        Ok(())
    }

    /// Enters a barrier; returns the data of all members.
    async fn enter(
        &self,
        record: &RoundRecord,
        tag: &str,
        phase: u64,
        data: impl std::fmt::Display,
    ) -> Result<Vec<Bytes>, CollectiveFailed> {
        let barriers = self.barriers.as_ref().ok_or(CollectiveFailed)?;
        let entries = barriers.enter(record, tag, phase, data).await?;
        let members = record.members.iter().map(|member| member.node.to_string());
        if !entries.keys().cloned().eq(members.collect::<std::collections::BTreeSet<_>>()) {
            barriers.broken(format!("{tag} {phase} has the entries {entries:?} in {record:?}"));
        }
        Ok(entries.into_values().collect())
    }

    /// Writes the state after so many steps to the memory of the agent, as the commit with this number.
    async fn commit(&mut self, number: u64, steps: u64) -> Result<(), Status> {
        let Worker { memory, job, .. } = self.worker;
        if !job.uses_agent {
            memory.write_file(steps);
            return Ok(());
        }
        let path = self.agent.begin_commit(BeginCommitRequest {}).await?.into_inner().path;
        memory.begin_write(&path);
        sleep(Duration::from_millis(random::seed() % WRITE_MS)).await;
        memory.end_write(&path, LastCommit { number, steps });
        let request = EndCommitRequest { path, number, bytes: 1 };
        self.agent.end_commit(request).await.map(drop)
    }

    /// Returns the last commit of this node.
    async fn last_commit(&mut self) -> Result<KnownCommit, Status> {
        let Worker { memory, job, .. } = self.worker;
        if !job.uses_agent {
            let steps = memory.read_file();
            return Ok(LastCommit { number: steps, steps }.into());
        }
        let last = self.agent.last_commit(LastCommitRequest {}).await?.into_inner();
        if last.path.is_empty() {
            return Ok(KnownCommit::default());
        }
        let stored = memory.read(&last.path);
        match stored {
            Some(commit) if commit.number == last.number => {
                let record = String::from_utf8_lossy(&last.commit).into_owned();
                Ok(KnownCommit { commit, record })
            }
            Some(_) | None => {
                let broken =
                    format!("the agent keeps commit {}, but {stored:?} is stored", last.number);
                self.worker.broken(broken);
                Ok(KnownCommit::default())
            }
        }
    }

    /// Asks the agent whether the round is over.
    async fn is_over(&mut self, place: &WorkerAssignment) -> Result<bool, Status> {
        let WorkerAssignment { local_rank, round, .. } = *place;
        let request = SuspectRequest { local_rank, round, wait_ms: WAIT_MS };
        loop {
            match self.agent.suspect(request).await?.into_inner().verdict() {
                Verdict::Over => return Ok(true),
                Verdict::GoesOn => return Ok(false),
                Verdict::Unknown => {}
            }
        }
    }
}

/// Waits until the members of the round change, or this node leaves.
async fn until_changed(agent: &mut Client, local_rank: u32) -> Option<()> {
    let mut revision = 0;
    loop {
        let request = ChangesRequest { local_rank, revision, wait_ms: WAIT_MS };
        let reply = agent.changes(request).await.ok()?.into_inner();
        if !reply.changes.is_empty() {
            return Some(());
        }
        revision = reply.revision;
    }
}

fn number(data: &Bytes) -> Option<u64> {
    std::str::from_utf8(data).ok()?.parse().ok()
}
