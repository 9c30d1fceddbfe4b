//! Errors of reading a checkpoint.

use steadfast_store::StoreError;

/// A checkpoint that cannot be read. The message names the object that causes the error, if any.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("the manifest is invalid: {reason}")]
    Manifest { reason: String },
    #[error("{object} is missing")]
    Missing { object: String },
    #[error("{object} is damaged: {reason}")]
    Damaged { object: String, reason: String },
    #[error("no shard holds `{tensor}`")]
    NotHeld { tensor: String },
    #[error("{object} cannot be read: {source}")]
    Store { object: String, source: StoreError },
}

impl CheckpointError {
    /// Returns whether the checkpoint itself is damaged, so that a retry cannot succeed. An unavailable store, or
    /// denied access, does not imply that the checkpoint is damaged.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Manifest { .. }
            | Self::Missing { .. }
            | Self::Damaged { .. }
            | Self::NotHeld { .. } => true,
            Self::Store { .. } => false,
        }
    }

    /// Classifies a store's error for `object`.
    pub(crate) fn of_store(object: &str, error: StoreError) -> Self {
        let object = object.to_owned();
        match error {
            StoreError::NotFound { .. } | StoreError::NoMatch { .. } => Self::Missing { object },
            StoreError::OutOfRange { .. } => {
                Self::Damaged { object, reason: "it is truncated".to_owned() }
            }
            StoreError::BadName { .. } => {
                Self::Manifest { reason: format!("`{object}` is not a valid object name") }
            }
            // Caused by the user's settings or the store; both can be fixed.
            error @ (StoreError::BadUrl { .. }
            | StoreError::PasswordInUrl { .. }
            | StoreError::CloudMissing { .. }
            | StoreError::NoContainer { .. }
            | StoreError::OddName { .. }
            | StoreError::Configuration { .. }
            | StoreError::Denied { .. }
            | StoreError::Unsupported { .. }
            | StoreError::TimedOut { .. }
            | StoreError::Failed { .. }) => Self::Store { object, source: error },
        }
    }
}
