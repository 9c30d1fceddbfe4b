//! Checks that a generation names processes that have held its slots, and that a checkpoint is committed in
//! the generation that it belongs to.

use std::collections::{BTreeMap, BTreeSet};

use steadfast_audit::history::{Change, Revision};
use steadfast_common::ids::{Generation, Incarnation, Slot};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{CheckpointRecord, GenerationRecord, PserverRecord};

/// The processes that have held each slot, and the present generation.
#[derive(Debug, Default)]
pub struct GenerationCheck {
    held: BTreeMap<Slot, BTreeSet<Incarnation>>,
    generation: Generation,
}

impl GenerationCheck {
    /// Applies a revision; returns an error if it begins a wrong generation or commits a wrong
    /// checkpoint.
    pub fn follow(&mut self, keys: &Keys, revision: &Revision) -> Option<String> {
        let mut begun: Option<GenerationRecord> = None;
        for change in &revision.changes {
            if let Some(slot) = keys.slot_of(&change.key) {
                let value = change.value.as_deref();
                let record: Option<PserverRecord> =
                    value.and_then(|it| serde_json::from_str(it).ok());
                if let Some(record) = record {
                    let incarnation = record.incarnation(change.create_revision);
                    self.held.entry(slot).or_default().insert(incarnation);
                }
            } else if change.key == keys.generation() {
                begun = change.value.as_deref().and_then(|it| serde_json::from_str(it).ok());
            }
        }
        let stray = revision.changes.iter().find_map(|change| self.is_stray(keys, change));
        if stray.is_some() {
            return stray;
        }
        let begun = begun?;
        self.generation = begun.generation;
        let mut named = begun.slots.iter().enumerate();
        let has_held = |slot: usize, named: &Incarnation| {
            self.held.get(&Slot(slot as u32)).is_some_and(|held| held.contains(named))
        };
        let (slot, named) = named.find(|(slot, named)| !has_held(*slot, named))?;
        let generation = begun.generation;
        Some(format!(
            "I5: generation {generation} names {named} for slot {slot}, which never held it"
        ))
    }

    fn is_stray(&self, keys: &Keys, change: &Change) -> Option<String> {
        let id = change.key.strip_prefix(&keys.checkpoints_prefix())?;
        let record: CheckpointRecord = serde_json::from_str(change.value.as_deref()?).ok()?;
        let is_new = change.version == 1 && record.generation != self.generation;
        is_new.then(|| {
            format!(
                "I9: checkpoint {id} of generation {} was committed in generation {}",
                record.generation, self.generation
            )
        })
    }
}
