//! The status of a master, whatever it does: acts for a job of either kind, waits, or is a standby.

use std::sync::Arc;

use serde_json::{Value, json};
use steadfast_common::status::{Document, ElasticStatus, JobStatus, StandbyStatus};
use tokio::sync::watch;

use crate::acting::Acting;
use crate::elastic::service::Serving;

/// Reads the status. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct StatusView {
    pub job: String,
    pub acting: watch::Receiver<Option<Acting>>,
    pub elastic: watch::Receiver<Serving>,
    /// What this master waits for before it accepts calls. It holds the lock meanwhile.
    pub waits: watch::Receiver<Option<String>>,
}

/// A status of any kind.
enum AnyStatus {
    Training(Box<JobStatus>),
    Elastic(Arc<ElasticStatus>),
    Standby(StandbyStatus),
}

impl StatusView {
    /// Returns whether this master holds the lock.
    pub fn is_acting(&self) -> bool {
        let is_elastic = self.elastic.borrow().status().is_some();
        is_elastic || self.acting.borrow().is_some() || self.waits.borrow().is_some()
    }

    pub fn json(&self) -> Value {
        match self.read() {
            AnyStatus::Training(status) => json!(status),
            AnyStatus::Elastic(status) => json!(*status),
            AnyStatus::Standby(status) => json!(status),
        }
    }

    pub fn document(&self) -> Document {
        match self.read() {
            AnyStatus::Training(status) => status.document(),
            AnyStatus::Elastic(status) => status.document(),
            AnyStatus::Standby(status) => status.document(&self.job),
        }
    }

    fn read(&self) -> AnyStatus {
        let acting = self.acting.borrow().clone();
        match (acting, self.elastic.borrow().status()) {
            (Some(acting), _) => AnyStatus::Training(Box::new(acting.status())),
            (None, Some(status)) => AnyStatus::Elastic(status),
            (None, None) => AnyStatus::Standby(StandbyStatus::new(self.waits.borrow().clone())),
        }
    }
}
