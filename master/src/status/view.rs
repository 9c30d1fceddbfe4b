//! The status of a master, whatever it does: acts for a job of either kind, waits, or is a standby.

use serde_json::{Value, json};
use steadfast_common::status::{Document, StandbyStatus};
use tokio::sync::watch;

use crate::acting_handles::ActingHandles;
use crate::elastic::service::Serving;

/// Reads the status. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct StatusView {
    pub job: String,
    pub acting: watch::Receiver<Option<ActingHandles>>,
    pub elastic: watch::Receiver<Serving>,
    /// What this master waits for before it accepts calls. It holds the lock meanwhile.
    pub waits: watch::Receiver<Option<String>>,
}

impl StatusView {
    /// Returns whether this master holds the lock.
    pub fn is_acting(&self) -> bool {
        let is_elastic = self.elastic.borrow().status().is_some();
        is_elastic || self.acting.borrow().is_some() || self.waits.borrow().is_some()
    }

    pub fn json(&self) -> Value {
        if let Some(acting) = &*self.acting.borrow() {
            return json!(acting.status());
        }
        self.elastic.borrow().status().map_or_else(|| json!(self.standby()), |it| json!(*it))
    }

    pub fn document(&self) -> Document {
        if let Some(acting) = &*self.acting.borrow() {
            return acting.document();
        }
        let elastic = self.elastic.borrow().status();
        elastic.map_or_else(|| self.standby().document(&self.job), |it| it.document())
    }

    fn standby(&self) -> StandbyStatus {
        StandbyStatus::new(self.waits.borrow().clone())
    }
}
