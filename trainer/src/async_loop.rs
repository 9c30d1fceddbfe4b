//! Asynchronous training: takes tasks, pushes every n mini-batches, pulls every m.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use steadfast_client::{Gradient, Name, Pservers, Pulled};
use steadfast_common::compression::Codec;
use steadfast_common::dataset::Records;
use steadfast_common::finite::bounded;
use steadfast_common::ids::{Lane, Pass, RequestId, TaskId};
use steadfast_common::spec::OptimizerSpec;
use steadfast_common::status::Spent;
use steadfast_common::tally::{TaskPiece, checksum};
use steadfast_host::chance;
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

use crate::context::{Context, Interrupt, Last};

/// Tasks held at a time: one in work, one being read ahead.
const HELD_MAX: usize = 2;

/// How long one question about staleness waits at the master.
const ADVANCE_WAIT_MS: u64 = 1000;

/// How training ended.
pub enum Ending {
    /// All passes are over.
    Trained(Last),
    /// The process shall leave; its tasks were handed back.
    Left,
}

/// Trains until all passes are over. `clock` counts this process's pushes over all
/// generations.
///
/// # Errors
/// Another generation, the end of the job, or what a person has to act on.
pub async fn train(
    context: &Arc<Context>,
    pservers: &Pservers,
    clock: &mut u64,
    leave: &CancellationToken,
) -> Result<Ending, Interrupt> {
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
    /// Sum over the mini-batches since the last push, and what rounding took from the one before.
    gradient: Parameters,
    position: Pulled,
    /// Records of the task in work before which all were pushed.
    pushed_to: u32,
    loss_sum: f64,
    /// Mini-batches since this generation began.
    batches: u64,
    /// Tasks in our care; the first is in work, the others are read ahead.
    held: VecDeque<Dispatch>,
}

/// What the master said about the next task.
enum Outlook {
    Held,
    Later(Duration),
    AllDone,
}

impl Worker<'_> {
    async fn work(&mut self, leave: &CancellationToken) -> Result<Ending, Interrupt> {
        let mut outlook = self.ask(None, true).await?;
        loop {
            if leave.is_cancelled() {
                self.hand_back().await?;
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

    /// Reports on the task just done and takes another.
    async fn ask(&mut self, report: Option<Report>, more: bool) -> Result<Outlook, Interrupt> {
        let request = NextTaskRequest {
            caller: self.context.master.caller(self.pservers.generation()),
            request_id: RequestId(chance::uuid()).0.to_string(),
            report,
            more,
            spent: Some(self.context.view.spent()),
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

    async fn hand_back(&mut self) -> Result<(), Interrupt> {
        while let Some(dispatch) = self.held.pop_front() {
            info!(task = dispatch.task, "task handed back");
            let returned = Returned { attempt: dispatch.attempt, task: dispatch.task };
            self.ask(Some(Report::Returned(returned)), false).await?;
        }
        Ok(())
    }

    /// Trains on one task; everything is acknowledged when this returns.
    async fn compute(&mut self, dispatch: Dispatch) -> Result<Report, Interrupt> {
        let (pass, task) = (Pass(dispatch.pass), TaskId(dispatch.task));
        self.context.view.note(|facts| {
            facts.pass = pass;
            facts.task = Some(task);
            facts.version = self.position.version;
            facts.doing = "training";
        });
        let started = Instant::now();
        let read = info_span!(target: TRACE, "read");
        let records = self.context.tasks.get(pass, task).instrument(read).await;
        let data = started.elapsed().as_secs_f64();
        self.context.view.spend(Spent { data, ..Spent::default() });
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
    ) -> Result<f64, Interrupt> {
        let rhythm = &self.context.job.spec.asynchronous;
        let (batch_size, push_every, pull_every) =
            (rhythm.batch as usize, u64::from(rhythm.push_every), u64::from(rhythm.pull_every));
        let mut loss_sum = 0.0;
        self.pushed_to = 0;
        let indices: Vec<u32> = (0..records.len() as u32).collect();
        let batches = indices.chunks(batch_size).len();
        for (step, indices) in indices.chunks(batch_size).enumerate() {
            let batch = records.select(indices);
            // Chance is named by the task, so that it does not depend on who trains on it.
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
            // Pushes begin and end at the same records whoever trains on the task: that is their
            // name. The task counts as done only when its last one is in.
            let last = step + 1 == batches;
            if last || (step as u64 + 1).is_multiple_of(push_every) {
                let to = indices.last().map_or(0, |index| index + 1);
                self.push(TaskPiece { pass, task, from: self.pushed_to, to, last }).await?;
                self.pushed_to = to;
            }
            if self.batches.is_multiple_of(pull_every) {
                self.pull().await?;
            }
        }
        Ok(loss_sum)
    }

    async fn push(&mut self, piece: TaskPiece) -> Result<(), Interrupt> {
        let started = Instant::now();
        self.wait_for_the_slowest().await?;
        self.waited(started);
        let records = u64::from(piece.to - piece.from);
        let zeros = Parameters::zeros(self.context.layout.clone());
        let mut values = std::mem::replace(&mut self.gradient, zeros).into_values();
        clip(&mut values, records, &self.context.job.spec.optimizer);
        in_place(|| self.round(&mut values));
        *self.clock += 1;
        let name = Name::Piece { piece, version: self.position.version };
        let gradient = Gradient {
            records,
            loss_sum: std::mem::take(&mut self.loss_sum),
            checksum: checksum(piece.pass, piece.task, piece.from..piece.to),
            values: Arc::new(values),
        };
        let started = Instant::now();
        let push = info_span!(target: TRACE, "push");
        let moved_bytes = self.pservers.push(name, gradient).instrument(push).await?;
        let took = started.elapsed();
        self.context.metrics.pushed(took);
        let push = took.as_secs_f64();
        self.context.view.spend(Spent { push, moved_bytes, ..Spent::default() });
        Ok(())
    }

    /// Rounds a gradient to what travels; what that takes from it goes with the next one (error
    /// feedback: Seide et al., 1-Bit Stochastic Gradient Descent, 2014).
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
        self.context.view.spend(Spent { wait, ..Spent::default() });
    }

    /// Bounded staleness: a trainer too far ahead of the slowest waits.
    async fn wait_for_the_slowest(&mut self) -> Result<(), Interrupt> {
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

    async fn pull(&mut self) -> Result<(), Interrupt> {
        let started = Instant::now();
        let values = self.parameters.values_mut();
        let pull = info_span!(target: TRACE, "pull");
        self.position = self.pservers.pull(values).instrument(pull).await?;
        let took = started.elapsed();
        self.context.metrics.pulled(took);
        let (pull, moved_bytes) = (took.as_secs_f64(), self.position.bytes);
        self.context.view.spend(Spent { pull, moved_bytes, ..Spent::default() });
        Ok(())
    }

    /// The final parameters. Every push of every trainer is in: tasks are done only then.
    async fn last(&mut self) -> Result<Last, Interrupt> {
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

/// Bounds the mean that a sum over `records` stands for: by value first, then by norm, as pservers
/// do in synchronous mode. There the norm is that of all slots; here this is the one place that
/// sees the whole gradient.
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
