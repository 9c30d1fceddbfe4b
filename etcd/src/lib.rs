//! An embedded etcd: one process that serves the part of the etcd v3 API that Steadfast uses.
//!
//! It is what a job on one machine, a test or a simulation has instead of a cluster: the same
//! client code speaks to it. A conformance suite plays random sequences of requests against it and
//! against a real etcd and compares every answer; where they differ, real etcd is right.
//!
//! ```no_run
//! # async fn example() -> Result<(), steadfast_etcd::Error> {
//! use steadfast_etcd::{Config, Server};
//! let listen = "127.0.0.1:2379".parse().expect("an address");
//! let server = Server::bind(Config::new(listen, "/var/lib/steadfast/etcd")).await?;
//! println!("etcd on {}", server.local_addr());
//! server.serve(std::future::pending()).await
//! # }
//! ```
//!
//! From the inside out: `core` thinks (pure: no clock, file or wait), `disk` remembers (log and
//! snapshot), `node` is where requests meet both (one lock, group commit), `server` speaks gRPC.
//!
//! What is absent: a cluster of several members, authentication, TLS, quotas and alarms, the lock
//! and election services, and snapshots in etcd's file format.

mod committer;
mod config;
mod core;
mod disk;
mod error;
mod node;
mod server;
mod simulated;

pub use config::Config;
pub use core::Retention;
pub use error::Error;
pub use server::Server;
pub use simulated::{Changed, Simulated, Unwritten};
