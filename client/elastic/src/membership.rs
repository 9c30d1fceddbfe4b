//! A node's membership in the rounds of an elastic job: registers, joins one round after the other, and tells
//! when a round is over.

use std::time::Duration;

use bytes::Bytes;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Phase, Round};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::{PORTS_TAG, RoundRecord};
use steadfast_coord::Etcd;
use steadfast_host::time::{Instant, sleep, timeout};
use steadfast_proto::v1::NodeReport;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::node::{Change, Entered, Joined, NodeError, NodeIdentity, NodeSession, Terms};

/// Time between attempts to register while the node's former lease has not ended.
const RETRY: Duration = Duration::from_millis(200);

/// How long attempts to register are made, beyond the time to live of the lease: a new leader of etcd extends leases.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the first request for a round waits, so that the node soon knows what it waits for.
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// Pause of [`until_over`] after an error that is not expected to last.
const WATCH_RETRY: Duration = Duration::from_millis(500);

/// How long one call waits at the exit for the other members.
const EXIT_WAIT: Duration = Duration::from_secs(5);

/// How a node takes part in the job.
#[derive(Debug)]
pub struct Membership {
    etcd: Etcd,
    keys: Keys,
    lease_ttl: Duration,
    identity: NodeIdentity,
    terms: Terms,
    start_timeout: Duration,
    session: Option<NodeSession>,
    /// The last round of this registration; 0 if there is none.
    last: Round,
    /// Whether a master of the job has ever answered.
    is_job_known: bool,
    /// What the node waits for, for users; empty if it does not wait.
    reason: watch::Sender<String>,
}

/// A round that a node has joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JoinedRound<H> {
    pub record: RoundRecord,
    /// The rank of this node among the members.
    pub rank: usize,
    /// What each member told the others, by rank.
    pub data: Vec<Bytes>,
    /// What the caller prepared for this round.
    pub prepared: H,
}

/// How the exit barrier ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exited {
    /// The job has succeeded.
    All,
    /// Another round has to be formed.
    Again,
}

/// Why a round is over for a node.
#[derive(Debug)]
pub enum RoundOver {
    /// Nodes wait to be added, or were lost, or a worker of another node has failed.
    Changed(Change),
    /// This node's registration was lost: it registers again.
    Unregistered,
    JobEnded,
    /// The job rejects this node.
    Failed(NodeError),
}

/// The reasons why an attempt to join failed.
enum Attempt {
    /// Register, or ask for another round, and try again.
    Again,
    Failed(NodeError),
}

impl From<NodeError> for Attempt {
    fn from(error: NodeError) -> Self {
        match error {
            NodeError::Unregistered => Self::Again,
            // The round is over, or another phase was released meanwhile.
            NodeError::Rejected { kind: ErrorKind::Stale, .. } => Self::Again,
            error => Self::Failed(error),
        }
    }
}

fn unavailable(message: String) -> NodeError {
    NodeError::Rejected { kind: ErrorKind::Unavailable, message }
}

impl Membership {
    /// Creates a membership that is not registered yet. The first registration waits for a master for at most
    /// `start_timeout`. Later ones wait for as long as it takes: then the job is known to exist, and its
    /// workers do not need the master.
    pub fn new(
        etcd: Etcd,
        keys: Keys,
        lease_ttl: Duration,
        identity: NodeIdentity,
        terms: Terms,
        start_timeout: Duration,
    ) -> Self {
        Self {
            etcd,
            keys,
            lease_ttl,
            identity,
            terms,
            start_timeout,
            session: None,
            last: Round(0),
            is_job_known: false,
            reason: watch::Sender::new(String::new()),
        }
    }

    /// Returns what the node waits for, for users; empty while it does not wait.
    pub fn reason(&self) -> watch::Receiver<String> {
        self.reason.subscribe()
    }

    /// Shows what the node waits for, and logs it if it is new.
    fn show(&self, reason: String) {
        let is_new = self.reason.send_if_modified(|shown| {
            let is_new = *shown != reason;
            shown.clone_from(&reason);
            is_new
        });
        if is_new && !reason.is_empty() {
            info!(reason, "waiting");
        }
    }

    /// Returns the registration, if there is one.
    pub fn session(&self) -> Option<&NodeSession> {
        self.session.as_ref()
    }

    /// Forgets a registration that was lost, so that [`Membership::join`] registers again.
    pub fn forget(&mut self) {
        self.session = None;
    }

    /// Registers, if the node is not registered, and announces that it is starting. Waits for the end of an
    /// earlier registration of the same node, or of a node that was at the same address.
    async fn register(&mut self) -> Result<(), NodeError> {
        if self.session.is_some() {
            return Ok(());
        }
        let mut give_up: Option<Instant> = None;
        let session = loop {
            match self.try_register().await {
                Ok(session) => break session,
                Err(error) if error.kind() == ErrorKind::Conflict => {
                    let now = Instant::now();
                    self.show(format!("waits for the end of an earlier registration: {error}"));
                    if *give_up.get_or_insert(now + self.lease_ttl + REGISTER_TIMEOUT) <= now {
                        return Err(error);
                    }
                    sleep(RETRY).await;
                }
                // The lease ended before it was used.
                Err(NodeError::Coord(error))
                    if matches!(error.kind(), ErrorKind::Stale | ErrorKind::NotFound) =>
                {
                    sleep(RETRY).await;
                }
                Err(error) => return Err(error),
            }
        };
        self.last = Round(0);
        self.session = Some(session);
        self.is_job_known = true;
        Ok(())
    }

    async fn try_register(&self) -> Result<NodeSession, NodeError> {
        let (etcd, identity) = (&self.etcd, self.identity.clone());
        let session = NodeSession::register(etcd, &self.keys, self.lease_ttl, identity).await?;
        // The log says so only if it takes long.
        self.reason.send_replace("waits for a master of the job to answer".to_owned());
        let announced = match self.is_job_known {
            true => session.announce().await,
            false => timeout(self.start_timeout, session.announce())
                .await
                .unwrap_or_else(|_| Err(self.no_master())),
        };
        match announced {
            Ok(()) | Err(NodeError::Unregistered) => Ok(session),
            Err(error) => {
                session.close().await;
                Err(error)
            }
        }
    }

    fn no_master(&self) -> NodeError {
        unavailable(format!(
            "no master of the job at `{}` in etcd answered within {:?}; check the job's name, and that a master of \
             it runs",
            self.keys.root(),
            self.start_timeout
        ))
    }

    /// Waits until this node is a member of another round, and its members have told each other the data that `prepare`
    /// returns. The returned round includes the first result of `prepare`.
    ///
    /// # Errors
    /// If too few nodes join, or the job rejects this node.
    pub async fn join<H>(
        &mut self,
        prepare: impl Fn() -> Result<(H, Bytes), NodeError>,
    ) -> Result<JoinedRound<H>, NodeError> {
        loop {
            self.register().await?;
            let (prepared, data) = prepare()?;
            match self.try_join(data).await {
                Ok((record, rank, data)) => {
                    self.show(String::new());
                    return Ok(JoinedRound { record, rank, data, prepared });
                }
                Err(Attempt::Again) => {}
                Err(Attempt::Failed(error)) => return Err(error),
            }
        }
    }

    async fn try_join(&mut self, data: Bytes) -> Result<(RoundRecord, usize, Vec<Bytes>), Attempt> {
        let record = self.next_round().await.inspect_err(|_| self.session = None)?;
        self.last = record.round;
        let node = self.identity.node;
        let rank = record.members.iter().position(|member| member.node == node);
        let rank = rank.ok_or_else(|| {
            let message = format!("round {} does not have this node", record.round);
            Attempt::Failed(NodeError::BadReply(message))
        })?;
        let data = self.exchange(&record, data).await?;
        Ok((record, rank, data))
    }

    async fn next_round(&self) -> Result<RoundRecord, Attempt> {
        let Some(session) = &self.session else { return Err(Attempt::Again) };
        let mut wait = FIRST_WAIT;
        loop {
            match session.join(self.last, self.terms, wait).await? {
                Joined::Round(record) => return Ok(record),
                Joined::TooFew(reason) => return Err(Attempt::Failed(unavailable(reason))),
                Joined::Waits(reason) => self.show(reason),
            }
            wait = Duration::MAX;
        }
    }

    /// Tells the other members of a round the data of this node; returns those of all by rank.
    async fn exchange(&self, record: &RoundRecord, data: Bytes) -> Result<Vec<Bytes>, Attempt> {
        let Some(session) = &self.session else { return Err(Attempt::Again) };
        let mut entries = loop {
            match session.enter(record.round, PORTS_TAG, Phase(0), data.clone()).await? {
                Entered::Released(entries) => break entries,
                Entered::Ended(reason) => {
                    info!(round = record.round.0, reason, "round ended before it began");
                    return Err(Attempt::Again);
                }
                Entered::Waits(reason) => self.show(reason),
            }
        };
        let data = record.members.iter().map(|member| {
            entries.remove(&member.node).ok_or_else(|| {
                let message = format!("a released barrier has no data of node {}", member.node);
                Attempt::Failed(NodeError::BadReply(message))
            })
        });
        data.collect()
    }

    /// Waits until all members of the round have succeeded.
    ///
    /// # Errors
    /// If the job rejects this node, or the time is over.
    pub async fn exit(&mut self, limit: Option<Duration>) -> Result<Exited, NodeError> {
        let end = limit.map(|limit| Instant::now() + limit);
        let mut shown = String::new();
        // The first answer says at once who is waited for.
        let mut wait = Duration::ZERO;
        loop {
            let Some(session) = &self.session else { return Ok(Exited::Again) };
            let entering = session.succeed(self.last, wait);
            let entered = match end {
                None => entering.await,
                Some(end) => match timeout(end.remaining(), entering).await {
                    Ok(entered) => entered,
                    Err(_) if shown.is_empty() => {
                        let message =
                            "gave up at the exit: no master answers (--exit-barrier-timeout)";
                        return Err(unavailable(message.to_owned()));
                    }
                    Err(_) => {
                        let message =
                            format!("gave up at the exit: {shown} (--exit-barrier-timeout)");
                        return Err(unavailable(message));
                    }
                },
            };
            wait = EXIT_WAIT;
            match entered {
                Ok(Entered::Released(_)) => return Ok(Exited::All),
                // It was not a member any more when it entered.
                Ok(Entered::Ended(reason)) => {
                    warn!(reason, "this node's workers succeeded, but they run again");
                    return Ok(Exited::Again);
                }
                Ok(Entered::Waits(reason)) => {
                    if shown != reason {
                        info!(reason, "this node's workers succeeded");
                        shown = reason;
                    }
                }
                Err(NodeError::JobEnded) => return Ok(Exited::All),
                Err(NodeError::Unregistered) => {
                    self.session = None;
                    return Ok(Exited::Again);
                }
                Err(NodeError::Rejected { kind: ErrorKind::Stale, .. }) => {
                    return Ok(Exited::Again);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns whether a master of the job has ever answered.
    pub fn is_job_known(&self) -> bool {
        self.is_job_known
    }

    /// Leaves the job: the others form a round without this node at once.
    pub async fn leave(&mut self) {
        if let Some(session) = self.session.take() {
            session.close().await;
        }
    }
}

/// Completes when the round is over for a node. `interval` is how long one call waits at most.
pub async fn until_over(
    session: &NodeSession,
    round: Round,
    report: impl Fn() -> NodeReport,
    interval: Duration,
) -> RoundOver {
    loop {
        match session.watch(round, 0, Some(report()), interval).await {
            Ok(Change { nodes: 0, failed, .. }) if failed.is_empty() => {}
            Ok(change) => return RoundOver::Changed(change),
            Err(NodeError::Unregistered) => return RoundOver::Unregistered,
            Err(NodeError::JobEnded) => return RoundOver::JobEnded,
            Err(error @ NodeError::Rejected { .. }) => return RoundOver::Failed(error),
            Err(NodeError::BadReply(_) | NodeError::Coord(_)) => sleep(WATCH_RETRY).await,
        }
    }
}
