//! The gRPC codes of refusals, the same as real etcd's.

use crate::core::Refusal;
use crate::node::NodeError;
use tonic::{Code, Status};

pub fn refused(refusal: Refusal) -> Status {
    let code = match refusal {
        Refusal::EmptyKey
        | Refusal::KeyNotFound
        | Refusal::ValueProvided
        | Refusal::LeaseProvided
        | Refusal::TooManyOperations
        | Refusal::DuplicateKey
        | Refusal::InvalidSortOption
        | Refusal::RequestTooLarge => Code::InvalidArgument,
        Refusal::Compacted | Refusal::FutureRevision | Refusal::LeaseTtlTooLarge => {
            Code::OutOfRange
        }
        Refusal::LeaseNotFound => Code::NotFound,
        Refusal::LeaseExists => Code::FailedPrecondition,
    };
    Status::new(code, refusal.to_string())
}

pub fn status_of(error: NodeError) -> Status {
    match error {
        NodeError::Refused(refusal) => refused(refusal),
        NodeError::Stopped => stopped(),
    }
}

pub fn stopped() -> Status {
    Status::unavailable("etcdserver: server stopped")
}
