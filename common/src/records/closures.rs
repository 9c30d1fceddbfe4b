//! A coordinator stores the results of named closures and the numbers of their pushes in etcd; its workers announce
//! themselves there.
//!
//! | key | record |
//! |---|---|
//! | `<root>/coordinator/results/<name>` | [`ClosureRecord`] |
//! | `<root>/coordinator/pushes` | [`PushesRecord`] |
//! | `<root>/coordinator/workers/<uuid>` | [`WorkerRecord`] |

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The maximum length of a name in characters.
const NAME_LENGTH_MAX: usize = 200;

/// The name of a closure, by which its result is found again. It is one part of a key in etcd.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct ClosureName(String);

/// The text is not a valid closure name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a valid closure name: use 1 to {NAME_LENGTH_MAX} letters (a to z, A to Z), digits, and `-_.:=+@`"
)]
pub struct BadName(String);

impl FromStr for ClosureName {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        let is_allowed = |it: u8| it.is_ascii_alphanumeric() || b"-_.:=+@".contains(&it);
        let is_name = (1..=NAME_LENGTH_MAX).contains(&text.len()) && text.bytes().all(is_allowed);
        match is_name {
            true => Ok(Self(text.to_owned())),
            false => Err(BadName(text.chars().take(NAME_LENGTH_MAX).collect())),
        }
    }
}

impl fmt::Display for ClosureName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `coordinator/results/<name>`: the result of a closure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClosureRecord {
    /// The function, as `module:function`.
    pub function: String,
    /// SHA-256 of the function and its arguments. The name identifies this call only.
    pub digest: String,
    /// Holds the returned value as an encoded `steadfast.v1.Value`; `None` if the function ran out of data.
    #[serde(
        default,
        with = "super::base64_text::optional",
        skip_serializing_if = "Option::is_none"
    )]
    pub result: Option<Vec<u8>>,
    /// The number of its push to the parameter servers, which is the same for each attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub push: Option<u32>,
    /// Set while it has no result: it has begun to run.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub runs: bool,
}

/// `coordinator/workers/<uuid>`: a worker that runs closures of the job's coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// `host:port` at which the coordinator connects to it.
    pub address: String,
}

/// `coordinator/pushes`: the numbers of pushes that may be in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushesRecord {
    /// The first number that no closure has.
    pub next: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_part_of_a_key() {
        for name in ["epoch-3", "a", "2026-11-29T10:00:00+01:00", "user@host", &"x".repeat(200)] {
            assert_eq!(name.parse::<ClosureName>().map(|it| it.to_string()), Ok(name.to_owned()));
        }
        for text in ["", "a/b", "a b", "ä", "<name>", &"x".repeat(201)] {
            let error = text.parse::<ClosureName>().unwrap_err().to_string();
            assert!(error.contains("is not a valid closure name"), "{error}");
        }
    }

    #[test]
    fn a_result_that_is_empty_is_not_the_end_of_data() {
        for result in [None, Some(Vec::new()), Some(vec![0, 255])] {
            let (function, digest) = ("a:b".into(), "00".into());
            let record = ClosureRecord { function, digest, result, push: Some(7), runs: true };
            let text = serde_json::to_string(&record).unwrap();
            assert_eq!(serde_json::from_str::<ClosureRecord>(&text).unwrap(), record, "{text}");
        }
    }
}
