//! What can be wrong with a checkpoint.

use steadfast_store::StoreError;

/// Why a checkpoint cannot be read. The message names the object at fault, if one is.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error("the manifest is not sound: {reason}")]
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

impl Fault {
    /// Whether the checkpoint itself is at fault, so that no other attempt can read it. A store
    /// that does not answer, or refuses us, says nothing about the checkpoint.
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Manifest { .. }
            | Self::Missing { .. }
            | Self::Damaged { .. }
            | Self::NotHeld { .. } => true,
            Self::Store { .. } => false,
        }
    }

    /// Sorts what a store said about `object`.
    pub(crate) fn of_store(object: &str, error: StoreError) -> Self {
        let object = object.to_owned();
        match error {
            StoreError::NotFound { .. } | StoreError::NoMatch { .. } => Self::Missing { object },
            StoreError::OutOfRange { .. } => {
                Self::Damaged { object, reason: "it has been cut short".to_owned() }
            }
            StoreError::BadName { .. } => {
                Self::Manifest { reason: format!("`{object}` is no name of an object") }
            }
            // The user's settings or the store are at fault, and both can be mended.
            error @ (StoreError::BadUrl { .. }
            | StoreError::PasswordInUrl { .. }
            | StoreError::CloudMissing { .. }
            | StoreError::Configuration { .. }
            | StoreError::Denied { .. }
            | StoreError::Unsupported { .. }
            | StoreError::TimedOut { .. }
            | StoreError::Failed { .. }) => Self::Store { object, source: error },
        }
    }
}
