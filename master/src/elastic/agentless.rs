//! Nodes that are known by their address only, and count as alive while they call: the interface for programs
//! in any language, after TensorFlow Elastic's `GetClusterSpec`, `GetWaitingNodes`, `Barrier` and
//! `Synchronize`.
//!
//! The master registers such a node under a lease as an agent would, and renews the lease with each call. So
//! there is one kind of node; another master goes on with the same lease.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{NodeId, Phase, Round};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::{AgentRecord, RoundRecord, Runner};
use steadfast_coord::{CoordError, Etcd};
use steadfast_host::time::{Instant, sleep};
use steadfast_master_core::rendezvous::{BarrierId, Caller, Directive, JoinTerms};
use steadfast_proto::status;
use tonic::Status;

use super::handle::{ElasticError, ElasticHandle, Event, Known, Passage};
use super::service::{enter, join, reject};

/// Agents use tags that begin like this.
const RESERVED_TAGS: &str = "steadfast.";

/// Time to live of a registration: how long after its last call a node counts as alive.
const TTL: Duration = Duration::from_secs(10);

/// How often a call that blocks renews the registration.
const BEAT: Duration = Duration::from_secs(3);

/// Time between looks for a registration that etcd has and this master does not see yet.
const RETRY: Duration = Duration::from_millis(10);

/// How long a registration may take.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(5);

/// The event loop of an elastic job, and what it takes to register nodes. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct AgentlessNodes {
    pub etcd: Etcd,
    pub keys: Keys,
    pub handle: ElasticHandle,
    pub informed: Informed,
}

/// The members of a round that have received the answer for it: they have called something else in it. At most as many
/// as the round has members. A new master knows none until it calls again. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Informed(Arc<Mutex<(Round, BTreeSet<String>)>>);

impl Informed {
    fn note(&self, round: &RoundRecord, address: &str) {
        let mut informed = self.lock();
        if informed.0 != round.round {
            *informed = (round.round, BTreeSet::new());
        }
        let is_member = |address| round.members.iter().any(|member| member.address == address);
        if !informed.1.contains(address) && is_member(address) {
            informed.1.insert(address.to_owned());
        }
    }

    fn has(&self, round: Round, address: &str) -> bool {
        let informed = self.lock();
        informed.0 == round && informed.1.contains(address)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (Round, BTreeSet<String>)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the time limit of a call; `None` if it has none.
pub(super) fn limit(seconds: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(seconds).ok().filter(|limit| !limit.is_zero())
}

fn failed(error: CoordError) -> Status {
    status(error.kind(), error.to_string())
}

impl AgentlessNodes {
    /// Waits until the node is a member of a round that it has not been answered with.
    pub(super) async fn cluster(
        &self,
        address: &str,
        nodes_min: u32,
        nodes_max: u32,
    ) -> Result<Arc<RoundRecord>, Status> {
        let mut known = self.registered(address).await?;
        let number = number_of(&known);
        // If its round goes on, the node has lost the answer, or has failed and asks for another round.
        let has_lost_it = known.waiting_nodes == Some(0) && !self.informed.has(number, address);
        let after = if has_lost_it { Round(0) } else { number };
        let terms = JoinTerms { after, nodes_min, nodes_max };
        loop {
            let (caller, deadline) = (known.caller, Instant::now() + BEAT);
            let joined = join(&self.handle, caller, terms, deadline).await;
            if let Err(ElasticError::OtherRunner { .. }) = joined {
                // It must not stay, and be the oldest one when the others are started again.
                self.etcd.revoke(known.lease).await.map_err(failed)?;
            }
            match joined.map_err(|error| reject(&error))? {
                Directive::Start(record) => return Ok(record),
                Directive::TooFew { waiting, nodes_min, .. } => {
                    let message = format!(
                        "{waiting} of at least {nodes_min} nodes joined within the join timeout"
                    );
                    return Err(Status::deadline_exceeded(message));
                }
                Directive::Continue { .. }
                | Directive::Join { .. }
                | Directive::Wait { .. }
                | Directive::WaitForPlace { .. } => {}
            }
            known = self.alive(address).await?;
        }
    }

    /// Returns the change of the node's round.
    pub(super) async fn waiting_nodes(&self, address: &str) -> Result<i64, Status> {
        let known = self.alive(address).await?;
        let waiting_nodes = known.waiting_nodes.ok_or_else(|| unknown(address))?;
        if let Some(round) = &known.round {
            self.informed.note(round, address);
        }
        Ok(waiting_nodes)
    }

    /// Passes a barrier of the node's round; returns the data of all members by address, or why it was not
    /// released.
    pub(super) async fn pass(
        &self,
        address: &str,
        tag: String,
        phase: Option<Phase>,
        data: Arc<[u8]>,
        limit: Option<Duration>,
    ) -> Result<Result<HashMap<String, Bytes>, String>, Status> {
        if tag.starts_with(RESERVED_TAGS) {
            let message =
                format!("tag `{tag}`: tags that begin with `{RESERVED_TAGS}` are reserved");
            return Err(Status::invalid_argument(message));
        }
        let known = self.alive(address).await?;
        let round = known.round.clone().ok_or_else(|| unknown(address))?;
        self.informed.note(&round, address);
        let end = limit.map(|limit| Instant::now() + limit);
        let barrier = self.barrier_id(&round, tag, phase).await?;
        let mut caller: Caller = known.caller;
        loop {
            let beat = Instant::now() + BEAT;
            let deadline = end.map_or(beat, |end| end.min(beat));
            let passed = enter(&self.handle, caller, &barrier, data.clone(), deadline).await;
            match passed.map_err(|error| reject(&error))? {
                Passage::Released(data) => {
                    let of_member = round.members.iter().filter_map(|member| {
                        let data = Bytes::copy_from_slice(data.get(&member.node)?);
                        Some((member.address.clone(), data))
                    });
                    return Ok(Ok(of_member.collect()));
                }
                Passage::Ended { reason } => return Ok(Err(reason)),
                Passage::Waiting { reason } if end.is_some_and(|end| end <= Instant::now()) => {
                    return Ok(Err(format!("timed out: {reason}")));
                }
                Passage::Waiting { .. } => caller = self.alive(address).await?.caller,
            }
        }
    }

    async fn barrier_id(
        &self,
        round: &RoundRecord,
        tag: String,
        phase: Option<Phase>,
    ) -> Result<BarrierId, Status> {
        let phase = match phase {
            Some(phase) => phase,
            None => {
                let next = |reply| Event::NextPhase { tag: tag.clone(), reply };
                self.handle.ask(next).await.map_err(|error| reject(&error))?
            }
        };
        Ok(BarrierId { round: round.round, tag, phase })
    }

    /// Returns a node after it was registered, if it was not.
    async fn registered(&self, address: &str) -> Result<Known, Status> {
        if let Some(known) = self.find(address).await? {
            return self.renewed(known).await;
        }
        let record = AgentRecord::new(Runner::Program, address.to_owned(), 1);
        if !record.has_valid_address() {
            let message = format!("`{address}` is not an address (`host:port`)");
            return Err(status(ErrorKind::Invalid, message));
        }
        let value = serde_json::to_vec(&record)
            .map_err(|error| status(ErrorKind::Internal, error.to_string()))?;
        let key = self.keys.agent(NodeId::of_address(address));
        let lease = self.etcd.grant_unattended(TTL).await.map_err(failed)?;
        // If another call has registered the node at the same time, this lease ends unused.
        let _ = self.etcd.create(&key, &value, lease).await.map_err(failed)?;
        let deadline = Instant::now() + REGISTER_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(known) = self.find(address).await? {
                return Ok(known);
            }
            sleep(RETRY).await;
        }
        Err(status(ErrorKind::Unavailable, format!("{address} could not be registered in time")))
    }

    /// Returns a registered node, after renewing its lease.
    async fn alive(&self, address: &str) -> Result<Known, Status> {
        let known = self.find(address).await?.ok_or_else(|| unknown(address))?;
        self.renewed(known).await
    }

    async fn renewed(&self, known: Known) -> Result<Known, Status> {
        self.etcd.renew_once(known.lease).await.map_err(failed)?;
        Ok(known)
    }

    async fn find(&self, address: &str) -> Result<Option<Known>, Status> {
        let find = |reply| Event::Find { address: address.to_owned(), reply };
        self.handle.ask(find).await.map_err(|error| reject(&error))
    }
}

fn number_of(known: &Known) -> Round {
    known.round.as_ref().map_or(Round(0), |round| round.round)
}

fn unknown(address: &str) -> Status {
    let message = format!("{address} is not registered; call GetClusterSpec, and start again");
    status(ErrorKind::NotFound, message)
}
