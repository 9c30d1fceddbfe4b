//! The follower of a slot, as the holder sees it: what it has, what it still has to get, and which steps wait for it.
//!
//! A follower begins with a snapshot at some version, and gets what each later step adds up to (in asynchronous mode,
//! each push). Once it has caught up, the holder shows a step only when the follower has it, and then records the
//! follower in etcd: from then on the follower may take the slot over. In reverse order, a follower that is slow or
//! gone is first removed from etcd, and then no step waits for it.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use steadfast_common::ids::Version;
use steadfast_common::records::contribution::ContributionName;
use steadfast_common::tensor::table::Rows;
use steadfast_host::time::Instant;
use steadfast_pserver_core::contribution::{Contribution, ValidatedBlock};
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

use crate::event::FollowerReport;

/// Bytes of steps that a follower may lack before it has caught up, if that is more than [`STEPS_MAX`] steps.
const BYTES_MIN: usize = 64 << 20;

/// The most steps that a follower may lack before it has caught up, if they take more than [`BYTES_MIN`].
const STEPS_MAX: usize = 4;

/// The longest that a step waits for a follower, and a second more for each so many bytes that it lacks.
const PATIENCE: Duration = Duration::from_secs(1);
const BYTES_PER_SECOND: f64 = (256 << 20) as f64;

/// A follower that has not caught up keeps others away for this long without a sign of life.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// A pserver that asks to follow the slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applicant {
    pub id: Uuid,
    pub address: String,
    pub admin: String,
    /// Its lease, to which its record in etcd is bound.
    pub lease: i64,
}

/// A part of what a follower gets of a step.
#[derive(Clone, Debug)]
pub enum StepPart {
    Blocks(Vec<ValidatedBlock>),
    /// The rest of the step, which is complete.
    End(Arc<StepEnd>),
    /// In place of the rest, a comparison: the follower reports the digest of its state at this version, and asks
    /// again.
    Compare {
        number: u64,
        /// It also saves its state as the shard of a checkpoint, after this time.
        save_after: Option<Duration>,
    },
}

/// Ends a step for its follower: it has all but the blocks.
#[derive(Clone, Debug)]
pub struct StepEnd {
    pub name: ContributionName,
    pub records: u64,
    pub loss_sum: f64,
    pub weight: Option<f64>,
    pub checksum: u64,
    pub rows: Vec<Rows>,
    /// The global norm of the mean gradient, if the job clips by it.
    pub norm: Option<f64>,
}

/// A follower's request for the step from a version on. It has all steps before.
#[derive(Debug)]
pub struct StepRequest {
    pub version: Version,
    /// The last comparison whose digest it computes or has reported; 0 if there was none.
    pub comparison: u64,
    /// Where the parts of the step are sent.
    pub parts: mpsc::UnboundedSender<StepPart>,
}

/// A step that a follower may lack.
#[derive(Debug, Default)]
struct Step {
    blocks: Vec<ValidatedBlock>,
    end: Option<Arc<StepEnd>>,
    bytes: usize,
}

/// States how far a follower is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It catches up, and steps wait for it only if it lacks too many.
    Joining,
    /// Each step waits for it. It is recorded in etcd, or is about to be.
    Following,
    /// It gets nothing any more, but steps wait until it is no longer recorded.
    Leaving,
}

/// Shows others the follower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedFollower {
    pub applicant: Arc<Applicant>,
    /// Whether each step waits for it, so that it may be recorded in etcd.
    pub is_following: bool,
    /// Whether steps wait until it is no longer recorded.
    pub is_leaving: bool,
    /// Number of complete steps that it lacks.
    pub behind: usize,
    /// Since when a step waits for it.
    pub waiting: Option<Instant>,
}

/// The follower of a slot.
#[derive(Debug)]
pub struct Follower {
    pub applicant: Arc<Applicant>,
    stage: Stage,
    /// The version of the snapshot that it began with.
    began: Version,
    /// It has all steps before this version.
    has: Version,
    /// The steps from `has` on; the last one may be incomplete.
    steps: VecDeque<Step>,
    /// Who asks for the step at `has`.
    request: Option<StepRequest>,
    heard: Instant,
    /// Alive as long as the snapshot is sent.
    snapshot: Weak<()>,
    /// Since when a step waits for it.
    waiting: Option<Instant>,
    comparison: Option<Comparison>,
    /// Number of comparisons so far.
    comparisons: u64,
}

/// A version of which the follower reports its state.
#[derive(Debug)]
struct Comparison {
    number: u64,
    version: Version,
    save_after: Option<Duration>,
    report: oneshot::Sender<FollowerReport>,
}

impl Follower {
    /// Returns a follower that begins with a snapshot at `version`. The snapshot is sent as long as the returned token
    /// exists.
    pub fn new(applicant: Applicant, version: Version) -> (Self, Arc<()>) {
        let token = Arc::new(());
        let follower = Self {
            applicant: applicant.into(),
            stage: Stage::Joining,
            began: version,
            has: version,
            steps: VecDeque::new(),
            request: None,
            heard: Instant::now(),
            snapshot: Arc::downgrade(&token),
            waiting: None,
            comparison: None,
            comparisons: 0,
        };
        (follower, token)
    }

    /// Returns whether another pserver may take its place.
    pub fn is_replaceable(&self) -> bool {
        let is_reading = 0 < self.snapshot.strong_count();
        let asks = self.request.as_ref().is_some_and(|request| !request.parts.is_closed());
        let is_silent = !is_reading && !asks && SILENCE_MAX < self.heard.elapsed();
        self.stage == Stage::Joining && is_silent
    }

    /// Returns whether each step waits for it, so that it may be recorded in etcd.
    pub fn is_following(&self) -> bool {
        self.stage == Stage::Following
    }

    pub fn is_leaving(&self) -> bool {
        self.stage == Stage::Leaving
    }

    pub fn published(&self) -> PublishedFollower {
        PublishedFollower {
            applicant: self.applicant.clone(),
            is_following: self.is_following(),
            is_leaving: self.is_leaving(),
            behind: self.lag(),
            waiting: self.waiting,
        }
    }

    /// Returns the number of complete steps that the follower lacks.
    pub fn lag(&self) -> usize {
        self.steps.iter().filter(|step| step.end.is_some()).count()
    }

    /// Returns whether the step from `version` on may be shown.
    pub fn admits(&self, version: Version) -> bool {
        match self.stage {
            Stage::Joining => {
                let bytes: usize = self.steps.iter().map(|step| step.bytes).sum();
                self.steps.len() <= STEPS_MAX || bytes <= BYTES_MIN
            }
            Stage::Following | Stage::Leaving => version < self.has,
        }
    }

    /// Notes whether a step waits for the follower.
    pub fn note_waiting(&mut self, waits: bool) {
        self.waiting = waits.then(|| self.waiting.unwrap_or_else(Instant::now));
    }

    /// Returns when the step that waits stops to wait, unless the follower is removed already.
    pub fn patience_ends(&self) -> Option<Instant> {
        let bytes: usize = self.steps.iter().map(|step| step.bytes).sum();
        let more = Duration::from_secs_f64(bytes as f64 / BYTES_PER_SECOND);
        let since = self.waiting.filter(|_| self.stage != Stage::Leaving);
        since.map(|since| since + PATIENCE + more)
    }

    /// Gives up on the follower. Returns whether nothing waits for it any more; otherwise steps wait until it is no
    /// longer recorded in etcd.
    pub fn leave(&mut self) -> bool {
        (self.request, self.waiting, self.comparison) = (None, None, None);
        self.steps.clear();
        let was_joining = self.stage == Stage::Joining;
        self.stage = Stage::Leaving;
        was_joining
    }

    /// Handles a request for a step. Returns whether the version is one that can follow.
    pub fn ask(&mut self, request: StepRequest) -> bool {
        let version = request.version;
        let done = version.0.checked_sub(self.has.0).map(|done| done as usize);
        let complete = self.steps.iter().take_while(|step| step.end.is_some()).count();
        let Some(done) = done.filter(|done| *done <= complete && self.stage != Stage::Leaving)
        else {
            return false;
        };
        self.steps.drain(..done);
        (self.has, self.heard, self.waiting) = (version, Instant::now(), None);
        // Of a step before the first one that it has got, others may need the parameters.
        if self.stage == Stage::Joining && self.began < self.has && self.lag() == 0 {
            self.stage = Stage::Following;
        }
        self.request = Some(request);
        if !self.ask_to_compare()
            && let (Some(step), Some(StepRequest { parts, .. })) =
                (self.steps.front(), &self.request)
        {
            let _ = parts.send(StepPart::Blocks(step.blocks.clone()));
            step.end.iter().for_each(|end| drop(parts.send(StepPart::End(end.clone()))));
        }
        true
    }

    /// Asks for a report of its state at `version`, if it follows the slot and has not got the whole step from there
    /// on yet. Who waits for the report of an earlier version gets none.
    pub fn compare(
        &mut self,
        version: Version,
        save_after: Option<Duration>,
    ) -> Option<oneshot::Receiver<FollowerReport>> {
        let is_past =
            version < self.has || version == self.has && self.request.is_some() && 0 < self.lag();
        if self.stage != Stage::Following || is_past {
            return None;
        }
        let (report, received) = oneshot::channel();
        self.comparisons += 1;
        let number = self.comparisons;
        self.comparison = Some(Comparison { number, version, save_after, report });
        self.ask_to_compare();
        Some(received)
    }

    /// Asks for the report once the follower is at the version, in answer to its request; returns whether it has asked
    /// now. If the answer is lost, the next request gets it.
    fn ask_to_compare(&mut self) -> bool {
        let due = self.comparison.as_ref().filter(|it| it.version == self.has);
        let Some(&Comparison { number, save_after, .. }) = due else { return false };
        match self.request.take_if(|request| request.comparison != number) {
            Some(request) => {
                let _ = request.parts.send(StepPart::Compare { number, save_after });
                true
            }
            None => false,
        }
    }

    /// Passes its report on to who waits for it.
    pub fn compared(&mut self, number: u64, report: FollowerReport) {
        if let Some(comparison) = self.comparison.take_if(|it| it.number == number) {
            let _ = comparison.report.send(report);
        }
    }

    /// Adds blocks of the step from `version` on.
    pub fn add(&mut self, version: Version, blocks: Vec<ValidatedBlock>) {
        if blocks.is_empty() || self.stage == Stage::Leaving {
            return;
        }
        let is_asked = version == self.has;
        let parts = self.request.as_ref().filter(|_| is_asked).map(|it| it.parts.clone());
        let Some(step) = self.step(version) else { return };
        step.bytes += blocks.iter().map(|block| size_of_val(block.values())).sum::<usize>();
        step.blocks.extend(blocks.iter().cloned());
        parts.iter().for_each(|parts| drop(parts.send(StepPart::Blocks(blocks.clone()))));
    }

    /// Completes the step from `version` on, with its blocks that were not added yet.
    pub fn end(
        &mut self,
        version: Version,
        (name, rest): (ContributionName, Contribution),
        norm: Option<f64>,
    ) {
        let Contribution { records, loss_sum, weight, checksum, blocks, rows } = rest;
        self.add(version, blocks);
        let end = Arc::new(StepEnd { name, records, loss_sum, weight, checksum, rows, norm });
        let is_asked = version == self.has;
        let parts = self.request.as_ref().filter(|_| is_asked).map(|it| it.parts.clone());
        let Some(step) = self.step(version).filter(|step| step.end.is_none()) else { return };
        step.bytes += end.rows.iter().map(|rows| size_of_val(rows.values())).sum::<usize>();
        step.end = Some(end.clone());
        parts.iter().for_each(|parts| drop(parts.send(StepPart::End(end.clone()))));
    }

    fn step(&mut self, version: Version) -> Option<&mut Step> {
        if self.stage == Stage::Leaving {
            return None;
        }
        let index = version.0.checked_sub(self.has.0)? as usize;
        if self.steps.len() <= index {
            self.steps.resize_with(index + 1, Step::default);
        }
        self.steps.get_mut(index)
    }
}
