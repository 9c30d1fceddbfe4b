//! The status of a master that does not act.

use serde::{Deserialize, Serialize};

use super::document::{Body, Document, Row, Section};

/// The status of a standby master, or of one that waits before it accepts calls.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandbyStatus {
    /// Always false: distinguishes this from the status of an acting master.
    pub acting: bool,
    /// What it waits for before it accepts calls. It holds the lock meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

impl StandbyStatus {
    pub fn new(waits_for: Option<String>) -> Self {
        Self { acting: false, waits_for }
    }

    /// Describes the status of the master of `job`.
    pub fn document(&self, job: &str) -> Document {
        let (state, row) = match &self.waits_for {
            Some(waits_for) => ("waiting", Row::text("waits for", waits_for)),
            None => ("standby", Row::text("to do", "`steadfast members` lists the acting master")),
        };
        Document {
            job: job.to_owned(),
            state: state.to_owned(),
            sections: vec![Section { id: "job", title: "Job", body: Body::Rows(vec![row]) }],
            ..Document::default()
        }
    }
}
