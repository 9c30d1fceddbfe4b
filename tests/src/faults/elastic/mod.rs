//! An elastic job of real processes under a fault schedule: agents whose workers train with PyTorch, masters, and
//! etcd.

mod history;
mod logs;
mod shape;
mod world;

pub use history::History as ElasticHistory;
pub use shape::ElasticShape;
pub use world::{ElasticOutcome, ElasticTarget};
