//! The report of an audit, as JSON and as text.

use std::fmt;

use serde::Serialize;
use steadfast_common::ids::{Generation, Pass, Slot, TaskId, Version};
use steadfast_common::job::spec::Mode;

use crate::words::{pass as name_of, plural, some};
use crate::{Evidence, Finding, Severity, Sum, What};

/// The outcome of an audit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub job: String,
    pub mode: Mode,
    /// The audited checkpoint.
    pub checkpoint: Option<String>,
    pub passes: Vec<PassReport>,
    pub generations: Vec<GenerationReport>,
    /// The work that a restore of the checkpoint would repeat (asynchronous mode).
    pub replay: Option<Replay>,
    /// The findings, most severe first.
    pub findings: Vec<Finding>,
    /// What is proved, as sentences.
    pub proved: Vec<String>,
    /// What is not proved, as sentences.
    pub unproved: Vec<String>,
}

/// Whether the checkpoint is past the end of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PassState {
    Finished,
    InProgress,
}

/// The applied records of one pass.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PassReport {
    pub pass: Pass,
    pub state: PassState,
    /// Records that must have been applied; in the present pass of an asynchronous job, those of the
    /// acknowledged tasks.
    pub expected: Sum,
    /// Given-up tasks.
    pub discarded: Vec<TaskId>,
    /// Records of the given-up tasks.
    pub discarded_records: u64,
    pub slots: Vec<SlotFigures>,
}

/// The records of one pass that a group of a slot's blocks has applied.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlotFigures {
    pub slot: Slot,
    pub blocks: usize,
    pub found: Sum,
    pub verdict: Coverage,
}

/// A slot's applied records of a pass, compared with the expected ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Coverage {
    /// Each record was applied exactly once.
    Exact,
    /// Records are missing, as the job's policy allows.
    AllowedLoss,
    /// The records differ.
    Wrong,
}

/// One generation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GenerationReport {
    pub generation: Generation,
    /// The checkpoint that the generation began from; absent for the start of the job.
    pub checkpoint: Option<String>,
    /// The version at which the slots before handed their states over, in place of the checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handover: Option<Version>,
    /// Slots that kept their memory.
    pub kept: Vec<Slot>,
    /// Slots that restarted while others kept their memory.
    pub lost: Vec<Slot>,
    /// Why the previous generation ended.
    pub reason: String,
}

/// The work that a restore of the checkpoint would repeat.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Replay {
    pub pass: Pass,
    /// Tasks of the pass that are not done.
    pub tasks: u32,
    pub records: u64,
    /// Records of these tasks that each slot has already applied, and will not apply again.
    pub counted: Vec<(Slot, u64)>,
}

impl Report {
    pub(crate) fn new(evidence: &Evidence) -> Self {
        Self {
            job: evidence.spec.name.clone(),
            mode: evidence.spec.mode,
            checkpoint: evidence.checkpoint.as_ref().map(|it| it.id.clone()),
            passes: Vec::new(),
            generations: Vec::new(),
            replay: None,
            findings: Vec::new(),
            proved: Vec::new(),
            unproved: Vec::new(),
        }
    }

    /// Returns whether every record was applied exactly once, is listed as given up, or is an allowed loss.
    pub fn is_clean(&self) -> bool {
        self.findings.iter().all(|it| it.severity != Severity::Violation)
    }

    pub fn of(&self, severity: Severity) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |it| it.severity == severity)
    }

    pub(crate) fn find(&mut self, severity: Severity, what: What) {
        self.findings.push(Finding::new(severity, what));
    }

    pub(crate) fn violation(&mut self, what: What) {
        self.find(Severity::Violation, what);
    }

    /// Adds what is proved and what is not, and sorts the findings.
    pub(crate) fn conclude(&mut self, evidence: &Evidence) {
        self.findings.sort_by_key(|it| it.severity);
        let losses: Vec<String> =
            self.of(Severity::AllowedLoss).map(|it| it.text.clone()).collect();
        let claims = claims(&self.passes);
        self.proved.splice(0..0, claims);
        if !losses.is_empty() {
            self.unproved.push("that no records are missing besides the allowed losses".to_owned());
        }
        let is_last = evidence.result.as_ref().is_some_and(|it| it.checkpoint == self.checkpoint);
        if let Some(id) = self.checkpoint.as_ref().filter(|_| !is_last) {
            self.unproved.push(format!("what was trained on after checkpoint {id}"));
        }
    }
}

/// Returns what is proved of the passes, as lines of text; consecutive passes with equal claims share a line.
fn claims(passes: &[PassReport]) -> Vec<String> {
    let is_proved = |pass: &&PassReport| {
        !pass.slots.is_empty() && pass.slots.iter().all(|it| it.verdict != Coverage::Wrong)
    };
    let mut claims: Vec<(Pass, Pass, String)> = Vec::new();
    for pass in passes.iter().filter(is_proved) {
        let claim = pass.claim();
        match claims.last_mut() {
            Some((_, last, known)) if *known == claim && last.0 + 1 == pass.pass.0 => {
                *last = pass.pass;
            }
            Some(_) | None => claims.push((pass.pass, pass.pass, claim)),
        }
    }
    let line = |(first, last, claim): (Pass, Pass, String)| match first == last {
        true => format!("{}: {claim}", name_of(first)),
        false => {
            let number = |pass: Pass| u64::from(pass.0) + 1;
            format!("passes {} to {}, each: {claim}", number(first), number(last))
        }
    };
    claims.into_iter().map(line).collect()
}

impl PassReport {
    fn claim(&self) -> String {
        let records = plural(self.expected.records, "record");
        let left_out = match self.discarded.len() as u64 {
            0 => String::new(),
            count => format!(
                "; {} with {} given up",
                plural(count, "task"),
                plural(self.discarded_records, "record")
            ),
        };
        let lossless = self.slots.iter().all(|it| it.verdict == Coverage::Exact);
        let claim = match (self.state, lossless) {
            (PassState::Finished, true) => format!("{records} applied exactly once to every block"),
            (PassState::Finished, false) => format!("of {records} none applied twice to any block"),
            (PassState::InProgress, true) => {
                format!("so far {records} applied exactly once to every block")
            }
            (PassState::InProgress, false) => {
                format!("so far of {records} none applied twice to any block")
            }
        };
        format!("{claim}{left_out}")
    }
}

impl fmt::Display for GenerationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all_kept = self.lost.is_empty() && !self.kept.is_empty();
        let from = match (self.handover, &self.checkpoint) {
            (Some(version), _) => {
                format!("with what the slots before handed over at version {version}")
            }
            (None, _) if all_kept => "with the memory of all slots".to_owned(),
            (None, Some(id)) => format!("from checkpoint {id}"),
            (None, None) => "from the start".to_owned(),
        };
        write!(f, "generation {} began {from}", self.generation)?;
        if !self.lost.is_empty() {
            write!(
                f,
                " (slots restored: {}; slots that kept their memory: {})",
                some(&self.lost),
                some(&self.kept)
            )?;
        }
        match self.reason.as_str() {
            "" => Ok(()),
            reason => write!(f, ": {reason}"),
        }
    }
}

impl fmt::Display for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tasks, records) = (u64::from(self.tasks), plural(self.records, "record"));
        let name = name_of(self.pass);
        write!(f, "a restore leaves {} of {name} to compute ({records})", plural(tasks, "task"))?;
        for (slot, counted) in self.counted.iter().filter(|(_, counted)| 0 < *counted) {
            let counted = plural(*counted, "record");
            write!(f, "; slot {slot} has already applied {counted} of these and skips them")?;
        }
        Ok(())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = match self.mode {
            Mode::Sync => "synchronous",
            Mode::Async => "asynchronous",
        };
        let of = match &self.checkpoint {
            Some(id) => format!("as of checkpoint {id}"),
            None => "without a checkpoint".to_owned(),
        };
        writeln!(f, "audit of job {} ({mode}), {of}", self.job)?;
        section(f, "generations", &self.generations)?;
        let findings: Vec<String> =
            self.findings.iter().map(|it| format!("{}: {}", it.severity, it.text)).collect();
        section(f, "findings", &findings)?;
        section(f, "restore", self.replay.as_slice())?;
        section(f, "proved", &self.proved)?;
        section(f, "not proved", &self.unproved)?;
        let (violations, losses) =
            (self.of(Severity::Violation).count(), self.of(Severity::AllowedLoss).count());
        match (violations, losses) {
            (0, 0) => write!(f, "clean"),
            (0, losses) => write!(f, "clean, with {}", plural_loss(losses)),
            (violations, _) => write!(f, "not clean: {}", plural(violations as u64, "violation")),
        }
    }
}

fn plural_loss(losses: usize) -> String {
    if losses == 1 { "1 allowed loss".to_owned() } else { format!("{losses} allowed losses") }
}

fn section<T: fmt::Display>(f: &mut fmt::Formatter<'_>, name: &str, items: &[T]) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    writeln!(f, "{name}")?;
    items.iter().try_for_each(|item| writeln!(f, "  {item}"))
}
