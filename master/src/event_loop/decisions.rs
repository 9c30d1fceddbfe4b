//! The decisions of the acting master, one for each event.

use steadfast_common::given_up::{Discarded, DiscardedTask, GivenUpRecord, LISTED_MAX};
use steadfast_common::ids::{Generation, TaskId, TrainerId};
use steadfast_common::records::{CheckpointRecord, DispatchRecord, JobOutcome, ResultRecord};
use steadfast_common::spec::Mode;
use steadfast_common::status::TimeBreakdown;
use steadfast_coord::now;
use steadfast_host::time::unix_ms;
use steadfast_master_core::election::{self, InitReply};
use steadfast_master_core::job_state::{Fact, JobState};
use steadfast_master_core::ledger::{Next, Request, TaskReply};
use steadfast_master_core::sync_tasks::Failure;
use tracing::{error, info, warn};

use crate::event_loop::EventLoop;
use crate::event_loop::batch::Batch;
use crate::event_loop::handle::{ControlError, Event, GivenUp, Rollback, TaskDone};

impl EventLoop {
    pub(crate) fn decide(&self, event: Event, batch: &mut Batch) {
        match event {
            Event::NextTask { generation, request, done, time_breakdown, reply } => {
                self.note_time_breakdown(batch, request.trainer, time_breakdown);
                let answer = self.next_task(batch, generation, &request, done);
                batch.reply(reply, answer);
            }
            Event::FailTask { generation, failure, reply } => {
                let answer = self.fail_task(batch, generation, &failure);
                let is_training = !self.is_held_out(failure.task);
                batch.after(move |state| {
                    let _ = reply.send(answer.map(|answer| match answer {
                        GivenUp::No if is_training => state.move_lane(&failure),
                        GivenUp::Yes | GivenUp::Elsewhere | GivenUp::No => answer,
                    }));
                });
            }
            Event::BeginInit { generation, trainer, reply } => {
                let answer = self.begin_init(batch, generation, trainer);
                batch.reply(reply, answer);
            }
            Event::FinishInit { generation, trainer, attempt, reply } => {
                let answer = self.finish_init(batch, generation, trainer, attempt);
                batch.reply(reply, answer);
            }
            Event::Position { generation, trainer, position, time_breakdown } => {
                self.note_time_breakdown(batch, trainer, time_breakdown);
                if self.check_caller(generation, trainer).is_ok() {
                    batch.after(move |live| live.note_position(position));
                }
            }
            Event::Evaluated { generation, trainer, evaluation, reply } => {
                let answer = self.check_caller(generation, trainer);
                if answer.is_ok() {
                    batch.add(Fact::Evaluation(Some(evaluation)));
                }
                batch.reply(reply, answer);
            }
            Event::BeginSave { generation, trainer, report, reply } => {
                match self.check_caller(generation, trainer) {
                    Ok(()) => {
                        let trainers = self.live_trainers();
                        batch.after(move |live| {
                            let _ = reply.send(Ok(live.begin_save(trainer, report, &trainers)));
                        });
                    }
                    Err(error) => batch.reply(reply, Err(error)),
                }
            }
            Event::GivenUp { reply } => {
                let given_up = self.all_discarded(batch.state()).collect();
                batch.reply(reply, Ok(given_up));
            }
            Event::FinishSave { generation, result, reply } => {
                let answer = self.finish_save(batch, generation, *result);
                batch.reply(reply, answer);
            }
            Event::Queues { reply } => {
                let queues = match self.job.record.spec.mode {
                    Mode::Sync => None,
                    Mode::Async => Some(batch.state().ledger.snapshot()),
                };
                batch.reply(reply, Ok(queues));
            }
            Event::CommitCheckpoint { id, record, reply } => {
                let answer = self.commit_checkpoint(batch, id, record);
                batch.reply(reply, answer);
            }
            Event::DeleteManifests { ids, reply } => {
                let deleted = delete_manifests(batch, ids);
                batch.reply(reply, Ok(deleted));
            }
            Event::Damaged { generation, checkpoint, reason, reply } => {
                let answer = self.note_damage(batch, generation, checkpoint, reason);
                batch.reply(reply, answer);
            }
            Event::Inconsistent { generation, reason, reply } => {
                let answer = self.note_inconsistency(batch, generation, reason);
                batch.reply(reply, answer);
            }
            Event::Diverged { generation, reason, reply } => {
                let answer = self.diverged(batch, generation, reason);
                batch.reply(reply, answer);
            }
            Event::AddPass { pass, record, reply } => {
                let added = batch.state().stream.add(pass, *record);
                let answer = added.map_err(ControlError::from).map(|facts| {
                    facts.into_iter().for_each(|fact| batch.add(fact));
                    batch.state().stream.record.clone()
                });
                batch.reply(reply, answer);
            }
            Event::EndStream { left_out, reply } => {
                if let Some(fact) = batch.state().stream.end(left_out) {
                    info!("the stream ends");
                    batch.add(fact);
                }
                let record = batch.state().stream.record.clone();
                batch.reply(reply, Ok(record));
            }
            Event::ForgetPasses { to, forgotten, reply } => {
                let facts = batch.state().stream.forget(to, forgotten);
                facts.into_iter().for_each(|fact| batch.add(fact));
                let record = batch.state().stream.record.clone();
                batch.reply(reply, Ok(record));
            }
            Event::RollBack { reply, .. } if batch.state().result.is_some() => {
                batch.reply(reply, Err(ControlError::Over));
            }
            Event::RollBack { checkpoint, force, reply } => {
                batch.after(move |live| match live.rollback {
                    Some(Rollback::Wanted { .. }) => drop(reply.send(Err(ControlError::Busy))),
                    Some(Rollback::Damaged { .. } | Rollback::Inconsistent { .. }) | None => {
                        live.rollback = Some(Rollback::Wanted { checkpoint, force, reply });
                    }
                })
            }
        }
    }

    fn diverged(
        &self,
        batch: &mut Batch,
        generation: Generation,
        reason: String,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        self.fail_job(batch, reason);
        Ok(())
    }

    /// Requests a rollback after the report that the checkpoint from which the present generation began is damaged. The
    /// report is trusted, since its sender compared the hash. Reports on other checkpoints are ignored.
    fn note_damage(
        &self,
        batch: &mut Batch,
        generation: Generation,
        checkpoint: String,
        reason: String,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        let record = self.state.generation.as_ref();
        let is_present = record.and_then(|it| it.checkpoint.as_ref()) == Some(&checkpoint);
        if is_present {
            batch.after(move |live| {
                if live.rollback.is_none() {
                    error!(
                        checkpoint,
                        reason, "checkpoint is damaged; rolling back to the one before it"
                    );
                    live.rollback = Some(Rollback::Damaged { checkpoint, reason });
                }
            });
        }
        Ok(())
    }

    fn note_inconsistency(
        &self,
        batch: &mut Batch,
        generation: Generation,
        reason: String,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        batch.after(move |live| {
            if live.rollback.is_none() {
                error!(reason, "rolling the job back to its latest checkpoint");
                live.rollback = Some(Rollback::Inconsistent { reason });
            }
        });
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
        let is_live = {
            let key = self.committer.keys.trainer(trainer);
            self.members.trainers.view().entries.contains_key(&key)
        };
        if is_live { Ok(()) } else { Err(ControlError::UnknownTrainer(trainer)) }
    }

    fn check_caller(&self, found: Generation, trainer: TrainerId) -> Result<(), ControlError> {
        self.check_generation(found)?;
        self.check_live(trainer)
    }

    fn next_task(
        &self,
        batch: &mut Batch,
        generation: Generation,
        request: &Request,
        done: Option<TaskDone>,
    ) -> Result<TaskReply, ControlError> {
        self.check_caller(generation, request.trainer)?;
        let (pass, facts) = (batch.state().ledger.head().pass, batch.facts);
        let late = self.live.deadlines.late(now());
        let answer = batch.decide(|draft| draft.next_task(request, &late, &self.limits));
        let is_repeat = batch.facts == facts;
        if let Some(report) = request.report.clone().filter(|_| answer.accepted && !is_repeat) {
            batch.after(move |live| {
                live.note_report(pass, report);
                if let Some(done) = done {
                    live.note_done(done);
                }
            });
        }
        if let Next::Task(DispatchRecord { task, attempt, .. }) = answer.next
            && !is_repeat
            && late.iter().any(|(of, _)| *of == task)
        {
            info!(%task, %attempt, trainer = %request.trainer, "a late task is computed here too");
        }
        if batch.state().ledger.head().pass != pass {
            info!(pass = pass.0, "pass completed");
        }
        if let Next::AllFailed { pass } = answer.next {
            self.fail_job(batch, format!("every task of pass {} was given up", pass.0 + 1));
            return Err(ControlError::AllFailed { pass });
        }
        Ok(answer)
    }

    /// Records a failure. The lane of a task that is not given up moves after the commit.
    fn fail_task(
        &self,
        batch: &mut Batch,
        generation: Generation,
        failure: &Failure,
    ) -> Result<GivenUp, ControlError> {
        self.check_caller(generation, failure.trainer)?;
        let (pass, task, reason) = (failure.pass, failure.task, &failure.reason);
        if self.is_held_out(task) {
            return Ok(self.fail_held_out(batch, failure));
        }
        let spec = &self.job.record.spec;
        let exists = match spec.dataset.follow {
            true => batch.state().stream.pass(pass).is_some_and(|it| task.0 < it.tasks),
            false => !self.job.manifest.chunks_of(task).is_empty(),
        };
        if spec.mode == Mode::Async || !exists {
            return Err(ControlError::NoSuchTask);
        }
        let fact = batch.state().sync_tasks.fail(failure, &self.limits);
        fact.into_iter().for_each(|fact| batch.add(Fact::Failure(fact)));
        let given_up = batch.state().sync_tasks.given_up_in(pass);
        // One bad file may be a whole pass of a stream.
        if given_up.len() == self.job.tasks as usize && !spec.dataset.follow {
            self.fail_job(
                batch,
                format!("every task of pass {} was given up: {reason}", pass.0 + 1),
            );
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

    fn fail_held_out(&self, batch: &mut Batch, failure: &Failure) -> GivenUp {
        let task = failure.task;
        if batch.state().held_out.records().contains_key(&task) {
            return GivenUp::Yes;
        }
        let record = self.live.held_out.fail(failure, &self.limits);
        let (failure, is_given_up) = (failure.clone(), record.is_some());
        batch.after(move |live| {
            live.held_out.evolve(&failure);
            if is_given_up {
                live.held_out.forget(task);
            }
        });
        let Some(record) = record else {
            let is_alone = self.live_trainers().len() < 2;
            return if is_alone { GivenUp::No } else { GivenUp::Elsewhere };
        };
        warn!(%task, record.reason, "held-out task given up");
        batch.add(Fact::HeldOutGivenUp { task, record });
        GivenUp::Yes
    }

    pub(crate) fn fail_job(&self, batch: &mut Batch, reason: String) {
        let state = batch.state();
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
            parameters_sha256: None,
            model: None,
            checkpoint: self.state.checkpoint.clone(),
            discarded: self.discarded(state),
            left_out: state.stream.record.left_out.clone(),
            ended_unix_ms: Some(unix_ms()),
        };
        batch.add(Fact::Result(Box::new(result)));
    }

    /// Returns the number of records trained on so far.
    pub(crate) fn examples(&self, state: &JobState) -> u64 {
        if self.job.record.spec.mode == Mode::Sync {
            return self.live.position.examples;
        }
        // Tasks are nearly equal in size, so the records are estimated from the number of done tasks.
        let pass = state.ledger.head().pass;
        let (before, tasks, records) = match self.job.record.spec.dataset.follow {
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

    fn begin_init(
        &self,
        batch: &mut Batch,
        generation: Generation,
        trainer: TrainerId,
    ) -> Result<InitReply, ControlError> {
        self.check_caller(generation, trainer)?;
        let from_checkpoint =
            self.state.generation.as_ref().is_some_and(|record| record.checkpoint.is_some());
        if from_checkpoint {
            return Ok(InitReply::Done);
        }
        let stored = batch.state().init.as_ref();
        let decision = election::elect(stored, generation, trainer, &self.live_trainers());
        if let InitReply::Elected { record } = &decision
            && stored != Some(record)
        {
            info!(%trainer, attempt = record.attempt, "initializer elected");
            batch.add(Fact::Init(record.clone()));
        }
        Ok(decision)
    }

    fn finish_init(
        &self,
        batch: &mut Batch,
        generation: Generation,
        trainer: TrainerId,
        attempt: u64,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        let record = election::finish(batch.state().init.as_ref(), generation, trainer, attempt)
            .ok_or(ControlError::NotElected)?;
        info!(%trainer, attempt, "parameters initialized");
        batch.add(Fact::Init(record));
        Ok(())
    }

    fn note_time_breakdown(
        &self,
        batch: &mut Batch,
        trainer: TrainerId,
        time_breakdown: Option<TimeBreakdown>,
    ) {
        if let Some(time_breakdown) = time_breakdown.filter(|_| self.check_live(trainer).is_ok()) {
            batch.after(move |live| live.time_breakdowns.note(trainer, time_breakdown));
        }
    }

    fn finish_save(
        &self,
        batch: &mut Batch,
        generation: Generation,
        mut result: ResultRecord,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        // Another event of this batch may have ended the job.
        if batch.state().result.is_some() {
            return Err(ControlError::Over);
        }
        let list = result.discarded.list.take();
        result.discarded = Discarded { list, ..self.discarded(batch.state()) };
        let stream = &batch.state().stream.record;
        if let Some(passes) = self.job.record.spec.passes.or(stream.end.map(|end| end.0)) {
            result.passes = passes;
        }
        result.left_out.clone_from(&stream.left_out);
        info!(sha256 = result.parameters_sha256, "the job is finished");
        batch.add(Fact::Result(Box::new(result)));
        Ok(())
    }

    /// Commits a manifest.
    ///
    /// Only this master begins generations, so a check of the generation is sufficient. A slot that was lost
    /// after its shard was saved does not matter: the shard is in the store, and belongs to the same
    /// generation and version as the others.
    fn commit_checkpoint(
        &self,
        batch: &mut Batch,
        id: String,
        record: Box<CheckpointRecord>,
    ) -> Result<(), ControlError> {
        self.check_generation(record.generation)?;
        // A shard may have left the pass of a task that was given up since. It would not receive what is
        // recomputed after a rollback.
        if record.queue.as_ref().is_some_and(|queue| batch.state().ledger.gave_up_since(queue)) {
            return Err(ControlError::QueuesMoved);
        }
        let position = record.position;
        batch.add(Fact::Manifest { id: id.clone(), record: Some(record) });
        batch.add(Fact::Latest(Some(id)));
        batch.after(move |live| live.note_checkpoint(position));
        Ok(())
    }

    /// Returns the counts of given-up tasks, and the first [`LISTED_MAX`] of them.
    pub(crate) fn discarded(&self, state: &JobState) -> Discarded {
        let all = state.given_up();
        Discarded {
            tasks: all.iter().map(|it| it.records().len() as u64).sum(),
            times: all.iter().map(|it| it.times()).sum(),
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
        all.map(|(task, record)| self.discarded_task(*task, record))
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
}

/// Deletes manifests; returns their ids.
fn delete_manifests(batch: &mut Batch, mut ids: Vec<String>) -> Vec<String> {
    // The job may have been rolled back to one of them since they were selected.
    let state = batch.state();
    let began_from = state.generation.as_ref().and_then(|it| it.checkpoint.as_ref());
    let in_use = [state.checkpoint.as_ref(), began_from];
    ids.retain(|id| !in_use.contains(&Some(id)));
    for id in &ids {
        batch.add(Fact::Manifest { id: id.clone(), record: None });
    }
    ids
}
