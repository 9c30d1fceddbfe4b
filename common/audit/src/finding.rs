//! What an audit found.

use std::fmt;

use serde::Serialize;
use steadfast_common::ids::{Generation, Pass, Slot, TaskId};

use crate::words::{pass as name_of, plural, some};
use crate::{Cause, Sum};

/// What a finding means for the claim that each record counted once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The claim is false, or what was read contradicts itself.
    Violation,
    /// Records are missing as the job's own policy allows.
    AllowedLoss,
    /// The claim holds; worth knowing.
    Note,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// The same for people.
    pub text: String,
    #[serde(flatten)]
    pub what: What,
}

/// A generation in which a slot lost what it had counted since a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Loss {
    pub generation: Generation,
    pub checkpoint: Option<String>,
}

/// Kinds of findings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "rule")]
pub enum What {
    /// A slot counted other records in a pass than it should have.
    Miscounted { pass: Pass, slot: Slot, expected: Sum, found: Sum, cause: Option<Cause> },
    /// Records that were acknowledged are not in a slot's parameters. The tasks are those that can
    /// be told; where the number is not exact there may be more.
    Lost {
        pass: Pass,
        slot: Slot,
        records: u64,
        exact: bool,
        tasks: Vec<TaskId>,
        losses: Vec<Loss>,
    },
    /// The first records of a task counted before it was given up.
    Prefix { pass: Pass, slot: Slot, task: TaskId, counted: u32, records: u64 },
    /// All records of a task counted although it was given up.
    WhollyCounted { pass: Pass, slot: Slot, task: TaskId },
    /// A slot counted a task, or records of it, that the pass does not have.
    NotOfThePass { pass: Pass, slot: Slot, task: TaskId },
    /// A slot's counts are not in the order of passes, or name a pass that cannot be.
    PassOutOfOrder { pass: Pass, slot: Slot },
    /// A checkpoint's queues gave a task up, and it is not listed.
    Unlisted { pass: Pass, task: TaskId },
    /// The list of given-up tasks names one that is not trained on, or names it twice.
    ListedWrongly { pass: Pass, task: TaskId },
    /// The result lists other given-up tasks than etcd does.
    ResultDiffers { only_in_result: Vec<(Pass, TaskId)>, only_in_etcd: Vec<(Pass, TaskId)> },
    /// A number of records is not the one that was counted.
    Examples { told_by: String, told: u64, counted: u64 },
    /// The parameters of the final checkpoint are not those of the result.
    OtherParameters { told: String, found: String },
    /// Version, pass or dry lanes contradict what was counted.
    Position { reason: String },
    /// The counts of a slot, or all of them, are missing.
    Uncounted { slot: Option<Slot> },
    /// A generation that cannot have been.
    Generation { generation: Generation, reason: String },
    /// The checkpoint was set aside, so the lists of today may not be those of its time.
    SetAside { reason: String },
}

impl Finding {
    pub(crate) fn new(severity: Severity, what: What) -> Self {
        Self { severity, text: what.to_string(), what }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Violation => "violation",
            Self::AllowedLoss => "allowed loss",
            Self::Note => "note",
        })
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Miscounted { pass, slot, expected, found, cause } => {
                write!(f, "{}, slot {slot}: ", name_of(*pass))?;
                let counted = plural(found.records, "record");
                write!(f, "{counted} counted, {} expected", expected.records)?;
                cause.as_ref().map_or(Ok(()), |cause| write!(f, "; {cause}"))
            }
            Self::Lost { pass, slot, records, exact, tasks, losses } => {
                let least = if *exact { "" } else { "at least " };
                write!(f, "{}, slot {slot}: {least}", name_of(*pass))?;
                lost(f, *records, tasks, losses)
            }
            Self::Prefix { pass, slot, task, counted, records } => write!(
                f,
                "{}, slot {slot}: the first {counted} of {records} records of task {task} were \
                 counted before it was given up",
                name_of(*pass)
            ),
            Self::WhollyCounted { pass, slot, task } => write!(
                f,
                "{}, slot {slot}: all records of task {task} were counted, and then it was given \
                 up",
                name_of(*pass)
            ),
            Self::NotOfThePass { pass, slot, task } => write!(
                f,
                "{}, slot {slot}: task {task} is counted with records that it does not have",
                name_of(*pass)
            ),
            Self::PassOutOfOrder { pass, slot } => {
                write!(f, "slot {slot}: {} is counted where it cannot be", name_of(*pass))
            }
            Self::Unlisted { pass, task } => write!(
                f,
                "{}: task {task} was given up before the checkpoint and is not listed",
                name_of(*pass)
            ),
            Self::ListedWrongly { pass, task } => write!(
                f,
                "{}: task {task} is listed as given up twice, or is not trained on at all",
                name_of(*pass)
            ),
            Self::ResultDiffers { only_in_result, only_in_etcd } => write!(
                f,
                "the result and etcd list different tasks as given up: {} only in the result, {} \
                 only in etcd",
                only_in_result.len(),
                only_in_etcd.len()
            ),
            Self::Examples { told_by, told, counted } => {
                write!(f, "{told_by} tells of {}, {counted} were counted", plural(*told, "record"))
            }
            Self::OtherParameters { told, found } => {
                write!(
                    f,
                    "the parameters of the final checkpoint have the SHA-256 {found}, those of the \
                     result {told}"
                )
            }
            Self::Position { reason } => f.write_str(reason),
            Self::Uncounted { slot: Some(slot) } => write!(f, "slot {slot} has no counts"),
            Self::Uncounted { slot: None } => f.write_str("no block of the checkpoint is counted"),
            Self::Generation { generation, reason } => {
                write!(f, "generation {generation}: {reason}")
            }
            Self::SetAside { reason } => write!(f, "the checkpoint was set aside: {reason}"),
        }
    }
}

fn lost(
    f: &mut fmt::Formatter<'_>,
    records: u64,
    tasks: &[TaskId],
    losses: &[Loss],
) -> fmt::Result {
    write!(f, "{} acknowledged and missing", plural(records, "record"))?;
    if !tasks.is_empty() {
        write!(f, " (tasks {})", some(tasks))?;
    }
    for Loss { generation, checkpoint } in losses {
        let from = checkpoint.as_deref().unwrap_or("the start");
        write!(f, "; generation {generation} began this slot anew from {from}")?;
    }
    Ok(())
}
