//! Parsing of the values in etcd.

use serde::de::DeserializeOwned;

use super::{Change, HistoryReport, Rule};

/// Parses the value that was put; reports a violation if it is malformed.
pub(super) fn read<T: DeserializeOwned>(
    at: i64,
    change: &Change,
    report: &mut HistoryReport,
) -> Option<T> {
    let value = change.value.as_deref()?;
    match serde_json::from_str(value) {
        Ok(value) => Some(value),
        Err(error) => {
            report.breaks(at, Rule::Value, format!("{}: {error}", change.key));
            None
        }
    }
}
