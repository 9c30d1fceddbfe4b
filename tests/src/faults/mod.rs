//! Faults, fault schedules, and a world that runs a job under a schedule.

mod fault;
mod inject;
mod member;
mod schedule;
mod shape;
mod store;
mod world;

pub use fault::{Fault, Kind, Role};
pub use schedule::{Event, Schedule, When};
pub use shape::Shape;
pub use world::{FaultTarget, Outcome};
