//! The decision logic of the master: task queues, lane assignments, election of the initializer,
//! staleness gate, checkpoint schedule, rendezvous of nodes. It is pure: callers pass the time, and commit its
//! decisions to etcd.

pub mod checkpoint_schedule;
pub mod deadlines;
pub mod draft;
pub mod election;
pub mod given_up;
pub mod held_out;
mod holdings;
pub mod job_state;
pub mod lane_losses;
pub mod lanes;
pub mod ledger;
pub mod rate;
pub mod rendezvous;
pub mod restore_point;
pub mod saver;
pub mod scaling;
pub mod speeds;
pub mod staleness;
pub mod stream;
pub mod sync_tasks;
