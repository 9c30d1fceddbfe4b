//! What may have gone wrong where the sums differ: a search for one task or one contribution whose
//! absence, or second counting, makes up the difference.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use steadfast_common::ids::{Lane, TaskId};

use crate::Sum;
use crate::words::plural;

/// Candidates looked at; a search over more would cost more than it is worth.
const CANDIDATES_MAX: usize = 1 << 20;

/// Some records that go together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Which {
    /// A whole task.
    Task(TaskId),
    /// Consecutive records of a task, by their positions.
    Piece { task: TaskId, from: u32, to: u32 },
    /// What one lane computes in one step of the pass.
    MicroBatch { lane: Lane, step: u64 },
    /// What all lanes compute in one step of the pass.
    Step(u64),
}

/// An explanation of a difference that fits exactly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// These were left out.
    Missing(Which),
    /// These counted once more than they should.
    TooOften(Which),
    /// One counted in the other's place.
    Instead { missing: Which, counted: Which },
    /// As many records as expected, but others: some in the place of some.
    Exchanged,
}

/// Explains why `found` is not `expected`, if one candidate (or one for another) does.
pub(crate) fn explain(
    expected: Sum,
    found: Sum,
    candidates: impl IntoIterator<Item = (Which, Sum)>,
) -> Option<Cause> {
    let (extra, lacking) = (found.less(expected), expected.less(found));
    let mut known = BTreeMap::new();
    for (which, sum) in candidates.into_iter().take(CANDIDATES_MAX) {
        if sum.records == 0 {
            continue;
        }
        if sum == extra {
            return Some(Cause::TooOften(which));
        }
        if sum == lacking {
            return Some(Cause::Missing(which));
        }
        known.insert(sum, which);
    }
    let pair = known.iter().find_map(|(sum, missing)| {
        let counted = known.get(&sum.and(extra))?;
        Some(Cause::Instead { missing: missing.clone(), counted: counted.clone() })
    });
    pair.or((extra.records == 0).then_some(Cause::Exchanged))
}

impl fmt::Display for Which {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Task(task) => write!(f, "task {task}"),
            Self::Piece { task, from, to } => {
                write!(
                    f,
                    "{} of task {task} from {from} on",
                    plural(u64::from(to - from), "record")
                )
            }
            Self::MicroBatch { lane, step } => {
                write!(f, "what lane {lane} computes in step {step} of the pass")
            }
            Self::Step(step) => write!(f, "step {step} of the pass"),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(which) => write!(f, "{which} is missing"),
            Self::TooOften(which) => write!(f, "{which} counted once too often"),
            Self::Instead { missing, counted } => {
                write!(f, "{counted} counted once too often, and {missing} is missing")
            }
            Self::Exchanged => f.write_str("the number is right, but they are other records"),
        }
    }
}
