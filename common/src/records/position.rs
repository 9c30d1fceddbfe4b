//! How far training has come.

use serde::{Deserialize, Serialize};

use crate::ids::{Pass, Version};

/// The position of training that some parameters reflect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Position {
    pub version: Version,
    pub pass: Pass,
    /// The version at which the pass began.
    pub pass_start: Version,
    /// Number of records that the parameters reflect.
    pub examples: u64,
    /// Mean loss per record in the last update; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
}
