//! How large a request may be.

use super::status::refused;
use crate::core::{Checked, Form, Refusal};
use prost::Message;
use tonic::{Request, Status};

/// Real etcd's `--max-request-bytes`: what may go into its log.
const LOGGED_BYTES_MAX: usize = 1_536 * 1_024;
/// Real etcd's gRPC server reads this much more before it hangs up on the request.
const RECEIVED_BYTES_MAX: usize = LOGGED_BYTES_MAX + 512 * 1_024;
/// What the envelope adds in real etcd's log to a request of that limit's size.
const ENVELOPE_BYTES: usize = 16;
/// Ours reads more, to answer with etcd's words rather than with those of the transport.
pub const DECODED_BYTES_MAX: usize = 4 * RECEIVED_BYTES_MAX;

/// Takes a request that only reads, if its size and its form are good.
pub fn admit_read<R: Form + Message>(request: Request<R>) -> Result<Checked<R>, Status> {
    let request = request.into_inner();
    let bytes = request.encoded_len();
    if bytes > RECEIVED_BYTES_MAX {
        let text =
            format!("grpc: received message larger than max ({bytes} vs. {RECEIVED_BYTES_MAX})");
        return Err(Status::resource_exhausted(text));
    }
    Checked::new(request).map_err(refused)
}

/// Takes a request that may write, if its size and its form are good. Bad form is told first.
pub fn admit_write<R: Form + Message>(request: Request<R>) -> Result<Checked<R>, Status> {
    let request = admit_read(request)?;
    check_logged(&request)?;
    Ok(request)
}

/// Refuses what real etcd would not take into its log.
pub fn check_logged<R: Message>(request: &Checked<R>) -> Result<(), Status> {
    if request.encoded_len() + ENVELOPE_BYTES > LOGGED_BYTES_MAX {
        return Err(refused(Refusal::RequestTooLarge));
    }
    Ok(())
}
