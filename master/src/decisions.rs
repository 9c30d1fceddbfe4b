//! The decisions of the acting master, one for each event.

use std::collections::BTreeSet;

use steadfast_common::given_up::{Discarded, DiscardedTask, GivenUpRecord, LISTED_MAX};
use steadfast_common::ids::{Generation, TaskId, TrainerId};
use steadfast_common::records::{CheckpointRecord, JobOutcome, ResultRecord};
use steadfast_common::spec::Mode;
use steadfast_common::status::TimeBreakdown;
use steadfast_coord::{Op, now};
use steadfast_host::time::unix_ms;
use steadfast_master_core::election::{self, InitReply};
use steadfast_master_core::ledger::{Next, Request, TaskReply};
use steadfast_master_core::saver;
use steadfast_master_core::sync_tasks::Failure;
use tracing::{error, info, warn};

use crate::event_loop::{Batch, EventLoop, State};
use crate::handle::{ControlError, Event, GivenUp, Position, Rollback, SaveReport, TaskDone};

impl EventLoop {
    pub(crate) fn decide(&mut self, event: Event, batch: &mut Batch) {
        match event {
            Event::NextTask { generation, request, done, time_breakdown, reply } => {
                self.note_time_breakdown(request.trainer, time_breakdown);
                let answer = self.next_task(batch, generation, &request, done);
                batch.later(reply, answer);
            }
            Event::FailTask { generation, failure, reply } => {
                let answer = self.fail_task(batch, generation, &failure);
                batch.later(reply, answer);
            }
            Event::BeginInit { generation, trainer, reply } => {
                let answer = self.begin_init(batch, generation, trainer);
                batch.later(reply, answer);
            }
            Event::FinishInit { generation, trainer, attempt, reply } => {
                let answer = self.finish_init(batch, generation, trainer, attempt);
                batch.later(reply, answer);
            }
            Event::Position { generation, trainer, position, time_breakdown } => {
                self.note_time_breakdown(trainer, time_breakdown);
                self.note_position(generation, trainer, position);
            }
            Event::Evaluated { evaluation, reply } => {
                batch.changes.add(Op::put(&self.keys.evaluation(), &evaluation));
                batch.state.evaluation = Some(evaluation);
                batch.later(reply, Ok(()));
            }
            Event::BeginSave { generation, trainer, report, reply } => {
                let answer = self.begin_save(generation, trainer, report);
                batch.later(reply, answer);
            }
            Event::GivenUp { reply } => {
                batch.later(reply, Ok(self.all_discarded(&batch.state).collect()));
            }
            Event::FinishSave { generation, result, reply } => {
                let answer = self.finish_save(batch, generation, *result);
                batch.later(reply, answer);
            }
            Event::Queues { reply } => {
                let queues = match self.job.record.spec.mode {
                    Mode::Sync => None,
                    Mode::Async => Some(batch.state.ledger.snapshot()),
                };
                batch.later(reply, Ok(queues));
            }
            Event::Checkpoint { id, record, reply } => {
                let answer = self.keep_checkpoint(batch, &id, &record);
                batch.later(reply, answer);
            }
            Event::ForgetCheckpoints { ids, reply } => {
                let forgotten = self.forget_checkpoints(batch, ids);
                batch.later(reply, Ok(forgotten));
            }
            Event::Damaged { generation, checkpoint, reason, reply } => {
                batch.later(reply, self.note_damage(generation, checkpoint, reason));
            }
            Event::Inconsistent { generation, reason, reply } => {
                batch.later(reply, self.note_inconsistency(generation, reason));
            }
            Event::Diverged { generation, reason, reply } => {
                let answer = self.diverged(batch, generation, reason);
                batch.later(reply, answer);
            }
            Event::RollBack { checkpoint, force, reply } => {
                if batch.state.result.is_some() {
                    return batch.later(reply, Err(ControlError::Over));
                }
                self.rollback = Some(Rollback::Wanted { checkpoint, force, reply });
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
        // Another process may have reported it already.
        if batch.state.result.is_none() {
            self.fail_job(batch, reason);
        }
        Ok(())
    }

    fn forget_checkpoints(&self, batch: &mut Batch, ids: Vec<String>) -> Vec<String> {
        // The job may have been rolled back to one of them since they were selected.
        let generation = batch.state.generation.as_ref();
        let began_from = generation.and_then(|it| it.checkpoint.as_ref());
        let in_use = [batch.state.checkpoint.as_ref(), began_from];
        let forgotten: Vec<String> =
            ids.into_iter().filter(|id| !in_use.contains(&Some(id))).collect();
        for id in &forgotten {
            batch.changes.add(Op::delete(&self.keys.checkpoint(id)));
        }
        forgotten
    }

    /// Trusts the report of the process that failed to load a checkpoint, since it compared the hash.
    /// Ignores checkpoints other than the one that the present generation begins from.
    fn note_damage(
        &mut self,
        generation: Generation,
        checkpoint: String,
        reason: String,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        let record = self.state.generation.as_ref();
        let is_present = record.and_then(|it| it.checkpoint.as_ref()) == Some(&checkpoint);
        if is_present && self.rollback.is_none() {
            error!(checkpoint, reason, "checkpoint is damaged; the one before it is used");
            self.rollback = Some(Rollback::Damaged { checkpoint, reason });
        }
        Ok(())
    }

    fn note_inconsistency(
        &mut self,
        generation: Generation,
        reason: String,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        if self.rollback.is_none() {
            error!(reason, "rolling the job back to its latest checkpoint");
            self.rollback = Some(Rollback::Inconsistent { reason });
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
        let is_live = self.trainers.view().entries.contains_key(&self.keys.trainer(trainer));
        if is_live { Ok(()) } else { Err(ControlError::UnknownTrainer(trainer)) }
    }

    fn next_task(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        request: &Request,
        done: Option<TaskDone>,
    ) -> Result<TaskReply, ControlError> {
        self.check_generation(generation)?;
        self.check_live(request.trainer)?;
        let pass = batch.state.ledger.head().pass;
        let (facts, answer) = batch.state.ledger.next_task(request, &self.limits);
        let is_repeat = facts.is_empty();
        self.adopt(batch, &facts);
        if let Some(done) = done.filter(|_| answer.counted && !is_repeat) {
            batch.after(move |event_loop| event_loop.note_done(done));
        }
        if batch.state.ledger.head().pass != pass {
            info!(pass = pass.0, "pass over");
        }
        if let Next::AllFailed { pass } = answer.next {
            self.fail_job(batch, format!("every task of pass {} was given up", pass.0 + 1));
            return Err(ControlError::AllFailed { pass });
        }
        Ok(answer)
    }

    fn note_done(&mut self, done: TaskDone) {
        self.finished.records += done.records;
        self.finished.loss = Some(done.loss_sum / done.records.max(1) as f64);
        self.position.version = self.position.version.max(done.version);
        self.recoveries.progress(self.position.version, now(), unix_ms());
    }

    fn fail_task(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        failure: &Failure,
    ) -> Result<GivenUp, ControlError> {
        self.check_generation(generation)?;
        self.check_live(failure.trainer)?;
        let (pass, task, reason) = (failure.pass, failure.task, &failure.reason);
        if self.is_held_out(task) {
            return Ok(self.fail_held_out(batch, failure));
        }
        let is_sync = self.job.record.spec.mode == Mode::Sync;
        if !is_sync || self.job.manifest.chunks_of(task).is_empty() {
            return Err(ControlError::NoSuchTask);
        }
        if let Some(fact) = batch.state.sync_tasks.fail(failure, &self.limits) {
            batch.changes.add_sync_fact(&self.keys, &fact);
            batch.state.sync_tasks.evolve(&fact);
        }
        let given_up = batch.state.sync_tasks.given_up_in(pass);
        if given_up.len() == self.job.tasks as usize {
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
        match self.lanes.pass_on(failure.lane, failure.trainer, &self.live()) {
            true => Ok(GivenUp::Elsewhere),
            false => Ok(GivenUp::No),
        }
    }

    fn is_held_out(&self, task: TaskId) -> bool {
        self.job.manifest.held_out.binary_search(&task).is_ok()
    }

    fn fail_held_out(&mut self, batch: &mut Batch, failure: &Failure) -> GivenUp {
        let (task, reason) = (failure.task, &failure.reason);
        if batch.state.held_out.records().contains_key(&task) {
            return GivenUp::Yes;
        }
        let Some(record) = batch.held_out.fail(failure, &self.limits) else {
            let is_alone = self.live().len() < 2;
            return if is_alone { GivenUp::No } else { GivenUp::Elsewhere };
        };
        warn!(%task, reason, "held-out task given up");
        batch.changes.add(Op::put(&self.keys.given_up(task), &record));
        batch.state.held_out.set(task, Some(record));
        GivenUp::Yes
    }

    fn fail_job(&self, batch: &mut Batch, reason: String) {
        error!(reason, "the job failed");
        let result = ResultRecord {
            state: JobOutcome::Failed,
            reason: Some(reason),
            passes: self.position.pass.0.max(batch.state.ledger.head().pass.0),
            steps: self.position.version.0,
            examples: self.examples(&batch.state),
            loss: None,
            metric: None,
            metric_name: None,
            parameters_sha256: None,
            model: None,
            checkpoint: self.state.checkpoint.clone(),
            discarded: self.discarded(&batch.state),
        };
        batch.changes.add(Op::put(&self.keys.result(), &result));
        batch.state.result = Some(result);
    }

    /// Returns the number of records trained on so far.
    pub(crate) fn examples(&self, state: &State) -> u64 {
        if self.job.record.spec.mode == Mode::Sync {
            return self.position.examples;
        }
        // Tasks are nearly equal in size, so the records are estimated from the number of done tasks.
        let (total, records) = (u64::from(self.job.tasks.max(1)), self.job.records);
        let pass = state.ledger.head().pass;
        let done = match self.limits.passes <= pass.0 {
            true => 0,
            false => u64::from(state.ledger.queues().done) * records / total,
        };
        u64::from(pass.0) * records + done
    }

    fn begin_init(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        trainer: TrainerId,
    ) -> Result<InitReply, ControlError> {
        self.check_generation(generation)?;
        self.check_live(trainer)?;
        let from_checkpoint =
            self.state.generation.as_ref().is_some_and(|record| record.checkpoint.is_some());
        if from_checkpoint {
            return Ok(InitReply::Done);
        }
        let stored = batch.state.init.as_ref();
        let verdict = election::elect(stored, generation, trainer, &self.live());
        if let InitReply::Elected { record } = &verdict
            && stored != Some(record)
        {
            info!(%trainer, attempt = record.attempt, "initialiser elected");
            batch.changes.add(Op::put(&self.keys.init(), record));
            batch.state.init = Some(record.clone());
        }
        Ok(verdict)
    }

    fn finish_init(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        trainer: TrainerId,
        attempt: u64,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        let record = election::finish(batch.state.init.as_ref(), generation, trainer, attempt)
            .ok_or(ControlError::NotElected)?;
        info!(%trainer, attempt, "parameters initialised");
        batch.changes.add(Op::put(&self.keys.init(), &record));
        batch.state.init = Some(record);
        Ok(())
    }

    fn note_time_breakdown(&mut self, trainer: TrainerId, time_breakdown: Option<TimeBreakdown>) {
        if let Some(time_breakdown) = time_breakdown.filter(|_| self.check_live(trainer).is_ok()) {
            self.time_breakdowns.note(trainer, time_breakdown);
        }
    }

    fn note_position(&mut self, generation: Generation, trainer: TrainerId, position: Position) {
        let is_news = self.check_generation(generation).is_ok()
            && self.check_live(trainer).is_ok()
            && self.position.version <= position.version;
        if is_news {
            self.position = position;
            self.recoveries.progress(position.version, now(), unix_ms());
        }
    }

    fn begin_save(
        &mut self,
        generation: Generation,
        trainer: TrainerId,
        report: SaveReport,
    ) -> Result<saver::SaveReply, ControlError> {
        self.check_generation(generation)?;
        self.check_live(trainer)?;
        if let Some(position) = report.position {
            self.note_position(generation, trainer, position);
        }
        if let Some(error) = &report.error {
            warn!(%trainer, error, "the model was not saved");
        }
        let live = self.live();
        let verdict = self.saver.ask(trainer, report.stage, report.error, &live);
        if self.saver.holder().is_none() {
            self.wake_another_saver(&live);
        }
        Ok(verdict)
    }

    /// Rebalances the lanes over trainers that have not failed to save: a trainer without lanes does not
    /// check whether training is over.
    fn wake_another_saver(&mut self, live: &BTreeSet<TrainerId>) {
        let others: BTreeSet<TrainerId> =
            live.difference(self.saver.passed_over()).copied().collect();
        if !others.is_empty() {
            self.lanes.rebalance(&others);
        }
    }

    fn finish_save(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        mut result: ResultRecord,
    ) -> Result<(), ControlError> {
        self.check_generation(generation)?;
        let list = result.discarded.list.take();
        result.discarded = Discarded { list, ..self.discarded(&batch.state) };
        if let Some(passes) = self.job.record.spec.passes {
            result.passes = passes;
        }
        info!(sha256 = result.parameters_sha256, "the job is finished");
        batch.changes.add(Op::put(&self.keys.result(), &result));
        batch.state.result = Some(result);
        Ok(())
    }

    /// Commits a manifest.
    ///
    /// Only this master begins generations, so a check of the generation is sufficient. A slot that was lost
    /// after its shard was saved does not matter: the shard is in the store, and belongs to the same
    /// generation and version as the others.
    fn keep_checkpoint(
        &mut self,
        batch: &mut Batch,
        id: &str,
        record: &CheckpointRecord,
    ) -> Result<(), ControlError> {
        self.check_generation(record.generation)?;
        // A shard may have left the pass of a task that was given up since. It would not receive what is
        // recomputed after a rollback.
        if record.queue.as_ref().is_some_and(|queue| batch.state.ledger.gave_up_since(queue)) {
            return Err(ControlError::QueuesMoved);
        }
        batch.changes.add(Op::put(&self.keys.checkpoint(id), record));
        batch.changes.add(Op::put(&self.keys.checkpoint_latest(), &id));
        batch.state.checkpoint = Some(id.to_owned());
        // Trainers report the position slightly later.
        let position = Position::of(&record.position);
        batch.after(move |event_loop| {
            if event_loop.position.version < position.version {
                let loss = event_loop.position.loss;
                event_loop.position = Position { loss, ..position };
            }
        });
        Ok(())
    }

    /// Returns the counts of given-up tasks, and the first [`LISTED_MAX`] of them.
    pub(crate) fn discarded(&self, state: &State) -> Discarded {
        let all = given_up(state);
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
    fn all_discarded(&self, state: &State) -> impl Iterator<Item = DiscardedTask> {
        let all = given_up(state).into_iter().flat_map(|it| it.records());
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

/// Returns the given-up tasks of a synchronous job, those of an asynchronous one, and held-out ones.
fn given_up(state: &State) -> [&steadfast_master_core::given_up::GivenUp; 3] {
    [state.sync_tasks.given_up(), state.ledger.given_up(), &state.held_out]
}
