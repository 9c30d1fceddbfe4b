//! What a master thinks: the task queues, the lanes' owners, the initialiser's election, the
//! staleness gate. Pure: time is given, etcd is elsewhere.

pub mod clocks;
pub mod deadlines;
mod draft;
pub mod election;
mod holdings;
pub mod lanes;
pub mod ledger;
pub mod rate;
pub mod restore_point;
pub mod sync_tasks;
