//! Asynchronous training: takes tasks, pushes every n mini-batches and pulls every m.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use steadfast_common::ids::{Lane, Pass, TaskId};
use steadfast_common::job::dataset::Records;
use steadfast_common::job::schedule::{mini_batches, record_order};
use steadfast_common::records::DispatchRecord;
use steadfast_common::records::applied_records::{RecordRange, checksum};
use steadfast_common::records::position::Position;
use steadfast_common::status::TimeBreakdown;
use steadfast_common::tensor::table::Rows;
use steadfast_host::task::in_place;
use steadfast_host::time::{Instant, sleep};
use steadfast_net::traces::TRACE;
use steadfast_trainer_core::record_search::RecordName;
use steadfast_trainer_core::{Batch, MicroBatch, Parameters, TableRows};
use steadfast_training_client::{
    ContributionName, FailureCause, GenerationClient, Gradient, HeldTasks, NextTask, TaskOutcome,
    clip,
};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, info, info_span, warn};

use crate::buffers::Buffers;
use crate::context::{Computed, Context, Destination, TrainError, TrainedModel};
use crate::suspects::{IdsRead, Suspects};
use crate::trial::TrialBatch;

/// Maximum number of tasks held at a time: one in progress, one being read ahead.
const HELD_MAX: usize = 2;

/// Mini-batches of a task that a model prepares ahead, with the one that is computed.
const AHEAD: usize = 4;

/// Pause after a task whose data could not be reached, if there is no other.
const RETRY: Duration = Duration::from_secs(1);

/// The outcome of training.
pub enum Ending {
    /// All passes are over.
    Trained(TrainedModel),
    /// The process was told to leave; its tasks were returned.
    Left,
}

/// Trains until all passes are over.
///
/// # Errors
/// Another generation, the end of the job, or an error that requires user action.
pub async fn train(
    context: &Arc<Context>,
    generation: &GenerationClient,
    leave: &CancellationToken,
) -> Result<Ending, TrainError> {
    let parameters = Parameters::zeros(context.layout().clone());
    let mut worker = Worker {
        context,
        generation,
        tasks: generation.tasks(),
        parameters,
        gradient: None,
        rows: Vec::new(),
        buffers: Buffers::new(context.layout().len()),
        position: Position::default(),
        pushed_to: 0,
        counted: (0, 0),
        loss_sum: 0.0,
        weight: 0.0,
        is_weighted: false,
        batches: 0,
    };
    worker.pull().await?;
    worker.work(leave).await
}

/// What became of a task.
enum Ended {
    By(TaskOutcome),
    /// The data cannot be reached, which does not count as a failure of the task: a later attempt or another trainer
    /// may succeed.
    Unreachable(String),
}

/// Holds what a mini-batch adds to the loss of its task.
struct BatchLoss {
    loss_sum: f64,
    /// Says what its records count, if that is not their number.
    weight: Option<f64>,
}

struct Worker<'a> {
    context: &'a Arc<Context>,
    generation: &'a GenerationClient,
    /// The first task is in progress, the other is read ahead.
    tasks: HeldTasks,
    parameters: Parameters,
    /// Sum over the mini-batches since the last push, plus the rounding error of the previous push. `None` if
    /// that is zero.
    gradient: Option<Parameters>,
    /// Sum of the rows of each table since the last push, which are not rounded; empty before the first mini-batch.
    rows: Vec<Rows>,
    /// Memory of the gradients that were pushed.
    buffers: Buffers,
    position: Position,
    /// Number of leading records of the current task that were pushed.
    pushed_to: u32,
    /// The number of records since the last push, and the sum of their checksums.
    counted: (u64, u64),
    loss_sum: f64,
    /// What the records since the last push count, and whether that may differ from their number.
    weight: f64,
    is_weighted: bool,
    /// Mini-batches in this generation.
    batches: u64,
}

impl Worker<'_> {
    async fn work(&mut self, leave: &CancellationToken) -> Result<Ending, TrainError> {
        let mut next = self.request(None).await?;
        loop {
            if leave.is_cancelled() {
                self.tasks.return_all(self.context.activity.time_breakdown()).await?;
                return Ok(Ending::Left);
            }
            if matches!(next, NextTask::Taken(_)) && self.tasks.len() < HELD_MAX {
                self.request(None).await?;
            }
            let Some(dispatch) = self.tasks.first() else {
                match next {
                    NextTask::AllDone => return Ok(Ending::Trained(self.trained().await?)),
                    NextTask::Later(pause) => {
                        let started = Instant::now();
                        sleep(pause).await;
                        self.waited(started);
                    }
                    NextTask::Taken(_) => {}
                }
                next = self.request(None).await?;
                continue;
            };
            let (task, pass, attempt) = (dispatch.task.0, dispatch.pass.0, dispatch.attempt.0);
            let span = info_span!(target: TRACE, parent: None, "task", task, pass, attempt);
            next = match self.compute(dispatch).instrument(span.clone()).await? {
                Ended::By(outcome) => self.request(Some(outcome)).instrument(span).await?,
                Ended::Unreachable(reason) => {
                    let spent = self.context.activity.time_breakdown();
                    self.tasks.return_first(Some(reason), spent).await?;
                    NextTask::Later(RETRY)
                }
            };
        }
    }

    /// Reports on the finished task, if there is one, and requests another.
    async fn request(&mut self, outcome: Option<TaskOutcome>) -> Result<NextTask, TrainError> {
        let started = Instant::now();
        let spent = self.context.activity.time_breakdown();
        let next = match outcome {
            Some(outcome) => self.tasks.report(outcome, spent).await?,
            None => self.tasks.take(spent).await?,
        };
        self.waited(started);
        if let NextTask::Taken(DispatchRecord { pass, task, .. }) = next {
            self.context.tasks.prefetch(pass, task);
        }
        Ok(next)
    }

    /// Trains on one task; all pushes are acknowledged when this returns.
    async fn compute(&mut self, dispatch: DispatchRecord) -> Result<Ended, TrainError> {
        let DispatchRecord { pass, task, .. } = dispatch;
        self.context.activity.note(|activity| {
            activity.pass = pass;
            activity.task = Some(task);
            activity.version = self.position.version;
            activity.description = "training";
        });
        let started = Instant::now();
        let read = info_span!(target: TRACE, "read");
        let records = self.context.tasks.get(pass, task).instrument(read).await;
        let data = started.elapsed().as_secs_f64();
        self.context.activity.add_time(TimeBreakdown { data, ..TimeBreakdown::default() });
        let records = match records {
            Ok(records) => records,
            Err(error) => {
                warn!(%task, %pass, %error, "task cannot be computed");
                self.context.metrics.failed();
                let reason = error.to_string();
                return Ok(match error.cause() {
                    FailureCause::Data => Ended::By(TaskOutcome::Failed { reason }),
                    FailureCause::Transient => Ended::Unreachable(reason),
                });
            }
        };
        if dispatch.is_suspected {
            self.try_suspect(pass, task, &records).await?;
        }
        let loss_sum = self.train_on(pass, task, &records).await?;
        let (records, version) = (records.len() as u64, self.position.version);
        Ok(Ended::By(TaskOutcome::Finished { records, loss_sum, version }))
    }

    /// Lets processes of their own compute a task at which trainers were lost, before this process does.
    async fn try_suspect(
        &mut self,
        pass: Pass,
        task: TaskId,
        records: &Records,
    ) -> Result<(), TrainError> {
        info!(
            %task,
            %pass,
            "trainers were lost with this task: a process of its own computes it first"
        );
        let (spec, count) = (self.context.spec(), records.len() as u32);
        let (size, min) = (spec.asynchronous.batch, spec.model.min_records());
        let order = record_order(count, spec.seed, pass, task);
        let (mut batches, mut parts) = (Vec::new(), Vec::new());
        for (step, range) in (0..).zip(mini_batches(count, size, min)) {
            let kept = self.generation.left_out().kept(pass, task, count, range);
            let key = MicroBatch { seed: spec.seed, pass, step, lane: Lane(task.0) };
            let name = |position: &u32| RecordName { task, record: order[*position as usize] };
            let records: Vec<RecordName> = kept.iter().map(name).collect();
            if !records.is_empty() {
                let (lane, held_out) = (key.lane, false);
                batches.push(TrialBatch { pass, step, lane, records, held_out });
            }
            parts.push((key, kept));
        }
        let suspects = Suspects {
            context: self.context,
            generation: self.generation,
            position: self.position,
            parameters: &self.parameters,
        };
        let ids = async {
            let mut ids = IdsRead::new(self.context);
            for (key, kept) in &parts {
                ids.add(self.context, &Batch::from(&records.select(kept)), Some(key))?;
            }
            Ok(ids)
        };
        suspects.search(&batches, ids).await
    }

    async fn train_on(
        &mut self,
        pass: Pass,
        task: TaskId,
        records: &Records,
    ) -> Result<f64, TrainError> {
        let settings = &self.context.spec().asynchronous;
        let (push_every, pull_every) =
            (u64::from(settings.push_every), u64::from(settings.pull_every));
        let records_min = self.context.spec().model.min_records();
        let batches = mini_batches(records.len() as u32, settings.batch, records_min);
        let (mut loss_sum, mut weight, mut is_weighted) = (0.0, 0.0, false);
        (self.pushed_to, self.counted) = (0, (0, 0));
        let left_out = self.generation.left_out();
        let kept =
            |range: &Range<u32>| left_out.kept(pass, task, records.len() as u32, range.clone());
        let of_range = |range: &Range<u32>| records.select(&kept(range));
        // The key depends on the task and not on the trainer.
        let (seed, lane) = (self.context.spec().seed, Lane(task.0));
        let key_of = |step: usize| MicroBatch { seed, pass, step: step as u64, lane };
        let mut prepared = 0;
        for (step, range) in batches.iter().enumerate() {
            if self.context.prepares() {
                let ahead = batches.iter().enumerate().take(step + AHEAD).skip(prepared);
                for (step, range) in ahead {
                    self.context.prepare(&of_range(range), &key_of(step))?;
                }
                prepared = step + AHEAD;
            }
            let last = step + 1 == batches.len();
            let (records, key) = (of_range(range), key_of(step));
            self.counted.0 += records.len() as u64;
            self.counted.1 = self.counted.1.wrapping_add(checksum(pass, task, kept(range)));
            let computed = self.add_gradient(&records, &key).await?;
            loss_sum += computed.loss_sum;
            weight += computed.weight.unwrap_or(records.len() as f64);
            is_weighted |= computed.weight.is_some();
            self.batches += 1;
            // The record ranges of pushes are their names: they do not depend on the trainer. The task is
            // done only once its last push is acknowledged.
            if last || (step as u64 + 1).is_multiple_of(push_every) {
                let (from, to) = (self.pushed_to, range.end);
                self.push(RecordRange { pass, task, from, to, last }).await?;
                self.pushed_to = to;
            }
            if self.batches.is_multiple_of(pull_every) {
                self.pull().await?;
            }
        }
        // The master divides it by the number of records.
        Ok(match is_weighted {
            true if weight != 0.0 => loss_sum * (records.len() as f64 / weight),
            true | false => loss_sum,
        })
    }

    /// Adds the gradient of a mini-batch to that of the next push. A mini-batch is empty if its records are left out.
    async fn add_gradient(
        &mut self,
        records: &Records,
        key: &MicroBatch,
    ) -> Result<BatchLoss, TrainError> {
        if records.is_empty() {
            return Ok(BatchLoss { loss_sum: 0.0, weight: None });
        }
        let batch = Batch::from(records);
        let (context, generation) = (&self.context, self.generation);
        let parameters = context.with_rows(&self.parameters, &batch, Some(key), generation).await?;
        let zeros = || parameters.tables().iter().map(TableRows::zeros).collect();
        let into = match self.gradient.take() {
            Some(sum) => Destination::Sum(sum.with_tables(zeros())),
            None => Destination::Replaced(self.memory().with_tables(zeros())),
        };
        let Computed { loss_sum, weight, gradient } =
            self.context.gradient(&parameters, &batch, key, into)?;
        self.add_rows(gradient.tables());
        self.gradient = Some(gradient);
        self.loss_sum += loss_sum;
        self.weight += weight.unwrap_or(batch.len() as f64);
        self.is_weighted |= weight.is_some();
        Ok(BatchLoss { loss_sum, weight })
    }

    /// Adds the gradients of rows of each table.
    fn add_rows(&mut self, tables: &[TableRows]) {
        if self.rows.is_empty() {
            self.rows = tables.iter().map(|table| table.rows.clone()).collect();
            return;
        }
        self.rows.iter_mut().zip(tables).for_each(|(sum, table)| sum.add(&table.rows));
    }

    async fn push(&mut self, range: RecordRange) -> Result<(), TrainError> {
        let started = Instant::now();
        if self.context.spec().asynchronous.max_staleness.is_some() {
            self.generation.wait_at_staleness_gate().await?;
        }
        self.waited(started);
        let (records, checksum) = std::mem::take(&mut self.counted);
        let mut values = match self.gradient.take() {
            Some(gradient) => gradient.into_values(),
            // All its records are left out.
            None => Parameters::zeros(self.context.layout().clone()).into_values(),
        };
        let mut rows = std::mem::take(&mut self.rows);
        if rows.is_empty() {
            let tables = self.context.layout().tables().iter();
            rows = tables.map(|table| Rows::new(table.width)).collect();
        }
        let bounds = self.context.session.job().settings_at(self.position.version);
        let weight = std::mem::take(&mut self.weight);
        let weight = std::mem::take(&mut self.is_weighted).then_some(weight);
        let divisor = weight.unwrap_or(records as f64);
        clip(&mut values, &mut rows, self.context.layout(), divisor, &bounds);
        if self.generation.pservers().rounds() {
            in_place(|| self.round(&mut values));
        }
        let values = Arc::new(values);
        self.buffers.keep(&values);
        let name = ContributionName::Range { range, version: self.position.version };
        let gradient = Gradient {
            records,
            loss_sum: std::mem::take(&mut self.loss_sum),
            weight,
            checksum,
            values,
            rows,
        };
        let started = Instant::now();
        let push = info_span!(target: TRACE, "push");
        let moved_bytes = self.generation.pservers().push(name, gradient).instrument(push).await?;
        let took = started.elapsed();
        self.context.metrics.pushed(took);
        let push = took.as_secs_f64();
        self.context.activity.add_time(TimeBreakdown {
            push,
            moved_bytes,
            ..TimeBreakdown::default()
        });
        Ok(())
    }

    /// Rounds a gradient to values that its encoding represents exactly; the rounding error is added to the
    /// next gradient (error feedback: Seide et al., 1-Bit Stochastic Gradient Descent, 2014).
    fn round(&mut self, values: &mut [f32]) {
        let mut rest = self.buffers.take();
        rest.copy_from_slice(values);
        self.generation.pservers().round(values);
        rest.iter_mut().zip(values).for_each(|(rest, sent)| *rest -= *sent);
        self.gradient = Some(Parameters::new(self.context.layout().clone(), rest));
    }

    /// Returns memory for a gradient, of any content.
    fn memory(&mut self) -> Parameters {
        Parameters::new(self.context.layout().clone(), self.buffers.take())
    }

    fn waited(&self, since: Instant) {
        let wait = since.elapsed().as_secs_f64();
        self.context.activity.add_time(TimeBreakdown { wait, ..TimeBreakdown::default() });
    }

    async fn pull(&mut self) -> Result<(), TrainError> {
        let started = Instant::now();
        let values = self.parameters.values_mut();
        let pull = info_span!(target: TRACE, "pull");
        let pulled = self.generation.pservers().pull(values).instrument(pull).await?;
        self.position = pulled.position;
        let took = started.elapsed();
        self.context.metrics.pulled(took);
        let (pull, moved_bytes) = (took.as_secs_f64(), pulled.bytes);
        self.context.activity.add_time(TimeBreakdown {
            pull,
            moved_bytes,
            ..TimeBreakdown::default()
        });
        Ok(())
    }

    /// Pulls the final parameters. They contain every push of every trainer, since tasks are done only then.
    async fn trained(&mut self) -> Result<TrainedModel, TrainError> {
        self.pull().await?;
        let end = self.context.tasks.dataset().end().await;
        let pass = end.or(self.context.spec().passes.map(Pass)).unwrap_or_default();
        let pass_start = self.position.version;
        let position = Position { pass, pass_start, ..self.position };
        Ok(TrainedModel { parameters: self.parameters.clone(), position })
    }
}
