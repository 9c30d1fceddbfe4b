//! Asynchronous training: takes tasks, pushes every n mini-batches and pulls every m.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use steadfast_client::{Gradient, Name, Pservers, Pulled};
use steadfast_common::applied_records::{RecordRange, checksum};
use steadfast_common::compression::Codec;
use steadfast_common::dataset::Records;
use steadfast_common::finite::bounded;
use steadfast_common::ids::{Lane, Pass, RequestId, TaskId};
use steadfast_common::spec::OptimizerSpec;
use steadfast_common::status::TimeBreakdown;
use steadfast_host::random;
use steadfast_host::task::in_place;
use steadfast_host::time::{Instant, sleep};
use steadfast_host::traces::TRACE;
use steadfast_proto::v1::next_task_reply::Next;
use steadfast_proto::v1::next_task_request::Report;
use steadfast_proto::v1::{
    AdvanceRequest, Dispatch, Failed, Finished, Held, NextTaskReply, NextTaskRequest, Returned,
};
use steadfast_trainer_core::{Batch, MicroBatch, Parameters};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, info, info_span, warn};

use crate::context::{Context, Last, TrainError};

/// Maximum number of tasks held at a time: one in progress, one being read ahead.
const HELD_MAX: usize = 2;

/// How long one request for bounded staleness waits at the master.
const ADVANCE_WAIT_MS: u64 = 1000;

/// The outcome of training.
pub enum Ending {
    /// All passes are over.
    Trained(Last),
    /// The process was told to leave; its tasks were returned.
    Left,
}

/// Trains until all passes are over. `clock` counts the pushes of this process over all generations.
///
/// # Errors
/// Another generation, the end of the job, or an error that requires user action.
pub async fn train(
    context: &Arc<Context>,
    pservers: &Pservers,
    clock: &mut u64,
    leave: &CancellationToken,
) -> Result<Ending, TrainError> {
    let parameters = Parameters::zeros(context.layout.clone());
    let gradient = Parameters::zeros(context.layout.clone());
    let mut worker = Worker {
        context,
        pservers,
        clock,
        parameters,
        gradient,
        position: Pulled::default(),
        pushed_to: 0,
        loss_sum: 0.0,
        batches: 0,
        held: VecDeque::new(),
    };
    worker.pull().await?;
    worker.work(leave).await
}

struct Worker<'a> {
    context: &'a Arc<Context>,
    pservers: &'a Pservers,
    clock: &'a mut u64,
    parameters: Parameters,
    /// Sum over the mini-batches since the last push, plus the rounding error of the previous push.
    gradient: Parameters,
    position: Pulled,
    /// Number of leading records of the current task that were pushed.
    pushed_to: u32,
    loss_sum: f64,
    /// Mini-batches in this generation.
    batches: u64,
    /// Tasks held; the first is in progress, the others are read ahead.
    held: VecDeque<Dispatch>,
}

/// The master's answer to a request for a task.
enum Outlook {
    Held,
    Later(Duration),
    AllDone,
}

impl Worker<'_> {
    async fn work(&mut self, leave: &CancellationToken) -> Result<Ending, TrainError> {
        let mut outlook = self.ask(None, true).await?;
        loop {
            if leave.is_cancelled() {
                self.return_tasks().await?;
                return Ok(Ending::Left);
            }
            if matches!(outlook, Outlook::Held) && self.held.len() < HELD_MAX {
                self.ask(None, true).await?;
            }
            let Some(dispatch) = self.held.pop_front() else {
                match outlook {
                    Outlook::AllDone => return Ok(Ending::Trained(self.last().await?)),
                    Outlook::Later(pause) => {
                        let started = Instant::now();
                        sleep(pause).await;
                        self.waited(started);
                    }
                    Outlook::Held => {}
                }
                outlook = self.ask(None, true).await?;
                continue;
            };
            let (task, pass) = (dispatch.task, dispatch.pass);
            let span =
                info_span!(target: TRACE, parent: None, "task", task, pass, dispatch.attempt);
            let report = self.compute(dispatch).instrument(span.clone()).await?;
            outlook = self.ask(Some(report), true).instrument(span).await?;
        }
    }

    /// Reports on the finished task and requests another.
    async fn ask(&mut self, report: Option<Report>, more: bool) -> Result<Outlook, TrainError> {
        let request = NextTaskRequest {
            caller: self.context.master.caller(self.pservers.generation()),
            request_id: RequestId(random::uuid()).0.to_string(),
            report,
            more,
            time_breakdown: Some(self.context.activity.time_breakdown()),
            held: Some(Held { attempts: self.held.iter().map(|it| it.attempt).collect() }),
        };
        let started = Instant::now();
        let NextTaskReply { next, .. } = self.context.master.next_task(request).await?;
        self.waited(started);
        Ok(match next {
            Some(Next::Task(dispatch)) => {
                debug!(task = dispatch.task, attempt = dispatch.attempt, "task taken");
                self.context.tasks.prefetch(Pass(dispatch.pass), TaskId(dispatch.task));
                self.held.push_back(dispatch);
                Outlook::Held
            }
            Some(Next::Later(later)) => Outlook::Later(Duration::from_millis(later.retry_ms)),
            Some(Next::AllDone(_)) => Outlook::AllDone,
            None => Outlook::Later(Duration::from_millis(100)),
        })
    }

    async fn return_tasks(&mut self) -> Result<(), TrainError> {
        while let Some(dispatch) = self.held.pop_front() {
            info!(task = dispatch.task, "task returned");
            let returned = Returned { attempt: dispatch.attempt, task: dispatch.task };
            self.ask(Some(Report::Returned(returned)), false).await?;
        }
        Ok(())
    }

    /// Trains on one task; all pushes are acknowledged when this returns.
    async fn compute(&mut self, dispatch: Dispatch) -> Result<Report, TrainError> {
        let (pass, task) = (Pass(dispatch.pass), TaskId(dispatch.task));
        self.context.activity.note(|activity| {
            activity.pass = pass;
            activity.task = Some(task);
            activity.version = self.position.version;
            activity.doing = "training";
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
                let (attempt, task) = (dispatch.attempt, dispatch.task);
                let reason = error.to_string();
                return Ok(Report::Failed(Failed { attempt, task, reason }));
            }
        };
        let loss_sum = self.train_on(pass, task, &records).await?;
        Ok(Report::Finished(Finished {
            attempt: dispatch.attempt,
            task: dispatch.task,
            records: records.len() as u64,
            loss_sum,
            version: self.position.version.0,
        }))
    }

    async fn train_on(
        &mut self,
        pass: Pass,
        task: TaskId,
        records: &Records,
    ) -> Result<f64, TrainError> {
        let rhythm = &self.context.job.spec.asynchronous;
        let (batch_size, push_every, pull_every) =
            (rhythm.batch as usize, u64::from(rhythm.push_every), u64::from(rhythm.pull_every));
        let mut loss_sum = 0.0;
        self.pushed_to = 0;
        let indices: Vec<u32> = (0..records.len() as u32).collect();
        let batches = indices.chunks(batch_size).len();
        for (step, indices) in indices.chunks(batch_size).enumerate() {
            let batch = records.select(indices);
            // The key depends on the task and not on the trainer.
            let key = MicroBatch {
                seed: self.context.job.spec.seed,
                pass,
                step: step as u64,
                lane: Lane(task.0),
            };
            let empty = Parameters::zeros(Arc::default());
            let sum = std::mem::replace(&mut self.gradient, empty);
            let computed =
                self.context.gradient(&self.parameters, &Batch::from(&batch), &key, sum)?;
            self.gradient = computed.gradient;
            self.loss_sum += computed.loss_sum;
            loss_sum += computed.loss_sum;
            self.batches += 1;
            // The record ranges of pushes are their names: they do not depend on the trainer. The task is
            // done only once its last push is acknowledged.
            let last = step + 1 == batches;
            if last || (step as u64 + 1).is_multiple_of(push_every) {
                let to = indices.last().map_or(0, |index| index + 1);
                self.push(RecordRange { pass, task, from: self.pushed_to, to, last }).await?;
                self.pushed_to = to;
            }
            if self.batches.is_multiple_of(pull_every) {
                self.pull().await?;
            }
        }
        Ok(loss_sum)
    }

    async fn push(&mut self, range: RecordRange) -> Result<(), TrainError> {
        let started = Instant::now();
        self.wait_for_the_slowest().await?;
        self.waited(started);
        let records = u64::from(range.to - range.from);
        let zeros = Parameters::zeros(self.context.layout.clone());
        let mut values = std::mem::replace(&mut self.gradient, zeros).into_values();
        clip(&mut values, records, &self.context.job.spec.optimizer);
        in_place(|| self.round(&mut values));
        *self.clock += 1;
        let name = Name::Range { range, version: self.position.version };
        let gradient = Gradient {
            records,
            loss_sum: std::mem::take(&mut self.loss_sum),
            checksum: checksum(range.pass, range.task, range.from..range.to),
            values: Arc::new(values),
        };
        let started = Instant::now();
        let push = info_span!(target: TRACE, "push");
        let moved_bytes = self.pservers.push(name, gradient).instrument(push).await?;
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
        if self.context.job.spec.gradients.codec() == Codec::Plain {
            return;
        }
        let rest = self.gradient.values_mut();
        rest.copy_from_slice(values);
        self.pservers.round(values);
        rest.iter_mut().zip(values).for_each(|(rest, sent)| *rest -= *sent);
    }

    fn waited(&self, since: Instant) {
        let wait = since.elapsed().as_secs_f64();
        self.context.activity.add_time(TimeBreakdown { wait, ..TimeBreakdown::default() });
    }

    /// Bounded staleness: waits while this trainer is too far ahead of the slowest.
    async fn wait_for_the_slowest(&mut self) -> Result<(), TrainError> {
        if self.context.job.spec.asynchronous.max_staleness.is_none() {
            return Ok(());
        }
        loop {
            let request = AdvanceRequest {
                caller: self.context.master.caller(self.pservers.generation()),
                clock: *self.clock,
                wait_ms: ADVANCE_WAIT_MS,
            };
            if self.context.master.advance(request).await?.go {
                return Ok(());
            }
        }
    }

    async fn pull(&mut self) -> Result<(), TrainError> {
        let started = Instant::now();
        let values = self.parameters.values_mut();
        let pull = info_span!(target: TRACE, "pull");
        self.position = self.pservers.pull(values).instrument(pull).await?;
        let took = started.elapsed();
        self.context.metrics.pulled(took);
        let (pull, moved_bytes) = (took.as_secs_f64(), self.position.bytes);
        self.context.activity.add_time(TimeBreakdown {
            pull,
            moved_bytes,
            ..TimeBreakdown::default()
        });
        Ok(())
    }

    /// Pulls the final parameters. They contain every push of every trainer, since tasks are done only then.
    async fn last(&mut self) -> Result<Last, TrainError> {
        self.pull().await?;
        let spec = &self.context.job.spec;
        Ok(Last {
            parameters: self.parameters.clone(),
            pass: Pass(spec.passes.unwrap_or(0)),
            version: self.position.version,
            examples: self.position.examples,
            loss: self.position.loss,
        })
    }
}

/// Clips the mean gradient, given as a sum over `records`: by value first, then by norm, as pservers do in
/// synchronous mode with the norm over all slots. In asynchronous mode only the trainer has the whole
/// gradient.
fn clip(values: &mut [f32], records: u64, rules: &OptimizerSpec) {
    let Some(bound) = rules.clip_norm else { return };
    if let Some(most) = rules.clip_value.map(|most| most * records as f32) {
        values.iter_mut().for_each(|value| *value = bounded(*value, most));
    }
    let square: f64 = values.iter().map(|value| f64::from(*value) * f64::from(*value)).sum();
    let norm = square.sqrt() / records as f64;
    if f64::from(bound) < norm {
        let shrink = (f64::from(bound) / norm) as f32;
        values.iter_mut().for_each(|value| *value *= shrink);
    }
}
