//! Faults, schedules of faults, and a world in which a job meets them.

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
pub use world::{Outcome, World};
