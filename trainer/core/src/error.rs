//! What keeps a model from being built or from giving a gradient.

use steadfast_common::error::ErrorKind;
use thiserror::Error;

/// Why there is no model or no gradient. Records are numbered within their batch.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ModelError {
    /// The job file asks for a model that nobody registered.
    #[error("there is no model `{kind}`; known are {}", known.join(", "))]
    UnknownModel { kind: String, known: Vec<String> },
    /// The job file asks for something that the model cannot be; every fault is listed.
    #[error("{}", faults.join("; "))]
    BadSpec { faults: Vec<String> },
    /// The records are not those that the model was built for.
    #[error("records have {found} features, the model takes {expected}")]
    Width { expected: usize, found: usize },
    /// A batch was put together from pieces that do not match.
    #[error("a batch has the features of {features} records and {labels} labels")]
    Uneven { features: usize, labels: usize },
    /// A record of the dataset is unfit for any model.
    #[error("feature {feature} of record {record} is not a finite number")]
    BadFeature { record: usize, feature: usize },
    /// A record of the dataset has a label that is not a class.
    #[error("label {value} of record {record} is not a class from 0 to {}", classes.saturating_sub(1))]
    BadLabel { record: usize, value: f32, classes: usize },
    /// A record of the dataset has no finite label.
    #[error("label {value} of record {record} is not a finite number")]
    LabelNotFinite { record: usize, value: f32 },
    /// Training diverged: the records are sound and the loss is not.
    #[error("the loss is not finite; a lower learning rate or a bound on gradients may help")]
    NotFinite,
}

impl ModelError {
    /// What a caller does next.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::UnknownModel { .. }
            | Self::BadSpec { .. }
            | Self::Width { .. }
            | Self::BadFeature { .. }
            | Self::BadLabel { .. }
            | Self::LabelNotFinite { .. }
            | Self::NotFinite => ErrorKind::Invalid,
            Self::Uneven { .. } => ErrorKind::Internal,
        }
    }
}
