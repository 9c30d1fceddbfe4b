//! An embedded etcd: one process that serves the part of the etcd v3 API that Steadfast uses.
//!
//! It replaces a cluster for jobs on one machine, tests and simulations, with the same client code. A
//! conformance suite sends random sequences of requests to it and to a real etcd and compares every
//! reply; where they differ, real etcd is right.
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
//! From the inside out: `core` decides (pure: no clock, no files, no waiting), `disk` makes facts durable
//! (log and snapshot), `node` connects requests with both (one lock, group commit), `server` serves gRPC.
//!
//! Not supported: a cluster of several members, authentication, TLS, quotas and alarms, the lock
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
