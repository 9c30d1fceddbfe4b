//! The rendezvous of an elastic job: gathers nodes into rounds, and keeps their barriers.
//!
//! ```text
//!           announce            join               formed
//!   unknown ────────▶ starting ───────▶ waiting ────────────▶ member
//!      │                 │              ▲  ▲  ▲                │  │
//!      └────── join ─────┼──────────────┘  │  └───── join ─────┘  │
//!                        │                join                    │ join timeout, if the
//!                        └─ join timeout ─▶ late ◀────────────────┘ round is not intact
//!
//!   from any state: remove (the lease ended, or the node left) ──▶ unknown
//! ```
//!
//! A round is *intact* while each member is alive and has not asked for the next round. The round that was
//! formed last is the current one, intact or not, until the next is formed; so there is at most one.
//!
//! Decisions ([`Rendezvous::announce`], [`Rendezvous::join`], [`Rendezvous::remove`], [`Rendezvous::due`],
//! [`Rendezvous::enter`]) return facts. Answers ([`Rendezvous::ask`], [`Rendezvous::barrier`]) are computed
//! from the state after the facts, so a repeated request gets the same answer from a new master.
//!
//! Every request must come from the incarnation that is registered in etcd at that time.

mod barriers;
mod commits;
mod dealing;
mod ending;
mod gathering;
mod membership;
mod recovery;
mod refusal;
mod report;
mod scaling;
mod state;
#[cfg(test)]
mod tests;

use steadfast_common::ids::{Incarnation, NodeId};
use steadfast_common::records::commits::RecordOrder;
use steadfast_common::records::rendezvous::NodeRange;

pub use barriers::{
    BarrierId, EndedBy, Outcome, TAG_BYTES_MAX, TAGS_MAX, VALUE_BYTES_MAX, VALUES_BYTES_MAX,
};
pub use dealing::{DealTerms, Held};
pub use gathering::{FACTS_MAX, Timers};
pub use membership::{Directive, JoinTerms, KNOWN_MAX, Limit, Name, Names};
pub use recovery::InvalidRecord;
pub use refusal::Refusal;
pub use state::{Entries, Fact, Rendezvous};

/// The settings of the job.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub nodes: NodeRange,
    /// How long the first round is kept open after each arrival, if no node is known to be starting.
    pub last_call_ms: u64,
    /// How long nodes wait for those that are starting, and for members of the last round.
    pub join_timeout_ms: u64,
    /// The number of records of a pass, if commits count them.
    pub records: Option<u64>,
    /// Says how they are dealt to workers.
    pub order: RecordOrder,
}

/// The sender of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    pub node: NodeId,
    pub incarnation: Incarnation,
}

/// Describes what a node waits for: named nodes, and `missing` others to reach the minimum.
pub fn describe_wait(awaited: &Names, missing: usize) -> String {
    let nodes = if missing == 1 { "node" } else { "nodes" };
    match (awaited.count, missing) {
        (0, 0) => "waits for more nodes (last call)".to_owned(),
        (0, _) => format!("waits for {missing} more {nodes} to reach the minimum"),
        (_, 0) => format!("waits for {awaited}"),
        (_, _) => format!("waits for {awaited}, and {missing} more {nodes} to reach the minimum"),
    }
}
