//! Bytes in object stores: local files, memory, S3, Google Cloud Storage, Azure and plain HTTP
//! behind one small API. Every operation names its URL in errors and ends within a bounded time.

mod address;
#[cfg(feature = "cloud")]
mod cloud;
mod error;
mod expand;
mod location;
mod root;
mod unfinished;

pub use error::{ErrorKind, StoreError};
pub use expand::expand;
pub use location::{Created, Location, open};
pub use object_store::PutPayload;
pub use root::{Mounted, mount};
