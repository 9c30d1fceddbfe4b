//! Whether a generation names those who hold the slots when it begins, and whether checkpoints are of
//! the generation that they are committed in.

use std::collections::BTreeMap;

use steadfast_audit::history::{Change, Revision};
use steadfast_common::ids::{Generation, Incarnation, Slot};
use steadfast_common::keys::Keys;
use steadfast_common::records::{CheckpointRecord, GenerationRecord, PserverRecord};

/// Who holds which slot, and in which generation.
#[derive(Debug, Default)]
pub struct Crew {
    holders: BTreeMap<Slot, Incarnation>,
    generation: Generation,
}

impl Crew {
    /// Takes a revision in; says what is wrong with a generation that begins with it, or a checkpoint
    /// that is committed by it.
    pub fn follow(&mut self, keys: &Keys, revision: &Revision) -> Option<String> {
        let mut begun: Option<GenerationRecord> = None;
        for change in &revision.changes {
            if let Some(slot) = keys.slot_of(&change.key) {
                let value = change.value.as_deref();
                let record: Option<PserverRecord> =
                    value.and_then(|it| serde_json::from_str(it).ok());
                match record {
                    Some(record) => {
                        self.holders.insert(slot, record.incarnation(change.create_revision));
                    }
                    None => drop(self.holders.remove(&slot)),
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
        let (slot, named) =
            named.find(|(slot, named)| self.holders.get(&Slot(*slot as u32)) != Some(named))?;
        Some(format!(
            "I5: generation {} names {named} for slot {slot}, which {:?} holds",
            begun.generation,
            self.holders.get(&Slot(slot as u32))
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
