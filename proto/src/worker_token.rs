//! The secret by which an agent knows its own workers.

use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::{Request, Status};

/// Name of the header.
const HEADER: &str = "steadfast-worker-token";

/// Adds the secret of an agent to each call.
#[derive(Clone, Debug)]
pub struct WorkerToken(MetadataValue<Ascii>);

impl WorkerToken {
    /// Creates the token from its text, or returns `None` if a header cannot carry the text.
    pub fn new(text: &str) -> Option<Self> {
        let mut value: MetadataValue<Ascii> = text.parse().ok()?;
        // No log shows it.
        value.set_sensitive(true);
        Some(Self(value))
    }

    /// Returns the secret that a call shows.
    pub fn of<T>(request: &Request<T>) -> &[u8] {
        request.metadata().get(HEADER).map_or(&[], |value| value.as_bytes())
    }
}

impl Interceptor for WorkerToken {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert(HEADER, self.0.clone());
        Ok(request)
    }
}
