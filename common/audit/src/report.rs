//! What an audit says, for programs and for people.

use std::fmt;

use serde::Serialize;
use steadfast_common::ids::{Generation, Pass, Slot, TaskId};
use steadfast_common::spec::Mode;

use crate::words::{pass as name_of, plural, some};
use crate::{Evidence, Finding, Severity, Sum, What};

/// The outcome of an audit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub job: String,
    pub mode: Mode,
    /// The checkpoint whose counts were looked at.
    pub checkpoint: Option<String>,
    pub passes: Vec<PassReport>,
    pub generations: Vec<GenerationReport>,
    /// What going back to the checkpoint would compute again (asynchronous mode).
    pub replay: Option<Replay>,
    /// The worst first.
    pub findings: Vec<Finding>,
    /// What is proved, in words.
    pub proved: Vec<String>,
    /// What is not.
    pub unproved: Vec<String>,
}

/// How far a pass is in the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PassState {
    Over,
    UnderWay,
}

/// One pass.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PassReport {
    pub pass: Pass,
    pub state: PassState,
    /// Records that had to be counted by then; in the present pass of an asynchronous job, those
    /// of tasks that were acknowledged.
    pub expected: Sum,
    /// Tasks that were given up.
    pub discarded: Vec<TaskId>,
    /// Records of these.
    pub discarded_records: u64,
    pub slots: Vec<SlotFigures>,
}

/// What some blocks of a slot counted in one pass.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlotFigures {
    pub slot: Slot,
    pub blocks: usize,
    pub found: Sum,
    pub verdict: Verdict,
}

/// What the records that a slot counted in a pass are, against those that it should have counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The same, each once.
    Exact,
    /// Fewer, as the job allows.
    AllowedLoss,
    /// Others.
    Wrong,
}

/// One generation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GenerationReport {
    pub generation: Generation,
    /// From where it began; from the start when absent.
    pub checkpoint: Option<String>,
    /// Slots that went on with their memory.
    pub kept: Vec<Slot>,
    /// Slots that began anew while those went on.
    pub lost: Vec<Slot>,
    /// Why the one before it ended.
    pub reason: String,
}

/// What going back to a checkpoint would compute again.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Replay {
    pub pass: Pass,
    /// Tasks of the pass that are not done.
    pub tasks: u32,
    pub records: u64,
    /// Records among all that is computed again which a slot has counted already, and will not
    /// count a second time.
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

    /// Whether every record counted once, is listed as given up, or is missing as the job allows.
    pub fn is_clean(&self) -> bool {
        self.findings.iter().all(|it| it.severity != Severity::Violation)
    }

    /// Findings of one severity.
    pub fn of(&self, severity: Severity) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(move |it| it.severity == severity)
    }

    pub(crate) fn find(&mut self, severity: Severity, what: What) {
        self.findings.push(Finding::new(severity, what));
    }

    pub(crate) fn violation(&mut self, what: What) {
        self.find(Severity::Violation, what);
    }

    /// Says in words what holds, and sorts the findings.
    pub(crate) fn conclude(&mut self, evidence: &Evidence) {
        self.findings.sort_by_key(|it| it.severity);
        let losses: Vec<String> =
            self.of(Severity::AllowedLoss).map(|it| it.text.clone()).collect();
        let claims = claims(&self.passes);
        self.proved.splice(0..0, claims);
        if !losses.is_empty() {
            self.unproved.push(
                "where records are missing as the job allows, their number is known, and that no \
                 others are missing is not proved"
                    .to_owned(),
            );
        }
        let is_last = evidence.result.as_ref().is_some_and(|it| it.checkpoint == self.checkpoint);
        if let Some(id) = self.checkpoint.as_ref().filter(|_| !is_last) {
            self.unproved.push(format!("what was trained on after checkpoint {id}"));
        }
    }
}

/// What is proved of the passes; neighbours of which the same is proved share a line.
fn claims(passes: &[PassReport]) -> Vec<String> {
    let is_proved = |pass: &&PassReport| {
        !pass.slots.is_empty() && pass.slots.iter().all(|it| it.verdict != Verdict::Wrong)
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
            format!("passes {} to {}: {claim}, each", number(first), number(last))
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
        let lossless = self.slots.iter().all(|it| it.verdict == Verdict::Exact);
        let claim = match (self.state, lossless) {
            (PassState::Over, true) => format!("{records} counted exactly once in every block"),
            (PassState::Over, false) => format!("of {records} none counted twice in any block"),
            (PassState::UnderWay, true) => {
                format!("so far {records} counted exactly once in every block")
            }
            (PassState::UnderWay, false) => {
                format!("so far of {records} none counted twice in any block")
            }
        };
        format!("{claim}{left_out}")
    }
}

impl fmt::Display for GenerationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = match &self.checkpoint {
            Some(id) => format!("from checkpoint {id}"),
            None => "from the start".to_owned(),
        };
        write!(f, "generation {} began {from}", self.generation)?;
        if !self.lost.is_empty() {
            write!(f, " in slots {}; slots {} went on", some(&self.lost), some(&self.kept))?;
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
        write!(
            f,
            "going back to it leaves {} of {name} to be computed ({records})",
            plural(tasks, "task")
        )?;
        for (slot, counted) in self.counted.iter().filter(|(_, counted)| 0 < *counted) {
            let counted = plural(*counted, "record");
            write!(f, "; slot {slot} has {counted} of these, which count no second time")?;
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
            (0, losses) => write!(f, "clean, with {} that the job allows", plural_loss(losses)),
            (violations, _) => write!(f, "not clean: {}", plural(violations as u64, "violation")),
        }
    }
}

fn plural_loss(losses: usize) -> String {
    if losses == 1 { "1 loss".to_owned() } else { format!("{losses} losses") }
}

fn section<T: fmt::Display>(f: &mut fmt::Formatter<'_>, name: &str, items: &[T]) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    writeln!(f, "{name}")?;
    items.iter().try_for_each(|item| writeln!(f, "  {item}"))
}
