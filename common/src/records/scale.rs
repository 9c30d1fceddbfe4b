//! Says how many workers a job is to have, and who decides that: those of the rounds of an elastic job, or the trainers
//! of a training job.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::records::rendezvous::{NODES_MAX, SLOTS_MAX};

/// The most workers that a round can have.
pub const WORKERS_MAX: u32 = NODES_MAX * SLOTS_MAX;

/// The values of [`ScaleRecord::worth_percent`] that a person may choose.
pub const WORTH_PERCENT: std::ops::RangeInclusive<u32> = 1..=100;

/// Says who decides how many workers a job has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleMode {
    /// A person does.
    Off,
    /// A person does; the master says what it would do.
    #[default]
    Advise,
    /// The master does.
    Auto,
}

impl ScaleMode {
    /// Returns the name, for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Advise => "advise",
            Self::Auto => "auto",
        }
    }
}

/// `rendezvous/workers_desired` says how many workers the rounds of an elastic job are to have, and `trainers_desired` how
/// many trainers work in a training job, which are its workers. A job without it has as many as there are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScaleRecord {
    pub mode: ScaleMode,
    /// A round has at most so many workers, unless its fewest nodes have more: a node runs all of its workers, or none.
    /// Absent: as many as there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// The most workers for which nodes are started as the number grows. Absent: there are only the nodes that are there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub startable: Option<u32>,
    /// One more worker is worth its price if it adds at least this part, in percent, of what a worker brings on average.
    #[serde(default = "default_worth_percent")]
    pub worth_percent: u32,
    /// Says why the number is as it is.
    #[serde(default)]
    pub reason: ScaleReason,
    /// Holds what the master needs to know for its next decision.
    #[serde(default, skip_serializing_if = "ScaleMemory::is_empty")]
    pub memory: ScaleMemory,
}

/// Returns [`ScaleRecord::worth_percent`] of a job for which none was chosen.
pub fn default_worth_percent() -> u32 {
    50
}

/// Holds what a master remembers from one decision to the next.
///
/// All times are in milliseconds of one clock, which stands still while no master acts: each master goes on from
/// [`ScaleMemory::at_ms`], so that it does not matter what the clocks of their machines show.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScaleMemory {
    /// When the record was written.
    #[serde(default)]
    pub at_ms: u64,
    /// The number of workers before the last change; absent before the first, and after a person has chosen one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<u32>,
    /// When the number was changed last.
    #[serde(default)]
    pub changed_ms: u64,
    /// Says how long the master tries no other number after it has turned back. It doubles each time.
    #[serde(default)]
    pub pause_ms: u64,
    /// The time before which no other number is tried.
    #[serde(default)]
    pub next_try_ms: u64,
    /// Holds what was measured up to the last decision, by number of workers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub measured: BTreeMap<u32, MeasuredSpeed>,
}

impl ScaleMemory {
    /// Returns whether no decision was taken yet.
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The speed of a number of workers at some time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredSpeed {
    pub records_per_second: f64,
    pub ms: u64,
}

/// Says why a job has the number of workers that it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleReason {
    /// A person chose it, or no number was chosen.
    #[default]
    Chosen,
    /// Tries more workers.
    TriesMore,
    /// Tries fewer workers.
    TriesFewer,
    /// More workers have paid.
    MorePaid,
    /// More workers did not pay.
    MoreDidNotPay,
    /// Fewer workers do nearly as much.
    FewerSuffice,
    /// Fewer workers did much less.
    FewerDidLess,
    /// Nodes were lost while another number was tried.
    TooFewNodes,
}

impl ScaleReason {
    /// Returns whether the number is to be tried, and was not judged yet.
    pub fn is_try(self) -> bool {
        matches!(self, Self::TriesMore | Self::TriesFewer)
    }

    /// Returns why the number before is better than one that was tried for this reason.
    pub fn of_return(self) -> Self {
        match self {
            Self::TriesFewer => Self::FewerDidLess,
            Self::Chosen
            | Self::TriesMore
            | Self::MorePaid
            | Self::MoreDidNotPay
            | Self::FewerSuffice
            | Self::FewerDidLess
            | Self::TooFewNodes => Self::MoreDidNotPay,
        }
    }
}

impl fmt::Display for ScaleReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Chosen => "chosen by a person",
            Self::TriesMore => "tries whether more pay",
            Self::TriesFewer => "tries whether fewer suffice",
            Self::MorePaid => "more have paid",
            Self::MoreDidNotPay => "more did not pay",
            Self::FewerSuffice => "fewer suffice",
            Self::FewerDidLess => "fewer did less",
            Self::TooFewNodes => "nodes were lost meanwhile",
        })
    }
}

impl Default for ScaleRecord {
    fn default() -> Self {
        Self {
            mode: ScaleMode::default(),
            workers: None,
            startable: None,
            worth_percent: default_worth_percent(),
            reason: ScaleReason::default(),
            memory: ScaleMemory::default(),
        }
    }
}

impl ScaleRecord {
    /// Returns for how many workers there should be nodes; `None` if there is room for all that can be started. While fewer
    /// workers are tried, the nodes of the others stay, to which the job may go back.
    pub fn nodes_for(&self) -> Option<u32> {
        let workers = self.workers?;
        match (self.reason, self.memory.before) {
            (ScaleReason::TriesFewer, Some(before)) => Some(workers.max(before)),
            _ => Some(workers),
        }
    }
}

impl fmt::Display for ScaleRecord {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.workers {
            Some(workers) => write!(formatter, "at most {workers}, {}", self.reason)?,
            None => formatter.write_str("as many as there are")?,
        }
        write!(formatter, " (mode {})", self.mode.name())
    }
}

/// Holds what a person asks for. What is absent stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScaleWish {
    pub mode: Option<ScaleMode>,
    /// The most workers; `Some(None)` is as many as there are.
    pub workers: Option<Option<u32>>,
    pub worth_percent: Option<u32>,
    /// The most workers for which nodes are started; `Some(None)` is none but those of the nodes that are there.
    pub startable: Option<Option<u32>>,
}

impl ScaleRecord {
    /// Returns the record of what a person asks for, unless `stored` has it already.
    pub fn chosen(stored: Option<&Self>, wish: ScaleWish) -> Option<Self> {
        let next = stored.cloned().unwrap_or_default().with(wish);
        Some(next).filter(|next| stored != Some(next))
    }

    /// Returns the record that follows from what a person asks for. A number that a person chooses stays until the
    /// mode is set to `auto` again.
    pub fn with(&self, wish: ScaleWish) -> Self {
        let mut next = self.clone();
        next.worth_percent = wish.worth_percent.unwrap_or(self.worth_percent);
        if let Some(workers) = wish.workers {
            next.workers = workers;
            next.reason = ScaleReason::Chosen;
            if next.mode == ScaleMode::Auto {
                next.mode = ScaleMode::Advise;
            }
        }
        next.mode = wish.mode.unwrap_or(next.mode);
        if next != *self {
            next.memory = ScaleMemory::default();
        }
        // What was measured is as true as before.
        next.startable = wish.startable.unwrap_or(self.startable);
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// S002-10: a number that a person chooses is not changed until the master is asked to decide again.
    #[test]
    fn a_number_that_a_person_chooses_stays() {
        let auto = ScaleWish { mode: Some(ScaleMode::Auto), ..ScaleWish::default() };
        let four = ScaleWish { workers: Some(Some(4)), ..ScaleWish::default() };
        let record = ScaleRecord::default().with(auto);
        assert_eq!((record.mode, record.workers), (ScaleMode::Auto, None));
        let record = record.with(four);
        assert_eq!((record.mode, record.workers), (ScaleMode::Advise, Some(4)));
        let record = record.with(auto);
        assert_eq!((record.mode, record.workers), (ScaleMode::Auto, Some(4)));
        let all = ScaleWish { workers: Some(None), ..ScaleWish::default() };
        assert_eq!(record.with(all).workers, None);
    }

    #[test]
    fn the_record_reads_well_in_etcdctl() {
        let text = r#"{"mode":"auto","workers":4}"#;
        let record: ScaleRecord = serde_json::from_str(text).unwrap();
        let mode = ScaleMode::Auto;
        assert_eq!(record, ScaleRecord { mode, workers: Some(4), ..ScaleRecord::default() });
        let written = r#"{"mode":"auto","workers":4,"worth_percent":50,"reason":"chosen"}"#;
        assert_eq!(serde_json::to_string(&record).unwrap(), written);
    }
}
