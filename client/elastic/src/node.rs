//! A node of an elastic job: the registration of an agent, and its calls to the acting master.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Incarnation, NodeId, Phase, Round};
use steadfast_common::records::commits::{CommitId, CommitRecord, RecordOrder};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::ranges::Ranges;
use steadfast_common::records::rendezvous::{
    AgentRecord, EXIT_TAG, MemberRecord, RoundData, RoundRecord, SharedRecord,
};
use steadfast_coord::{self as coord, CoordError, Etcd};
use steadfast_host::time::timeout;
use steadfast_master_client::{ActingMaster, CallError};
use steadfast_net::{Channel, TlsIdentity};
use steadfast_proto::v1::elastic_client::ElasticClient;
use steadfast_proto::v1::{
    AnnounceRequest, DealRequest, ElasticRound, EnterRequest, Entries, GiveUpRequest, JoinRequest,
    Node, NodeReport, ShareStateRequest, ShutDownRequest, WatchReply, WatchRequest, enter_reply,
    join_reply,
};
use tonic::{Response, Status};

/// How long one call waits at the master for a change.
const WAIT: Duration = Duration::from_secs(5);

/// How long the result of a job may take to be seen here.
const RESULT_TIMEOUT: Duration = Duration::from_secs(1);

/// How an agent presents itself to the job.
#[derive(Clone, Debug)]
pub struct NodeIdentity {
    pub node: NodeId,
    pub record: AgentRecord,
    pub tls: TlsIdentity,
}

/// An agent that is registered with a job, under a lease.
#[derive(Debug)]
pub struct NodeSession {
    etcd: Etcd,
    lease: coord::Session,
    keys: Keys,
    node: NodeId,
    incarnation: Incarnation,
    acting: ActingMaster,
}

/// The number of nodes that an agent expects. It must be that of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub nodes_min: u32,
    pub nodes_max: u32,
}

/// The answer to a request to join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Joined {
    /// The node is a member of this round.
    Round(RoundRecord),
    /// No round has started yet; the text tells users why.
    Waits(String),
    /// Too few nodes joined within the join timeout; the text is for users.
    TooFew(String),
}

/// The state of a barrier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entered {
    /// All members have entered, with these data.
    Released(BTreeMap<NodeId, Bytes>),
    /// The barrier will not be released; the text tells users why.
    Ended(String),
    /// The barrier is not released yet; the text tells users why.
    Waits(String),
}

/// The records that a node asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordsWish {
    /// It would like to have so many.
    pub wanted: u64,
    /// It gets at least so many while there are some.
    pub least: u64,
    /// Only records with numbers below this; 0 means all.
    pub end: u64,
}

/// The records that a node was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DealtRecords {
    /// Counts those that it was given in the round.
    pub total: u64,
    /// Holds those of them that no commit has seen.
    pub ranges: Ranges,
    /// Whether no more are left to deal.
    pub is_end: bool,
}

/// How a round changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Nodes to be added, or that will have no place in the next round, or, negative, removed; 0 if the round goes on.
    /// Otherwise, the node joins again.
    pub nodes: i64,
    /// Counts those of them that will have no place.
    pub surplus: u32,
    /// Addresses of removed nodes, for users.
    pub lost: String,
    /// Grows with each change of the nodes, and is the same for all of them.
    pub revision: i64,
    /// Address of another member, a worker of which has failed in the round; empty if there is none.
    pub failed: String,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error("the job is over")]
    JobEnded,
    /// The lease was lost, or the node was removed. The node must register again.
    #[error("the node's registration was lost")]
    Unregistered,
    #[error("{message}")]
    Rejected { kind: ErrorKind, message: String },
    #[error("the master's reply is invalid: {0}")]
    BadReply(String),
    #[error(transparent)]
    Coord(#[from] CoordError),
}

impl NodeError {
    /// Returns the kind of the error: what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::JobEnded | Self::Unregistered => ErrorKind::Stale,
            Self::Rejected { kind, .. } => *kind,
            Self::BadReply(_) => ErrorKind::Internal,
            Self::Coord(error) => error.kind(),
        }
    }
}

impl NodeSession {
    /// Opens a lease, and registers the node.
    ///
    /// # Errors
    /// If etcd fails with an error that is not transient, or the node is registered already.
    pub async fn register(
        etcd: &Etcd,
        keys: &Keys,
        lease_ttl: Duration,
        identity: NodeIdentity,
    ) -> Result<Self, NodeError> {
        let NodeIdentity { node, record, tls } = identity;
        // First, because this waits for an unavailable etcd.
        let lease = coord::Session::open_with_retry(etcd, lease_ttl).await?;
        let value = serde_json::to_vec(&record).expect("records are plain data");
        let created = etcd.create(&keys.agent(node), &value, lease.lease()).await?;
        let incarnation = created.map_err(|_| NodeError::Rejected {
            kind: ErrorKind::Conflict,
            message: format!("node {node} is registered already"),
        })?;
        let acting = ActingMaster::follow(etcd, keys, tls).await?;
        let incarnation = Incarnation(incarnation);
        let (etcd, keys) = (etcd.clone(), keys.clone());
        Ok(Self { etcd, lease, keys, node, incarnation, acting })
    }

    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Returns the incarnation: the create-revision of the registration.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Announces that the node is starting, so that others wait for it.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub async fn announce(&self) -> Result<(), NodeError> {
        let request = AnnounceRequest { node: self.caller() };
        self.call(Duration::ZERO, |channel| {
            let request = request.clone();
            async move { ElasticClient::new(channel).announce(request).await }
        })
        .await
        .map(|_| ())
    }

    /// Asks to be in a round after `after`, and waits some seconds for it, at most `wait`.
    ///
    /// # Errors
    /// See [`NodeError`]. The node range is rejected if it is not that of the job.
    pub async fn join(
        &self,
        after: Round,
        terms: Terms,
        wait: Duration,
    ) -> Result<Joined, NodeError> {
        let wait = wait.min(WAIT);
        let request = JoinRequest {
            node: self.caller(),
            after: after.0,
            nodes_min: terms.nodes_min,
            nodes_max: terms.nodes_max,
            wait_ms: wait.as_millis() as u32,
        };
        let reply = self
            .call(wait, |channel| {
                let request = request.clone();
                async move { ElasticClient::new(channel).join(request).await }
            })
            .await?;
        match reply.next {
            Some(join_reply::Next::Start(round)) => Ok(Joined::Round(record(decode(round)?)?)),
            Some(join_reply::Next::Wait(reason)) => Ok(Joined::Waits(reason)),
            Some(join_reply::Next::TooFew(reason)) => Ok(Joined::TooFew(reason)),
            None => Err(NodeError::BadReply("it says nothing".to_owned())),
        }
    }

    /// Waits until the change of `round` differs from `known`, for some seconds and at most for `wait`. The change is
    /// the number of nodes to be added or, if negative, removed.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub async fn watch(
        &self,
        round: Round,
        known: i64,
        report: Option<NodeReport>,
        wait: Duration,
    ) -> Result<Change, NodeError> {
        self.watch_for(round, known, report, wait.min(WAIT)).await
    }

    /// Returns the change of `round` without waiting.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub async fn change(&self, round: Round) -> Result<Change, NodeError> {
        self.watch_for(round, 0, None, Duration::ZERO).await
    }

    async fn watch_for(
        &self,
        round: Round,
        known: i64,
        report: Option<NodeReport>,
        wait: Duration,
    ) -> Result<Change, NodeError> {
        let request = WatchRequest {
            node: self.caller(),
            round: round.0,
            wait_ms: wait.as_millis() as u32,
            known_change: known,
            report,
        };
        let reply = self
            .call(wait, |channel| {
                let request = request.clone();
                async move { ElasticClient::new(channel).watch(request).await }
            })
            .await?;
        let WatchReply { change, surplus, lost, revision, failed } = reply;
        Ok(Change { nodes: change, surplus, lost, revision, failed })
    }

    /// Enters a barrier of a round, and waits some seconds for it. `phase` counts how often the node passed
    /// the tag in this round before.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub async fn enter(
        &self,
        round: Round,
        tag: &str,
        phase: Phase,
        data: Bytes,
    ) -> Result<Entered, NodeError> {
        self.enter_for(round, tag, phase, data, WAIT).await
    }

    /// Returns the last commit that was decided.
    ///
    /// # Errors
    /// If etcd does not answer, or the value cannot be parsed.
    pub async fn last_commit(&self) -> Result<Option<CommitRecord>, CoordError> {
        self.etcd.get_json(&self.keys.commit()).await
    }

    /// Asks for records for the workers of the node, after it was given `total` of them in a round.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub async fn deal(
        &self,
        round: Round,
        total: u64,
        wish: RecordsWish,
    ) -> Result<DealtRecords, NodeError> {
        let RecordsWish { wanted, least, end } = wish;
        let request =
            DealRequest { node: self.caller(), round: round.0, total, wanted, least, end };
        let reply = self
            .call(Duration::ZERO, |channel| {
                let request = request.clone();
                async move { ElasticClient::new(channel).deal(request).await }
            })
            .await?;
        let pairs: Vec<_> = reply.ranges.iter().map(|range| (range.start, range.end)).collect();
        let ranges = Ranges::try_from(pairs).map_err(NodeError::BadReply)?;
        Ok(DealtRecords { total: reply.total, ranges, is_end: reply.is_end })
    }

    /// Notes that the workers of the node have succeeded in a round, and waits some seconds, at most `wait`, for the
    /// other members. The job has succeeded with the last of them.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub async fn succeed(&self, round: Round, wait: Duration) -> Result<Entered, NodeError> {
        self.enter_for(round, EXIT_TAG, Phase(0), Bytes::new(), wait.min(WAIT)).await
    }

    async fn enter_for(
        &self,
        round: Round,
        tag: &str,
        phase: Phase,
        data: Bytes,
        wait: Duration,
    ) -> Result<Entered, NodeError> {
        let request = EnterRequest {
            node: self.caller(),
            round: round.0,
            tag: tag.to_owned(),
            phase: phase.0,
            data,
            wait_ms: wait.as_millis() as u32,
        };
        let reply = self
            .call(wait, |channel| {
                let request = request.clone();
                async move { ElasticClient::new(channel).enter(request).await }
            })
            .await?;
        match reply.outcome() {
            enter_reply::Outcome::Waiting => Ok(Entered::Waits(reply.reason)),
            enter_reply::Outcome::Ended => Ok(Entered::Ended(reply.reason)),
            enter_reply::Outcome::Released => {
                let entries = decode::<Entries>(reply.entries)?.data.into_iter();
                let data = entries.map(|(node, data)| Ok((node_id(&node)?, data)));
                Ok(Entered::Released(data.collect::<Result<_, NodeError>>()?))
            }
        }
    }

    /// Replaces the shared state, if its token is `token`; without a state, reads it. Returns the state after
    /// that, and whether it is the caller's.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub async fn share(
        &self,
        state: Option<Bytes>,
        token: u64,
    ) -> Result<(Option<SharedRecord>, bool), NodeError> {
        let request = ShareStateRequest { state, token };
        let reply = self
            .call(Duration::ZERO, |channel| {
                let request = request.clone();
                async move { ElasticClient::new(channel).share_state(request).await }
            })
            .await?;
        let token = reply.token;
        let record = reply.state.map(|state| SharedRecord { token, state: state.to_vec() });
        Ok((record, reply.accepted))
    }

    /// Leaves the job, because the workers of this node have failed for good.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub async fn give_up(&self, reason: &str, report: NodeReport) -> Result<(), NodeError> {
        let (reason, report) = (reason.to_owned(), Some(report));
        let request = GiveUpRequest { node: self.caller(), reason, report };
        self.call(Duration::ZERO, |channel| {
            let request = request.clone();
            async move { ElasticClient::new(channel).give_up(request).await }
        })
        .await
        .map(|_| ())
    }

    /// Ends the job for all nodes, because it has succeeded.
    ///
    /// # Errors
    /// See [`NodeError`].
    pub async fn close_job(&self) -> Result<(), NodeError> {
        let request = ShutDownRequest { reason: String::new(), success: true };
        let called = self.call(Duration::ZERO, |channel| {
            let request = request.clone();
            async move { ElasticClient::new(channel).shut_down(request).await }
        });
        match called.await {
            Ok(_) | Err(NodeError::JobEnded) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Returns whether the job has ended.
    pub fn has_job_ended(&self) -> bool {
        self.acting.has_job_ended()
    }

    /// Completes when the lease is lost: the node must register again.
    pub async fn lost(&self) {
        self.lease.lost().await;
    }

    /// Completes when the job has ended.
    pub async fn job_ended(&self) {
        self.acting.job_ended().await;
    }

    /// Ends the registration: the others form a round without this node at once.
    pub async fn close(&self) {
        self.lease.close(&self.etcd).await;
    }

    fn caller(&self) -> Option<Node> {
        Some(Node { id: self.node.to_string(), incarnation: self.incarnation.0 })
    }

    async fn call<T, F>(
        &self,
        wait: Duration,
        attempt: impl Fn(Channel) -> F,
    ) -> Result<T, NodeError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let called = tokio::select! {
            biased;
            called = self.acting.call(wait, attempt) => called,
            () = self.lease.lost() => return Err(NodeError::Unregistered),
        };
        match called {
            Ok(reply) => Ok(reply),
            Err(CallError::JobEnded) => Err(NodeError::JobEnded),
            Err(CallError::Rejected(status)) => Err(self.rejection(&status).await),
        }
    }

    /// Returns what a rejection means. A master of a job that is over rejects calls, as a conflict, until it shuts
    /// down; this node may see the result a little later.
    async fn rejection(&self, status: &Status) -> NodeError {
        let kind = steadfast_proto::kind(status);
        let is_over = if kind == ErrorKind::Conflict {
            timeout(RESULT_TIMEOUT, self.job_ended()).await.is_ok()
        } else {
            self.has_job_ended()
        };
        if is_over {
            return NodeError::JobEnded;
        }
        if kind == ErrorKind::NotFound {
            return NodeError::Unregistered;
        }
        NodeError::Rejected { kind, message: status.message().to_owned() }
    }
}

fn node_id(text: &str) -> Result<NodeId, NodeError> {
    let id = text.parse().map_err(|_| NodeError::BadReply(format!("`{text}` is not a node")))?;
    Ok(NodeId(id))
}

fn decode<M: Message + Default>(encoded: Bytes) -> Result<M, NodeError> {
    M::decode(encoded).map_err(|error| NodeError::BadReply(error.to_string()))
}

fn record(round: ElasticRound) -> Result<RoundRecord, NodeError> {
    let members = round.members.into_iter().map(|member| {
        Ok(MemberRecord {
            node: node_id(&member.node)?,
            incarnation: Incarnation(member.incarnation),
            address: member.address,
            slots: member.slots,
            first_rank: member.first_rank,
        })
    });
    let data = round.data.map(|data| RoundData {
        records: data.records,
        order: if data.is_dynamic { RecordOrder::Dynamic } else { RecordOrder::Fixed },
        commit: data.commit.map(|id| CommitId { round: Round(id.round), phase: Phase(id.phase) }),
    });
    Ok(RoundRecord {
        data,
        round: Round(round.round),
        world_size: round.world_size,
        members: members.collect::<Result<_, NodeError>>()?,
    })
}
