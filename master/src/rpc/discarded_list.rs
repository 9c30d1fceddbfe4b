//! Writes the list of all given-up tasks to the store.

use steadfast_common::records::given_up::DiscardedTask;
use steadfast_store::{Location, StoreError};

/// Writes the list, one JSON object per line. Returns its URL, or `None` if no task was given up.
///
/// # Errors
/// If the write to the store fails.
pub async fn write(
    store: &Location,
    tasks: &[DiscardedTask],
) -> Result<Option<String>, StoreError> {
    if tasks.is_empty() {
        return Ok(None);
    }
    let line = |task| serde_json::to_string(task).expect("a task is plain data") + "\n";
    let lines: String = tasks.iter().map(line).collect();
    let place = store.child("discarded.jsonl")?;
    place.write(lines.into()).await?;
    Ok(Some(place.url().to_owned()))
}
