//! The decision logic of the master: task queues, lane assignments, election of the initialiser,
//! staleness gate. It is pure: callers pass the time, and commit its decisions to etcd.

pub mod clocks;
pub mod deadlines;
mod draft;
pub mod election;
pub mod given_up;
pub mod held_out;
mod holdings;
pub mod lane_losses;
pub mod lanes;
pub mod ledger;
pub mod rate;
pub mod restore_point;
pub mod saver;
pub mod sync_tasks;
