//! A node of an elastic job that another agent than ours runs, such as torchrun's.

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{NodeId, Phase, Round as RoundNumber};
use steadfast_common::job::durations;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::{AgentRecord, RoundRecord, Runner};
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_elastic_client::{Entered, Joined, NodeError, NodeIdentity, NodeSession, Terms};
use steadfast_host::random;
use steadfast_net::TlsIdentity;
use steadfast_process::LivenessPort;
use tokio::runtime::Runtime;
use tokio::sync::Mutex as AsyncMutex;

use crate::error::{check_process, raise};
use crate::own_process::OwnProcess;

/// Longest time in which a signal of the user goes unnoticed.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// How long a call that does not wait for other nodes may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a question about the round may take, which is asked often.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);

/// How long leaving may take; then the lease ends by itself.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Time to live of the node's lease, unless the user sets it.
const LEASE_TTL: Duration = Duration::from_secs(5);

/// Time between attempts to register while the node's former lease has not ended.
const RETRY: Duration = Duration::from_millis(200);

/// This node, registered with an elastic job under a lease, until it is closed.
#[pyclass(frozen, module = "steadfast._native")]
pub struct Node {
    runtime: OwnProcess<Runtime>,
    registration: Arc<Registration>,
}

/// A round, as this node sees it.
#[pyclass(frozen, get_all, module = "steadfast._native")]
pub struct Round {
    round: u64,
    /// Rank of this node.
    rank: usize,
    /// Rank of its first worker.
    first_rank: u32,
    /// Number of workers of all nodes.
    world_size: u32,
    /// By rank: node id, address, slots, rank of the first worker.
    members: Vec<(String, String, u32, u32)>,
}

/// The state that the nodes share, and its token.
type Shared = (Vec<u8>, u64);

/// What the calls share.
struct Registration {
    etcd: Etcd,
    keys: Keys,
    lease_ttl: Duration,
    identity: NodeIdentity,
    terms: Terms,
    session: AsyncMutex<Option<Arc<NodeSession>>>,
    /// Closes when this process dies.
    _liveness: LivenessPort,
    /// How often each tag of a round was passed. The mutex guards only this.
    phases: Mutex<(u64, BTreeMap<String, u64>)>,
}

/// Why a call failed, by the exception that it becomes.
pub(crate) enum CallError {
    Node(NodeError),
    Timeout(String),
    Unavailable(String),
    RoundEnded(String),
}

impl From<NodeError> for CallError {
    fn from(error: NodeError) -> Self {
        Self::Node(error)
    }
}

impl CallError {
    fn into_exception(self, py: Python<'_>) -> PyErr {
        let (class, message) = match self {
            Self::Timeout(message) => ("RendezvousTimeout", message),
            Self::Unavailable(message) => ("UnavailableError", message),
            Self::RoundEnded(message) => ("RoundEnded", message),
            Self::Node(error) => {
                let message = error.to_string();
                match error {
                    NodeError::JobEnded => ("RendezvousClosed", message),
                    NodeError::Unregistered => ("NotFoundError", message),
                    NodeError::BadReply(_) => ("SteadfastError", message),
                    NodeError::Rejected { .. } | NodeError::Coord(_) => {
                        (class_of(error.kind()), message)
                    }
                }
            }
        };
        raise(py, class, message.as_str())
    }
}

fn class_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Conflict => "NodeRangeMismatch",
        ErrorKind::Invalid | ErrorKind::TooLarge => "InvalidError",
        ErrorKind::NotFound => "NotFoundError",
        ErrorKind::Stale => "RoundEnded",
        ErrorKind::NotYet | ErrorKind::Unavailable => "UnavailableError",
        ErrorKind::Denied => "DeniedError",
        ErrorKind::Internal => "SteadfastError",
    }
}

#[pymethods]
impl Node {
    /// Registers this node with the job.
    #[new]
    #[pyo3(signature = (endpoints, job, *, address, slots, nodes_min, nodes_max, settings))]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        endpoints: Vec<String>,
        job: &str,
        address: String,
        slots: u32,
        nodes_min: u32,
        nodes_max: u32,
        settings: BTreeMap<String, String>,
    ) -> PyResult<Self> {
        let lease_ttl = match settings.get("lease").map(|text| durations::parse(text)) {
            None => LEASE_TTL,
            Some(Ok(ttl)) => ttl,
            Some(Err(message)) => return Err(raise(py, "InvalidError", message.as_str())),
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("steadfast")
            .enable_all()
            .build()?;
        let (keys, terms) = (Keys::of_job(job), Terms { nodes_min, nodes_max });
        let options = EtcdOptions {
            endpoints: endpoints.iter().map(|endpoint| url(endpoint)).collect(),
            ..EtcdOptions::default()
        };
        let opening = async move {
            let etcd = Etcd::connect(&options).await.map_err(NodeError::from)?;
            let liveness = LivenessPort::beside(&address).await.map_err(|error| {
                CallError::Unavailable(format!("no port of this host is free: {error}"))
            })?;
            let record = AgentRecord {
                liveness: Some(liveness.address.clone()),
                ..AgentRecord::new(Runner::Torchrun, address, slots)
            };
            let tls = TlsIdentity::default();
            let identity = NodeIdentity { node: NodeId(random::uuid()), record, tls };
            let (session, phases) = (AsyncMutex::default(), Mutex::default());
            let registration = Registration {
                etcd,
                keys,
                lease_ttl,
                identity,
                terms,
                session,
                _liveness: liveness,
                phases,
            };
            registration.session().await?;
            Ok(Arc::new(registration))
        };
        let registration = wait(py, &runtime, CALL_TIMEOUT, no_answer(), opening)?;
        Ok(Self { runtime: OwnProcess::new(runtime), registration })
    }

    /// Waits until the node is a member of a round later than `after`.
    fn join(&self, py: Python<'_>, after: u64, timeout: f64) -> PyResult<Round> {
        let registration = self.registration.clone();
        let reason = Arc::new(Mutex::new("no master of the job answers".to_owned()));
        let shown = reason.clone();
        let joining = async move { registration.join(RoundNumber(after), &shown).await };
        let timed_out = move || {
            let reason = reason.lock().expect("no holder panics").clone();
            CallError::Timeout(format!("gave up waiting for the other nodes: {reason}"))
        };
        self.wait(py, seconds(timeout), timed_out, joining)
    }

    /// Returns how many nodes wait to be added to the round or, negative, were lost from it.
    fn waiting(&self, py: Python<'_>, round: u64) -> PyResult<i64> {
        let registration = self.registration.clone();
        let asking = async move {
            let session = registration.session.lock().await.clone();
            // Another call registers the node again.
            let Some(session) = session else { return Ok(-1) };
            match session.change(RoundNumber(round)).await {
                Ok(change) => Ok(change.nodes),
                Err(NodeError::Unregistered) => Ok(-1),
                Err(error) => Err(error.into()),
            }
        };
        self.wait(py, LOOK_TIMEOUT, no_answer(), asking)
    }

    /// Waits until all members of the round have called this; returns the data of each by node id.
    fn barrier<'py>(
        &self,
        py: Python<'py>,
        round: u64,
        tag: String,
        data: Vec<u8>,
        timeout: f64,
    ) -> PyResult<Bound<'py, PyDict>> {
        let registration = self.registration.clone();
        let reason = Arc::new(Mutex::new("no master of the job answers".to_owned()));
        let shown = reason.clone();
        let entering =
            async move { registration.enter(RoundNumber(round), &tag, data.into(), &shown).await };
        let timed_out =
            move || CallError::Timeout(reason.lock().expect("no holder panics").clone());
        let entries = self.wait(py, seconds(timeout), timed_out, entering)?;
        let answer = PyDict::new(py);
        for (node, data) in entries {
            answer.set_item(node.to_string(), PyBytes::new(py, &data))?;
        }
        Ok(answer)
    }

    /// Notes that the workers of this node have succeeded in the round, and waits for the other members. Returns true
    /// if the workers of all members have succeeded, so that the job has succeeded; false if some still run.
    fn succeed(&self, py: Python<'_>, round: u64, timeout: f64) -> PyResult<bool> {
        let registration = self.registration.clone();
        let limit = seconds(timeout);
        let exiting = async move { registration.succeed(RoundNumber(round), limit).await };
        self.wait(py, limit + CALL_TIMEOUT, no_answer(), exiting)
    }

    /// Returns the state that the nodes share in a protocol of their own, and its token.
    fn get_state<'py>(&self, py: Python<'py>) -> PyResult<Option<(Bound<'py, PyBytes>, u64)>> {
        let (record, _) = self.share(py, None, 0)?;
        Ok(record.map(|(state, token)| (PyBytes::new(py, &state), token)))
    }

    /// Replaces the state that the nodes share if `token` is its token. Returns the state and its token afterwards, and
    /// whether the state was replaced.
    fn set_state<'py>(
        &self,
        py: Python<'py>,
        state: Vec<u8>,
        token: Option<u64>,
    ) -> PyResult<(Bound<'py, PyBytes>, u64, bool)> {
        let (record, accepted) = self.share(py, Some(state), token.unwrap_or(0))?;
        let (state, token) = record.unwrap_or_default();
        Ok((PyBytes::new(py, &state), token, accepted))
    }

    /// Returns whether the job has ended.
    fn is_closed(&self, py: Python<'_>) -> PyResult<bool> {
        let registration = self.registration.clone();
        let asking = async move {
            let session = registration.session.lock().await.clone();
            Ok(session.is_some_and(|session| session.has_job_ended()))
        };
        self.wait(py, LOOK_TIMEOUT, no_answer(), asking)
    }

    /// Ends the job for all nodes: it has succeeded.
    fn set_closed(&self, py: Python<'_>) -> PyResult<()> {
        let registration = self.registration.clone();
        let closing = async move { Ok(registration.session().await?.close_job().await?) };
        self.wait(py, CALL_TIMEOUT, no_answer(), closing)
    }

    /// Leaves the job. May be called again, and in a forked process, where it does nothing.
    fn close(&self, py: Python<'_>) {
        if self.runtime.is_forked() {
            return;
        }
        let registration = self.registration.clone();
        let closing = async move {
            let session = registration.session.lock().await.take();
            if let Some(session) = session {
                session.close().await;
            }
        };
        // The timer must be created inside of the runtime.
        let limited = async { tokio::time::timeout(CLOSE_TIMEOUT, closing).await };
        // If it takes too long, the lease ends by itself.
        let _ = py.detach(|| self.runtime.block_on(limited));
    }
}

impl Node {
    fn share(
        &self,
        py: Python<'_>,
        state: Option<Vec<u8>>,
        token: u64,
    ) -> PyResult<(Option<Shared>, bool)> {
        let registration = self.registration.clone();
        let sharing = async move {
            let session = registration.session().await?;
            let (record, accepted) = session.share(state.map(Into::into), token).await?;
            Ok((record.map(|record| (record.state, record.token)), accepted))
        };
        self.wait(py, CALL_TIMEOUT, no_answer(), sharing)
    }

    fn wait<T: Send + 'static>(
        &self,
        py: Python<'_>,
        limit: Duration,
        timed_out: impl FnOnce() -> CallError,
        call: impl Future<Output = Result<T, CallError>> + Send + 'static,
    ) -> PyResult<T> {
        check_process(py, self.runtime.process())?;
        wait(py, &self.runtime, limit, timed_out, call)
    }
}

impl Registration {
    /// Returns the registration; registers the node if it is not registered.
    async fn session(&self) -> Result<Arc<NodeSession>, CallError> {
        let mut session = self.session.lock().await;
        if let Some(session) = &*session {
            return Ok(session.clone());
        }
        loop {
            let identity = self.identity.clone();
            let registered =
                NodeSession::register(&self.etcd, &self.keys, self.lease_ttl, identity).await;
            match registered {
                Ok(registered) => return Ok(session.insert(Arc::new(registered)).clone()),
                // The former registration has not ended yet.
                Err(error) if error.kind() == ErrorKind::Conflict => {
                    tokio::time::sleep(RETRY).await;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn forget_session(&self) {
        self.session.lock().await.take();
    }

    async fn join(&self, after: RoundNumber, shown: &Mutex<String>) -> Result<Round, CallError> {
        loop {
            let session = self.session().await?;
            match session.join(after, self.terms, Duration::MAX).await {
                Ok(Joined::Round(record)) => return self.seen(&record),
                Ok(Joined::Waits(reason)) => *shown.lock().expect("no holder panics") = reason,
                Ok(Joined::TooFew(reason)) => return Err(CallError::Timeout(reason)),
                Err(NodeError::Unregistered) => self.forget_session().await,
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn seen(&self, record: &RoundRecord) -> Result<Round, CallError> {
        let mut members = record.members.iter();
        let rank = members.position(|member| member.node == self.identity.node);
        let rank = rank.ok_or_else(|| {
            let message = format!("round {} does not have this node", record.round);
            CallError::Node(NodeError::BadReply(message))
        })?;
        let members = record
            .members
            .iter()
            .map(|it| (it.node.to_string(), it.address.clone(), it.slots, it.first_rank));
        Ok(Round {
            round: record.round.0,
            rank,
            first_rank: record.members[rank].first_rank,
            world_size: record.world_size,
            members: members.collect(),
        })
    }

    async fn enter(
        &self,
        round: RoundNumber,
        tag: &str,
        data: bytes::Bytes,
        shown: &Mutex<String>,
    ) -> Result<BTreeMap<NodeId, bytes::Bytes>, CallError> {
        let phase = self.phase(round, tag);
        loop {
            let session = self.session.lock().await.clone();
            let lost = || CallError::RoundEnded(format!("this node was lost from round {round}"));
            let session = session.ok_or_else(lost)?;
            match session.enter(round, tag, phase, data.clone()).await {
                Ok(Entered::Released(entries)) => {
                    self.passed(round, tag, phase);
                    return Ok(entries);
                }
                Ok(Entered::Ended(reason)) => return Err(CallError::RoundEnded(reason)),
                Ok(Entered::Waits(reason)) => *shown.lock().expect("no holder panics") = reason,
                Err(NodeError::Unregistered) => {
                    self.forget_session().await;
                    return Err(lost());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn succeed(&self, round: RoundNumber, limit: Duration) -> Result<bool, CallError> {
        let begun = Instant::now();
        loop {
            let session = self.session.lock().await.clone();
            let lost = || CallError::RoundEnded(format!("this node was lost from round {round}"));
            let left = limit.saturating_sub(begun.elapsed());
            match session.ok_or_else(lost)?.succeed(round, left).await {
                Ok(Entered::Released(_)) => return Ok(true),
                Ok(Entered::Ended(reason)) => return Err(CallError::RoundEnded(reason)),
                Ok(Entered::Waits(_)) if left.is_zero() => return Ok(false),
                Ok(Entered::Waits(_)) => {}
                Err(NodeError::JobEnded) => return self.has_job_succeeded().await,
                Err(NodeError::Unregistered) => {
                    self.forget_session().await;
                    return Err(lost());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn has_job_succeeded(&self) -> Result<bool, CallError> {
        let result = self.etcd.get_json::<ResultRecord>(&self.keys.result()).await;
        match result.map_err(NodeError::from)? {
            Some(result) if result.state == JobOutcome::Failed => {
                let reason = result.reason.unwrap_or_default();
                Err(CallError::RoundEnded(format!("the job failed: {reason}")))
            }
            Some(_) | None => Ok(true),
        }
    }

    fn phase(&self, round: RoundNumber, tag: &str) -> Phase {
        let phases = self.phases.lock().expect("no holder panics");
        let passed = if phases.0 == round.0 { phases.1.get(tag).copied() } else { None };
        Phase(passed.unwrap_or(0))
    }

    fn passed(&self, round: RoundNumber, tag: &str, phase: Phase) {
        let mut phases = self.phases.lock().expect("no holder panics");
        if phases.0 != round.0 {
            *phases = (round.0, BTreeMap::new());
        }
        phases.1.insert(tag.to_owned(), phase.0 + 1);
    }
}

/// Runs a call without the GIL. Handles signals meanwhile, and gives up at the time limit.
pub(crate) fn wait<T: Send + 'static>(
    py: Python<'_>,
    runtime: &Runtime,
    limit: Duration,
    timed_out: impl FnOnce() -> CallError,
    call: impl Future<Output = Result<T, CallError>> + Send + 'static,
) -> PyResult<T> {
    let (answer, answered) = sync_channel(1);
    let task = runtime.spawn(async move {
        let outcome = tokio::time::timeout(limit, call).await;
        // The caller may have been interrupted.
        let _ = answer.send(outcome);
    });
    let answered = Mutex::new(answered);
    loop {
        let received =
            py.detach(|| answered.lock().expect("no holder panics").recv_timeout(SIGNALS_EVERY));
        match received {
            Ok(Ok(Ok(value))) => return Ok(value),
            Ok(Ok(Err(error))) => return Err(error.into_exception(py)),
            Ok(Err(_)) => return Err(timed_out().into_exception(py)),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(raise(py, "SteadfastError", "a thread of the agent failed"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Err(interrupt) = py.check_signals() {
            task.abort();
            return Err(interrupt);
        }
    }
}

fn no_answer() -> impl FnOnce() -> CallError {
    || CallError::Unavailable("etcd, or the master of the job, does not answer".to_owned())
}

fn seconds(timeout: f64) -> Duration {
    Duration::try_from_secs_f64(timeout).unwrap_or(Duration::from_secs(365 * 24 * 3600))
}

fn url(endpoint: &str) -> String {
    match endpoint.contains("://") {
        true => endpoint.to_owned(),
        false => format!("http://{endpoint}"),
    }
}
