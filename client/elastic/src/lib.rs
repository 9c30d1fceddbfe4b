//! The client side of an elastic job: what a node does to take part in its rounds.
//!
//! A [`NodeSession`] registers a node under a lease, and makes the calls of the master's elastic service. A
//! [`Membership`] uses one session after the other: it registers the node again when its lease is lost, joins one
//! round after the other, and notices when a round is over.

mod changes;
mod membership;
mod node;

pub use changes::SeenChanges;
pub use membership::{Exited, JoinedRound, Membership, RoundOver, until_over};
pub use node::{
    Change, DealtRecords, Entered, Joined, NodeError, NodeIdentity, NodeSession, RecordsWish, Terms,
};
