//! The volatile state of an acting master. It changes with the decision that a change belongs to; a new master starts
//! without it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::ids::{Generation, Incarnation, Lane, Pass, Slot, TaskId, TrainerId};
use steadfast_common::job::schedule::LaneSchedule;
use steadfast_common::machine::Moment;
use steadfast_common::records::position::Position;
use steadfast_common::records::{CheckpointRecord, FollowerRecord};
use steadfast_master_core::deadlines::Deadlines;
use steadfast_master_core::held_out::HeldOut;
use steadfast_master_core::lane_losses::LaneLosses;
use steadfast_master_core::lanes::Lanes;
use steadfast_master_core::ledger::Report;
use steadfast_master_core::saver::{Saver, Stage};
use steadfast_master_core::speeds::{Speeds, WorkerSet};
use steadfast_master_core::sync_tasks::Failure;
use tracing::warn;

use crate::event_loop::handle::{GivenUp, Rollback, SaveAnswer, SaveReport, TaskDone};
use crate::event_loop::recoveries::Recoveries;
use crate::event_loop::time_breakdowns::TimeBreakdowns;
use crate::scaling::Scaling;

/// The volatile state of an acting master.
pub(crate) struct LiveState {
    pub lanes: Lanes,
    /// The pass and the trainers for which the lanes were assigned.
    assigned_for: Option<(Pass, Arc<BTreeSet<TrainerId>>)>,
    pub deadlines: Deadlines,
    pub position: Position,
    /// Whether a trainer has reported a position in this term. Before, it is that of the latest checkpoint.
    pub is_position_reported: bool,
    pub finished: Finished,
    pub saver: Saver,
    /// Failures of held-out tasks.
    pub held_out: HeldOut,
    /// Tasks whose data could not be reached when they were last tried, and why (asynchronous mode).
    unreachable: BTreeMap<(Pass, TaskId), String>,
    pub lane_losses: LaneLosses,
    /// Trainers lost since the last evaluation that may have been evaluating.
    pub evaluators_lost: u32,
    /// The lanes of the present pass, for the status.
    pub schedule: Option<(Pass, LaneSchedule)>,
    pub recoveries: Recoveries,
    pub time_breakdowns: TimeBreakdowns,
    pub speeds: Speeds,
    pub scaling: Scaling,
    /// The trainers that are measured, and of which generation they are.
    pub measured: WorkerSet,
    pub measured_of: Option<(Generation, Arc<BTreeSet<TrainerId>>)>,
    /// A requested rollback, which is decided next.
    pub rollback: Option<Rollback>,
    pub handover: Option<Handover>,
    /// Live trainers and lost slots at the last check.
    pub known_trainers: Arc<BTreeSet<TrainerId>>,
    /// The most trainers that lived at once in this term.
    pub trainers_most: usize,
    known_lost_slots: Vec<Slot>,
    /// Followers at the last check, and whose shards they follow.
    known_followers: BTreeMap<Slot, FollowerRecord>,
}

/// The states that the slots of a generation hand over, for one with another number of slots.
#[derive(Clone, Debug)]
pub(crate) struct Handover {
    pub of: Generation,
    pub answer: HandoverAnswer,
}

/// Tells what the slots have answered.
#[derive(Clone, Debug)]
pub(crate) enum HandoverAnswer {
    NotYet,
    State(Box<CheckpointRecord>),
    /// They cannot: the generation begins from the checkpoint.
    No,
}

/// Sums over tasks that were finished in this term, for the status.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Finished {
    pub records: u64,
    pub loss: Option<f64>,
}

impl LiveState {
    /// Returns the state of a new term.
    pub fn new(lanes: Lanes, position: Position, recoveries: Recoveries) -> Self {
        Self {
            lanes,
            assigned_for: None,
            deadlines: Deadlines::default(),
            position,
            is_position_reported: false,
            finished: Finished::default(),
            saver: Saver::default(),
            held_out: HeldOut::default(),
            unreachable: BTreeMap::new(),
            lane_losses: LaneLosses::default(),
            evaluators_lost: 0,
            schedule: None,
            recoveries,
            time_breakdowns: TimeBreakdowns::default(),
            speeds: Speeds::default(),
            scaling: Scaling::new("trainer"),
            measured: WorkerSet::default(),
            measured_of: None,
            rollback: None,
            handover: None,
            known_trainers: Arc::default(),
            trainers_most: 0,
            known_lost_slots: Vec::new(),
            known_followers: BTreeMap::new(),
        }
    }

    /// Records what a trainer reports of a task of `pass`, the present one.
    pub fn note_report(&mut self, pass: Pass, report: Report) {
        self.unreachable.retain(|(of, task), _| *of == pass && *task != report.task());
        if let Report::Returned { task, unreachable: Some(reason), .. } = report {
            self.unreachable.insert((pass, task), reason);
        }
    }

    /// Returns the tasks of `pass` whose data could not be reached when they were last tried, and why.
    pub fn unreachable(&self, pass: Pass) -> impl Iterator<Item = (TaskId, &str)> {
        let of_pass = self.unreachable.range((pass, TaskId(0))..=(pass, TaskId(u32::MAX)));
        of_pass.map(|((_, task), reason)| (*task, reason.as_str()))
    }

    pub fn note_done(&mut self, moment: Moment, done: TaskDone) {
        self.finished.records += done.records;
        self.finished.loss = Some(done.loss_sum / done.records.max(1) as f64);
        self.position.version = self.position.version.max(done.version);
        self.recoveries.progress(self.position.version, moment.now, moment.unix_ms);
    }

    /// Records the position that a live trainer reports, unless it is older than the known one.
    pub fn note_position(&mut self, moment: Moment, position: Position) {
        if self.position.version <= position.version {
            self.position = position;
            self.is_position_reported = true;
            self.recoveries.progress(position.version, moment.now, moment.unix_ms);
        }
    }

    /// Records the position of a committed checkpoint. Trainers report the position slightly later.
    pub fn note_checkpoint(&mut self, position: Position) {
        if self.position.version < position.version {
            self.position = Position { loss: self.position.loss, ..position };
        }
    }

    /// Handles the report of a trainer that has finished training.
    pub fn begin_save(
        &mut self,
        moment: Moment,
        trainer: TrainerId,
        report: SaveReport,
        live: &BTreeSet<TrainerId>,
    ) -> SaveAnswer {
        if let Some(position) = report.position {
            self.note_position(moment, position);
        }
        if let Some(error) = &report.error {
            warn!(%trainer, error, "the model could not be saved");
        }
        let reply = self.saver.request(trainer, report.stage, report.error, live);
        if self.saver.holder().is_none() {
            self.rebalance_for_saver();
        }
        SaveAnswer { reply, evaluation_is_suspected: self.evaluation_is_suspected() }
    }

    /// Returns whether trainers that evaluate were lost one after another. A single loss can have any cause.
    pub fn evaluation_is_suspected(&self) -> bool {
        2 <= self.evaluators_lost
    }

    /// Rebalances the lanes over trainers that have not failed to save: a trainer without lanes does not
    /// check whether training is over.
    fn rebalance_for_saver(&mut self) {
        let known = &self.known_trainers;
        let others: BTreeSet<TrainerId> =
            known.difference(self.saver.excluded()).copied().collect();
        if !others.is_empty() {
            self.lanes.rebalance(&others);
        }
    }

    /// Moves the lane of a task that failed to another trainer, among the trainers to which lanes were last assigned:
    /// the loss of any other trainer would not be noticed.
    pub fn move_lane(&mut self, failure: &Failure) -> GivenUp {
        match self.lanes.move_to_next(failure.lane, failure.trainer, &self.known_trainers) {
            true => GivenUp::Elsewhere,
            false => GivenUp::No,
        }
    }

    /// Assigns the lanes to the trainers that work. They change only with the pass or the set of these trainers: a
    /// trainer whose lanes were moved because it could not compute them gets others at the next pass.
    pub fn assign_lanes(&mut self, working: &Arc<BTreeSet<TrainerId>>) {
        let pass = self.position.pass;
        match &self.assigned_for {
            Some((of, trainers)) if *of == pass && is_same(trainers, working) => return,
            Some((of, _)) if *of == pass => self.lanes.rebalance(working),
            Some(_) | None => self.lanes.assign(working),
        }
        self.assigned_for = Some((pass, working.clone()));
    }

    /// Records which trainers live, and returns whether trainers were lost. The caller calls this before it reassigns
    /// the lanes of lost trainers.
    pub fn note_trainers(&mut self, moment: Moment, live: &Arc<BTreeSet<TrainerId>>) -> bool {
        if Arc::ptr_eq(&self.known_trainers, live) {
            return false;
        }
        let lost: Vec<TrainerId> = self.known_trainers.difference(live).copied().collect();
        let version = self.position.version;
        if let Some(first) = lost.first() {
            self.recoveries.notice(format!("trainer {first} left"), moment.now, Some(version));
        }
        for trainer in &lost {
            let lanes: Vec<Lane> = self.lanes.of(*trainer);
            self.lane_losses.note(version, &lanes);
            // The trainer with the first lane evaluates until training has ended.
            let saver_evaluates = self.saver.holder() == Some((*trainer, Stage::Evaluating));
            if lanes.contains(&Lane(0)) || saver_evaluates {
                self.evaluators_lost = self.evaluators_lost.saturating_add(1);
            }
        }
        self.time_breakdowns.follow(live);
        self.known_trainers = live.clone();
        !lost.is_empty()
    }

    /// Records which slots have lost their memory.
    pub fn note_lost_slots(&mut self, moment: Moment, lost: Vec<Slot>) {
        if let Some(slot) = lost.iter().find(|slot| !self.known_lost_slots.contains(slot)) {
            let cause = format!("the pserver of slot {slot} was lost");
            tracing::info!(cause);
            self.recoveries.notice(cause, moment.now, Some(self.position.version));
        }
        self.known_lost_slots = lost;
    }

    /// Records which spares follow a slot. A slot whose follower is lost waits for it at first; `is_holder` says whether an
    /// incarnation still holds a slot, so that the follower has not taken it over.
    pub fn note_followers(
        &mut self,
        moment: Moment,
        followers: &BTreeMap<Slot, FollowerRecord>,
        is_holder: impl Fn(&Slot, &Incarnation) -> bool,
    ) {
        let lost = self.known_followers.iter().find(|(slot, known)| {
            followers.get(slot).is_none_or(|it| it.id != known.id) && is_holder(slot, &known.of)
        });
        if let Some((slot, _)) = lost {
            let cause = format!("the follower of slot {slot} was lost");
            warn!(cause);
            self.recoveries.notice(cause, moment.now, Some(self.position.version));
        }
        if self.known_followers != *followers {
            self.known_followers.clone_from(followers);
        }
    }
}

/// Returns whether two sets are equal, in constant time if they are the same object.
fn is_same(one: &Arc<BTreeSet<TrainerId>>, other: &Arc<BTreeSet<TrainerId>>) -> bool {
    Arc::ptr_eq(one, other) || one == other
}
