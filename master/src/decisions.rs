//! The decisions of the acting master, one for each event.

use steadfast_common::ids::{Generation, TrainerId};
use steadfast_common::records::{CheckpointRecord, DiscardedTask, JobOutcome, ResultRecord};
use steadfast_common::spec::Mode;
use steadfast_common::status::Spent;
use steadfast_coord::{COMPARES_MAX, Condition, Op, now};
use steadfast_host::time::unix_ms;
use steadfast_master_core::election::{self, Verdict};
use steadfast_master_core::ledger::{Answer, Next, Request};
use steadfast_master_core::sync_tasks::Failure;
use tracing::{error, info, warn};

use crate::desk::{Batch, Desk, State};
use crate::office::{Event, GivenUp, OfficeError, Position, Saver, Setback, TaskDone};

impl Desk {
    pub(crate) fn decide(&mut self, event: Event, batch: &mut Batch) {
        match event {
            Event::NextTask { generation, request, done, spent, reply } => {
                self.note_spent(request.trainer, spent);
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
            Event::Position { generation, trainer, position, spent } => {
                self.note_spent(trainer, spent);
                self.note_position(generation, trainer, position);
            }
            Event::Evaluated { evaluation, reply } => {
                batch.changes.add(Op::put(&self.keys.evaluation(), &evaluation));
                batch.state.evaluation = Some(evaluation);
                batch.later(reply, Ok(()));
            }
            Event::BeginSave { generation, trainer, reply } => {
                let answer = self.begin_save(generation, trainer);
                batch.later(reply, answer);
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
            Event::Diverged { generation, reason, reply } => {
                let answer = self.check_generation(generation);
                // Others may have found it as well.
                if answer.is_ok() && batch.state.result.is_none() {
                    self.fail_job(batch, reason);
                }
                batch.later(reply, answer);
            }
            Event::SetBack { checkpoint, force, reply } => {
                if batch.state.result.is_some() {
                    return batch.later(reply, Err(OfficeError::Over));
                }
                self.setback = Some(Setback::Wanted { checkpoint, force, reply });
            }
        }
    }

    fn forget_checkpoints(&self, batch: &mut Batch, ids: Vec<String>) -> Vec<String> {
        // Somebody may have gone back to one of them since it was found to be old.
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

    /// Whether a checkpoint is damaged is decided by whoever failed to load it: its hash was compared
    /// there. Only the one that the present generation waits for counts.
    fn note_damage(
        &mut self,
        generation: Generation,
        checkpoint: String,
        reason: String,
    ) -> Result<(), OfficeError> {
        self.check_generation(generation)?;
        let record = self.state.generation.as_ref();
        let is_present = record.and_then(|it| it.checkpoint.as_ref()) == Some(&checkpoint);
        if is_present && self.setback.is_none() {
            error!(checkpoint, reason, "checkpoint is damaged; the one before it is used");
            self.setback = Some(Setback::Damaged { checkpoint, reason });
        }
        Ok(())
    }

    fn check_generation(&self, found: Generation) -> Result<(), OfficeError> {
        let present =
            self.state.generation.as_ref().map_or(Generation(0), |record| record.generation);
        if found == present { Ok(()) } else { Err(OfficeError::OtherGeneration { found, present }) }
    }

    fn check_live(&self, trainer: TrainerId) -> Result<(), OfficeError> {
        let is_live = self.trainers.view().entries.contains_key(&self.keys.trainer(trainer));
        if is_live { Ok(()) } else { Err(OfficeError::UnknownTrainer(trainer)) }
    }

    fn next_task(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        request: &Request,
        done: Option<TaskDone>,
    ) -> Result<Answer, OfficeError> {
        self.check_generation(generation)?;
        self.check_live(request.trainer)?;
        let pass = batch.state.ledger.head().pass;
        let (facts, answer) = batch.state.ledger.next_task(request, &self.limits);
        let is_repeat = facts.is_empty();
        self.adopt(batch, &facts);
        if let Some(done) = done.filter(|_| answer.counted && !is_repeat) {
            self.finished.records += done.records;
            self.position.version = self.position.version.max(done.version);
            self.recoveries.progress(self.position.version, now(), unix_ms());
            self.finished.loss = Some(done.loss_sum / done.records.max(1) as f64);
        }
        if batch.state.ledger.head().pass != pass {
            info!(pass = pass.0, "pass over");
        }
        if let Next::AllFailed { pass } = answer.next {
            self.fail_job(batch, format!("every task of pass {} was given up", pass.0 + 1));
            return Err(OfficeError::AllFailed { pass });
        }
        Ok(answer)
    }

    fn fail_task(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        failure: &Failure,
    ) -> Result<GivenUp, OfficeError> {
        self.check_generation(generation)?;
        self.check_live(failure.trainer)?;
        let (pass, task, reason) = (failure.pass, failure.task, &failure.reason);
        if self.job.manifest.chunks_of(task).is_empty() {
            return Err(OfficeError::NoSuchTask);
        }
        if let Some(fact) = batch.state.sync_tasks.fail(failure, &self.limits) {
            batch.changes.add_sync_fact(&self.keys, &fact);
            batch.state.sync_tasks.evolve(&fact);
        }
        let given_up = batch.state.sync_tasks.given_up(pass);
        if given_up.len() == self.job.tasks as usize {
            self.fail_job(
                batch,
                format!("every task of pass {} was given up: {reason}", pass.0 + 1),
            );
            return Err(OfficeError::AllFailed { pass });
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

    fn fail_job(&self, batch: &mut Batch, reason: String) {
        error!(reason, "the job failed");
        let result = ResultRecord {
            state: JobOutcome::Failed,
            reason: Some(reason),
            passes: self.position.pass.0.max(batch.state.ledger.head().pass.0),
            steps: self.position.version.0,
            examples: self.position.examples,
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

    fn begin_init(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        trainer: TrainerId,
    ) -> Result<Verdict, OfficeError> {
        self.check_generation(generation)?;
        self.check_live(trainer)?;
        let from_checkpoint =
            self.state.generation.as_ref().is_some_and(|record| record.checkpoint.is_some());
        if from_checkpoint {
            return Ok(Verdict::Done);
        }
        let stored = batch.state.init.as_ref();
        let verdict = election::elect(stored, generation, trainer, &self.live());
        if let Verdict::Elected { record } = &verdict
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
    ) -> Result<(), OfficeError> {
        self.check_generation(generation)?;
        let record = election::finish(batch.state.init.as_ref(), generation, trainer, attempt)
            .ok_or(OfficeError::NotElected)?;
        info!(%trainer, attempt, "parameters initialised");
        batch.changes.add(Op::put(&self.keys.init(), &record));
        batch.state.init = Some(record);
        Ok(())
    }

    fn note_spent(&mut self, trainer: TrainerId, spent: Option<Spent>) {
        if let Some(spent) = spent.filter(|_| self.check_live(trainer).is_ok()) {
            self.spendings.note(trainer, spent);
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
    ) -> Result<Saver, OfficeError> {
        self.check_generation(generation)?;
        self.check_live(trainer)?;
        let live = self.live();
        let saver = *self.saver.get_or_insert(trainer);
        if saver == trainer {
            return Ok(Saver::You);
        }
        if live.contains(&saver) {
            return Ok(Saver::Another);
        }
        self.saver = Some(trainer);
        Ok(Saver::You)
    }

    fn finish_save(
        &mut self,
        batch: &mut Batch,
        generation: Generation,
        mut result: ResultRecord,
    ) -> Result<(), OfficeError> {
        self.check_generation(generation)?;
        result.discarded = self.discarded(&batch.state);
        if let Some(passes) = self.job.record.spec.passes {
            result.passes = passes;
        }
        info!(sha256 = result.parameters_sha256, "the job is finished");
        batch.changes.add(Op::put(&self.keys.result(), &result));
        batch.state.result = Some(result);
        Ok(())
    }

    /// Commits a manifest, if every shard is still in the memory that it was cut from.
    fn keep_checkpoint(
        &mut self,
        batch: &mut Batch,
        id: &str,
        record: &CheckpointRecord,
    ) -> Result<(), OfficeError> {
        self.check_generation(record.generation)?;
        // A shard may have left the pass of a task that was given up since, so that nobody could give
        // it what going back would have computed again.
        if record.queue.as_ref().is_some_and(|queue| batch.state.ledger.gave_up_since(queue)) {
            return Err(OfficeError::QueuesMoved);
        }
        for shard in record.shards.iter().take(COMPARES_MAX) {
            let holder = self.holder(shard.slot).filter(|it| it.incarnation == shard.incarnation);
            let slot = shard.slot;
            let holder = holder.ok_or(OfficeError::SlotLost { slot })?;
            batch.conditions.push(Condition::CreateRevision {
                key: self.keys.ps(slot),
                revision: holder.create_revision,
            });
        }
        batch.changes.add(Op::put(&self.keys.checkpoint(id), record));
        batch.changes.add(Op::put(&self.keys.checkpoint_latest(), &id));
        batch.state.checkpoint = Some(id.to_owned());
        Ok(())
    }

    /// All tasks that were given up, with the records that they are made of.
    pub(crate) fn discarded(&self, state: &State) -> Vec<DiscardedTask> {
        let mut all = state.sync_tasks.discarded();
        all.extend(state.ledger.discarded());
        for discarded in &mut all {
            discarded.records = self.job.manifest.records_named(discarded.task);
        }
        all
    }
}
