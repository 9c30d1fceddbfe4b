//! Checkpoints: takes them as the schedule decides, and deletes those that are superseded.

pub(crate) mod coordinator;
pub(crate) mod garbage_collection;
pub(crate) mod handover;
mod snapshot;
