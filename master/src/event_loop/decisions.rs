//! The decisions of the acting master, one for each event.

use steadfast_common::ids::{Generation, Pass, TaskId, TrainerId, Version};
use steadfast_common::job::spec::Mode;
use steadfast_common::machine::Moment;
use steadfast_common::records::discarded_records::DiscardedRecord;
use steadfast_common::records::given_up::{
    Discarded, DiscardedTask, GivenUpRecord, LISTED_MAX, PassRanges,
};
use steadfast_common::records::{
    Best, CheckpointRecord, Course, DispatchRecord, EvaluationRecord, GenerationRecord, JobOutcome,
    ResultRecord,
};
use steadfast_common::status::TimeBreakdown;
use steadfast_master_core::election::{self, InitReply};
use steadfast_master_core::job_state::{Fact, JobState};
use steadfast_master_core::ledger::{Next, Request, TaskReply, Wants};
use steadfast_master_core::sync_tasks::Failure;
use tracing::{error, info, warn};

use crate::event_loop::effects::{Answer, Effect};
use crate::event_loop::handle::{ControlError, Event, GivenUp, Rollback, TaskDone};
use crate::event_loop::live_state::HandoverAnswer;
use crate::event_loop::machine::TrainingJob;

type Decision = steadfast_common::machine::Decision<TrainingJob>;

impl TrainingJob {
    /// Decides a request.
    pub(crate) fn decide(&mut self, moment: Moment, event: Event, decision: &mut Decision) {
        let answer = match event {
            Event::NextTask { generation, request, done, time_breakdown, reply } => {
                self.note_time_breakdown(request.trainer, time_breakdown);
                let answer = self.next_task(moment, generation, &request, done, decision);
                Answer::Task(reply, answer)
            }
            Event::FailTask { generation, failure, reply } => {
                let answer = self.fail_task(moment, generation, &failure, decision);
                let is_training = !self.is_held_out(failure.task);
                let answer = answer.map(|answer| match answer {
                    GivenUp::No if is_training => self.live.move_lane(&failure),
                    GivenUp::Yes | GivenUp::Elsewhere | GivenUp::No => answer,
                });
                Answer::GivenUp(reply, answer)
            }
            Event::BeginInit { generation, trainer, reply } => {
                Answer::Init(reply, self.begin_init(generation, trainer, decision))
            }
            Event::FinishInit { generation, trainer, attempt, reply } => {
                Answer::Done(reply, self.finish_init(generation, trainer, attempt, decision))
            }
            Event::Position { generation, trainer, position, time_breakdown } => {
                self.note_time_breakdown(trainer, time_breakdown);
                if self.check_caller(generation, trainer).is_ok() {
                    self.live.note_position(moment, position);
                }
                return;
            }
            Event::Evaluated { generation, trainer, evaluation, reply } => {
                let answer = self.check_caller(generation, trainer);
                if answer.is_ok() {
                    self.evaluated(*evaluation, decision);
                }
                Answer::Done(reply, answer)
            }
            Event::BeginSave { generation, trainer, report, reply } => {
                let answer = self.check_caller(generation, trainer).map(|()| {
                    let trainers = self.members.live_trainers.clone();
                    self.live.begin_save(moment, trainer, report, &trainers)
                });
                Answer::Save(reply, answer)
            }
            Event::GivenUp { reply } => {
                Answer::Discarded(reply, self.all_discarded(&self.state).collect())
            }
            Event::FinishSave { generation, result, reply } => {
                Answer::Done(reply, self.finish_save(generation, *result, decision))
            }
            Event::Queues { reply } => {
                let queues = match self.job.record.spec.mode {
                    Mode::Sync => None,
                    Mode::Async => Some(self.state.ledger.snapshot()),
                };
                Answer::Queues(reply, queues)
            }
            Event::HandedOver { generation, state, reply } => {
                if let Some(handover) = &mut self.live.handover
                    && handover.of == generation
                {
                    handover.answer = state.map_or(HandoverAnswer::No, HandoverAnswer::State);
                }
                Answer::Done(reply, Ok(()))
            }
            Event::CommitCheckpoint { id, record, reply } => {
                Answer::Done(reply, self.commit_checkpoint(id, record, decision))
            }
            Event::DeleteManifests { ids, reply } => {
                Answer::Deleted(reply, self.delete_manifests(ids, decision))
            }
            Event::Damaged { generation, checkpoint, reason, reply } => {
                Answer::Done(reply, self.note_damage(generation, checkpoint, reason))
            }
            Event::Inconsistent { generation, reason, reply } => {
                Answer::Done(reply, self.note_inconsistency(generation, reason))
            }
            Event::DiscardRecord { generation, trainer, record, version, reply } => {
                Answer::Done(reply, self.discard_record(generation, trainer, record, version))
            }
            Event::Diverged { generation, reason, reply } => {
                let answer = self.check_generation(generation);
                if answer.is_ok() {
                    self.fail_job(moment, reason, decision);
                }
                Answer::Done(reply, answer)
            }
            Event::AddPass { pass, record, reply } => {
                let added = self.state.stream.add(pass, *record);
                let answer = added.map_err(ControlError::from).map(|facts| {
                    facts.into_iter().for_each(|fact| self.add(fact, decision));
                    self.state.stream.record.clone()
                });
                Answer::Stream(reply, answer)
            }
            Event::EndStream { left_out, reply } => {
                if let Some(fact) = self.state.stream.end(left_out) {
                    info!("the stream ends");
                    self.add(fact, decision);
                }
                Answer::Stream(reply, Ok(self.state.stream.record.clone()))
            }
            Event::ForgetPasses { to, forgotten, reply } => {
                let facts = self.state.stream.forget(to, forgotten);
                facts.into_iter().for_each(|fact| self.add(fact, decision));
                Answer::Stream(reply, Ok(self.state.stream.record.clone()))
            }
            Event::RollBack { checkpoint, force, reply } => {
                return self.want(Rollback::Wanted { checkpoint, force, reply }, decision);
            }
            Event::Scale { wish, reply } => {
                Answer::Scaled(reply, self.choose_scale(moment, wish, decision))
            }
            Event::Amend { amendment, reply } => {
                return self.want(Rollback::Amended { amendment, reply }, decision);
            }
        };
        decision.effects.push(Effect::Answer(answer));
    }

    /// Notes a rollback that a user wants, unless another one is wanted.
    fn want(&mut self, rollback: Rollback, decision: &mut Decision) {
        let wanted = self.live.rollback.replace(rollback);
        let error = match wanted {
            Some(Rollback::Wanted { .. } | Rollback::Amended { .. }) => ControlError::Busy,
            // A report of damage comes again.
            Some(
                Rollback::Damaged { .. }
                | Rollback::Inconsistent { .. }
                | Rollback::Discarded { .. },
            )
            | None => match self.state.result {
                Some(_) => ControlError::Over,
                None => return,
            },
        };
        self.reject_rollback(error, decision);
        self.live.rollback = wanted;
    }

    /// Requests a rollback after the report that the checkpoint from which the present generation began is damaged. The
    /// report is trusted, since its sender compared the hash. Reports on other checkpoints are ignored.
    fn note_damage(
        &mut self,
        generation: Generation,
        checkpoint: String,
        reason: String,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        // What slots hand over has no name.
        if checkpoint.is_empty() {
            return self.note_inconsistency(generation, reason);
        }
        let record = self.state.generation.as_ref();
        let is_present = record.and_then(|it| it.checkpoint.as_ref()) == Some(&checkpoint);
        if is_present && self.live.rollback.is_none() {
            error!(checkpoint, reason, "checkpoint is damaged; rolling back to the one before it");
            self.live.rollback = Some(Rollback::Damaged { checkpoint, reason });
        }
        Ok(())
    }

    fn note_inconsistency(
        &mut self,
        generation: Generation,
        reason: String,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        if self.live.rollback.is_none() {
            error!(reason, "rolling the job back to its latest checkpoint");
            self.live.rollback = Some(Rollback::Inconsistent { reason });
        }
        Ok(())
    }

    /// Requests a generation without a record. The report is trusted, since its sender saw processes end twice. It comes
    /// again until that generation has begun.
    fn discard_record(
        &mut self,
        generation: Generation,
        trainer: TrainerId,
        record: DiscardedRecord,
        version: Version,
    ) -> Result<(), ControlError> {
        self.check_caller(generation, trainer)?;
        let manifest = &self.job.manifest;
        let is_in_manifest = u64::from(record.record) < manifest.records_of(record.task);
        let is_stream = self.job.record.spec.dataset.follow;
        let exists = match record.held_out {
            true => is_in_manifest && self.is_held_out(record.task),
            false if is_stream => {
                self.state.stream.pass(record.from).is_some_and(|it| record.task.0 < it.tasks)
            }
            false => is_in_manifest && !self.is_held_out(record.task),
        };
        if !exists {
            return Err(ControlError::NoSuchTask);
        }
        if self.live.rollback.is_none() {
            self.live.rollback = Some(Rollback::Discarded { record, version });
        }
        Ok(())
    }

    fn check_generation(&self, found: Generation) -> Result<(), ControlError> {
        let present =
            self.state.generation.as_ref().map_or(Generation(0), |record| record.generation);
        if found == present {
            Ok(())
        } else {
            Err(ControlError::OtherGeneration { found, present })
        }
    }

    fn check_live(&self, trainer: TrainerId) -> Result<(), ControlError> {
        if self.members.live_trainers.contains(&trainer) {
            Ok(())
        } else {
            Err(ControlError::UnknownTrainer(trainer))
        }
    }

    fn check_caller(&self, found: Generation, trainer: TrainerId) -> Result<(), ControlError> {
        self.check_generation(found)?;
        self.check_live(trainer)
    }

    fn next_task(
        &mut self,
        moment: Moment,
        generation: Generation,
        request: &Request,
        done: Option<TaskDone>,
        decision: &mut Decision,
    ) -> Result<TaskReply, ControlError> {
        self.check_caller(generation, request.trainer)?;
        if self.job.record.spec.mode == Mode::Sync {
            return Err(ControlError::NoQueue);
        }
        let (pass, facts) = (self.state.ledger.head().pass, decision.facts.len());
        let late = self.live.deadlines.late(moment.now);
        let is_over = self.limits.passes <= pass.0;
        let is_surplus = !is_over && !self.members.working.contains(&request.trainer);
        // It finishes what it has. Any trainer may save the model.
        let idle = is_surplus.then(|| Request { wants: Wants::Nothing, ..request.clone() });
        let request = idle.as_ref().unwrap_or(request);
        let answer = self.draft(decision, |draft, limits| draft.next_task(request, &late, limits));
        let is_repeat = decision.facts.len() == facts;
        if let Some(report) = request.report.clone().filter(|_| answer.accepted && !is_repeat) {
            self.live.note_report(pass, report);
            if let Some(done) = done {
                self.live.note_done(moment, done);
            }
        }
        if let Next::Task(DispatchRecord { task, attempt, .. }) = answer.next
            && !is_repeat
            && late.iter().any(|(of, _)| *of == task)
        {
            info!(%task, %attempt, trainer = %request.trainer, "a late task is computed here too");
        }
        if self.state.ledger.head().pass != pass {
            info!(pass = pass.0, "pass completed");
        }
        if let Next::AllFailed { pass } = answer.next {
            let reason = format!("every task of pass {} was given up", pass.0 + 1);
            self.fail_job(moment, reason, decision);
            return Err(ControlError::AllFailed { pass });
        }
        Ok(answer)
    }

    /// Records a failure.
    fn fail_task(
        &mut self,
        moment: Moment,
        generation: Generation,
        failure: &Failure,
        decision: &mut Decision,
    ) -> Result<GivenUp, ControlError> {
        self.check_caller(generation, failure.trainer)?;
        let (pass, task, reason) = (failure.pass, failure.task, &failure.reason);
        if self.is_held_out(task) {
            if self.job.record.has_decisive_evaluations() {
                // The trainer with the first lane evaluates, and all wait for it.
                self.live.move_lane(failure);
            }
            return Ok(self.fail_held_out(failure, decision));
        }
        let spec = &self.job.record.spec;
        let (mode, follows) = (spec.mode, spec.dataset.follow);
        let exists = match follows {
            true => self.state.stream.pass(pass).is_some_and(|it| task.0 < it.tasks),
            false => !self.job.manifest.chunks_of(task).is_empty(),
        };
        if mode == Mode::Async || !exists {
            return Err(ControlError::NoSuchTask);
        }
        let fact = self.state.sync_tasks.fail(failure, &self.limits);
        fact.into_iter().for_each(|fact| self.add(Fact::Failure(fact), decision));
        let given_up = self.state.sync_tasks.given_up_in(pass);
        // One bad file may be a whole pass of a stream.
        if given_up.len() == self.job.tasks as usize && !follows {
            let reason = format!("every task of pass {} was given up: {reason}", pass.0 + 1);
            self.fail_job(moment, reason, decision);
            return Err(ControlError::AllFailed { pass });
        }
        if given_up.contains(&task) {
            warn!(%task, %pass, reason, "task given up for this pass");
            return Ok(GivenUp::Yes);
        }
        Ok(GivenUp::No)
    }

    fn is_held_out(&self, task: TaskId) -> bool {
        self.job.manifest.held_out.binary_search(&task).is_ok()
    }

    fn fail_held_out(&mut self, failure: &Failure, decision: &mut Decision) -> GivenUp {
        let task = failure.task;
        if self.state.held_out.records().contains_key(&task) {
            return GivenUp::Yes;
        }
        let record = self.live.held_out.fail(failure, &self.limits);
        self.live.held_out.evolve(failure);
        let Some(record) = record else {
            let is_alone = self.limits.trainers < 2;
            return if is_alone { GivenUp::No } else { GivenUp::Elsewhere };
        };
        self.live.held_out.forget(task);
        warn!(%task, record.reason, "held-out task given up");
        self.add(Fact::HeldOutGivenUp { task, record }, decision);
        GivenUp::Yes
    }

    pub(crate) fn fail_job(&mut self, moment: Moment, reason: String, decision: &mut Decision) {
        let state = &self.state;
        if state.result.is_some() {
            return;
        }
        error!(reason, "the job failed");
        let result = ResultRecord {
            state: JobOutcome::Failed,
            reason: Some(reason),
            passes: self.live.position.pass.0.max(state.ledger.head().pass.0),
            steps: self.live.position.version.0,
            examples: self.examples(state),
            loss: None,
            metric: None,
            metric_name: None,
            further_metrics: Default::default(),
            parameters_sha256: None,
            model: None,
            checkpoint: self.state.checkpoint.clone(),
            discarded: self.discarded(state),
            left_out: state.stream.record.left_out.clone(),
            ended_unix_ms: Some(moment.unix_ms),
            best: None,
        };
        self.add(Fact::Result(Box::new(result)), decision);
    }

    /// Returns the number of records trained on so far.
    pub(crate) fn examples(&self, state: &JobState) -> u64 {
        let spec = &self.job.record.spec;
        if spec.mode == Mode::Sync || spec.model.has_closures() {
            return self.live.position.examples;
        }
        // Tasks are nearly equal in size, so the records are estimated from the number of done tasks.
        let pass = state.ledger.head().pass;
        let (before, tasks, records) = match spec.dataset.follow {
            false => (u64::from(pass.0) * self.job.records, self.job.tasks, self.job.records),
            true => {
                let present = state.stream.pass(pass);
                let (tasks, records) = present.map_or((0, 0), |it| (it.tasks, it.records));
                (state.stream.records_before(pass), tasks, records)
            }
        };
        let done = match self.limits.passes <= pass.0 {
            true => 0,
            false => u64::from(state.ledger.queues().done) * records / u64::from(tasks.max(1)),
        };
        before + done
    }

    /// Adds an evaluation. One that decides about the course of the job is counted once: a trainer repeats it if it does
    /// not know that another one was first.
    fn evaluated(&mut self, evaluation: EvaluationRecord, decision: &mut Decision) {
        let rules = self.job.record.evaluation_of(evaluation.version);
        let known = self.state.evaluation.as_ref();
        let counts_once = |known: &EvaluationRecord| rules.decides() || known.course.is_some();
        if known.is_some_and(|known| counts_once(known) && evaluation.version <= known.version) {
            return;
        }
        self.live.evaluators_lost = 0;
        let mut evaluation = rules.decided(known, evaluation);
        let best = evaluation.course.as_ref().map(|course| course.best.version);
        if best != Some(evaluation.version) {
            evaluation.model = None;
        }
        if evaluation.course.as_ref().is_some_and(Course::has_ended) {
            let (step, passes) = (evaluation.version.0, evaluation.pass.0);
            info!(step, passes, "training ends early: the evaluations do not improve");
        }
        self.add(Fact::Evaluation(Some(evaluation.into())), decision);
    }

    fn begin_init(
        &mut self,
        generation: Generation,
        trainer: TrainerId,
        decision: &mut Decision,
    ) -> Result<InitReply, ControlError> {
        self.check_caller(generation, trainer)?;
        if self.state.generation.as_ref().is_some_and(GenerationRecord::has_values) {
            return Ok(InitReply::Done);
        }
        let stored = self.state.init.as_ref();
        let reply = election::elect(stored, generation, trainer, &self.members.live_trainers);
        if let InitReply::Elected { record } = &reply
            && stored != Some(record)
        {
            info!(%trainer, attempt = record.attempt, "initializer elected");
            self.add(Fact::Init(record.clone()), decision);
        }
        Ok(reply)
    }

    fn finish_init(
        &mut self,
        generation: Generation,
        trainer: TrainerId,
        attempt: u64,
        decision: &mut Decision,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        let record = election::finish(self.state.init.as_ref(), generation, trainer, attempt)
            .ok_or(ControlError::NotElected)?;
        info!(%trainer, attempt, "parameters initialized");
        self.add(Fact::Init(record), decision);
        Ok(())
    }

    fn note_time_breakdown(&mut self, trainer: TrainerId, time_breakdown: Option<TimeBreakdown>) {
        if let Some(time_breakdown) = time_breakdown.filter(|_| self.check_live(trainer).is_ok()) {
            self.live.time_breakdowns.note(trainer, time_breakdown);
        }
    }

    fn finish_save(
        &mut self,
        generation: Generation,
        mut result: ResultRecord,
        decision: &mut Decision,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        // Another event of this transaction may have ended the job.
        if self.state.result.is_some() {
            return Err(ControlError::Over);
        }
        let list = result.discarded.list.take();
        result.discarded = Discarded { list, ..self.discarded(&self.state) };
        let ends_in_pass = self.state.course().is_some_and(|course| course.end_version.is_some());
        if self.limits.passes != u32::MAX && !ends_in_pass {
            result.passes = self.limits.passes;
        }
        result.left_out.clone_from(&self.state.stream.record.left_out);
        // Its file is deleted: its parameters are the model.
        let best = self.state.course().map(|course| course.best.clone());
        result.best = best.map(|best| Best { model: None, ..best });
        // Another checkpoint of the final parameters may have replaced the one that was taken for the result, which may
        // then have been deleted.
        if result.checkpoint.is_some() {
            result.checkpoint.clone_from(&self.state.checkpoint);
        }
        info!(sha256 = result.parameters_sha256, "the job is finished");
        self.add(Fact::Result(Box::new(result)), decision);
        Ok(())
    }

    /// Commits a manifest.
    ///
    /// Only this master begins generations, so a check of the generation is sufficient. A slot that was lost
    /// after its shard was saved does not matter: the shard is in the store, and belongs to the same
    /// generation and version as the others.
    fn commit_checkpoint(
        &mut self,
        id: String,
        record: Box<CheckpointRecord>,
        decision: &mut Decision,
    ) -> Result<(), ControlError> {
        self.check_generation(record.generation)?;
        // A shard may have left the pass of a task that was given up since. It would not receive what is
        // recomputed after a rollback.
        if record.queue.as_ref().is_some_and(|queue| self.state.ledger.gave_up_since(queue)) {
            return Err(ControlError::QueuesMoved);
        }
        let position = record.position;
        self.add(Fact::Manifest { id: id.clone(), record: Some(record) }, decision);
        self.add(Fact::Latest(Some(id)), decision);
        self.live.note_checkpoint(position);
        Ok(())
    }

    /// Returns the counts of given-up tasks, and the first [`LISTED_MAX`] of them.
    pub(crate) fn discarded(&self, state: &JobState) -> Discarded {
        let all = state.given_up();
        let (tasks, times): (u64, u64) = (
            all.iter().map(|it| it.records().len() as u64).sum(),
            all.iter().map(|it| it.times()).sum(),
        );
        let of_records = self.discarded_records(state).map(|it| it.times);
        let (more, more_times) = of_records.fold((0, 0), |(n, sum), times| (n + 1, sum + times));
        Discarded {
            tasks: tasks + more,
            times: times + more_times,
            listed: self
                .all_discarded(state)
                .take(LISTED_MAX)
                .map(DiscardedTask::shortened)
                .collect(),
            list: None,
        }
    }

    /// Returns all given-up tasks with their records.
    fn all_discarded(&self, state: &JobState) -> impl Iterator<Item = DiscardedTask> {
        let all = state.given_up().into_iter().flat_map(|it| it.records());
        let tasks = all.map(|(task, record)| self.discarded_task(*task, record));
        tasks.chain(self.discarded_records(state))
    }

    /// Returns the records that the generation leaves out, each as a part of its task.
    fn discarded_records(&self, state: &JobState) -> impl Iterator<Item = DiscardedTask> {
        let spec = &self.job.record.spec;
        let present = Pass(self.live.position.pass.0.max(state.ledger.head().pass.0));
        let last = spec.passes.map_or(present, |passes| present.min(Pass(passes.max(1) - 1)));
        let all = state.generation.iter().flat_map(|it| &it.discarded_records);
        all.map(move |it| {
            let last = if spec.dataset.follow { it.from } else { last.max(it.from) };
            let passes = match it.held_out {
                true => PassRanges::default(),
                false => PassRanges::of(it.from, last),
            };
            DiscardedTask {
                task: it.task,
                held_out: it.held_out,
                times: passes.count(),
                passes,
                reason: it.reason.clone(),
                records: self
                    .job
                    .manifest
                    .record_named(it.task, it.record.into())
                    .into_iter()
                    .collect(),
            }
        })
    }

    fn discarded_task(&self, task: TaskId, record: &GivenUpRecord) -> DiscardedTask {
        DiscardedTask {
            task,
            held_out: self.is_held_out(task),
            passes: record.passes.clone(),
            times: record.times,
            reason: record.reason.clone(),
            records: self.job.manifest.records_named(task),
        }
    }

    /// Deletes manifests; returns their ids.
    fn delete_manifests(&mut self, mut ids: Vec<String>, decision: &mut Decision) -> Vec<String> {
        // The job may have been rolled back to one of them since they were selected.
        let state = &self.state;
        let began_from = state.generation.as_ref().and_then(|it| it.checkpoint.as_ref());
        let in_use = [state.checkpoint.as_ref(), began_from];
        ids.retain(|id| !in_use.contains(&Some(id)));
        for id in &ids {
            self.add(Fact::Manifest { id: id.clone(), record: None }, decision);
        }
        ids
    }
}
