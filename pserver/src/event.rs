//! Events of the event loop, and their replies.

use std::sync::Arc;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Slot, Version};
use steadfast_common::records::applied_records::TaskRanges;
use steadfast_common::records::contribution::{ContributionName, LanesName};
use steadfast_common::records::position::Position;
use steadfast_common::records::{GenerationRecord, ShardRecord};
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::placement::PlacementRecord;
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::Rows;
use steadfast_proto::{PullAnswer, PullValues, VersionMatch};
use steadfast_pserver_core::block_store::{InitialStates, Parameters, ShardSnapshot};
use steadfast_pserver_core::contribution::{Contributed, Contribution, Refusal, ValidatedBlock};
use steadfast_pserver_core::sync_shard::EarlyBlock;
use steadfast_pserver_core::tables::{Obsolete, TablesSnapshot};
use steadfast_pserver_storage::StorageError;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::follower::{Applicant, StepRequest};
use crate::row_files::SavedRows;
use crate::shard_file::LoadedShard;

/// An event of the event loop.
#[derive(Debug)]
pub enum Event {
    /// The job began another generation; the reply says whether the slot must load its values.
    Generation { record: GenerationRecord, reply: Reply<Begun> },
    /// The job began a generation without this slot, whose slots may need what it hands over.
    GenerationWithout { record: GenerationRecord },
    /// The shard of a generation was loaded from a checkpoint.
    Restored { generation: Generation, loaded: LoadedShard },
    /// Rows cannot be kept, or cannot be read: they are lost.
    StorageFailed { error: StorageError },
    /// Initial values from the elected trainer.
    Init { generation: Generation, attempt: u64, first: InitialValues, reply: Reply<()> },
    /// Some blocks of a push in progress. Blocks that contradict applied ones end the shard; other errors are
    /// reported in the reply to the push.
    Part { generation: Generation, lanes: LanesName, blocks: Vec<ValidatedBlock> },
    /// A complete push, or the rest of one.
    Push {
        generation: Generation,
        name: ContributionName,
        contribution: Contribution,
        reply: Reply<Pushed>,
    },
    /// The global norm of the complete step from `version` to the next.
    Norm { generation: Generation, version: Version, norm: f64 },
    /// Requests the values at a version: once it is reached, or at once.
    Pull {
        generation: Generation,
        versions: VersionMatch,
        values: PullValues,
        wait_mode: WaitMode,
        /// Receives blocks that reach exactly that version before the other blocks. They are valid only if
        /// the reply confirms that version.
        early: mpsc::UnboundedSender<EarlyBlock>,
        reply: Reply<PullAnswer<Parameters>>,
    },
    /// Requests rows of each table, as a pull; their ids lie in the slot's ranges.
    PullRows {
        generation: Generation,
        versions: VersionMatch,
        ids: Vec<RowIds>,
        reply: Reply<PullAnswer<PositionedRows>>,
    },
    /// Requests the tasks of the current pass that all blocks reflect, and the layout of the model.
    Applied { generation: Generation, reply: Reply<(TaskRanges, Arc<Layout>)> },
    /// Requests the state of the slot, for a pserver that follows it from then on.
    Follow { generation: Generation, applicant: Applicant, reply: Reply<FollowStart> },
    /// Requests the step from `version` on, for the follower, which has all steps before.
    FollowStep { follower: Uuid, request: StepRequest, reply: Reply<()> },
    /// Has what the follower reports of its state, for who compares it with that of this slot.
    Report { follower: Uuid, comparison: u64, report: FollowerReport },
    /// No follower is recorded in etcd.
    NotRecorded,
    /// The lease of the follower has ended.
    FollowerGone { follower: Uuid },
    /// Requests the rows of all ranges as they are now.
    ReadTables { generation: Generation, reply: Reply<(Position, Arc<TablesSnapshot>)> },
    /// Rows that a snapshot found obsolete.
    Forget { generation: Generation, obsolete: Obsolete },
    /// Requests a snapshot at `version` (default: the current one).
    Snapshot {
        generation: Generation,
        version: Option<Version>,
        keeper: Keeper,
        reply: Reply<SnapshotAnswer>,
    },
    /// Requests the state that this slot hands over, if it is that of `version`.
    ReadHandover { version: Version, reply: Reply<Handed> },
    /// One of `slots` slots was sent what it needs of the state that this slot hands over.
    HandoverSent { reader: Slot, slots: u32 },
}

/// Who keeps a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// The caller.
    Caller,
    /// The caller, or the follower of the slot in its place, as a shard of a checkpoint that is uploaded after this
    /// time.
    Checkpoint { upload_after: Duration },
    /// The slot as well, for those of the next generation.
    Slot,
}

/// The values of a slot at the beginning of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// The values from the previous generation.
    Kept,
    Empty,
}

/// The channel of a reply. The receiver may have been dropped.
pub type Reply<T> = oneshot::Sender<Result<T, EventError>>;

/// Layout and values of an initialization.
#[derive(Debug)]
pub struct InitialValues {
    pub layout: Arc<Layout>,
    /// One vector for each of the slot's blocks, in order.
    pub values: Vec<Vec<f32>>,
    pub states: InitialStates,
}

/// The reply to a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    pub version: Version,
    pub outcome: Contributed,
}

/// Rows of each table, and the position that they reflect.
pub type PositionedRows = (Position, Vec<Rows>);

/// Whether a pull waits for its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    UntilReady,
    Immediate,
}

/// The reply to a snapshot request.
#[derive(Debug)]
pub enum SnapshotAnswer {
    Snapshot {
        snapshot: Box<SlotSnapshot>,
        /// Gets what the follower of the slot reports of the same version, if the slot has one.
        of_follower: Option<OfFollower>,
    },
    /// The version is past, for all blocks or some of them.
    Past { present: Version },
}

/// Gives what the follower of a slot reports of its state; ends without a report if the slot is not followed any more.
#[derive(Debug)]
pub struct OfFollower {
    pub follower: Uuid,
    /// Whether it was asked to save its state.
    pub saves: bool,
    pub report: oneshot::Receiver<FollowerReport>,
}

/// The report of a follower about its state at one version.
#[derive(Clone, Debug, PartialEq)]
pub struct FollowerReport {
    /// As `ShardStore::state_digest` returns it, or in its place what is wrong with the state. `None` if it could not be computed.
    pub digest: Option<String>,
    /// The shard that it has saved.
    pub saved: Option<ShardRecord>,
}

/// The values of a slot at one version, by reference.
#[derive(Clone, Debug)]
pub struct SlotSnapshot {
    pub layout: Arc<Layout>,
    pub shard: ShardSnapshot,
    pub tables: Arc<TablesSnapshot>,
    /// What earlier checkpoints have of the rows.
    pub saved: Arc<SavedRows>,
}

/// A state that a slot hands over.
#[derive(Clone, Debug)]
pub struct Handed {
    /// The generation in which it was taken.
    pub of: Generation,
    pub snapshot: SlotSnapshot,
}

/// Holds the state that a pserver begins to follow the slot with.
#[derive(Debug)]
pub struct FollowStart {
    pub snapshot: SlotSnapshot,
    pub placement: PlacementRecord,
    /// Is dropped when the snapshot was sent.
    pub token: Arc<()>,
}

/// The reason why the event loop refused an event.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EventError {
    #[error("the call is for generation {found}; this slot is in generation {present}")]
    OtherGeneration { found: Generation, present: Generation },
    #[error("the parameters are not initialized yet")]
    NotInitialized,
    #[error("the parameters were initialized by a later attempt, {latest}")]
    Superseded { latest: u64 },
    #[error("training has begun; the parameters cannot be initialized again")]
    InUse,
    #[error("the slot is followed by {by}")]
    Followed { by: Uuid },
    #[error("the slot is not followed by {found}")]
    NotFollowed { found: Uuid },
    #[error("the slot hands over no state of version {found}")]
    NoHandover { found: Version },
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the pserver is shutting down")]
    ShuttingDown,
}

impl EventError {
    /// Returns the kind of the error: what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::OtherGeneration { .. }
            | Self::Superseded { .. }
            | Self::InUse
            | Self::NotFollowed { .. }
            | Self::NoHandover { .. } => ErrorKind::Stale,
            Self::Followed { .. } => ErrorKind::Conflict,
            Self::NotInitialized => ErrorKind::NotYet,
            Self::Refused(refusal) => refusal.kind(),
            Self::ShuttingDown => ErrorKind::Unavailable,
        }
    }
}
