//! The findings of an audit.

use std::fmt;

use serde::Serialize;
use steadfast_common::ids::{Generation, Pass, Slot, TaskId};
use steadfast_common::records::closures::ClosureName;
use steadfast_common::records::code::CodeChange;

use crate::words::{pass as name_of, plural, some};
use crate::{Cause, Sum};

/// How a finding bears on the claim that each record was applied exactly once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The claim is false, or the input contradicts itself.
    Violation,
    /// Records are missing, as the job's policy allows.
    AllowedLoss,
    /// The claim holds; for information.
    Note,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// The finding as a sentence.
    pub text: String,
    #[serde(flatten)]
    pub what: What,
}

/// A generation in which a slot lost the records that it had applied since a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Loss {
    pub generation: Generation,
    pub checkpoint: Option<String>,
}

/// The kind of a finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "rule")]
pub enum What {
    /// A slot's applied records of a pass differ from the expected ones.
    CountMismatch { pass: Pass, slot: Slot, expected: Sum, found: Sum, cause: Option<Cause> },
    /// A slot's parameters lack acknowledged records. `tasks` lists those that can be identified; if
    /// `exact` is false, more records may be missing.
    Lost {
        pass: Pass,
        slot: Slot,
        records: u64,
        exact: bool,
        tasks: Vec<TaskId>,
        losses: Vec<Loss>,
    },
    /// The first records of a task were applied before it was given up.
    Prefix { pass: Pass, slot: Slot, task: TaskId, counted: u32, records: u64 },
    /// All records of a task were applied although it was given up.
    FullyApplied { pass: Pass, slot: Slot, task: TaskId },
    /// A slot's applied records include a task, or records of one, that the pass does not have.
    NotOfThePass { pass: Pass, slot: Slot, task: TaskId },
    /// A slot's applied records are not in the order of passes, or name an impossible pass.
    PassOutOfOrder { pass: Pass, slot: Slot },
    /// A pass of a stream contradicts another one, or its own manifest.
    StreamPass { pass: Pass, reason: String },
    /// A checkpoint's queues contain a given-up task that is not listed.
    Unlisted { pass: Pass, task: TaskId },
    /// The list of given-up tasks contains one that does not exist, or a held-out task as a training
    /// task.
    NotATrainingTask { task: TaskId },
    /// The given-up tasks of the result differ from those in etcd. `reported` and `found` are the number of
    /// tasks and of times in all; `tasks` are listed by the result and differ in etcd.
    ResultDiffers { reported: (u64, u64), found: (u64, u64), tasks: Vec<TaskId> },
    /// A reported number of records differs from the number of applied records.
    Examples { source: String, reported: u64, counted: u64 },
    /// The parameters of the final checkpoint differ from those of the result.
    OtherParameters { reported: String, found: String },
    /// A slot lacks pushes of closures that another slot has.
    LacksPushes { slot: Slot, pushes: Vec<TaskId> },
    /// The push of a closure with a result does not count on every slot.
    NotCounted { name: ClosureName, push: TaskId },
    /// Version, pass or exhausted lanes contradict the applied records.
    Position { reason: String },
    /// The applied records of a slot, or of all slots, are missing.
    NoAppliedRecords { slot: Option<Slot> },
    /// The record of a generation is inconsistent.
    Generation { generation: Generation, reason: String },
    /// The model's code was changed in the middle of the job, so no single program computed the parameters.
    CodeChanged { change: CodeChange },
    /// The checkpoint was invalidated, so the present lists may differ from those at its time.
    Invalidated { reason: String },
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
            Self::CountMismatch { pass, slot, expected, found, cause } => {
                write!(f, "{}, slot {slot}: ", name_of(*pass))?;
                let applied = plural(found.records, "record");
                write!(f, "{applied} applied, {} expected", expected.records)?;
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
                 applied before it was given up",
                name_of(*pass)
            ),
            Self::FullyApplied { pass, slot, task } => write!(
                f,
                "{}, slot {slot}: all records of task {task} were applied before it was given up",
                name_of(*pass)
            ),
            Self::NotOfThePass { pass, slot, task } => write!(
                f,
                "{}, slot {slot}: the applied records of task {task} include some that it does not \
                 have",
                name_of(*pass)
            ),
            Self::PassOutOfOrder { pass, slot } => write!(
                f,
                "slot {slot}: the applied records of {} are out of order or beyond the last pass",
                name_of(*pass)
            ),
            Self::StreamPass { pass, reason } => {
                write!(f, "{} of the stream: {reason}", name_of(*pass))
            }
            Self::Unlisted { pass, task } => write!(
                f,
                "{}: task {task} was given up before the checkpoint, but is not listed",
                name_of(*pass)
            ),
            Self::NotATrainingTask { task } => {
                write!(f, "task {task} is listed as given up in passes, but is not a training task")
            }
            Self::ResultDiffers { reported, found, tasks } => {
                result_differs(f, *reported, *found, tasks)
            }
            Self::Examples { source, reported, counted } => {
                write!(
                    f,
                    "{source} reports {}, {counted} were applied",
                    plural(*reported, "record")
                )
            }
            Self::OtherParameters { reported, found } => {
                write!(
                    f,
                    "the parameters of the final checkpoint have the SHA-256 {found}, those of the \
                     result {reported}"
                )
            }
            Self::LacksPushes { slot, pushes } => {
                write!(
                    f,
                    "slot {slot} lacks pushes of closures that another slot has: {}",
                    some(pushes)
                )
            }
            Self::NotCounted { name, push } => {
                write!(f, "push {push} of the closure `{name}` does not count on every slot")
            }
            Self::Position { reason } => f.write_str(reason),
            Self::NoAppliedRecords { slot: Some(slot) } => {
                write!(f, "slot {slot} has no applied records")
            }
            Self::NoAppliedRecords { slot: None } => {
                f.write_str("no block of the checkpoint has applied records")
            }
            Self::Generation { generation, reason } => {
                write!(f, "generation {generation}: {reason}")
            }
            Self::CodeChanged { change } => change.fmt(f),
            Self::Invalidated { reason } => write!(f, "the checkpoint was invalidated: {reason}"),
        }
    }
}

fn result_differs(
    f: &mut fmt::Formatter<'_>,
    reported: (u64, u64),
    found: (u64, u64),
    tasks: &[TaskId],
) -> fmt::Result {
    write!(
        f,
        "the result lists {} tasks given up {} times in all, etcd {} tasks and {} times",
        reported.0, reported.1, found.0, found.1
    )?;
    match tasks.is_empty() {
        true => Ok(()),
        false => write!(f, "; they differ in tasks {}", some(tasks)),
    }
}

fn lost(
    f: &mut fmt::Formatter<'_>,
    records: u64,
    tasks: &[TaskId],
    losses: &[Loss],
) -> fmt::Result {
    write!(f, "{} missing", plural(records, "acknowledged record"))?;
    if !tasks.is_empty() {
        write!(f, " (tasks {})", some(tasks))?;
    }
    for Loss { generation, checkpoint } in losses {
        let from = checkpoint.as_deref().unwrap_or("the start");
        write!(f, "; generation {generation} restarted this slot from {from}")?;
    }
    Ok(())
}
