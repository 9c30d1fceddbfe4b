//! Lets the policy choose how many workers the rounds have.

use std::sync::Arc;

use steadfast_common::machine::Moment;
use steadfast_master_core::rendezvous::Fact;

use super::machine::ElasticJob;

impl ElasticJob {
    /// Returns what the policy decides after a measurement.
    pub(super) fn scale_by_speed(&mut self, moment: Moment) -> Vec<Fact> {
        if self.state.round().is_none() || !self.state.is_intact() {
            return Vec::new();
        }
        let workers = || (self.state.worker_counts(&self.settings), self.state.workers_there());
        let next = self.scaling.decide(moment.now, self.state.scale(), &self.speeds, workers);
        next.into_iter().map(|next| Fact::Scaled(Arc::new(next))).collect()
    }
}
