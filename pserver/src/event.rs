//! What the engine is told, and what it answers.

use std::sync::Arc;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Lane, Version};
use steadfast_common::layout::Layout;
use steadfast_common::records::GenerationRecord;
use steadfast_common::tally::TaskPiece;
use steadfast_pserver_core::contribution::{Contributed, Contribution, Finite, LaneShare, Refusal};
use steadfast_pserver_core::shard::{Cut, EarlyBlock, Parameters};
use tokio::sync::{mpsc, oneshot};

/// What the engine is told.
#[derive(Debug)]
pub enum Event {
    /// The job began another generation; the answer is what this slot has to do.
    Generation { record: GenerationRecord, reply: Reply<Begun> },
    /// The shard of a generation was loaded from its checkpoint.
    Restored { generation: Generation, layout: Arc<Layout>, cut: Cut },
    /// First values from the elected trainer.
    Init { generation: Generation, attempt: u64, first: FirstValues, reply: Reply<()> },
    /// Some blocks of a push that is coming in. What is wrong with it is told at its end.
    Part { generation: Generation, lanes: LanesName, blocks: Vec<Finite> },
    /// A push, or what is left of it.
    Push {
        generation: Generation,
        name: PushName,
        contribution: Contribution,
        reply: Reply<Pushed>,
    },
    /// The global norm of the complete step that makes `version` old.
    Norm { generation: Generation, version: Version, norm: f64 },
    /// The values at `version`: once it has come, or at once.
    Pull {
        generation: Generation,
        version: Version,
        which: Which,
        patience: Patience,
        /// Where blocks go that have come to exactly that version before others have. They count once
        /// the reply says that it has come.
        early: mpsc::UnboundedSender<EarlyBlock>,
        reply: Reply<Pulled>,
    },
    /// Everything at `version` (now, if none is named).
    Cut { generation: Generation, version: Option<Version>, reply: Reply<CutAnswer> },
}

/// What a slot has at the beginning of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// The values that it had.
    Kept,
    Nothing,
}

/// Where an answer goes. Nobody may be waiting any more.
pub type Reply<T> = oneshot::Sender<Result<T, EngineError>>;

/// Layout and values of an initialisation.
#[derive(Debug)]
pub struct FirstValues {
    pub layout: Arc<Layout>,
    /// One vector for each of the slot's blocks, in order.
    pub values: Vec<Vec<f32>>,
}

/// What a push is called; equal names carry equal bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PushName {
    Lanes(LanesName),
    Piece(TaskPiece),
}

/// The sum of as many lanes from `first` on as there are shares, for the step from `version` on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LanesName {
    pub version: Version,
    pub first: Lane,
    pub shares: Arc<[LaneShare]>,
}

/// The answer to a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pushed {
    pub version: Version,
    pub outcome: Contributed,
}

/// The answer to a pull.
#[derive(Debug)]
pub enum Pulled {
    Parameters(Parameters),
    /// The version is past, or has not come.
    NotThere {
        present: Version,
    },
}

/// Whether a pull waits for its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    Waits,
    None,
}

/// Which versions will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    AtLeast,
    Exactly,
}

/// The answer to a request for a cut.
#[derive(Debug)]
pub enum CutAnswer {
    Cut {
        layout: Arc<Layout>,
        cut: Cut,
    },
    /// The version is past, or some blocks are.
    Past {
        present: Version,
    },
}

/// Why the loop refused an event.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EngineError {
    #[error("generation {found} was meant; this slot is in generation {present}")]
    OtherGeneration { found: Generation, present: Generation },
    #[error("the parameters are not initialised yet")]
    NotInitialised,
    #[error("the parameters were initialised by a later attempt, {latest}")]
    Superseded { latest: u64 },
    #[error("training has begun; the parameters cannot be initialised again")]
    InUse,
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the pserver is ending")]
    Ending,
}

impl EngineError {
    /// What the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::OtherGeneration { .. } | Self::Superseded { .. } | Self::InUse => {
                ErrorKind::Stale
            }
            Self::NotInitialised => ErrorKind::NotYet,
            Self::Refused(refusal) => refusal.kind(),
            Self::Ending => ErrorKind::Unavailable,
        }
    }
}
