//! The end of a job, and the state that its members share in a protocol of their own.

use std::sync::Arc;

use steadfast_common::given_up::Discarded;
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_common::rendezvous::SharedRecord;

use super::state::{Fact, Rendezvous};
use super::{Refusal, VALUE_BYTES_MAX};

impl Rendezvous {
    /// Ends the job, on request and without success.
    pub fn shut_down(&self, reason: &str) -> Vec<Fact> {
        match self.result() {
            Some(_) => Vec::new(),
            None => vec![ended(JobOutcome::Failed, Some(reason.to_owned()))],
        }
    }

    /// Replaces the shared state, if `token` is that of the present one.
    ///
    /// # Errors
    /// If the state is too large, or the job is over.
    pub fn share(&self, token: u64, state: Vec<u8>) -> Result<Vec<Fact>, Refusal> {
        self.check_open()?;
        if VALUE_BYTES_MAX < state.len() {
            let (given, limit) = (state.len(), VALUE_BYTES_MAX);
            return Err(Refusal::ValueTooLarge { given, limit });
        }
        let present = self.shared.as_ref().map_or(0, |record| record.token);
        Ok(match token == present {
            true => vec![Fact::Shared(Arc::new(SharedRecord { token: token + 1, state }))],
            false => Vec::new(),
        })
    }

    /// Returns the shared state.
    pub fn shared(&self) -> Option<&Arc<SharedRecord>> {
        self.shared.as_ref()
    }

    pub(super) fn check_open(&self) -> Result<(), Refusal> {
        match self.result() {
            Some(_) => Err(Refusal::Over),
            None => Ok(()),
        }
    }
}

pub(super) fn succeeded() -> Fact {
    ended(JobOutcome::Finished, None)
}

fn ended(state: JobOutcome, reason: Option<String>) -> Fact {
    Fact::Ended(Arc::new(ResultRecord {
        state,
        reason,
        passes: 0,
        steps: 0,
        examples: 0,
        loss: None,
        metric: None,
        metric_name: None,
        parameters_sha256: None,
        model: None,
        checkpoint: None,
        discarded: Discarded::default(),
    }))
}
