//! The network interface of a process: ports, channels and TLS.
//!
//! The default implementation is gRPC over HTTP/2. A simulation installs a [`Network`] of its own for
//! one thread with [`enter`], beside its `steadfast_host::Host`.

mod channel;
mod connect;
mod held_port;
pub mod incoming;
pub mod peers;
mod port;
mod probe;
mod ring;
mod shared_memory;
mod simulated;
pub mod tls;
pub mod traces;
mod unix;

use std::time::Duration;

pub use channel::{Channel, connect_once};
pub use held_port::HeldPort;
pub use port::{Port, SimulatedPort};
pub use probe::{Probe, probe};
pub use simulated::{Network, SimulatedChannel, enter, simulated};
pub use tls::TlsIdentity;

/// HTTP/2 flow-control window of one stream: enough for 10 Gbit/s over 3 ms. Bytes beyond it wait at the
/// sender; a larger window only fills caches at the receiver.
const STREAM_WINDOW_BYTES: u32 = 4 << 20;

/// HTTP/2 flow-control window of one connection.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;

/// Largest HTTP/2 frame; large frames keep the cost per byte low.
const FRAME_BYTES: u32 = 1 << 20;

/// Timeout for opening a connection.
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// Interval of pings on a connection, and the timeout for their reply: a peer that disappears without
/// closing the connection is detected within their sum.
const PING_EVERY: Duration = Duration::from_secs(5);
const PING_TIMEOUT: Duration = Duration::from_secs(5);
