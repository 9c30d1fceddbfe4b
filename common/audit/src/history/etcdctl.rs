//! Reads the output of `etcdctl watch --prefix --rev=1 -w json`: one response per line, keys and
//! values in Base64 (RFC 4648).

use std::collections::BTreeMap;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde::Deserialize;

use super::{Change, Revision};

/// A line that is not a watch response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} is not a watch response: {reason}")]
pub struct ParseError {
    pub line: usize,
    pub reason: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Response {
    /// Absent or null in a response that reports progress or the state of the watch.
    events: Option<Vec<Event>>,
    #[serde(default)]
    compact_revision: i64,
}

#[derive(Deserialize)]
struct Event {
    /// 1 or `DELETE` for a deletion; absent for a put.
    #[serde(default, rename = "type")]
    kind: serde_json::Value,
    kv: KeyValue,
}

#[derive(Deserialize)]
struct KeyValue {
    key: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    create_revision: i64,
    mod_revision: i64,
    #[serde(default)]
    version: i64,
}

/// Parses all lines into revisions, ascending. A revision may span several responses.
///
/// # Errors
/// If a line has another format, or reports a compaction.
pub fn parse(lines: &str) -> Result<Vec<Revision>, ParseError> {
    let mut revisions: BTreeMap<i64, Vec<Change>> = BTreeMap::new();
    for (number, line) in lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let failed = |reason: String| ParseError { line: number + 1, reason };
        let response: Response =
            serde_json::from_str(line).map_err(|error| failed(error.to_string()))?;
        if response.compact_revision != 0 {
            let reason = format!("revisions before {} are compacted", response.compact_revision);
            return Err(failed(reason));
        }
        for Event { kind, kv } in response.events.unwrap_or_default() {
            let bytes = |it: &str| {
                let decoded = BASE64_STANDARD.decode(it);
                decoded.map_err(|_| failed("a key or value is not Base64".to_owned()))
            };
            let key = String::from_utf8(bytes(&kv.key)?)
                .map_err(|_| failed("a key is not UTF-8".to_owned()))?;
            let is_delete = kind == 1 || kind == "DELETE";
            let change = Change {
                key,
                // The data of barriers are bytes of any kind; all other values are JSON, which is UTF-8.
                value: match is_delete {
                    true => None,
                    false => Some(String::from_utf8_lossy(&bytes(&kv.value)?).into_owned()),
                },
                create_revision: kv.create_revision,
                version: kv.version,
            };
            revisions.entry(kv.mod_revision).or_default().push(change);
        }
    }
    let revision = |(revision, changes)| Revision { revision, changes };
    Ok(revisions.into_iter().map(revision).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn puts_and_deletes_are_distinguished_and_grouped_by_revision() {
        let lines = concat!(
            r#"{"Header":{"revision":9},"Events":[{"kv":{"key":"L2E=","create_revision":3,"#,
            r#""mod_revision":5,"version":2,"value":"eA=="}},{"type":1,"kv":{"key":"L2I=","#,
            r#""mod_revision":5}}],"CompactRevision":0,"Canceled":false,"Created":false}"#,
            "\n\n",
            r#"{"Events":[{"type":"DELETE","kv":{"key":"L2E=","mod_revision":7}}]}"#,
        );
        let put =
            Change { key: "/a".into(), value: Some("x".into()), create_revision: 3, version: 2 };
        let deleted =
            |key: &str| Change { key: key.into(), value: None, create_revision: 0, version: 0 };
        let expected = [
            Revision { revision: 5, changes: vec![put, deleted("/b")] },
            Revision { revision: 7, changes: vec![deleted("/a")] },
        ];
        assert_eq!(parse(lines).unwrap(), expected);
    }

    #[test]
    fn the_data_of_a_barrier_need_not_be_text() {
        let line = r#"{"Events":[{"kv":{"key":"L2E=","mod_revision":5,"value":"/w=="}}]}"#;
        let revisions = parse(line).unwrap();
        assert_eq!(revisions[0].changes[0].value.as_deref(), Some("\u{fffd}"));
        let line = r#"{"Events":[{"kv":{"key":"/w==","mod_revision":5}}]}"#;
        assert!(parse(line).unwrap_err().to_string().contains("a key is not UTF-8"));
    }

    #[test]
    fn a_compacted_history_is_refused() {
        assert!(parse(r#"{"CompactRevision":12}"#).unwrap_err().to_string().contains("compacted"));
        assert_eq!(parse("{}\n{\"Events\":null}\nnonsense").unwrap_err().line, 3);
    }
}
