//! Events of the event loop, and their replies.

use std::sync::Arc;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Version};
use steadfast_common::records::GenerationRecord;
use steadfast_common::records::applied_records::TaskRanges;
use steadfast_common::records::contribution::{ContributionName, LanesName};
use steadfast_common::records::position::Position;
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::Rows;
use steadfast_proto::{PullAnswer, PullValues, VersionMatch};
use steadfast_pserver_core::block_store::{InitialStates, Parameters, ShardSnapshot};
use steadfast_pserver_core::contribution::{Contributed, Contribution, Refusal, ValidatedBlock};
use steadfast_pserver_core::sync_shard::EarlyBlock;
use steadfast_pserver_core::tables::{Obsolete, TablesSnapshot};
use steadfast_pserver_storage::StorageError;
use tokio::sync::{mpsc, oneshot};

use crate::row_files::SavedRows;
use crate::shard_file::LoadedShard;

/// An event of the event loop.
#[derive(Debug)]
pub enum Event {
    /// The job began another generation; the reply says whether the slot must load its values.
    Generation { record: GenerationRecord, reply: Reply<Begun> },
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
    /// Requests the rows of all ranges as they are now.
    ReadTables { generation: Generation, reply: Reply<(Position, Arc<TablesSnapshot>)> },
    /// Rows that a snapshot found obsolete.
    Forget { generation: Generation, obsolete: Obsolete },
    /// Requests a snapshot at `version` (default: the current one).
    Snapshot { generation: Generation, version: Option<Version>, reply: Reply<SnapshotAnswer> },
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
    Snapshot(Box<SlotSnapshot>),
    /// The version is past, for all blocks or some of them.
    Past {
        present: Version,
    },
}

/// The values of a slot at one version, by reference.
#[derive(Debug)]
pub struct SlotSnapshot {
    pub layout: Arc<Layout>,
    pub shard: ShardSnapshot,
    pub tables: TablesSnapshot,
    /// What earlier checkpoints have of the rows.
    pub saved: Arc<SavedRows>,
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
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the pserver is shutting down")]
    ShuttingDown,
}

impl EventError {
    /// Returns the kind of the error: what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::OtherGeneration { .. } | Self::Superseded { .. } | Self::InUse => {
                ErrorKind::Stale
            }
            Self::NotInitialized => ErrorKind::NotYet,
            Self::Refused(refusal) => refusal.kind(),
            Self::ShuttingDown => ErrorKind::Unavailable,
        }
    }
}
