//! Explains differing sums: searches for one task or contribution whose absence, or duplicate
//! application, makes up the difference.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use steadfast_common::ids::{Lane, TaskId};

use crate::Sum;
use crate::words::plural;

/// The most candidates that are tried; more would cost more than the explanation is worth.
const CANDIDATES_MAX: usize = 1 << 20;

/// A set of records that are applied together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordSet {
    /// A whole task.
    Task(TaskId),
    /// Consecutive records of a task, by their positions: `from..to`.
    Range { task: TaskId, from: u32, to: u32 },
    /// The micro-batch of one lane in one step of the pass.
    MicroBatch { lane: Lane, step: u64 },
    /// The micro-batches of all lanes in one step of the pass.
    Step(u64),
}

/// An explanation that matches a difference exactly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// These records are missing.
    Missing(RecordSet),
    /// These records were applied once too often.
    TooOften(RecordSet),
    /// `counted` was applied in place of `missing`.
    Instead { missing: RecordSet, counted: RecordSet },
    /// The number of records is right, but some were applied in place of others.
    Exchanged,
}

/// Explains the difference between `found` and `expected` by one candidate, or by one in place of
/// another, if possible.
pub(crate) fn explain(
    expected: Sum,
    found: Sum,
    candidates: impl IntoIterator<Item = (RecordSet, Sum)>,
) -> Option<Cause> {
    let (extra, lacking) = (found.less(expected), expected.less(found));
    let mut known = BTreeMap::new();
    for (set, sum) in candidates.into_iter().take(CANDIDATES_MAX) {
        if sum.records == 0 {
            continue;
        }
        if sum == extra {
            return Some(Cause::TooOften(set));
        }
        if sum == lacking {
            return Some(Cause::Missing(set));
        }
        known.insert(sum, set);
    }
    let pair = known.iter().find_map(|(sum, missing)| {
        let counted = known.get(&sum.and(extra))?;
        Some(Cause::Instead { missing: missing.clone(), counted: counted.clone() })
    });
    pair.or((extra.records == 0).then_some(Cause::Exchanged))
}

impl fmt::Display for RecordSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Task(task) => write!(f, "task {task}"),
            Self::Range { task, from, to } => {
                let records = plural(u64::from(to - from), "record");
                write!(f, "{records} of task {task} from position {from}")
            }
            Self::MicroBatch { lane, step } => {
                write!(f, "the micro-batch of lane {lane} in step {step} of the pass")
            }
            Self::Step(step) => write!(f, "step {step} of the pass"),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(set) => write!(f, "{set} is missing"),
            Self::TooOften(set) => write!(f, "{set} was applied once too often"),
            Self::Instead { missing, counted } => {
                write!(f, "{counted} was applied in place of {missing}")
            }
            Self::Exchanged => f.write_str(
                "the number of records is right, but some were applied in place of others",
            ),
        }
    }
}
