//! Deliberate faults in our own protocol, as changes of its sources.

use serde::Deserialize;

/// A deliberate fault.
#[derive(Clone, Debug, Deserialize)]
pub struct Mutation {
    pub name: String,
    /// What is wrong then.
    pub what: String,
    pub edits: Vec<Edit>,
}

/// A change of one place in one file.
#[derive(Clone, Debug, Deserialize)]
#[serde(from = "(String, String, String)")]
pub struct Edit {
    /// From the root of the repository.
    pub file: String,
    before: String,
    after: String,
}

impl From<(String, String, String)> for Edit {
    fn from((file, before, after): (String, String, String)) -> Self {
        Self { file, before, after }
    }
}

impl Edit {
    /// The changed text.
    ///
    /// # Errors
    /// If the place is not there exactly once.
    pub fn apply(&self, text: &str) -> Result<String, String> {
        match text.matches(&self.before).count() {
            1 => Ok(text.replacen(&self.before, &self.after, 1)),
            count => Err(format!("{} has {count} places that read\n{}", self.file, self.before)),
        }
    }
}

#[derive(Deserialize)]
struct Table {
    mutation: Vec<Mutation>,
}

/// All of them.
///
/// # Panics
/// If the table is none.
pub fn mutations() -> Vec<Mutation> {
    let table: Table = toml::from_str(include_str!("../mutations.toml")).expect("a table of ours");
    table.mutation
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::*;

    /// A mutation whose place has changed would prove nothing.
    #[test]
    fn every_mutation_still_has_its_place_in_the_sources() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut misplaced = Vec::new();
        for mutation in mutations() {
            let mut texts = BTreeMap::<String, String>::new();
            for edit in &mutation.edits {
                let text = texts.entry(edit.file.clone()).or_insert_with(|| {
                    std::fs::read_to_string(root.join(&edit.file)).unwrap_or_default()
                });
                match edit.apply(text) {
                    Ok(changed) => *text = changed,
                    Err(reason) => misplaced.push(format!("{}: {reason}", mutation.name)),
                }
            }
        }
        assert!(misplaced.is_empty(), "{}", misplaced.join("\n"));
    }
}
