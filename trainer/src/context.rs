//! The shared state of a running trainer.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_checkpoint::{EncodeError, ModelFile, encode_model};
use steadfast_client::{ClientError, Cluster, Master, PserverSet, Pservers};
use steadfast_common::dataset::Records;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Pass, RequestId, TaskId, Version};
use steadfast_common::layout::Layout;
use steadfast_common::records::JobRecord;
use steadfast_common::status::TimeBreakdown;
use steadfast_coord::{Deadline, pauses};
use steadfast_host::random;
use steadfast_host::task::in_place;
use steadfast_host::time::{Instant, sleep, timeout};
use steadfast_host::traces::TRACE;
use steadfast_process::Failure;
use steadfast_proto::v1::begin_init_reply::Answer;
use steadfast_proto::v1::begin_save_request::Stage;
use steadfast_proto::v1::fail_task_request::Cause;
use steadfast_proto::v1::{
    self, BeginInitRequest, BeginSaveRequest, FailTaskRequest, FinishInitRequest, FinishSaveRequest,
};
use steadfast_store::Location;
use steadfast_trainer_core::{Batch, Evaluation, Model, ModelError, Parameters};
use tokio::sync::watch;
use tracing::{info, info_span, warn};

use crate::activity::SharedActivity;
use crate::metrics::Metrics;
use crate::tasks::{TaskError, Tasks};

/// Interval at which a trainer that waits for the end of the job asks for the role of the saver.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// The shared state of a running trainer.
pub struct Context {
    pub job: JobRecord,
    pub cluster: Arc<Cluster>,
    pub master: Master,
    pub model: Arc<dyn Model>,
    pub layout: Arc<Layout>,
    pub tasks: Arc<Tasks>,
    pub store: Location,
    pub deadline: Arc<Deadline>,
    pub metrics: Metrics,
    pub activity: SharedActivity,
    pub pushing: Pushing,
    /// Held-out tasks that the master gave up. The mutex guards only this set.
    pub held_out_given_up: Mutex<BTreeSet<TaskId>>,
}

/// Counts the pushes in flight.
#[derive(Clone, Debug, Default)]
pub struct Pushing(watch::Sender<usize>);

impl Pushing {
    /// Counts a push until the guard is dropped.
    pub fn begin(&self) -> Push {
        self.0.send_modify(|count| *count += 1);
        Push(self.clone())
    }

    /// Waits until no push is in flight.
    pub async fn none(&self) {
        // Cannot fail: `self` holds the sender.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

/// A push in flight.
#[derive(Debug)]
pub struct Push(Pushing);

impl Drop for Push {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

/// The reason why training is interrupted.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("cannot save the model: {0}")]
    Store(#[from] steadfast_store::StoreError),
    #[error("cannot encode the model: {0}")]
    ModelFile(#[from] EncodeError),
    #[error("cannot read held-out records: {0}")]
    HeldOut(TaskError),
    #[error("the gradient of {what} is not finite; a lower learning rate or clipping may help")]
    NotFinite { what: String },
    #[error("a background task of the trainer failed: {0}")]
    Broken(String),
}

impl TrainError {
    /// Whether the error is that training diverged to non-finite values.
    pub fn is_divergence(&self) -> bool {
        matches!(
            self,
            Self::NotFinite { .. }
                | Self::Model(ModelError::NotFinite)
                | Self::ModelFile(EncodeError::NotFinite { .. })
        )
    }
}

impl From<TrainError> for Failure {
    fn from(interrupt: TrainError) -> Self {
        let kind = match &interrupt {
            TrainError::Client(error) => error.kind(),
            TrainError::Model(error) => error.kind(),
            TrainError::NotFinite { .. } | TrainError::ModelFile(_) => ErrorKind::Invalid,
            TrainError::Store(_) | TrainError::HeldOut(_) => ErrorKind::Unavailable,
            TrainError::Broken(_) => ErrorKind::Internal,
        };
        Self::new(kind, interrupt.to_string())
    }
}

/// The evaluation of parameters on held-out records.
#[derive(Debug, Default)]
pub struct Evaluated {
    pub sums: Evaluation,
    /// The error of a task that is missing from the sums and not given up.
    pub failed: Option<TaskError>,
}

/// The outcome of reading a held-out task.
enum HeldOut {
    Records(Arc<Records>),
    GivenUp,
    Failed(TaskError),
}

/// A gradient, checked to be finite: the sum over some records.
pub struct Computed {
    pub loss_sum: f64,
    pub gradient: Parameters,
}

impl Context {
    /// Waits for a complete pserver set with initialised parameters; initialises them if this trainer is
    /// elected to.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job.
    pub async fn pservers(&self) -> Result<Pservers, TrainError> {
        self.activity.note(|activity| activity.doing = "waiting for all pservers");
        let pserver_set = self.cluster.pserver_set().await?;
        let generation = pserver_set.record.generation;
        self.activity.note(|activity| {
            activity.generation = generation;
            activity.doing = "waiting for first values";
        });
        let (cluster, codec) = (self.cluster.clone(), self.job.spec.gradients.codec());
        let pservers = Pservers::new(
            cluster,
            &pserver_set,
            self.layout.clone(),
            codec,
            self.deadline.clone(),
        )?;
        while !self.cluster.is_initialised(&pserver_set.record) {
            self.offer_to_initialise(&pserver_set, &pservers).await?;
        }
        Ok(pservers)
    }

    async fn offer_to_initialise(
        &self,
        pserver_set: &PserverSet,
        pservers: &Pservers,
    ) -> Result<(), TrainError> {
        let generation = pserver_set.record.generation;
        let caller = self.master.caller(generation);
        let changed = self.cluster.init_changed();
        let reply = self.master.begin_init(BeginInitRequest { caller: caller.clone() }).await?;
        match reply.answer() {
            Answer::Initialize => {
                info!(attempt = reply.attempt, "initialises the parameters");
                let mut parameters = Parameters::zeros(self.layout.clone());
                self.model.initialize(self.job.spec.seed, &mut parameters);
                let values = Arc::new(parameters.into_values());
                pservers.init(reply.attempt, values).await?;
                let attempt = reply.attempt;
                self.master.finish_init(FinishInitRequest { caller, attempt }).await?;
            }
            // The mirror may lag behind the master.
            Answer::Wait | Answer::Done => {
                let limit = Duration::from_millis(500);
                let _ = timeout(limit, changed).await;
            }
        }
        if self.cluster.generation().is_some_and(|it| generation < it.generation) {
            return Err(ClientError::NewGeneration.into());
        }
        Ok(())
    }

    /// Sums loss and metric over all held-out records, in order, except for tasks that are given up. Reports
    /// read errors to the master.
    ///
    /// # Errors
    /// A refusal by the master, or another generation.
    pub async fn evaluate(
        &self,
        parameters: &Parameters,
        generation: Generation,
    ) -> Result<Evaluated, TrainError> {
        let mut evaluated = Evaluated::default();
        for task in &self.tasks.manifest().held_out {
            match self.held_out_records(*task, generation).await? {
                HeldOut::Records(records) => {
                    let batch = Batch::from(records.as_ref());
                    evaluated.sums.merge(&in_place(|| self.model.evaluate(parameters, &batch))?);
                }
                HeldOut::GivenUp => {}
                HeldOut::Failed(error) => evaluated.failed = Some(error),
            }
        }
        Ok(evaluated)
    }

    /// Reads the records of a held-out task. Reports bad data until the master gives the task up or asks for
    /// the attempt of another trainer.
    async fn held_out_records(
        &self,
        task: TaskId,
        generation: Generation,
    ) -> Result<HeldOut, TrainError> {
        loop {
            if self.held_out_given_up.lock().expect("no holder panics").contains(&task) {
                return Ok(HeldOut::GivenUp);
            }
            let error = match self.tasks.read_in_order(task).await {
                Ok(records) => return Ok(HeldOut::Records(records)),
                Err(error) => error,
            };
            warn!(%task, %error, "cannot read a held-out task");
            let request = FailTaskRequest {
                caller: self.master.caller(generation),
                request_id: RequestId(random::uuid()).0.to_string(),
                pass: 0,
                task: task.0,
                reason: error.to_string(),
                cause: error.cause().into(),
                lane: 0,
            };
            let reply = self.master.fail_task(request).await?;
            if reply.given_up {
                self.held_out_given_up.lock().expect("no holder panics").insert(task);
            } else if reply.elsewhere || error.cause() == Cause::Transient {
                return Ok(HeldOut::Failed(error));
            }
        }
    }

    /// Converts an evaluation to its message.
    pub fn wire(&self, sums: &Evaluation, pass: Pass, version: Version) -> v1::Evaluation {
        let metric = self.model.metric();
        v1::Evaluation {
            pass: pass.0,
            version: version.0,
            records: sums.records,
            loss: sums.mean_loss().unwrap_or(0.0),
            metric: sums.metric(&metric).unwrap_or(0.0),
            metric_name: metric.name.to_owned(),
        }
    }

    /// Whether an evaluation is due once `passes` passes are over.
    pub fn evaluates_after(&self, passes: u32) -> bool {
        let every = self.job.spec.evaluation.every_passes.unwrap_or(1);
        passes.is_multiple_of(every) && !self.tasks.manifest().held_out.is_empty()
    }

    /// Asks for the role of the saver, which evaluates and writes the model, and performs it if granted. Then
    /// waits for the end of the job, and asks again in case the saver dies or fails.
    ///
    /// # Errors
    /// If another generation begins before the job is over.
    pub async fn finish(&self, generation: Generation, last: &Last) -> Result<(), TrainError> {
        let (mut last_error, mut pauses) = (String::new(), pauses());
        loop {
            self.activity.note(|activity| activity.doing = "waiting for the end of the job");
            let why = std::mem::take(&mut last_error);
            let mut pause = ASK_AGAIN;
            if self.may_save(generation, last, Stage::Evaluates, why).await? {
                match self.save(generation, last).await {
                    Ok(()) => {}
                    Err(error @ (TrainError::Store(_) | TrainError::HeldOut(_))) => {
                        warn!(%error, "model not saved yet; retrying");
                        last_error = error.to_string();
                        pause = pauses.next().unwrap_or(ASK_AGAIN);
                    }
                    Err(error) => return Err(error),
                }
            }
            tokio::select! {
                biased;
                () = self.cluster.over() => return Ok(()),
                () = self.cluster.generation_after(generation) => {
                    return Err(ClientError::NewGeneration.into());
                }
                () = sleep(pause) => {}
            }
        }
    }

    /// Asks for the role of the saver, or reports the stage that this trainer has reached in it.
    async fn may_save(
        &self,
        generation: Generation,
        last: &Last,
        stage: Stage,
        error: String,
    ) -> Result<bool, TrainError> {
        let position = v1::Position {
            version: last.version.0,
            pass: last.pass.0,
            pass_start: last.version.0,
            examples: last.examples,
            loss: last.loss,
        };
        let request = BeginSaveRequest {
            caller: self.master.caller(generation),
            stage: stage.into(),
            error,
            position: Some(position),
        };
        Ok(self.master.begin_save(request).await?.save)
    }

    async fn save(&self, generation: Generation, last: &Last) -> Result<(), TrainError> {
        self.activity.note(|activity| activity.doing = "evaluating");
        let evaluated = self.evaluate(&last.parameters, generation).await?;
        let sums = match evaluated.failed {
            Some(error) => return Err(TrainError::HeldOut(error)),
            None => evaluated.sums,
        };
        if !self.may_save(generation, last, Stage::Writes, String::new()).await? {
            return Ok(());
        }
        self.activity.note(|activity| activity.doing = "writing the model");
        let sha256 = self.layout.digest(last.parameters.values());
        let place = self.store.child("model.safetensors")?;
        let spec = &self.job.spec;
        let about =
            ModelFile { job: &spec.name, model: &spec.model.kind, parameters_sha256: &sha256 };
        let bytes = encode_model(&self.layout, last.parameters.values(), about)?;
        place.write(bytes).await?;
        info!(model = place.url(), sha256, "model saved");
        let request = FinishSaveRequest {
            caller: self.master.caller(generation),
            model: place.url().to_owned(),
            parameters_sha256: sha256,
            version: last.version.0,
            examples: last.examples,
            loss: last.loss,
            evaluation: (0 < sums.records).then(|| self.wire(&sums, last.pass, last.version)),
        };
        self.master.finish_save(request).await?;
        Ok(())
    }

    /// Computes the gradient of a batch, off the threads that serve connections.
    ///
    /// # Errors
    /// If the model returns an error, or the gradient is not finite.
    pub fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch<'_>,
        key: &steadfast_trainer_core::MicroBatch,
        mut gradient: Parameters,
    ) -> Result<Computed, TrainError> {
        let started = Instant::now();
        let span = info_span!(target: TRACE, "compute", lane = key.lane.0, records = batch.len());
        let _traced = span.enter();
        let computed = in_place(|| {
            let loss_sum = self.model.gradient(parameters, batch, key, &mut gradient)?;
            if gradient.is_finite() {
                return Ok(Computed { loss_sum, gradient });
            }
            let what = format!("lane {}, step {} of pass {}", key.lane, key.step, key.pass);
            Err(TrainError::NotFinite { what })
        });
        let took = started.elapsed();
        self.metrics.computed(batch.len(), took);
        self.activity
            .add_time(TimeBreakdown { compute: took.as_secs_f64(), ..TimeBreakdown::default() });
        computed
    }
}

/// The final state of training.
pub struct Last {
    pub parameters: Parameters,
    pub pass: Pass,
    pub version: Version,
    pub examples: u64,
    pub loss: Option<f64>,
}
