//! Requests that a rendezvous refuses.

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{NodeId, Phase, Round};
use steadfast_common::records::commits::{CommitId, CommitRecord, DataPosition};

use super::Caller;

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the job is over")]
    Over,
    #[error("incarnation {} of node {} is not known; register again", .0.incarnation, .0.node)]
    Unknown(Caller),
    #[error(
        "the node expects {} to {} nodes, and the job {} to {}",
        given.0, given.1, expected.0, expected.1
    )]
    NodeRange { given: (u32, u32), expected: (u32, u32) },
    #[error("`{address}` is not an address (`host:port`)")]
    Address { address: String },
    #[error("the node has {given} slots; 1 to {limit} are allowed")]
    Slots { given: u32, limit: u32 },
    #[error("{limit} nodes are known already, which is the limit")]
    TooManyNodes { limit: usize },
    #[error("node {node} is not a member of round {round}")]
    NotMember { node: NodeId, round: Round },
    #[error("the tag has {given} bytes; 1 to {limit} are allowed")]
    TagLength { given: usize, limit: usize },
    #[error("the tag `{tag}` has characters other than visible ASCII without `/`")]
    TagCharacters { tag: String },
    #[error(
        "the round has {limit} tags already, which is the limit; use them again in a next phase"
    )]
    TooManyTags { limit: usize },
    #[error("the tag `{tag}` is in phase {next}, not {given}")]
    FuturePhase { tag: String, given: Phase, next: Phase },
    #[error("the node's data have {given} bytes; {limit} are allowed for one node")]
    ValueTooLarge { given: usize, limit: usize },
    #[error("the job has no `records`, so its commits are not decided together")]
    NoRecords,
    #[error("a member passes {what}, which is not a position in {records} records")]
    Position { what: String, records: u64 },
    #[error(
        "this node's state has seen {} records and is at record {} of pass {}; that of another member has seen \
         {} and is at record {} of pass {}: all workers commit after the same update",
        own.seen, own.used, own.pass, other.seen, other.used, other.pass
    )]
    OtherPosition { own: DataPosition, other: DataPosition },
    #[error(
        "a state that has seen {} records and is at record {} of pass {} cannot follow commit {}, which has seen {} \
         and is at record {} of pass {}",
        given.seen, given.used, given.pass, last.id, last.position.seen, last.position.used, last.position.pass
    )]
    NotNext { given: DataPosition, last: Box<CommitRecord> },
    #[error("the order of the job's records is fixed, so none are dealt (`order` of the job file)")]
    NotDealt,
    #[error("the workers of round {round} have not said yet which state they begin with")]
    NotBegun { round: Round },
    #[error(
        "the node holds {limit} ranges of records that no commit has seen, which is the limit; commit more often"
    )]
    TooManyRanges { limit: usize },
    #[error("a member passes {what}, which is no progress for commit {id}")]
    Progress { what: String, id: CommitId },
    #[error(
        "this node's workers begin with the state of number {own}, and those of another member with that of {other}: \
         all begin with the same"
    )]
    OtherState { own: u64, other: u64 },
    #[error(
        "it is not known which records the state of number {state} has seen: it is not that of the last commit, and says \
         no earlier one; remove its file to begin anew"
    )]
    OldState { state: u64 },
    #[error("node {node} has used records that it does not hold")]
    NotHeld { node: NodeId },
    #[error(
        "the data of tag `{tag}` would have {given} bytes; {limit} are allowed for all nodes together"
    )]
    ValuesTooLarge { tag: String, given: usize, limit: usize },
}

impl Refusal {
    /// Returns what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unknown(_) => ErrorKind::NotFound,
            Self::NodeRange { .. }
            | Self::OtherPosition { .. }
            | Self::OtherState { .. }
            | Self::OldState { .. }
            | Self::NotHeld { .. }
            | Self::NotNext { .. } => ErrorKind::Conflict,
            Self::NotBegun { .. } => ErrorKind::NotYet,
            Self::Address { .. }
            | Self::Slots { .. }
            | Self::NoRecords
            | Self::NotDealt
            | Self::Position { .. }
            | Self::Progress { .. }
            | Self::TagLength { .. }
            | Self::TagCharacters { .. } => ErrorKind::Invalid,
            Self::Over | Self::NotMember { .. } | Self::FuturePhase { .. } => ErrorKind::Stale,
            Self::TooManyNodes { .. }
            | Self::TooManyRanges { .. }
            | Self::TooManyTags { .. }
            | Self::ValueTooLarge { .. }
            | Self::ValuesTooLarge { .. } => ErrorKind::TooLarge,
        }
    }
}
