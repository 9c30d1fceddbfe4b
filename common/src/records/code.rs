//! The source of a model that is a program of its own: what was run, and what changed while the job ran.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::ids::TrainerId;

/// Number of changes that a record keeps, the latest ones.
const CHANGES_MAX: usize = 16;

/// SHA-256 of the source of each module, by the module's name.
pub type Modules = BTreeMap<String, String>;

/// `code`: the source of the model, as the newest trainers have it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeRecord {
    pub modules: Modules,
    /// The changes since the parameters had their initial values, the latest last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<CodeChange>,
}

/// A change of the source that an operator accepted while the job ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodeChange {
    pub modules: Vec<String>,
    /// The first trainer with the new source.
    pub trainer: TrainerId,
    /// Time of the change in milliseconds since 1970, by the clock of `trainer`.
    pub at_unix_ms: u64,
}

impl CodeRecord {
    /// Returns the modules whose source differs. A module of which only one side knows is no change: some are imported
    /// in certain processes alone, and if a module begins to import it, that one differs.
    pub fn differing(&self, modules: &Modules) -> Vec<String> {
        let differs = |(name, sha256): &(&String, &String)| {
            self.modules.get(*name).is_some_and(|known| known != *sha256)
        };
        modules.iter().filter(differs).map(|(name, _)| name.clone()).collect()
    }

    /// Returns the record after the change to `modules`.
    #[must_use]
    pub fn changed(&self, modules: &Modules, change: CodeChange) -> Self {
        let mut changed = self.clone();
        changed.modules.extend(modules.clone());
        let surplus = (changed.changes.len() + 1).saturating_sub(CHANGES_MAX);
        changed.changes.drain(..surplus);
        changed.changes.push(change);
        changed
    }
}

impl fmt::Display for CodeChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = UNIX_EPOCH + Duration::from_millis(self.at_unix_ms);
        let at = humantime::format_rfc3339_seconds(at);
        let modules = self.modules.join("`, `");
        write!(
            f,
            "the code of the model was changed at {at}, accepted by trainer {}: `{modules}`",
            self.trainer
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn modules(of: &[(&str, &str)]) -> Modules {
        of.iter().map(|(name, sha256)| ((*name).to_owned(), (*sha256).to_owned())).collect()
    }

    fn change(number: u64) -> CodeChange {
        let trainer = TrainerId(uuid::Uuid::from_u128(1));
        CodeChange { modules: vec!["digits".to_owned()], trainer, at_unix_ms: number }
    }

    #[test]
    fn a_module_that_one_side_lacks_is_no_change() {
        let record =
            CodeRecord { modules: modules(&[("a", "1"), ("b", "1")]), ..Default::default() };
        assert!(record.differing(&modules(&[("a", "1"), ("c", "1")])).is_empty());
        assert_eq!(record.differing(&modules(&[("a", "2"), ("b", "1")])), ["a"]);
        let changed = record.changed(&modules(&[("a", "2"), ("c", "1")]), change(0));
        assert_eq!(changed.modules, modules(&[("a", "2"), ("b", "1"), ("c", "1")]));
    }

    #[test]
    fn the_latest_changes_are_kept() {
        let record = (0..100).fold(CodeRecord::default(), |record, number| {
            record.changed(&Modules::new(), change(number))
        });
        assert_eq!(record.changes.len(), CHANGES_MAX);
        assert_eq!(record.changes.last(), Some(&change(99)));
    }
}
