//! The closures of a coordinator that have not been forgotten.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_common::records::closures::ClosureName;

use crate::call::{Call, ClosureId, WorkerIndex};
use crate::pushes::{Push, PushNumber};

/// The state of a closure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It waits for the results of other closures.
    Waiting {
        on: BTreeSet<ClosureId>,
    },
    /// It gets the outcome of another one with the same name.
    Follows,
    /// It can run.
    Ready,
    Running {
        worker: WorkerIndex,
        attempt: u64,
    },
    /// It is over. It is kept until no closure can name it as an input any more.
    Settled {
        has_result: bool,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Closure {
    pub call: Call,
    pub state: State,
    /// Counts the workers that were lost while they ran it.
    pub losses: u32,
    /// Closures of the same name, which get its outcome.
    pub followers: Vec<ClosureId>,
    /// Closures that wait for its result.
    pub dependents: Vec<ClosureId>,
    /// The number of its push, once it has run.
    pub push: Option<PushNumber>,
    /// Set if a worker that was lost, or is not waited for, may have pushed with the number.
    pub may_have_pushed: bool,
    /// The push of a closure that is over, until a checkpoint covers it.
    pub pushed: Option<Push>,
    /// Set while a closure that has a result runs again.
    pub repeats: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Closures {
    pub by_id: BTreeMap<ClosureId, Closure>,
    /// Maps names to closures that are not settled.
    pub by_name: BTreeMap<ClosureName, ClosureId>,
    /// Holds the closures that any worker may run next. The oldest come first, also when they are run again.
    pub ready: BTreeSet<ClosureId>,
}

impl Closures {
    pub fn add(&mut self, id: ClosureId, call: Call, state: State, push: Option<PushNumber>) {
        let closure = Closure {
            call,
            state,
            losses: 0,
            followers: Vec::new(),
            dependents: Vec::new(),
            // Another attempt had it.
            may_have_pushed: push.is_some(),
            push,
            pushed: None,
            repeats: false,
        };
        self.by_id.insert(id, closure);
    }

    /// Returns the closures that do not run and are not settled, the oldest first.
    pub fn not_begun(&self) -> Vec<ClosureId> {
        let waits = |closure: &Closure| match closure.state {
            State::Waiting { .. } | State::Ready => !closure.repeats,
            State::Follows | State::Running { .. } | State::Settled { .. } => false,
        };
        self.by_id.iter().filter(|(_, it)| waits(it)).map(|(&id, _)| id).collect()
    }
}
