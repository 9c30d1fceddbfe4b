//! What happened in an etcd, revision by revision.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use crate::etcd::watch_command;
use crate::{Process, Scene, within};

/// A key that was put (with its value) or deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub key: String,
    pub value: Option<String>,
}

/// All changes below `prefix` up to a revision, by revision. Nothing may have been compacted.
pub fn history(scene: &Scene, url: &str, prefix: &str, last: i64) -> BTreeMap<i64, Vec<Change>> {
    let mut command = watch_command(scene, url, prefix);
    let watch = Process::start(scene.folder(), "watch", &mut command);
    within(Duration::from_secs(30), "the history was read", || {
        let text = watch.stdout();
        // The last line may be half written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let changes = parse(whole);
        (changes.keys().next_back() >= Some(&last)).then_some(changes)
    })
}

fn parse(lines: &str) -> BTreeMap<i64, Vec<Change>> {
    let mut changes: BTreeMap<i64, Vec<Change>> = BTreeMap::new();
    for line in lines.lines() {
        let response: Value = serde_json::from_str(line).expect("etcdctl writes JSON");
        for event in response["Events"].as_array().into_iter().flatten() {
            let kv = &event["kv"];
            let text = |it: &Value| decode(it.as_str().unwrap_or_default());
            let is_delete = event["type"] == 1 || event["type"] == "DELETE";
            let value = (!is_delete).then(|| text(&kv["value"]));
            let revision = kv["mod_revision"].as_i64().expect("an event has a revision");
            changes.entry(revision).or_default().push(Change { key: text(&kv["key"]), value });
        }
    }
    changes
}

/// Decodes Base64 (RFC 4648) of text.
fn decode(text: &str) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for byte in text.bytes().filter(|byte| *byte != b'=') {
        let digit = ALPHABET.iter().position(|it| *it == byte).expect("it is Base64");
        bits = bits << 6 | digit as u32;
        count += 6;
        if 8 <= count {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    String::from_utf8(bytes).expect("keys and values are text")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_of_any_length_is_decoded() {
        let decoded = ["", "YQ==", "YWI=", "YWJj", "L2pvYnMv"].map(decode);
        assert_eq!(decoded, ["", "a", "ab", "abc", "/jobs/"]);
    }
}
