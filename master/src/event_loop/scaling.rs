//! Lets as many trainers work as a person, or the policy, has chosen.
//!
//! The first trainers that have joined work. The others have no lanes and get no tasks, and take the place of one that is
//! lost.

use std::sync::Arc;

use steadfast_common::ids::Generation;
use steadfast_common::job::spec::{JobSpec, Mode};
use steadfast_common::machine::{Decision, Moment};
use steadfast_common::records::scale::{ScaleRecord, ScaleWish};
use steadfast_master_core::job_state::Fact;

use crate::event_loop::handle::ControlError;
use crate::event_loop::machine::{Progress, TrainingJob};

impl TrainingJob {
    /// Decides how many trainers work, as a person wishes.
    pub(crate) fn choose_scale(
        &mut self,
        moment: Moment,
        wish: ScaleWish,
        decision: &mut Decision<Self>,
    ) -> Result<ScaleRecord, ControlError> {
        if self.job.record.spec.model.has_closures() {
            return Err(ControlError::NoTrainers);
        }
        if self.state.result.is_some() {
            return Err(ControlError::Over);
        }
        if let Some(next) = ScaleRecord::chosen(self.state.scale.as_deref(), wish) {
            self.scale(moment, next, decision);
        }
        Ok(self.state.scale.as_deref().cloned().unwrap_or_default())
    }

    fn scale(&mut self, moment: Moment, record: ScaleRecord, decision: &mut Decision<Self>) {
        let record = Arc::new(record);
        self.live.scaling.follow(moment.now, Some(&record));
        self.add(Fact::Scaled(record), decision);
    }

    /// Notes how many records the trainers that work have trained on.
    pub(crate) fn measure(&mut self, moment: Moment) {
        let generation = self.state.generation.as_ref().map_or(Generation(0), |it| it.generation);
        let working = &self.members.working;
        let is_same = self.live.measured_of.as_ref().is_some_and(|(of, trainers)| {
            *of == generation && (Arc::ptr_eq(trainers, working) || trainers == working)
        });
        if !is_same {
            self.live.measured_of = Some((generation, working.clone()));
            self.live.measured.number += 1;
        }
        self.live.measured.workers = working.len() as u32;
        let (set, records) = (self.live.measured, self.examples(&self.state));
        self.live.speeds.note(moment.now, set, records, Default::default());
    }

    /// Lets the policy choose.
    pub(crate) fn scale_by_speed(
        &mut self,
        moment: Moment,
        decision: &mut Decision<Self>,
    ) -> Progress {
        if self.job.record.spec.model.has_closures() {
            return Progress::None;
        }
        let (spec, stored) = (&self.job.record.spec, self.state.scale.as_ref());
        let there = self.members.live_trainers.len() as u32;
        let startable = stored.and_then(|it| it.startable).unwrap_or(0);
        let workers = || (trainer_counts(spec, there.max(startable)), there);
        match self.live.scaling.decide(moment.now, stored, &self.live.speeds, workers) {
            Some(next) => {
                self.scale(moment, next, decision);
                Progress::Decided
            }
            None => Progress::None,
        }
    }
}

/// Returns the numbers of trainers up to `most` that differ for a job, in ascending order. In synchronous mode a step takes
/// as long as that of the trainer with the most lanes, so of the numbers with the same most lanes only the smallest counts.
pub(super) fn trainer_counts(spec: &JobSpec, most: u32) -> Vec<u32> {
    match spec.mode {
        Mode::Async => (1..=most).collect(),
        Mode::Sync => {
            let lanes = spec.sync.lanes;
            let most_lanes = |trainers: u32| lanes.div_ceil(trainers);
            let differs = |it: &u32| *it == 1 || most_lanes(*it) < most_lanes(*it - 1);
            (1..=most.min(lanes)).filter(differs).collect()
        }
    }
}
