//! Checks that the tables of docs/job-file.md have a row for each key of a job file, and no others.

use std::collections::BTreeSet;

use steadfast_common::job::job_file::{elastic_keys, training_keys};
use steadfast_common::job::models::BUILT_IN;

/// The key that chooses between the kinds of job files.
const KIND: &str = "kind";

/// The key whose value is a list of sections.
const LIST: &str = "optimizer.groups";

/// Returns what the page says otherwise than the code.
pub fn differences(page: &str) -> Vec<String> {
    let (training, elastic) = page.split_once("\n## Elastic jobs").expect("the page has a section");
    let mut errors = compared(training, &training_keys());
    errors.extend(compared(elastic, &[elastic_keys(), vec![KIND.to_owned()]].concat()));
    let unnamed = BUILT_IN.iter().filter(|model| !page.contains(&format!("`\"{}\"`", model.name)));
    errors.extend(unnamed.map(|model| format!("the model `{}` is missing", model.name)));
    errors
}

fn compared(text: &str, keys: &[String]) -> Vec<String> {
    let is_section = |key: &str| keys.iter().any(|it| it.starts_with(&format!("{key}.")));
    let keys: BTreeSet<String> = keys.iter().filter(|key| !is_section(key)).cloned().collect();
    let shown = rows(text);
    // The section of tables is a table of a section for each name; a list of sections is one key.
    let whole =
        |key: &String| ["tables", LIST].into_iter().find(|it| key.starts_with(&format!("{it}.")));
    let shown: BTreeSet<String> =
        shown.into_iter().map(|key| whole(&key).map_or(key.clone(), str::to_owned)).collect();
    let missing = keys.difference(&shown).map(|key| format!("`{key}` has no row"));
    let unknown = shown.difference(&keys).map(|key| format!("`{key}` is not a key"));
    missing.chain(unknown).collect()
}

/// Returns the paths of the keys in the first column of tables that describe keys.
fn rows(text: &str) -> BTreeSet<String> {
    let (mut section, mut is_of_keys) = (String::new(), false);
    let mut found = BTreeSet::new();
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            let name = heading.strip_prefix("`[").and_then(|it| it.strip_suffix("]`"));
            section = name.map(|name| format!("{name}.")).unwrap_or_default();
        }
        if line == format!("### `[[{LIST}]]`") {
            section = format!("{LIST}.");
        }
        if !line.starts_with('|') {
            is_of_keys = false;
        } else if line.starts_with("| key | type |") {
            is_of_keys = true;
        } else if is_of_keys && !line.starts_with("|-") {
            let first = line.split('|').nth(1).unwrap_or_default();
            let keys =
                first.split(',').filter_map(|it| it.trim().strip_prefix('`')?.strip_suffix('`'));
            found.extend(keys.map(|key| format!("{section}{key}")));
        }
    }
    found
}
