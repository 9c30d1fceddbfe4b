//! Size limits of requests.

use super::status::refused;
use crate::core::{Checked, Refusal, Validate};
use prost::Message;
use tonic::{Request, Status};

/// Real etcd's `--max-request-bytes`: the limit for its log.
const LOGGED_BYTES_MAX: usize = 1_536 * 1_024;
/// Real etcd's gRPC server receives this much more before it refuses a message.
const RECEIVED_BYTES_MAX: usize = LOGGED_BYTES_MAX + 512 * 1_024;
/// What real etcd's log adds to a request of up to [`LOGGED_BYTES_MAX`].
const ENVELOPE_BYTES: usize = 16;
/// Our server receives more, to reply with etcd's message instead of the transport's.
pub const DECODED_BYTES_MAX: usize = 4 * RECEIVED_BYTES_MAX;

/// Validates the size and the fields of a request that only reads.
pub fn admit_read<R: Validate + Message>(request: Request<R>) -> Result<Checked<R>, Status> {
    let request = request.into_inner();
    let bytes = request.encoded_len();
    if bytes > RECEIVED_BYTES_MAX {
        let text =
            format!("grpc: received message larger than max ({bytes} vs. {RECEIVED_BYTES_MAX})");
        return Err(Status::resource_exhausted(text));
    }
    Checked::new(request).map_err(refused)
}

/// Validates a request that may write. An invalid field takes precedence over the size limit of the log.
pub fn admit_write<R: Validate + Message>(request: Request<R>) -> Result<Checked<R>, Status> {
    let request = admit_read(request)?;
    check_logged(&request)?;
    Ok(request)
}

/// Refuses a request that is too large for real etcd's log.
pub fn check_logged<R: Message>(request: &Checked<R>) -> Result<(), Status> {
    if request.encoded_len() + ENVELOPE_BYTES > LOGGED_BYTES_MAX {
        return Err(refused(Refusal::RequestTooLarge));
    }
    Ok(())
}
