//! The end of a job, and the state that its members share in a protocol of their own.
//!
//! A member whose workers have all succeeded enters the barrier [`EXIT_TAG`]. From then on the job is *closing*:
//! nodes that arrive do not break up the round. The job has succeeded when each member of the round has entered.
//! If one that has not is lost, or asks for another round because its workers failed, all members run again in
//! the next round. If that round cannot be formed within the join timeout, the job has failed.

use std::collections::BTreeMap;
use std::sync::Arc;

use steadfast_common::ids::{NodeId, Phase, Round};
use steadfast_common::records::given_up::Discarded;
use steadfast_common::records::rendezvous::{EXIT_TAG, SharedRecord};
use steadfast_common::records::stream::LeftOut;
use steadfast_common::records::{JobOutcome, ResultRecord};

use super::state::{Entries, Fact, Rendezvous, Standing};
use super::{Caller, Names, Refusal, Settings, VALUE_BYTES_MAX};

impl Rendezvous {
    /// Ends the job on request of a node. A success has a reason in the result only if it was requested.
    pub fn shut_down(&self, outcome: JobOutcome, reason: &str) -> Vec<Fact> {
        match self.result() {
            Some(_) => Vec::new(),
            None => {
                let reason = if reason.is_empty() { "a node shut it down" } else { reason };
                vec![ended(outcome, Some(reason.to_owned()))]
            }
        }
    }

    /// Removes a node whose workers have failed for good. The job fails if fewer than `nodes_needed` are left.
    ///
    /// # Errors
    /// If the job is over, or the incarnation is not known.
    pub fn give_up(
        &self,
        caller: Caller,
        reason: &str,
        nodes_needed: u32,
    ) -> Result<Vec<Fact>, Refusal> {
        self.check_open()?;
        self.standing_of(caller)?;
        let left = self.nodes.len() - 1;
        let removed = Fact::Removed { node: caller.node };
        if nodes_needed as usize <= left {
            return Ok(vec![removed]);
        }
        let address = self.address_of(caller.node).unwrap_or_default();
        let reason = format!("{address} gave up: {reason}");
        Ok(vec![removed, ended(JobOutcome::Failed, Some(reason))])
    }

    /// Returns whether the workers of a member of the last round have succeeded.
    pub fn is_closing(&self) -> bool {
        self.succeeded().is_some()
    }

    /// Returns whether the workers of this member of the last round have succeeded.
    pub(super) fn has_succeeded(&self, node: NodeId) -> bool {
        self.succeeded().is_some_and(|entries| entries.data().contains_key(&node))
    }

    fn succeeded(&self) -> Option<&Entries> {
        self.entries(EXIT_TAG, Phase(0))
    }

    /// Notes that all workers of a member have succeeded, whether or not the other members are still there.
    pub(super) fn succeed(&self, caller: Caller, round: Round) -> Result<Vec<Fact>, Refusal> {
        let node = caller.node;
        if self.standing_of(caller)? != Standing::InPlace || self.number() != round {
            return Err(Refusal::NotMember { node, round });
        }
        if self.has_succeeded(node) {
            return Ok(Vec::new());
        }
        let (tag, phase, data) = (EXIT_TAG.to_owned(), Phase(0), Arc::default());
        Ok(vec![Fact::Entered { round, tag, phase, node, data }])
    }

    /// Returns whether the workers of each member of the last round have succeeded.
    pub(super) fn has_each_succeeded(&self) -> bool {
        self.succeeded().is_some_and(|entries| entries.data().len() == self.members().len())
    }

    /// Ends the job: each member of the last round has succeeded.
    pub(super) fn finish(&self) -> Vec<Fact> {
        vec![ended(JobOutcome::Finished, None)]
    }

    /// Ends a closing job whose members cannot run again.
    pub(super) fn fail_to_close(&self, settings: &Settings) -> Vec<Fact> {
        let unfinished = self.members().iter().map(|member| member.node);
        let unfinished: Vec<_> = unfinished.filter(|node| !self.has_succeeded(*node)).collect();
        let unfinished = Names::first(self, unfinished.iter().copied(), unfinished.len());
        let (waiting, min) = (self.index.waiting.len(), settings.nodes.min());
        let reason = format!(
            "round {}: {unfinished} did not succeed, others did, and {waiting} of at least {min} nodes joined \
             another round within the join timeout",
            self.number()
        );
        vec![ended(JobOutcome::Failed, Some(reason))]
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
        further_metrics: BTreeMap::new(),
        parameters_sha256: None,
        model: None,
        checkpoint: None,
        discarded: Discarded::default(),
        left_out: LeftOut::default(),
        ended_unix_ms: None,
        best: None,
    }))
}
