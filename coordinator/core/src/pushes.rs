//! The numbers of pushes: which are in use, and which count on the parameter servers.

use std::collections::BTreeSet;

use steadfast_common::ids::{Generation, TaskId};
use steadfast_common::records::applied_records::TaskRanges;

/// Counts the numbers that are reserved in etcd at once.
const RESERVED_AT_ONCE: u32 = 4096;

/// Number of a closure's push to the parameter servers; the same for each attempt of the closure, and for no other one
/// of the job, in any run of its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PushNumber(pub u32);

/// A push that every slot has acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Push {
    pub number: PushNumber,
    /// The generation in which the slots have it. A later one may begin without it.
    pub generation: Generation,
}

/// The pushes that count on every slot, as they were read in a generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    pub generation: Generation,
    pub numbers: TaskRanges,
}

/// The state of pushes in the machine of a coordinator whose job has parameters.
#[derive(Clone, Debug)]
pub struct Pushes {
    /// The next number that was never used.
    next: u32,
    /// The first number that is not reserved: a program that is started again begins there.
    reserved: u32,
    /// Numbers of closures that ended without a push.
    free: BTreeSet<u32>,
    counted: Counted,
    /// Pushes of a generation that was not read yet.
    ahead: Vec<Push>,
}

impl Pushes {
    /// Creates the state for numbers from `reserved` on.
    pub fn new(reserved: u32, counted: Counted) -> Self {
        let (next, free) = (reserved, BTreeSet::new());
        Self { next, reserved, free, counted, ahead: Vec::new() }
    }

    /// Takes a number. If it was not reserved before, the second value is what is reserved with it.
    pub(crate) fn take(&mut self) -> (PushNumber, Option<u32>) {
        if let Some(number) = self.free.pop_first() {
            return (PushNumber(number), None);
        }
        let number = self.next;
        self.next = self.next.saturating_add(1);
        if number < self.reserved {
            return (PushNumber(number), None);
        }
        self.reserved = number.saturating_add(RESERVED_AT_ONCE);
        (PushNumber(number), Some(self.reserved))
    }

    /// Gives back a number with which nothing was pushed, so that the numbers that count stay few ranges.
    pub(crate) fn give_back(&mut self, number: PushNumber) {
        self.free.insert(number.0);
    }

    /// Notes a push that all slots have acknowledged. Returns whether it counts in the present generation: a slot may
    /// have been rolled back since.
    pub(crate) fn pushed(&mut self, push: Push) -> bool {
        if push.generation < self.counted.generation {
            return self.counts(push.number);
        }
        if self.counted.generation < push.generation {
            self.ahead.push(push);
        }
        self.counted.numbers.insert(TaskId(push.number.0));
        true
    }

    /// Returns whether a push counts on every slot.
    pub(crate) fn counts(&self, number: PushNumber) -> bool {
        self.counted.numbers.contains(TaskId(number.0))
    }

    /// Notes what was read in a generation. Returns whether it is a new one.
    pub(crate) fn read(&mut self, counted: Counted) -> bool {
        if counted.generation <= self.counted.generation {
            return false;
        }
        self.counted = counted;
        // They may have arrived after the slots were read.
        for push in std::mem::take(&mut self.ahead) {
            if self.counted.generation < push.generation {
                self.ahead.push(push);
            }
            if self.counted.generation <= push.generation {
                self.counted.numbers.insert(TaskId(push.number.0));
            }
        }
        true
    }

    pub(crate) fn generation(&self) -> Generation {
        self.counted.generation
    }

    /// Returns the pushes that count on every slot.
    pub fn counted(&self) -> &Counted {
        &self.counted
    }
}
