//! The end of a job, and the state that its members share in a protocol of their own.
//!
//! A member whose workers have all succeeded enters the barrier [`EXIT_TAG`]. From then on the job is *closing*:
//! no other round is formed, since a program that runs again after its end may begin from the start. The job
//! has succeeded when each member has entered, or was lost, or asked for another round.

use std::sync::Arc;

use steadfast_common::given_up::Discarded;
use steadfast_common::ids::{Phase, Round};
use steadfast_common::records::{JobOutcome, ResultRecord};
use steadfast_common::rendezvous::{EXIT_TAG, SharedRecord};
use steadfast_common::stream::LeftOut;

use super::state::{Entries, Fact, Rendezvous, Standing};
use super::{Caller, Refusal, VALUE_BYTES_MAX};

impl Rendezvous {
    /// Ends the job on request.
    pub fn shut_down(&self, outcome: JobOutcome, reason: &str) -> Vec<Fact> {
        match self.result() {
            Some(_) => Vec::new(),
            None => vec![ended(outcome, Some(reason.to_owned()).filter(|it| !it.is_empty()))],
        }
    }

    /// Returns whether the workers of a member of the last round have succeeded.
    pub fn is_closing(&self) -> bool {
        self.entries(EXIT_TAG, Phase(0)).is_some()
    }

    /// Notes that all workers of a member have succeeded, whatever became of the other members.
    pub(super) fn succeed(&self, caller: Caller, round: Round) -> Result<Vec<Fact>, Refusal> {
        let node = caller.node;
        if self.standing_of(caller)? != Standing::InPlace || self.number() != round {
            return Err(Refusal::NotMember { node, round });
        }
        let has_entered = |entries: &Entries| entries.data().contains_key(&node);
        if self.entries(EXIT_TAG, Phase(0)).is_some_and(has_entered) {
            return Ok(Vec::new());
        }
        let (tag, phase, data) = (EXIT_TAG.to_owned(), Phase(0), Arc::default());
        Ok(vec![Fact::Entered { round, tag, phase, node, data }])
    }

    /// Returns the success of a closing job, if no member is left whose workers run.
    pub(super) fn close_if_done(&self) -> Vec<Fact> {
        let Some(entries) = self.entries(EXIT_TAG, Phase(0)) else { return Vec::new() };
        let mut running = self.index.in_place.iter();
        match running.all(|node| entries.data().contains_key(node)) {
            true => vec![ended(JobOutcome::Finished, None)],
            false => Vec::new(),
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
        left_out: LeftOut::default(),
    }))
}
