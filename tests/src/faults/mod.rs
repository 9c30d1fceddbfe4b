//! Faults, fault schedules, and a world that runs a job under a schedule.

mod driver;
mod elastic;
mod fault;
mod feed;
mod inject;
mod member;
mod schedule;
mod shape;
mod soak;
mod store;
mod world;

pub use elastic::{ElasticHistory, ElasticOutcome, ElasticShape, ElasticTarget};
pub use fault::{Fault, Kind, Role};
pub use feed::{FILE_RECORDS, Feed};
pub use schedule::{Event, Schedule, Targets, When};
pub use shape::{Shape, Workload};
pub use soak::{Soak, Usage};
pub use world::{FaultTarget, Outcome};
