//! Object stores (local files, memory, S3, Google Cloud Storage, Azure and plain HTTP) behind one small
//! API. Errors of every operation name the URL, and every operation has a time limit.

mod address;
#[cfg(feature = "cloud")]
mod cloud;
mod error;
mod expand;
mod listing;
mod location;
mod root;
mod unfinished;
mod writer;

pub use error::{ErrorKind, StoreError};
pub use expand::{Expanded, Matching, expand, list_matching};
pub use location::{Created, Listed, Location, open};
pub use object_store::PutPayload;
pub use root::{Mounted, mount};
pub use writer::ObjectWriter;
