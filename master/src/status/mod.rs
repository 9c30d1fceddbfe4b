//! The status of the job, and its forms: page, metrics, TensorBoard.

mod curve;
pub(crate) mod metrics;
pub(crate) mod page;
mod picture;
pub(crate) mod status_snapshot;
pub(crate) mod tensorboard;
pub(crate) mod timeline;
pub(crate) mod view;
