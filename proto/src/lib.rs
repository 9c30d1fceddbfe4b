//! The wire protocol: messages and services of `steadfast.v1`, and the mapping between error kinds and
//! gRPC codes.

mod access;
mod calls;
mod contribution;
mod decoder;
mod framing;
mod param;
mod pull;
pub mod tensor;
mod tensor_method;
mod worker_token;

pub use access::access;
pub use calls::{answer, answer_as_it_comes, call, next, read_one};
pub use decoder::Decoder;
pub use framing::{encode, encode_chunks, framed};
pub use pull::{PullAnswer, PullValues, VersionMatch};
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Pass, Version};
use steadfast_common::records::position::Position;
pub use tensor_method::TensorMethod;
use tonic::{Code, Status};
pub use worker_token::WorkerToken;

/// Messages, clients and servers, as generated from `steadfast/v1/*.proto`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("steadfast.v1");
}

/// The largest message that either side accepts: a few blocks.
pub const MESSAGE_BYTES_MAX: usize = 8 << 20;

impl From<v1::Position> for Position {
    fn from(wire: v1::Position) -> Self {
        Self {
            version: Version(wire.version),
            pass: Pass(wire.pass),
            pass_start: Version(wire.pass_start),
            examples: wire.examples,
            loss: wire.loss,
        }
    }
}

impl From<Position> for v1::Position {
    fn from(position: Position) -> Self {
        Self {
            version: position.version.0,
            pass: position.pass.0,
            pass_start: position.pass_start.0,
            examples: position.examples,
            loss: position.loss,
        }
    }
}

/// Builds the status for an error of `kind`.
pub fn status(kind: ErrorKind, message: impl Into<String>) -> Status {
    let code = match kind {
        ErrorKind::Invalid => Code::InvalidArgument,
        ErrorKind::NotFound => Code::NotFound,
        ErrorKind::Conflict => Code::AlreadyExists,
        ErrorKind::Stale => Code::FailedPrecondition,
        ErrorKind::NotYet => Code::Aborted,
        ErrorKind::Unavailable => Code::Unavailable,
        ErrorKind::TooLarge => Code::ResourceExhausted,
        ErrorKind::Denied => Code::PermissionDenied,
        ErrorKind::Internal => Code::Internal,
    };
    Status::new(code, message)
}

/// Returns the error kind of a status.
pub fn kind(status: &Status) -> ErrorKind {
    // The status of a broken connection has a source, whatever its code. A status from the peer has none.
    if std::error::Error::source(status).is_some() {
        return ErrorKind::Unavailable;
    }
    match status.code() {
        Code::InvalidArgument | Code::Unimplemented => ErrorKind::Invalid,
        Code::NotFound => ErrorKind::NotFound,
        Code::AlreadyExists => ErrorKind::Conflict,
        Code::FailedPrecondition => ErrorKind::Stale,
        Code::Aborted => ErrorKind::NotYet,
        Code::ResourceExhausted | Code::OutOfRange => ErrorKind::TooLarge,
        Code::PermissionDenied | Code::Unauthenticated => ErrorKind::Denied,
        // A broken connection appears as `Unknown` or `Cancelled`, a timeout as `DeadlineExceeded`: in each
        // case the call can be retried.
        Code::Unavailable | Code::Cancelled | Code::Unknown | Code::DeadlineExceeded => {
            ErrorKind::Unavailable
        }
        Code::Ok | Code::Internal | Code::DataLoss => ErrorKind::Internal,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_error_survives_the_wire() {
        for sent in [
            ErrorKind::Invalid,
            ErrorKind::NotFound,
            ErrorKind::Conflict,
            ErrorKind::Stale,
            ErrorKind::NotYet,
            ErrorKind::Unavailable,
            ErrorKind::TooLarge,
            ErrorKind::Denied,
            ErrorKind::Internal,
        ] {
            assert_eq!(kind(&status(sent, "why")), sent);
        }
    }

    /// F25: HTTP/2 reports some broken connections as `Internal` or `ResourceExhausted`.
    #[test]
    fn a_connection_that_broke_is_no_word_of_the_other_side() {
        for code in [Code::Internal, Code::ResourceExhausted, Code::PermissionDenied] {
            let mut broken = Status::new(code, "h2 protocol error");
            broken.set_source(std::sync::Arc::new(std::io::Error::other("reset")));
            assert_eq!(kind(&broken), ErrorKind::Unavailable);
        }
    }
}
