//! What every part of a running trainer needs.

use std::sync::Arc;

use steadfast_checkpoint::{EncodeError, ModelFile, encode_model};
use steadfast_client::{ClientError, Cluster, Crew, Master, Pservers};
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, Pass, Version};
use steadfast_common::layout::Layout;
use steadfast_common::records::JobRecord;
use steadfast_common::status::Spent;
use steadfast_coord::Deadline;
use steadfast_host::task::in_place;
use steadfast_host::time::{Instant, sleep, timeout};
use steadfast_host::traces::TRACE;
use steadfast_process::Failure;
use steadfast_proto::v1::begin_init_reply::Answer;
use steadfast_proto::v1::{self, BeginInitRequest, BeginSaveRequest, FinishInitRequest};
use steadfast_store::Location;
use steadfast_trainer_core::{Batch, Evaluation, Model, ModelError, Parameters};
use tokio::sync::watch;
use tracing::{info, info_span};

use crate::metrics::Metrics;
use crate::tasks::{TaskError, Tasks};
use crate::view::View;

/// What every part of a running trainer needs.
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
    pub view: View,
    pub pushing: Pushing,
}

/// How many pushes were begun and not answered yet.
#[derive(Clone, Debug, Default)]
pub struct Pushing(watch::Sender<usize>);

impl Pushing {
    /// One more, until that is dropped.
    pub fn begin(&self) -> Push {
        self.0.send_modify(|count| *count += 1);
        Push(self.clone())
    }

    /// Waits for a moment at which there is none.
    pub async fn none(&self) {
        // The sender is ours.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

/// A push that was begun.
#[derive(Debug)]
pub struct Push(Pushing);

impl Drop for Push {
    fn drop(&mut self) {
        self.0.0.send_modify(|count| *count -= 1);
    }
}

/// Why a trainer stops what it is doing.
#[derive(Debug, thiserror::Error)]
pub enum Interrupt {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("the model was not saved: {0}")]
    Store(#[from] steadfast_store::StoreError),
    #[error("the model cannot be written: {0}")]
    ModelFile(#[from] EncodeError),
    #[error("held-out records cannot be read: {0}")]
    HeldOut(TaskError),
    #[error("the gradient of {what} is not finite; a lower learning rate or clipping may help")]
    NotFinite { what: String },
    #[error("a task of the trainer broke: {0}")]
    Broken(String),
}

impl Interrupt {
    /// Whether training has come to values that are not finite.
    pub fn is_divergence(&self) -> bool {
        matches!(
            self,
            Self::NotFinite { .. }
                | Self::Model(ModelError::NotFinite)
                | Self::ModelFile(EncodeError::NotFinite { .. })
        )
    }
}

impl From<Interrupt> for Failure {
    fn from(interrupt: Interrupt) -> Self {
        let kind = match &interrupt {
            Interrupt::Client(error) => error.kind(),
            Interrupt::Model(error) => error.kind(),
            Interrupt::NotFinite { .. } | Interrupt::ModelFile(_) => ErrorKind::Invalid,
            Interrupt::Store(_) | Interrupt::HeldOut(_) => ErrorKind::Unavailable,
            Interrupt::Broken(_) => ErrorKind::Internal,
        };
        Self::new(kind, interrupt.to_string())
    }
}

/// A checked gradient: the sum over some records.
pub struct Computed {
    pub loss_sum: f64,
    pub gradient: Parameters,
}

impl Context {
    /// Waits for a whole set of pservers whose parameters have values; gives them their first ones
    /// if this trainer is elected to.
    ///
    /// # Errors
    /// A refusal, another generation, or the end of the job.
    pub async fn pservers(&self) -> Result<Pservers, Interrupt> {
        self.view.note(|facts| facts.doing = "waiting for all pservers");
        let crew = self.cluster.crew().await?;
        let generation = crew.record.generation;
        self.view.note(|facts| {
            facts.generation = generation;
            facts.doing = "waiting for first values";
        });
        let (cluster, codec) = (self.cluster.clone(), self.job.spec.gradients.codec());
        let pservers =
            Pservers::new(cluster, &crew, self.layout.clone(), codec, self.deadline.clone())?;
        while !self.cluster.is_initialised(&crew.record) {
            self.offer_to_initialise(&crew, &pservers).await?;
        }
        Ok(pservers)
    }

    async fn offer_to_initialise(&self, crew: &Crew, pservers: &Pservers) -> Result<(), Interrupt> {
        let generation = crew.record.generation;
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
            // The mirror of the record may lag behind the master's word.
            Answer::Wait | Answer::Done => {
                let patience = std::time::Duration::from_millis(500);
                let _ = timeout(patience, changed).await;
            }
        }
        if self.cluster.generation().is_some_and(|it| generation < it.generation) {
            return Err(ClientError::NewGeneration.into());
        }
        Ok(())
    }

    /// Sums loss and metric over all held-out records, in order; nothing without any.
    ///
    /// # Errors
    /// If they cannot be read.
    pub async fn evaluate(&self, parameters: &Parameters) -> Result<Option<Evaluation>, Interrupt> {
        let held_out = &self.tasks.manifest().held_out;
        if held_out.is_empty() {
            return Ok(None);
        }
        let mut sums = Evaluation::default();
        for task in held_out {
            let records = self.tasks.read_in_order(*task).await.map_err(Interrupt::HeldOut)?;
            let batch = Batch::from(records.as_ref());
            sums.merge(&in_place(|| self.model.evaluate(parameters, &batch))?);
        }
        Ok(Some(sums))
    }

    /// An evaluation as the master is told of it.
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

    /// Offers to save; if elected, evaluates, writes the model and says so. Then waits for the end
    /// of the job, and offers itself again in case the elected one dies.
    ///
    /// # Errors
    /// If another generation begins before the job is over.
    pub async fn finish(&self, generation: Generation, last: &Last) -> Result<(), Interrupt> {
        self.view.note(|facts| facts.doing = "waiting for the end of the job");
        loop {
            let caller = self.master.caller(generation);
            let reply = self.master.begin_save(BeginSaveRequest { caller: caller.clone() }).await?;
            if reply.save {
                let request = self.save(last, caller).await?;
                self.master.finish_save(request).await?;
            }
            tokio::select! {
                biased;
                () = self.cluster.over() => return Ok(()),
                () = self.cluster.generation_after(generation) => {
                    return Err(ClientError::NewGeneration.into());
                }
                () = sleep(std::time::Duration::from_secs(1)) => {}
            }
        }
    }

    async fn save(
        &self,
        last: &Last,
        caller: Option<v1::Caller>,
    ) -> Result<v1::FinishSaveRequest, Interrupt> {
        let evaluation = self.evaluate(&last.parameters).await?;
        let sha256 = self.layout.digest(last.parameters.values());
        let place = self.store.child("model.safetensors")?;
        let spec = &self.job.spec;
        let about =
            ModelFile { job: &spec.name, model: &spec.model.kind, parameters_sha256: &sha256 };
        let bytes = encode_model(&self.layout, last.parameters.values(), about)?;
        place.write(bytes).await?;
        info!(model = place.url(), sha256, "model saved");
        Ok(v1::FinishSaveRequest {
            caller,
            model: place.url().to_owned(),
            parameters_sha256: sha256,
            version: last.version.0,
            examples: last.examples,
            loss: last.loss,
            evaluation: evaluation.map(|sums| self.wire(&sums, last.pass, last.version)),
        })
    }

    /// Computes the gradient of a batch, away from the threads that serve connections.
    ///
    /// # Errors
    /// If the model refuses, or the gradient is not finite.
    pub fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch<'_>,
        key: &steadfast_trainer_core::MicroBatch,
        mut gradient: Parameters,
    ) -> Result<Computed, Interrupt> {
        let started = Instant::now();
        let span = info_span!(target: TRACE, "compute", lane = key.lane.0, records = batch.len());
        let _traced = span.enter();
        let computed = in_place(|| {
            let loss_sum = self.model.gradient(parameters, batch, key, &mut gradient)?;
            if gradient.is_finite() {
                return Ok(Computed { loss_sum, gradient });
            }
            let what = format!("lane {}, step {} of pass {}", key.lane, key.step, key.pass);
            Err(Interrupt::NotFinite { what })
        });
        let took = started.elapsed();
        self.metrics.computed(batch.len(), took);
        self.view.spend(Spent { compute: took.as_secs_f64(), ..Spent::default() });
        computed
    }
}

/// The end of training.
pub struct Last {
    pub parameters: Parameters,
    pub pass: Pass,
    pub version: Version,
    pub examples: u64,
    pub loss: Option<f64>,
}
