//! Mutations: deliberate defects in the protocol, as edits of the sources.

use serde::Deserialize;

/// A deliberate defect.
#[derive(Clone, Debug, Deserialize)]
pub struct Mutation {
    pub name: String,
    /// The behavior with this defect.
    pub what: String,
    /// The mode in which seeds are run.
    #[serde(default = "both")]
    pub mode: String,
    pub edits: Vec<Edit>,
}

/// An edit of one place in one file.
#[derive(Clone, Debug, Deserialize)]
#[serde(from = "(String, String, String)")]
pub struct Edit {
    /// Path relative to the root of the repository.
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
    /// Returns `text` with the edit applied.
    ///
    /// # Errors
    /// If the place does not occur exactly once.
    pub fn apply(&self, text: &str) -> Result<String, String> {
        match text.matches(&self.before).count() {
            1 => Ok(text.replacen(&self.before, &self.after, 1)),
            count => Err(format!(
                "{} contains this text {count} times instead of once:\n{}",
                self.file, self.before
            )),
        }
    }
}

fn both() -> String {
    "both".to_owned()
}

#[derive(Deserialize)]
struct Table {
    mutation: Vec<Mutation>,
}

/// Returns all mutations.
///
/// # Panics
/// If `mutations.toml` is invalid.
pub fn mutations() -> Vec<Mutation> {
    let table: Table =
        toml::from_str(include_str!("../mutations.toml")).expect("`mutations.toml` is valid");
    table.mutation
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::*;

    /// A mutation whose source text has changed is not applied and tests nothing.
    #[test]
    fn every_mutation_still_applies_to_the_sources() {
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
