//! The handle to the event loop of an elastic job: its events and answers.

use std::collections::BTreeMap;
use std::sync::Arc;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{NodeId, Phase, Round};
use steadfast_common::records::JobOutcome;
use steadfast_common::records::rendezvous::{RoundRecord, Runner, SharedRecord};
use steadfast_common::records::scale::{ScaleRecord, ScaleWish};
use steadfast_common::status::{ElasticStatus, NodeReport};
use steadfast_master_core::rendezvous::{
    BarrierId, Caller, DealTerms, Directive, Held, JoinTerms, Refusal,
};
use tokio::sync::{mpsc, oneshot, watch};

use super::machine::Input;
use super::timings::RoundTimes;

/// The sender of an answer. The caller may no longer wait for it.
pub type Reply<T> = oneshot::Sender<Result<T, ElasticError>>;

/// An event for the loop.
#[derive(Debug)]
pub enum Event {
    Announce {
        caller: Caller,
        reply: Reply<()>,
    },
    Join {
        caller: Caller,
        terms: JoinTerms,
        reply: Reply<Directive>,
    },
    Watch {
        caller: Caller,
        known: Round,
        report: Option<NodeReport>,
        /// The last round in which a worker of the node has failed.
        failed: Round,
        reply: Reply<Change>,
    },
    Enter {
        caller: Caller,
        barrier: BarrierId,
        data: Arc<[u8]>,
        reply: Reply<Passage>,
    },
    /// A repeated [`Event::Enter`] whose data are known already.
    Look {
        caller: Caller,
        barrier: BarrierId,
        reply: Reply<Passage>,
    },
    Deal {
        caller: Caller,
        terms: DealTerms,
        reply: Reply<Held>,
    },
    GiveUp {
        caller: Caller,
        reason: String,
        report: Option<NodeReport>,
        reply: Reply<()>,
    },
    Find {
        address: String,
        reply: Reply<Option<Known>>,
    },
    NextPhase {
        tag: String,
        reply: Reply<Phase>,
    },
    Share {
        token: u64,
        state: Option<Vec<u8>>,
        reply: Reply<Shared>,
    },
    Scale {
        wish: ScaleWish,
        reply: Reply<ScaleRecord>,
    },
    ShutDown {
        outcome: JobOutcome,
        reason: String,
        reply: Reply<ShutDown>,
    },
}

/// The rounds of a job until it was shut down.
#[derive(Clone, Debug)]
pub struct ShutDown {
    /// The last round.
    pub last: Round,
    /// The times of the last rounds, the oldest first.
    pub times: Vec<RoundTimes>,
}

/// A node that was looked up by its address.
#[derive(Clone, Debug)]
pub struct Known {
    pub caller: Caller,
    /// The lease of its registration.
    pub lease: i64,
    /// The round that was formed last.
    pub round: Option<Arc<RoundRecord>>,
    /// See [`steadfast_master_core::rendezvous::Rendezvous::waiting_nodes`]; `None` before its first request.
    pub waiting_nodes: Option<i64>,
}

/// How a node's round changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Nodes to be added, or that will have no place, or, negative, removed; 0 if the round goes on.
    pub nodes: i64,
    /// Counts those of them that will have no place.
    pub surplus: u32,
    /// Addresses of removed nodes.
    pub lost: String,
    /// When nodes last joined or were removed.
    pub revision: i64,
    /// Address of another member, a worker of which has failed in the round; empty if there is none.
    pub failed: String,
}

/// The state of a barrier for one of its members.
#[derive(Clone, Debug)]
pub enum Passage {
    /// The barrier was released, with the data of each member.
    Released(Arc<BTreeMap<NodeId, Arc<[u8]>>>),
    Ended {
        reason: String,
    },
    Waiting {
        reason: String,
    },
}

/// The shared state after an event.
#[derive(Clone, Debug)]
pub struct Shared {
    pub record: Option<Arc<SharedRecord>>,
    pub accepted: bool,
}

/// Why the loop rejected an event.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ElasticError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("node {0} is not registered")]
    NotRegistered(NodeId),
    #[error("the address {address} is that of node {holder} already")]
    AddressTaken { address: String, holder: NodeId },
    #[error(
        "this node is run by {own}, and the others of the job by {others}; the nodes of a job have to be \
         run by the same program"
    )]
    OtherRunner { own: Runner, others: Runner },
    #[error("this master is not the acting master of an elastic job")]
    NotActing,
}

impl ElasticError {
    /// Returns the kind, which determines what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused(refusal) => refusal.kind(),
            Self::NotRegistered(_) => ErrorKind::NotYet,
            Self::AddressTaken { .. } => ErrorKind::Conflict,
            Self::OtherRunner { .. } => ErrorKind::Invalid,
            Self::NotActing => ErrorKind::Unavailable,
        }
    }
}

/// A handle to the loop. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ElasticHandle {
    pub(super) requests: mpsc::Sender<Input>,
    /// Changes when the answer to a waiting node, or to a member of a round, may have changed.
    pub(super) rounds: watch::Receiver<u64>,
    /// Changes when a barrier was released or has ended.
    pub(super) barriers: watch::Receiver<u64>,
    pub status: watch::Receiver<Arc<ElasticStatus>>,
}

impl ElasticHandle {
    /// Sends an event and waits for its answer.
    ///
    /// # Errors
    /// If the loop rejects the event, or has ended.
    pub async fn ask<T>(&self, event: impl FnOnce(Reply<T>) -> Event) -> Result<T, ElasticError> {
        let (reply, answer) = oneshot::channel();
        let request = Input::Request(event(reply));
        self.requests.send(request).await.map_err(|_| ElasticError::NotActing)?;
        answer.await.map_err(|_| ElasticError::NotActing)?
    }
}
