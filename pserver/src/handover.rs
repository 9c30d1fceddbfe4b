//! The state of a slot at one version, which it keeps in memory for the slots of the next generation: when their number
//! changes, these read it from each other in place of the store.

use std::collections::BTreeSet;
use std::time::Duration;

use steadfast_common::ids::{Generation, Slot, Version};
use steadfast_common::records::GenerationRecord;
use steadfast_host::time::Instant;

use crate::event::{Handed, SlotSnapshot};

/// Limits how long a state is kept for a generation that does not begin.
pub(crate) const HANDOVER_MAX: Duration = Duration::from_secs(30);

/// Limits how long a slot may take to request again what it was sent.
const AGAIN_MAX: Duration = Duration::from_secs(3);

/// A state that is handed over.
#[derive(Debug)]
pub struct Handover {
    state: Handed,
    since: Instant,
    /// Whether the generation that begins with it is known here.
    is_named: bool,
    /// The slots that have got what they need, how many there are, and when one was last sent something.
    read_by: BTreeSet<Slot>,
    slots: usize,
    last_read: Instant,
}

impl Handover {
    pub fn new(of: Generation, snapshot: SlotSnapshot) -> Self {
        let (since, state) = (Instant::now(), Handed { of, snapshot });
        let (read_by, slots) = (BTreeSet::new(), usize::MAX);
        Self { state, since, is_named: false, read_by, slots, last_read: since }
    }

    /// Returns the state, if it is that of `version`.
    pub fn state(&self, version: Version) -> Option<Handed> {
        (self.version() == version).then(|| self.state.clone())
    }

    fn version(&self) -> Version {
        self.state.snapshot.shard.position.version
    }

    /// Notes that another generation has begun; returns whether its slots need the state.
    pub fn begin(&mut self, record: &GenerationRecord) -> bool {
        self.is_named = record.handover.as_ref().is_some_and(|it| {
            it.generation == self.state.of && it.position.version == self.version()
        });
        self.is_named
    }

    /// Notes that one of `slots` slots was sent what it needs.
    pub fn sent(&mut self, reader: Slot, slots: u32) {
        self.read_by.insert(reader);
        (self.slots, self.last_read) = (slots as usize, Instant::now());
    }

    /// Returns when it is dropped; `None` as long as slots need it.
    pub fn ends(&self) -> Option<Instant> {
        // What was sent last may be lost on its way, and is then requested again.
        let when_read = (self.slots <= self.read_by.len()).then(|| self.last_read + AGAIN_MAX);
        when_read.or_else(|| (!self.is_named).then(|| self.since + HANDOVER_MAX))
    }
}
