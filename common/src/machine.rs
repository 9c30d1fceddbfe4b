//! State machines whose facts are committed before anyone learns of them.
//!
//! ```text
//!   input ──▶ handle ──▶ facts ──▶ one transaction ──▶ effects: answers, wake-ups, actions
//!               ▲                        │
//!               └── due, until it decides nothing
//! ```
//!
//! A machine waits for nothing, reads no clock, and touches nothing outside: a driver passes the time, commits the
//! facts, and releases the effects. While a commit is in progress no one sees the machine, and if the commit fails, the
//! driver drops it. So a machine applies its facts when it decides them, and is still never ahead of etcd for an
//! observer.

use crate::ids::Millis;

/// A deterministic state machine.
pub trait Machine {
    /// A request, a change that was observed, or the passing of time.
    type Input;
    /// A durable change.
    type Fact;
    /// What follows the commit of the facts that were decided before it.
    type Effect;

    /// Decides an input, and applies the facts.
    fn handle(&mut self, moment: Moment, input: Self::Input, decision: &mut Decision<Self>);

    /// Changes what is not durable after the facts since the last call were committed: waits count from the commit. The
    /// effects are released before those that were decided with the facts.
    fn committed(&mut self, moment: Moment, effects: &mut Vec<Self::Effect>);

    /// Decides what the inputs so far and the time make due, and applies the facts. The driver calls this at the start
    /// of a term and after each input, until it decides no facts.
    fn due(&mut self, moment: Moment, decision: &mut Decision<Self>);

    /// Returns an upper bound of what the facts of an input take in a transaction.
    fn size_max(&self, input: &Self::Input) -> Size;

    /// Returns whether all is decided. The term ends then.
    fn is_over(&self) -> bool;
}

/// What a driver tells a machine with each input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// The time on the clock that deadlines are measured with.
    pub now: Millis,
    /// The wall-clock time, for display and records. No decision depends on it.
    pub unix_ms: u64,
    /// The revision of the latest commit of this term; 0 before the first.
    pub revision: i64,
}

/// The facts and effects that were decided together.
#[derive(Debug)]
pub struct Decision<M: Machine + ?Sized> {
    /// Facts that have no effect before the others are committed. They are committed first, one list after the other,
    /// each in as many transactions as needed.
    pub ahead: Vec<Vec<M::Fact>>,
    /// Facts that are committed in one transaction.
    pub facts: Vec<M::Fact>,
    /// In the order in which they are released.
    pub effects: Vec<M::Effect>,
}

impl<M: Machine + ?Sized> Default for Decision<M> {
    fn default() -> Self {
        Self { ahead: Vec::new(), facts: Vec::new(), effects: Vec::new() }
    }
}

/// What facts take in a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Changes of keys.
    pub changes: usize,
    /// Bytes of keys and values.
    pub bytes: usize,
}
