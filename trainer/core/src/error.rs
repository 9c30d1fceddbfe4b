//! Errors of building a model and of computing its gradient.

use steadfast_common::error::ErrorKind;
use thiserror::Error;

/// The reason why there is no model or no gradient. Records are numbered within their batch.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ModelError {
    /// The job file names a model that is not registered.
    #[error("there is no model `{kind}`; known are {}", known.join(", "))]
    UnknownModel { kind: String, known: Vec<String> },
    /// The job file has invalid settings for the model; every error is listed.
    #[error("{}", errors.join("; "))]
    BadSpec { errors: Vec<String> },
    /// The records do not fit the model.
    #[error("records have {found} features, the model expects {expected}")]
    Width { expected: usize, found: usize },
    /// The records do not fit the model.
    #[error("records have {found} columns of categories, the model expects {expected}")]
    Columns { expected: usize, found: usize },
    /// The parts of a batch do not match.
    #[error("a batch has features for {features} records but {labels} labels")]
    Uneven { features: usize, labels: usize },
    /// A record of the dataset has a feature that is not finite.
    #[error("feature {feature} of record {record} is not a finite number")]
    BadFeature { record: usize, feature: usize },
    /// A record of the dataset has a label that is not a class.
    #[error("label {value} of record {record} is not a class from 0 to {}; `dataset.classes` names other ones, such as [\"-1\", \"1\"]", classes.saturating_sub(1))]
    BadLabel { record: usize, value: f32, classes: usize },
    /// A record of the dataset has a label that is not finite.
    #[error("label {value} of record {record} is not a finite number")]
    LabelNotFinite { record: usize, value: f32 },
    /// A record of the dataset has a weight that is not one.
    #[error("the weight {value} of record {record} is not a finite number from 0 on")]
    BadWeight { record: usize, value: f32 },
    /// Training diverged: the records are valid but the loss, or its gradient, is not finite.
    #[error(
        "the loss or its gradient is not finite; a lower learning rate or gradient clipping may help"
    )]
    NotFinite,
    /// The model's own code failed.
    #[error("{message}")]
    Failed { message: String },
}

impl ModelError {
    /// Returns the kind of the error: what the caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::UnknownModel { .. }
            | Self::BadSpec { .. }
            | Self::Width { .. }
            | Self::Columns { .. }
            | Self::BadFeature { .. }
            | Self::BadLabel { .. }
            | Self::LabelNotFinite { .. }
            | Self::BadWeight { .. }
            | Self::NotFinite
            | Self::Failed { .. } => ErrorKind::Invalid,
            Self::Uneven { .. } => ErrorKind::Internal,
        }
    }
}
