//! The decisions of one commit, and what follows them.

use steadfast_common::keys::Keys;
use steadfast_master_core::draft::Draft;
use steadfast_master_core::job_state::{Fact, JobState};

use crate::event_loop::committer::Proposal;
use crate::event_loop::handle::{ControlError, Reply};
use crate::event_loop::live_state::LiveState;

/// A change of the volatile state, or an answer, that follows the commit.
pub(crate) type Effect = Box<dyn FnOnce(&mut LiveState) + Send>;

/// The decisions of one commit, made on a copy of the durable state.
pub(crate) struct Batch {
    keys: Keys,
    draft: Draft,
    pub proposal: Proposal,
    /// Number of proposed facts.
    pub facts: usize,
    effects: Vec<Effect>,
}

impl Batch {
    /// Returns an empty batch.
    pub fn of(keys: &Keys, state: &JobState) -> Self {
        Self {
            keys: keys.clone(),
            draft: Draft::of(state),
            proposal: Proposal::default(),
            facts: 0,
            effects: Vec::new(),
        }
    }

    /// Returns the state after the decisions so far.
    pub fn state(&self) -> &JobState {
        self.draft.state()
    }

    /// Makes a decision on the copy, and proposes its facts.
    pub fn decide<T>(&mut self, decision: impl FnOnce(&mut Draft) -> T) -> T {
        let answer = decision(&mut self.draft);
        for fact in self.draft.take_facts() {
            self.proposal.add_fact(&self.keys, &fact);
            self.facts += 1;
        }
        answer
    }

    pub fn add(&mut self, fact: Fact) {
        self.decide(|draft| draft.add(fact));
    }

    /// Runs `effect` after the commit.
    pub fn after(&mut self, effect: impl FnOnce(&mut LiveState) + Send + 'static) {
        self.effects.push(Box::new(effect));
    }

    /// Sends `answer` after the commit.
    pub fn reply<T: Send + 'static>(&mut self, reply: Reply<T>, answer: Result<T, ControlError>) {
        self.after(move |_| {
            let _ = reply.send(answer);
        });
    }

    /// Returns the proposal, and what follows its commit: the next state and the effects.
    pub fn into_parts(self) -> (Proposal, JobState, Vec<Effect>) {
        (self.proposal, self.draft.into_state(), self.effects)
    }
}
