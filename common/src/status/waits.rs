//! Who waits for whom: the graph behind `steadfast why` and the picture on the page.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// The name of the job in [`Wait::who`].
pub const JOB: &str = "job";

/// An edge of the graph: a process, or the job, waits.
///
/// Processes have the names of `steadfast members`: `master`, `slot 1`, `trainer ID`; a node of an elastic job is
/// `node ID`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    pub who: String,
    /// The process that it waits for; empty if it waits for something else.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub on: String,
    /// What it waits for, and why, in words.
    pub why: String,
}

impl Wait {
    /// Creates the wait of the job for the process `on`.
    pub fn of_job(on: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(JOB, on, why)
    }

    pub fn new(who: impl Into<String>, on: impl Into<String>, why: impl Into<String>) -> Self {
        Self { who: who.into(), on: on.into(), why: why.into() }
    }
}

/// A wait, and the waits of the process that it is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Chain {
    pub what: String,
    pub because: Vec<Chain>,
}

/// Walks the graph from the job, each process once on a way.
pub fn chains(waits: &[Wait]) -> Vec<Chain> {
    walk(waits, JOB, &mut BTreeSet::new())
}

fn walk<'a>(waits: &'a [Wait], who: &'a str, way: &mut BTreeSet<&'a str>) -> Vec<Chain> {
    if !way.insert(who) {
        return Vec::new();
    }
    let mut found: Vec<Chain> = Vec::new();
    for wait in waits.iter().filter(|wait| wait.who == who) {
        let because = if wait.on.is_empty() { Vec::new() } else { walk(waits, &wait.on, way) };
        // A wait for several processes is one line.
        match found.iter_mut().find(|known| known.what == wait.why) {
            Some(known) => known.because.extend(because),
            None => found.push(Chain { what: wait.why.clone(), because }),
        }
    }
    way.remove(who);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_walk_leads_from_the_job_to_the_last_wait_and_ends_in_circles() {
        let waits = [
            Wait::of_job("step", "version 8"),
            Wait::new("step", "slot 0", "slot 0 waits"),
            Wait::new("step", "slot 1", "slot 1 waits"),
            Wait::new("slot 0", "trainer a", "lane 2 of trainer a"),
            Wait::new("trainer a", "step", "trainer a waits for version 8"),
            Wait::of_job("", "an idle host"),
        ];
        let end = |what: &str| Chain { what: what.to_owned(), because: Vec::new() };
        let on = |what: &str, because| Chain { what: what.to_owned(), because };
        let trainer = on("lane 2 of trainer a", vec![end("trainer a waits for version 8")]);
        let step = vec![on("slot 0 waits", vec![trainer]), end("slot 1 waits")];
        assert_eq!(chains(&waits), [on("version 8", step), end("an idle host")]);
    }
}
