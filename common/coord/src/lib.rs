//! Everything we ask of etcd: reads, fenced commits, leases with a deadline of their holder's own,
//! and pictures of keys that stay current. The only crate on the client's side that names
//! etcd-client.

mod clock;
mod error;
mod etcd;
mod mirror;
mod op;
mod reign;
mod retry;
mod session;
mod troubles;
mod users;

pub use clock::now;
pub use error::CoordError;
pub use etcd::{Entry, Etcd, EtcdOptions};
pub use mirror::{Mirror, Range, View};
pub use op::Op;
pub use reign::{COMPARES_MAX, Commit, Condition, OPS_MAX, Reign};
pub use retry::pauses;
pub use session::{Deadline, Session};
pub use troubles::{Troubles, troubles};
pub use users::Grant;
