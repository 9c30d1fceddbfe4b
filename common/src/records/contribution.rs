//! Names of contributions. A name says which records a contribution covers, not which trainer computed it.

use std::sync::Arc;

use crate::ids::{Lane, Version};
use crate::records::applied_records::RecordRange;

/// Names a contribution; contributions with equal names carry equal bits.
#[derive(Clone, Debug, PartialEq)]
pub enum ContributionName {
    /// Synchronous mode.
    Lanes(LanesName),
    /// Asynchronous mode.
    Range {
        range: RecordRange,
        /// The version that the gradient was computed on, for information only.
        version: Version,
    },
}

/// Names the sum of a node of the lane tree, for the step that begins at `version`.
#[derive(Clone, Debug, PartialEq)]
pub struct LanesName {
    pub version: Version,
    /// The first lane of the node.
    pub first: Lane,
    /// The shares of the node's lanes, in order.
    pub shares: Arc<[LaneShare]>,
    /// How often evaluations have reduced the learning rate of the step.
    pub reductions: u32,
}

/// Describes the part of one lane in a contribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LaneShare {
    pub records: u32,
    /// Sum of the records' checksums.
    pub checksum: u64,
    pub end: LaneEnd,
    /// What the records count in the mean gradient and loss, if that is not their number.
    pub weight: Option<f64>,
}

impl LaneShare {
    /// Returns what the records count in the mean gradient and loss.
    pub fn weight(&self) -> f64 {
        self.weight.unwrap_or(f64::from(self.records))
    }
}

/// Says whether a lane has further records after a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneEnd {
    MoreToCome,
    /// The lane has no further records in this pass.
    LastOfPass,
}
