//! A worker of an elastic job, as it speaks with the agent of its node.

use std::fs::OpenOptions;
use std::io::Read;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use pyo3::exceptions::{PyOSError, PyTimeoutError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Phase, Round};
use steadfast_common::records::commits::CommitId;
use steadfast_common::role::Role;
use steadfast_elastic_client::{NodeError, SeenChanges};
use steadfast_net::{Channel, TlsIdentity};
use steadfast_proto::WorkerToken;
use steadfast_proto::v1::worker_client::WorkerClient;
use steadfast_proto::v1::{
    BeginCommitRequest, ChangesRequest, DecideCommitRequest, EndCommitRequest, FetchRecordsRequest,
    LastCommitRequest, NextRoundRequest, ProgressRequest, SuspectRequest, WorkerAssignment,
    decide_commit_reply::Outcome, next_round_reply, suspect_reply::Verdict,
};
use tokio::runtime::Runtime;
use tonic::Status;
use tonic::service::interceptor::InterceptedService;

use crate::error::{check_process, raise};
use crate::node::{CallError, wait};

/// The environment variable by which the agent says where it is.
const AGENT: &str = "STEADFAST_AGENT";

/// How long one call waits at the agent for a change.
const WAIT: Duration = Duration::from_secs(5);

/// How long a call that does not wait may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The limit of calls that end by themselves.
const FAR: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Pause after the agent did not answer. A worker does not outlive its agent.
const RETRY: Duration = Duration::from_millis(200);

/// Bits of [`Worker::changes`].
const REMOVED: u32 = 1;
const ADDED: u32 = 2;

/// Ranges of records: the first number of each, and the first one behind it.
type Pairs = Vec<(u64, u64)>;

/// Calls the agent, and shows its token.
type Client = WorkerClient<InterceptedService<Channel, WorkerToken>>;

/// The agent of this process, as `steadfast.elastic.Agent` describes it.
#[pyclass(frozen, module = "steadfast._native")]
pub struct Worker {
    process: u32,
    runtime: Runtime,
    client: Client,
    local_rank: u32,
    /// Follows the changes. The mutexes guard only their fields.
    seen: Arc<Mutex<SeenChanges>>,
    assignment: Mutex<WorkerAssignment>,
}

/// The place of a worker in a round.
#[pyclass(frozen, get_all, module = "steadfast._native")]
pub struct WorkerPlace {
    round: u64,
    rank: u32,
    local_rank: u32,
    world_size: u32,
    local_world_size: u32,
    group_rank: u32,
    group_world_size: u32,
    master_addr: String,
    master_port: u32,
    records: u64,
    commit: u64,
    is_dynamic: bool,
}

impl From<WorkerAssignment> for WorkerPlace {
    fn from(wire: WorkerAssignment) -> Self {
        Self {
            round: wire.round,
            rank: wire.rank,
            local_rank: wire.local_rank,
            world_size: wire.world_size,
            local_world_size: wire.local_world_size,
            group_rank: wire.group_rank,
            group_world_size: wire.group_world_size,
            master_addr: wire.master_addr,
            master_port: wire.master_port,
            records: wire.records,
            commit: wire.commit,
            is_dynamic: wire.is_dynamic,
        }
    }
}

#[pymethods]
impl Worker {
    /// Connects to the agent that started this process.
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        let variable = |name: &str| {
            std::env::var(name).map_err(|_| {
                let message = format!("{name} is not set; start the program with `steadfast run`");
                raise(py, "InvalidError", message.as_str())
            })
        };
        let invalid = |name: &str, text: &str| {
            let message = format!("{name} is `{text}`, which the agent did not set");
            raise(py, "InvalidError", message.as_str())
        };
        let agent = variable(AGENT)?;
        let text = variable("LOCAL_RANK")?;
        let local_rank = text.parse().map_err(|_| invalid("LOCAL_RANK", &text))?;
        let parts: Vec<&str> = agent.split(' ').collect();
        let [address, name, token] = parts[..] else { return Err(invalid(AGENT, &agent)) };
        let token = WorkerToken::new(token).ok_or_else(|| invalid(AGENT, &agent))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("steadfast")
            .enable_all()
            .build()?;
        let entered = runtime.enter();
        let dialled = TlsIdentity::default().dial_unix_or_tcp(address, name, Role::Trainer);
        drop(entered);
        let channel = dialled.map_err(|_| invalid(AGENT, &agent))?;
        let client = WorkerClient::with_interceptor(channel, token);
        let of_first = client.clone();
        let first = async move { first_assignment(of_first, local_rank).await };
        let assignment = wait(py, &runtime, CALL_TIMEOUT, no_answer(), first)?;
        let seen = Arc::<Mutex<SeenChanges>>::default();
        runtime.spawn(follow(client.clone(), local_rank, seen.clone()));
        let process = std::process::id();
        Ok(Self { process, runtime, client, local_rank, seen, assignment: Mutex::new(assignment) })
    }

    /// Returns the place of this worker in its round.
    fn assignment(&self) -> WorkerPlace {
        self.assignment.lock().expect("no holder panics").clone().into()
    }

    /// Returns the newest revision of the members, and the bits of all changes after `since`. Does not block.
    fn changes(&self, since: i64) -> (i64, u32) {
        let round = self.assignment.lock().expect("no holder panics").round;
        let change = self.seen.lock().expect("no holder panics").after(since, round);
        let removed = if change.removed { REMOVED } else { 0 };
        (change.revision, removed | if change.added { ADDED } else { 0 })
    }

    /// Says that this worker is ready to leave round `after`, and waits until it is in a later one.
    fn next_round(
        &self,
        py: Python<'_>,
        after: u64,
        timeout: Option<f64>,
    ) -> PyResult<WorkerPlace> {
        let (client, local_rank) = (self.client(), self.local_rank);
        let reason = Arc::new(Mutex::new(String::new()));
        let shown = reason.clone();
        let limit = timeout
            .map_or(Some(Duration::MAX / 4), |timeout| Duration::try_from_secs_f64(timeout).ok());
        let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
        let next =
            async move { next_assignment(client, local_rank, after, deadline, &shown).await };
        let next = self.wait(py, FAR, next)?;
        let Some(assignment) = next else {
            let reason = reason.lock().expect("no holder panics").clone();
            let message = format!("no round after {after} was formed in time: {reason}");
            return Err(PyTimeoutError::new_err(message));
        };
        *self.assignment.lock().expect("no holder panics") = assignment.clone();
        Ok(assignment.into())
    }

    /// Returns whether the round is over, as soon as that is known: an operation of all workers may have failed.
    fn is_over(&self, py: Python<'_>, round: u64) -> PyResult<bool> {
        let (mut client, local_rank) = (self.client(), self.local_rank);
        let asking = async move {
            loop {
                let wait_ms = WAIT.as_millis() as u32;
                let request = SuspectRequest { local_rank, round, wait_ms };
                match client.suspect(request).await?.into_inner().verdict() {
                    Verdict::Over => return Ok(true),
                    Verdict::GoesOn => return Ok(false),
                    Verdict::Unknown => {}
                }
            }
        };
        self.wait(py, FAR, asking)
    }

    /// Keeps a commit in the memory of the agent, in place of the one before.
    fn put_commit(&self, py: Python<'_>, number: u64, parts: Vec<Py<PyAny>>) -> PyResult<()> {
        let mut client = self.client();
        let begin =
            async move { Ok(client.begin_commit(BeginCommitRequest {}).await?.into_inner()) };
        let path = self.wait(py, CALL_TIMEOUT, begin)?.path;
        // The stable ABI has no buffers before Python 3.11, so Python writes them.
        let file = py.import("io")?.call_method1("open", (&path, "r+b"))?;
        let written = parts.iter().try_fold(0, |bytes, part| {
            let written: u64 = file.call_method1("write", (part,))?.extract()?;
            PyResult::Ok(bytes + written)
        });
        file.call_method0("close")?;
        let bytes = written?;
        let mut client = self.client();
        let request = EndCommitRequest { path, number, bytes };
        let end = async move { Ok(client.end_commit(request).await?.into_inner()) };
        self.wait(py, CALL_TIMEOUT, end).map(|_| ())
    }

    /// Returns the number and the contents of the commit that the agent keeps, if any.
    fn get_commit<'py>(&self, py: Python<'py>) -> PyResult<Option<(u64, Bound<'py, PyBytes>)>> {
        let mut client = self.client();
        let last = async move { Ok(client.last_commit(LastCommitRequest {}).await?.into_inner()) };
        let last = self.wait(py, CALL_TIMEOUT, last)?;
        if last.path.is_empty() {
            return Ok(None);
        }
        let mut file = OpenOptions::new().read(true).open(&last.path)?;
        let bytes = usize::try_from(last.bytes)
            .map_err(|_| PyOSError::new_err("the commit is larger than the memory"))?;
        let data = PyBytes::new_with(py, bytes, |data| Ok(file.read_exact(data)?))?;
        Ok(Some((last.number, data)))
    }

    /// Says that this worker has a copy of its state for a commit of its round; returns whether it was decided.
    fn decide_commit(
        &self,
        py: Python<'_>,
        phase: u64,
        pass_number: u32,
        used: u64,
        seen: u64,
    ) -> PyResult<bool> {
        let (pass, request) = (pass_number, DecideCommitRequest::default());
        let request = DecideCommitRequest { phase, pass, used, seen, ..request };
        Ok(self.decide(py, request)?.is_some())
    }

    /// Does the same in a job that deals its records to workers as they ask for them; returns what the commit has seen.
    fn decide_dynamic_commit<'py>(
        &self,
        py: Python<'py>,
        phase: u64,
        place: u64,
        number: u64,
        record: Vec<u8>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (state, commit) = (number, record.into());
        let request = DecideCommitRequest { phase, place, state, commit, ..Default::default() };
        Ok(self.decide(py, request)?.map(|record| PyBytes::new(py, &record)))
    }

    /// Returns what the commit that the agent keeps has seen; empty if that is unknown.
    fn get_commit_record<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let mut client = self.client();
        let last = async move { Ok(client.last_commit(LastCommitRequest {}).await?.into_inner()) };
        Ok(PyBytes::new(py, &self.wait(py, CALL_TIMEOUT, last)?.commit))
    }

    /// Returns the present round, a part of this worker's list of records, and whether the list ends behind it.
    fn fetch_records(
        &self,
        py: Python<'_>,
        round: u64,
        place: u64,
        wanted: u64,
        least: u64,
        end: u64,
    ) -> PyResult<(u64, Pairs, bool)> {
        let (mut client, local_rank) = (self.client(), self.local_rank);
        let wait_ms = WAIT.as_millis() as u32;
        let request = FetchRecordsRequest { local_rank, round, place, wanted, least, end, wait_ms };
        let fetching = async move {
            let reply = client.fetch_records(request).await;
            Ok(reply.map_err(CallError::of_decision)?.into_inner())
        };
        let reply = self.wait(py, CALL_TIMEOUT, fetching)?;
        let ranges = reply.ranges.iter().map(|range| (range.start, range.end)).collect();
        Ok((reply.round, ranges, reply.is_end))
    }

    /// Reports that this worker proceeds, and how many seconds it has computed for its last updates.
    #[pyo3(signature = (busy=0.0, updates=0))]
    fn progress(&self, py: Python<'_>, busy: f64, updates: u32) -> PyResult<()> {
        let (mut client, local_rank) = (self.client(), self.local_rank);
        let request = ProgressRequest { local_rank, busy_us: (busy * 1e6) as u64, updates };
        let report = async move { Ok(client.progress(request).await?.into_inner()) };
        self.wait(py, CALL_TIMEOUT, report).map(|_| ())
    }
}

impl Worker {
    fn client(&self) -> Client {
        self.client.clone()
    }

    /// Waits for the outcome of a commit of the present round; returns its record if it was decided.
    fn decide(&self, py: Python<'_>, request: DecideCommitRequest) -> PyResult<Option<Bytes>> {
        let round = self.assignment.lock().expect("no holder panics").round;
        let (mut client, local_rank) = (self.client(), self.local_rank);
        let wait_ms = WAIT.as_millis() as u32;
        let request = DecideCommitRequest { local_rank, round, wait_ms, ..request };
        let deciding = async move {
            loop {
                let reply = client.decide_commit(request.clone()).await;
                let reply = reply.map_err(CallError::of_decision)?.into_inner();
                match reply.outcome() {
                    Outcome::Decided => return Ok(Some(reply.commit)),
                    Outcome::Over => return Ok(None),
                    Outcome::Waiting => {}
                }
            }
        };
        self.wait(py, FAR, deciding)
    }

    fn wait<T: Send + 'static>(
        &self,
        py: Python<'_>,
        limit: Duration,
        call: impl Future<Output = Result<T, CallError>> + Send + 'static,
    ) -> PyResult<T> {
        check_process(py, self.process)?;
        wait(py, &self.runtime, limit, no_answer(), call)
    }
}

impl From<Status> for CallError {
    fn from(status: Status) -> Self {
        Self::Unavailable(format!("the agent of this node does not answer: {}", status.message()))
    }
}

/// Returns the number by which workers name a commit of a round.
#[pyfunction]
pub fn commit_number(round: u64, phase: u64) -> u64 {
    CommitId { round: Round(round), phase: Phase(phase) }.number()
}

impl CallError {
    /// Returns what an answer about a commit means: an error of the program, or of the connection to the agent.
    fn of_decision(status: Status) -> Self {
        match steadfast_proto::kind(&status) {
            ErrorKind::Conflict | ErrorKind::Invalid | ErrorKind::TooLarge => {
                let (kind, message) = (ErrorKind::Invalid, status.message().to_owned());
                Self::Node(NodeError::Rejected { kind, message })
            }
            _ => status.into(),
        }
    }
}

fn no_answer() -> impl FnOnce() -> CallError {
    || CallError::Unavailable("the agent of this node does not answer".to_owned())
}

/// Returns the place of the worker in the round in which it was started.
async fn first_assignment(client: Client, local_rank: u32) -> Result<WorkerAssignment, CallError> {
    let reason = Mutex::new(String::new());
    let first = next_assignment(client, local_rank, 0, None, &reason).await?;
    first.ok_or_else(no_answer())
}

/// Returns the place of the worker in a round later than `after`; `None` if the deadline passes before.
async fn next_assignment(
    mut client: Client,
    local_rank: u32,
    after: u64,
    deadline: Option<Instant>,
    shown: &Mutex<String>,
) -> Result<Option<WorkerAssignment>, CallError> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let wait = left.map_or(WAIT, |left| left.min(WAIT));
        let wait_ms = wait.as_millis() as u32;
        let request = NextRoundRequest { local_rank, after, wait_ms };
        match client.next_round(request).await?.into_inner().next {
            Some(next_round_reply::Next::Assignment(assignment)) => return Ok(Some(assignment)),
            Some(next_round_reply::Next::Wait(reason)) => {
                *shown.lock().expect("no holder panics") = reason;
            }
            None => {}
        }
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(None);
        }
    }
}

/// Keeps what is known of changes current.
async fn follow(mut client: Client, local_rank: u32, seen: Arc<Mutex<SeenChanges>>) {
    let mut revision = 0;
    loop {
        let wait_ms = WAIT.as_millis() as u32;
        match client.changes(ChangesRequest { local_rank, revision, wait_ms }).await {
            Ok(reply) => {
                let reply = reply.into_inner();
                revision = reply.revision;
                seen.lock().expect("no holder panics").keep(reply);
            }
            Err(_) => tokio::time::sleep(RETRY).await,
        }
    }
}
