//! The shared state of a running trainer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use steadfast_checkpoint::{
    EncodeError, ModelFile, StartError, TableFile, TableFileError, describe_fixed, encode_model,
    table_file_name,
};
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Lane, Pass, TaskId, Version};
use steadfast_common::job::dataset::{self, Records};
use steadfast_common::job::spec::{EvaluationSpec, JobSpec, Keep, Mode};
use steadfast_common::records::position::Position;
use steadfast_common::records::{AVERAGE_MODEL, Best, EvaluationRecord, KeptModel, MODEL};
use steadfast_common::status::TimeBreakdown;
use steadfast_common::tensor::finite::are_finite;
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::table::{RANGES, RangeDigest};
use steadfast_coord::backoff;
use steadfast_host::task::in_place;
use steadfast_host::time::{Instant, sleep};
use steadfast_net::traces::TRACE;
use steadfast_process::Failure;
use steadfast_store::{Location, ObjectWriter, StoreError};
use steadfast_trainer_core::record_search::{RecordName, TrialStandIn};
use steadfast_trainer_core::{
    Batch, BatchIds, Evaluation, LaneBatches, Metric, MicroBatch, Model, ModelError, Parameters,
    Validity,
};
use steadfast_training_client::{
    ClientError, FailedTask, FailureCause, FailureDecision, GenerationClient, InitialValues,
    SavedModel, SaverElection, Session,
};
use tokio::sync::watch;
use tracing::{info, info_span, warn};

use crate::activity::SharedActivity;
use crate::course::Evaluations;
use crate::current::Current;
use crate::hang_watch::HangWatch;
use crate::kept_names::KeptNames;
use crate::metrics::Metrics;
use crate::start;
use crate::suspects::{IdsRead, Suspects};
use crate::tasks::{TaskError, Tasks};
use crate::trial::TrialBatch;

/// Ranges of a table that are read at the same time: few enough that they are polled in order, which simulations need,
/// and no more than are known to fit into so many bytes.
const RANGES_AT_ONCE: usize = 16;
const RANGES_BYTES: usize = 64 << 20;

/// The shared state of a running trainer.
pub struct Context {
    pub session: Session,
    pub model: Arc<dyn Model>,
    pub tasks: Arc<Tasks>,
    pub store: Location,
    pub metrics: Metrics,
    pub activity: SharedActivity,
    /// The parameters, for the program in whose process this trainer runs.
    pub current: Current,
    pub pushing: Pushing,
    pub evaluations: Evaluations,
    /// Held-out tasks that the master gave up. The mutex guards only this set.
    pub held_out_given_up: Mutex<BTreeSet<TaskId>>,
    /// The tensors that the model has beside its parameters, once they were asked for.
    pub fixed: OnceLock<Option<Arc<Vec<u8>>>>,
    /// Stands in for the processes of trials.
    pub trial: Option<TrialStandIn>,
    pub hang_watch: HangWatch,
    /// Evaluations may go on beside gradients.
    pub evaluation_watch: HangWatch,
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
    #[error("cannot encode a table: {0}")]
    TableFile(#[from] TableFileError),
    #[error("the file with the best parameters, {1}, {0}")]
    BestLost(&'static str, String),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("cannot read held-out records: {0}")]
    HeldOut(TaskError),
    #[error("{what} is not finite; a lower learning rate or clipping may help")]
    NotFinite { what: String },
    #[error("a background task of the trainer failed: {0}")]
    TaskFailed(String),
}

impl TrainError {
    /// Returns whether the error means that training diverged to non-finite values.
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
    fn from(error: TrainError) -> Self {
        let kind = match &error {
            TrainError::Client(error) => error.kind(),
            TrainError::Model(error) => error.kind(),
            TrainError::Start(error) => error.kind(),
            TrainError::NotFinite { .. } | TrainError::ModelFile(_) | TrainError::BestLost(..) => {
                ErrorKind::Invalid
            }
            TrainError::Store(_) | TrainError::HeldOut(_) => ErrorKind::Unavailable,
            TrainError::TaskFailed(_) | TrainError::TableFile(_) => ErrorKind::Internal,
        };
        Self::new(kind, error.to_string())
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

/// Where a gradient goes.
pub enum Destination {
    /// The gradient replaces these values, which are arbitrary.
    Replaced(Parameters),
    /// The gradient is added to this sum.
    Sum(Parameters),
}

/// A gradient, checked to be finite: the sum over some records.
pub struct Computed {
    pub loss_sum: f64,
    /// What the records count in the mean, if that is not their number.
    pub weight: Option<f64>,
    pub gradient: Parameters,
}

impl Context {
    pub fn spec(&self) -> &JobSpec {
        &self.session.job().spec
    }

    pub fn layout(&self) -> &Arc<Layout> {
        self.session.layout()
    }

    /// Joins the newest generation; sets the initial values of the parameters if this trainer is elected to.
    ///
    /// # Errors
    /// The model's error, a rejection, another generation, or the end of the job.
    pub async fn join_generation(&self) -> Result<GenerationClient, TrainError> {
        self.activity.note(|activity| {
            // That of an earlier generation may be one that this one reaches late, or never.
            activity.version = Version(0);
            activity.description = "waiting for all pservers";
        });
        let generation = self.session.join_generation().await?;
        self.activity.note(|activity| {
            activity.generation = generation.number();
            activity.description = "waiting for first values";
        });
        let current = generation.clone();
        self.model.begin_generation(Validity::new(move || !current.is_over()));
        generation.initialize(|| self.initial_values()).await?;
        Ok(generation)
    }

    async fn initial_values(&self) -> Result<InitialValues, TrainError> {
        let fixed = in_place(|| self.model.fixed())?.map(Bytes::from);
        if let Some(fixed) = &fixed {
            self.record_fixed(fixed).await?;
        }
        let mut parameters = Parameters::zeros(self.layout().clone());
        in_place(|| self.model.initialize(self.spec().seed, &mut parameters))?;
        let (job, mut pauses) = (self.session.job(), None);
        let state = loop {
            let (values, fixed) = (parameters.values_mut(), fixed.as_deref());
            match start::overwrite(job, self.layout(), values, fixed).await {
                Ok(state) => break state,
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    warn!(%error, "cannot read the values to start from; retrying");
                    sleep(pauses.get_or_insert_with(backoff).next().unwrap_or_default()).await;
                }
                Err(error) => return Err(error.into()),
            }
        };
        Ok(InitialValues { values: parameters.into_values(), state })
    }

    /// Writes the tensors that the model has beside its parameters into the store, once in the life of a job: before the
    /// first checkpoint, so that each one can be exported without the program of the model.
    async fn record_fixed(&self, fixed: &Bytes) -> Result<(), TrainError> {
        let mut pauses = None;
        let record = in_place(|| describe_fixed(&self.spec().name, fixed));
        let place = self.store.child(&record.object)?;
        while let Err(error) = place.write(fixed.clone()).await {
            if error.kind() == steadfast_store::ErrorKind::Permanent {
                return Err(error.into());
            }
            warn!(%error, "cannot write the tensors that training does not change; retrying");
            sleep(pauses.get_or_insert_with(backoff).next().unwrap_or_default()).await;
        }
        Ok(self.session.record_fixed(&record).await.map_err(ClientError::from)?)
    }

    /// Returns the distinct ids of each table in a batch, for a gradient with `key` or an evaluation.
    ///
    /// # Errors
    /// If the model returns an error, or ids for another number of tables than it has.
    pub fn ids(
        &self,
        batch: &Batch<'_>,
        key: Option<&MicroBatch>,
    ) -> Result<Vec<BatchIds>, TrainError> {
        let tables = self.layout().tables().len();
        if tables == 0 {
            return Ok(Vec::new());
        }
        // A lane may have no record left in the last steps of a pass. Models need not expect that.
        if batch.is_empty() {
            return Ok(vec![BatchIds::default(); tables]);
        }
        let ids = || self.model.ids(batch, key);
        let ids = in_place(|| match key {
            Some(_) => self.hang_watch.computes(ids),
            None => self.evaluation_watch.computes(ids),
        })?;
        if ids.len() != tables {
            let message = format!("it returned ids for {} of {tables} tables", ids.len());
            return Err(ModelError::Failed { message }.into());
        }
        Ok(in_place(|| ids.iter().map(|ids| BatchIds::new(ids)).collect()))
    }

    /// Returns `parameters` with the current rows of a batch.
    ///
    /// # Errors
    /// As [`Context::ids`], or another generation.
    pub async fn with_rows(
        &self,
        parameters: &Parameters,
        batch: &Batch<'_>,
        key: Option<&MicroBatch>,
        generation: &GenerationClient,
    ) -> Result<Parameters, TrainError> {
        let ids = self.ids(batch, key)?;
        if ids.is_empty() {
            return Ok(parameters.clone());
        }
        let wanted = ids.iter().map(|ids| ids.ids.clone()).collect();
        let pulled = generation.pservers().pull_rows(None, wanted).await?;
        let rows = pulled.expect("without a version, none is past").rows;
        let own = ids.iter().zip(&rows).map(|(ids, rows)| ids.rows_of(rows));
        Ok(parameters.clone().with_tables(own.collect()))
    }

    /// Returns the tensors that the model has beside its parameters.
    ///
    /// # Errors
    /// An error of the model's code.
    pub fn fixed(&self) -> Result<Option<Arc<Vec<u8>>>, ModelError> {
        if let Some(known) = self.fixed.get() {
            return Ok(known.clone());
        }
        let fixed = in_place(|| self.model.fixed())?.map(Arc::new);
        Ok(self.fixed.get_or_init(|| fixed).clone())
    }

    /// Returns the parameters that are evaluated: in a job with `average` the averages of those at `version`, or in
    /// asynchronous mode the current averages. Returns `None` if the pservers have gone on from the version.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn averaged(
        &self,
        parameters: &Parameters,
        version: Version,
        generation: &GenerationClient,
    ) -> Result<Option<Parameters>, TrainError> {
        if self.spec().average.is_none() {
            return Ok(Some(parameters.clone()));
        }
        let version = (self.spec().mode == Mode::Sync).then_some(version);
        let mut values = vec![0.0; self.layout().len()];
        let is_pulled = generation.pservers().pull_averages(version, &mut values).await?;
        Ok(is_pulled.then(|| Parameters::new(self.layout().clone(), values)))
    }

    /// Sums loss and metric over all held-out records, in order, except for tasks that are given up, and records that are
    /// left out. Reports read errors to the master. If the evaluation is suspected, processes of their own evaluate first.
    ///
    /// # Errors
    /// A rejection by the master, or another generation.
    pub async fn evaluate(
        &self,
        parameters: &Parameters,
        position: &Position,
        generation: &GenerationClient,
        is_suspected: bool,
    ) -> Result<Evaluated, TrainError> {
        if is_suspected {
            self.try_evaluation(parameters, position, generation).await?;
        }
        let mut evaluated = Evaluated::default();
        for task in &self.tasks.dataset().manifest().held_out {
            match self.held_out_records(*task, generation).await? {
                HeldOut::Records(records) => {
                    let count = records.len() as u32;
                    let kept = generation.left_out().evaluated(position.pass, *task, count);
                    let records = match kept.len() == records.len() {
                        true => records,
                        false if kept.is_empty() => continue,
                        false => Arc::new(records.select(&kept)),
                    };
                    let batch = Batch::from(records.as_ref());
                    let parameters = &self.with_rows(parameters, &batch, None, generation).await?;
                    let evaluate = || self.model.evaluate(parameters, &batch);
                    let sums = in_place(|| self.evaluation_watch.computes(evaluate))?;
                    self.check_weights(&batch, sums.weights.is_some())?;
                    evaluated.sums.merge(&sums);
                }
                HeldOut::GivenUp => {}
                HeldOut::Failed(error) => evaluated.failed = Some(error),
            }
        }
        Ok(evaluated)
    }

    /// Lets processes of their own evaluate, because trainers that did so were lost. If a record ends them, waits until
    /// another generation leaves it out.
    async fn try_evaluation(
        &self,
        parameters: &Parameters,
        position: &Position,
        generation: &GenerationClient,
    ) -> Result<(), TrainError> {
        info!("trainers were lost that evaluate: a process of its own evaluates first");
        let mut batches = Vec::new();
        for task in &self.tasks.dataset().manifest().held_out {
            let read = self.held_out_records(*task, generation).await?;
            let HeldOut::Records(records) = read else { continue };
            let count = records.len() as u32;
            let kept = generation.left_out().evaluated(position.pass, *task, count);
            let records = kept.into_iter().map(|record| RecordName { task: *task, record });
            let records: Vec<RecordName> = records.collect();
            if !records.is_empty() {
                let (pass, lane) = (position.pass, Lane(0));
                batches.push(TrialBatch { pass, step: 0, lane, records, held_out: true });
            }
        }
        let ids = async {
            let mut ids = IdsRead::new(self);
            for TrialBatch { records: names, .. } in &batches {
                let task = names[0].task;
                let HeldOut::Records(records) = self.held_out_records(task, generation).await?
                else {
                    continue;
                };
                let kept: Vec<u32> = names.iter().map(|it| it.record).collect();
                ids.add(self, &Batch::from(&records.select(&kept)), None)?;
            }
            Ok(ids)
        };
        let suspects = Suspects { context: self, generation, position: *position, parameters };
        suspects.search(&batches, ids).await
    }

    /// Reads the records of a held-out task. Reports bad data until the master gives the task up or asks for
    /// the attempt of another trainer.
    async fn held_out_records(
        &self,
        task: TaskId,
        generation: &GenerationClient,
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
            let cause = error.cause();
            let reason = error.to_string();
            let failed = FailedTask { pass: Pass(0), task, lane: Lane(0), cause, reason };
            match (generation.fail_task(failed).await?, cause) {
                (FailureDecision::GivenUp, _) => {
                    self.held_out_given_up.lock().expect("no holder panics").insert(task);
                }
                (FailureDecision::Elsewhere, _) | (_, FailureCause::Transient) => {
                    return Ok(HeldOut::Failed(error));
                }
                (FailureDecision::Retry, FailureCause::Data) => {}
            }
        }
    }

    /// Returns the record of an evaluation at `position`.
    pub fn evaluation_record(&self, sums: &Evaluation, position: &Position) -> EvaluationRecord {
        let metric = self.model.metric();
        EvaluationRecord {
            pass: position.pass,
            version: position.version,
            records: sums.records,
            // Nothing may count, and a record may still be held out.
            loss: sums.mean_loss().unwrap_or(f64::NAN),
            metric: sums.metric(&metric).unwrap_or(f64::NAN),
            metric_name: metric.name.to_owned(),
            further_metrics: self.further_metrics(sums),
            course: None,
            model: None,
        }
    }

    /// Returns the values of the further metrics by name. All have one, also if no record was evaluated.
    fn further_metrics(&self, sums: &Evaluation) -> BTreeMap<String, f64> {
        let metrics = self.model.further_metrics().into_iter().enumerate();
        let value = |(index, metric): (usize, Metric)| {
            let value = sums.further.get(index).and_then(|sum| sum.value(&metric));
            (metric.name.to_owned(), value.unwrap_or(f64::NAN))
        };
        metrics.map(value).collect()
    }

    /// Returns the rules of an evaluation of the parameters at a position.
    pub fn evaluation_at(&self, position: &Position) -> EvaluationSpec {
        self.session.job().evaluation_of(position.version)
    }

    /// Returns whether the model prepares batches ahead.
    pub fn prepares(&self) -> bool {
        self.model.prepares()
    }

    /// Lets the model prepare a batch.
    ///
    /// # Errors
    /// The error of the model.
    pub fn prepare(&self, records: &Records, key: &MicroBatch) -> Result<(), TrainError> {
        if records.is_empty() {
            return Ok(());
        }
        Ok(in_place(|| self.model.prepare(&Batch::from(records), key))?)
    }

    /// Returns whether an evaluation is due at a position; never if no records are held out.
    pub fn is_evaluated(&self, position: &Position) -> bool {
        let has_records = !self.tasks.dataset().manifest().held_out.is_empty();
        has_records && self.evaluation_at(position).is_due(position)
    }

    /// Returns whether the course of the job depends on an evaluation at this position: training goes on, or the job
    /// ends, only when that is known.
    pub fn is_decisive(&self, position: &Position) -> bool {
        let spec = self.spec();
        let ends = spec.passes == Some(position.pass.0) || spec.steps == Some(position.version.0);
        let rules = self.evaluation_at(position);
        rules.decides() && (ends || self.is_evaluated(position))
    }

    /// Evaluates the parameters at a position on which the course of the job depends; writes them, if the job keeps the
    /// best and they are the best so far; and reports them. Errors that another attempt may not have are only logged.
    ///
    /// # Errors
    /// A rejection by the master, another generation, the end of the job, or an error of the model's code.
    pub async fn decide(
        &self,
        parameters: &Parameters,
        position: &Position,
        generation: &GenerationClient,
        is_suspected: bool,
    ) -> Result<(), TrainError> {
        let before = self.evaluations.latest();
        if self.evaluations.is_known(position.version) {
            // Another trainer was first.
            return Ok(());
        }
        self.leave_out_given_up().await?;
        let Some(parameters) = self.averaged(parameters, position.version, generation).await?
        else {
            // Another trainer was first, and training goes on.
            return Ok(());
        };
        let evaluated = self.evaluate(&parameters, position, generation, is_suspected).await?;
        let Evaluated { sums, failed } = evaluated;
        if let Some(error) = failed {
            warn!(%error, "evaluation failed; retrying");
            return Ok(());
        }
        let mut record = self.evaluation_record(&sums, position);
        if sums.records == 0 {
            // All of its tasks are given up.
            (record.loss, record.metric) = (f64::NAN, f64::NAN);
        }
        let rules = self.evaluation_at(position);
        let decided = rules.decided(before.as_ref(), record.clone());
        let best = decided.course.map(|course| course.best);
        let is_best = best.is_some_and(|best| best.version == position.version);
        if rules.keep == Keep::Best && is_best {
            let name = self.kept_names().next(position.version);
            record.model = match self.write_model(&parameters, &[], &name).await {
                Ok(kept) => Some(kept),
                Err(TrainError::Store(error)) => {
                    return self.cannot_keep(&error, generation).await;
                }
                Err(error) => return Err(error),
            };
        }
        let written = record.model.clone();
        generation.report_evaluation(record).await?;
        // Which one is the best now is what etcd says: the report of another trainer may have been first.
        self.evaluations.known(position.version).await;
        let best = self.kept_best();
        let before = before.and_then(|it| it.course?.best.model);
        for model in [before, written].into_iter().flatten() {
            if best.as_ref().is_none_or(|(_, best)| best.url != model.url) {
                self.delete_kept(&model.url).await;
            }
        }
        Ok(())
    }

    /// Leaves out held-out tasks that the master has given up, also for another trainer: which trainer evaluates must not
    /// matter.
    async fn leave_out_given_up(&self) -> Result<(), TrainError> {
        let given_up = self.evaluations.given_up().await.map_err(ClientError::from)?;
        let held_out = &self.tasks.dataset().manifest().held_out;
        let known = held_out.iter().filter(|task| given_up.contains(task));
        self.held_out_given_up.lock().expect("no holder panics").extend(known);
        Ok(())
    }

    /// Reports that the best parameters so far cannot be written, so that another trainer tries. They follow an
    /// evaluation, and so the report names a held-out task.
    async fn cannot_keep(
        &self,
        error: &StoreError,
        generation: &GenerationClient,
    ) -> Result<(), TrainError> {
        warn!(%error, "cannot save the best parameters so far; retrying");
        let Some(task) = self.tasks.dataset().manifest().held_out.first() else { return Ok(()) };
        let reason = format!("cannot save the best parameters so far: {error}");
        let (pass, lane, cause) = (Pass(0), Lane(0), FailureCause::Transient);
        generation.fail_task(FailedTask { pass, task: *task, lane, cause, reason }).await?;
        Ok(())
    }

    fn kept_names(&self) -> KeptNames {
        KeptNames::of(&self.spec().name)
    }

    /// Deletes a kept model.
    async fn delete_kept(&self, url: &str) {
        let name = url.rsplit('/').next().unwrap_or_default();
        let deleted = match self.store.child(name) {
            Ok(place) => place.delete().await,
            Err(error) => Err(error),
        };
        if let Err(error) = deleted {
            warn!(%error, url, "cannot delete a model that is not the best any more");
        }
    }

    /// Deletes all kept models, once the best is the model of the job: also those that crashes have left.
    async fn delete_all_kept(&self) {
        let names = self.kept_names();
        match self.store.list().await {
            Ok(objects) => {
                for (name, _) in objects.iter().filter(|(name, _)| names.contain(name)) {
                    self.delete_kept(name).await;
                }
            }
            Err(error) => warn!(%error, "cannot delete the models that were the best for a while"),
        }
    }

    /// Writes a model file into the store.
    async fn write_model(
        &self,
        parameters: &Parameters,
        ranges: &[RangeDigest],
        name: &str,
    ) -> Result<KeptModel, TrainError> {
        let values = parameters.values();
        let sha256 = self.layout().digest(values, ranges);
        let place = self.store.child(name)?;
        let spec = self.spec();
        let about =
            ModelFile { job: &spec.name, model: &spec.model.kind, parameters_sha256: &sha256 };
        let fixed = in_place(|| self.model.fixed())?;
        let bytes = encode_model(self.layout(), values, about, fixed.as_deref())?;
        let file_sha256 = dataset::sha256(&bytes);
        place.write(bytes).await?;
        info!(model = place.url(), sha256, "model saved");
        Ok(KeptModel { url: place.url().to_owned(), parameters_sha256: sha256, file_sha256 })
    }

    /// Returns the best evaluation of a job that keeps its parameters, and the parameters.
    fn kept_best(&self) -> Option<(Best, KeptModel)> {
        let keeps = self.spec().evaluation.keep == Keep::Best;
        let best = self.evaluations.latest().filter(|_| keeps)?.course?.best;
        let model = best.model.clone()?;
        Some((best, model))
    }

    /// Copies the best parameters to the place of the job's model; returns them.
    async fn write_best(&self, best: Best, kept: &KeptModel) -> Result<SavedModel, TrainError> {
        let name = kept.url.rsplit('/').next().unwrap_or_default();
        let (from, place) = (self.store.child(name)?, self.store.child(MODEL)?);
        let is_whole = |bytes: &Bytes| dataset::sha256(bytes) == kept.file_sha256;
        match from.read().await {
            Ok(bytes) if is_whole(&bytes) => place.write(bytes).await?,
            Ok(_) => return Err(TrainError::BestLost("is damaged", kept.url.clone())),
            Err(StoreError::NotFound { .. }) => {
                // A trainer that copied it died before it reported that, or the file is lost.
                match place.read().await {
                    Ok(bytes) if is_whole(&bytes) => {}
                    Ok(_) | Err(StoreError::NotFound { .. }) => {
                        let url = kept.url.clone();
                        return Err(TrainError::BestLost("does not exist any more", url));
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error) => return Err(error.into()),
        }
        let sha256 = kept.parameters_sha256.clone();
        info!(model = place.url(), sha256, version = best.version.0, "the best model saved");
        let evaluation = EvaluationRecord {
            pass: best.pass,
            version: best.version,
            records: 0,
            loss: best.loss,
            metric: best.metric,
            metric_name: self.model.metric().name.to_owned(),
            further_metrics: best.further_metrics,
            course: None,
            model: None,
        };
        let url = place.url().to_owned();
        Ok(SavedModel { url, parameters_sha256: sha256, evaluation: Some(evaluation) })
    }

    /// Takes part in the election of the saver until the job has ended; evaluates and writes the model if
    /// elected.
    ///
    /// # Errors
    /// If another generation begins before that.
    pub async fn finish(
        &self,
        generation: &GenerationClient,
        trained: &TrainedModel,
    ) -> Result<(), TrainError> {
        let mut election = generation.saver_election(trained.position);
        loop {
            self.activity.note(|activity| activity.description = "waiting for the end of the job");
            if !election.is_elected().await? {
                return Ok(());
            }
            match self.save(generation, &mut election, trained).await {
                Ok(()) => {}
                Err(error @ (TrainError::Store(_) | TrainError::HeldOut(_))) => {
                    warn!(%error, "model not saved yet; retrying");
                    election.failed(error);
                }
                Err(error) => return Err(error),
            }
        }
    }

    async fn save(
        &self,
        generation: &GenerationClient,
        election: &mut SaverElection,
        trained: &TrainedModel,
    ) -> Result<(), TrainError> {
        let position = &trained.position;
        let known = self.evaluations.latest().filter(|it| it.version == position.version);
        let best = self.kept_best().filter(|(best, _)| best.version != position.version);
        let averaged = self.averaged(&trained.parameters, position.version, generation).await?;
        // The last version stays on the pservers of the generation.
        let averaged = averaged.ok_or(ClientError::NewGeneration)?;
        let evaluation = match known {
            Some(known) => Some(known),
            None if best.is_some() => None,
            None => {
                let is_suspected = election.evaluation_is_suspected();
                self.evaluate_last(&averaged, position, generation, is_suspected).await?
            }
        };
        if !election.may_write().await? {
            return Ok(());
        }
        self.activity.note(|activity| activity.description = "writing the model");
        let saved = match best {
            Some((best, kept)) => self.write_best(best, &kept).await?,
            None => {
                let ranges = self.save_tables(generation).await?;
                if self.spec().average.is_some() {
                    self.write_model(&averaged, &[], AVERAGE_MODEL).await?;
                }
                let kept = match self.spec().evaluation.keep {
                    // The best parameters are those that were evaluated.
                    Keep::Best => &averaged,
                    Keep::Last => &trained.parameters,
                };
                let written = self.write_model(kept, &ranges, MODEL).await?;
                let KeptModel { url, parameters_sha256, .. } = written;
                SavedModel { url, parameters_sha256, evaluation }
            }
        };
        let changes = self.session.job().changes.iter().map(|it| it.before.evaluation.keep);
        if changes.chain([self.spec().evaluation.keep]).any(|keep| keep == Keep::Best) {
            self.delete_all_kept().await;
        }
        election.finish(saved).await?;
        Ok(())
    }

    /// Evaluates the parameters after the last step; `None` without held-out records.
    async fn evaluate_last(
        &self,
        parameters: &Parameters,
        position: &Position,
        generation: &GenerationClient,
        is_suspected: bool,
    ) -> Result<Option<EvaluationRecord>, TrainError> {
        self.activity.note(|activity| activity.description = "evaluating");
        let evaluated = self.evaluate(parameters, position, generation, is_suspected).await?;
        let Evaluated { sums, failed } = evaluated;
        if let Some(error) = failed {
            return Err(TrainError::HeldOut(error));
        }
        Ok((0 < sums.records).then(|| self.evaluation_record(&sums, position)))
    }

    /// Writes the tables; returns the digests of all their ranges.
    async fn save_tables(
        &self,
        generation: &GenerationClient,
    ) -> Result<Vec<RangeDigest>, TrainError> {
        let mut digests = Vec::with_capacity(self.layout().ranges());
        for (index, table) in self.layout().tables().iter().enumerate() {
            let mut writer = ObjectWriter::new(self.store.child(&table_file_name(&table.name))?);
            match self.write_table(generation, index, &mut writer).await {
                Ok(mut of_table) => digests.append(&mut of_table),
                Err(error) => {
                    writer.abort().await;
                    return Err(error);
                }
            }
            let place = writer.place().clone();
            writer.finish().await?;
            info!(table = table.name, place = place.url(), "table saved");
        }
        Ok(digests)
    }

    async fn write_table(
        &self,
        generation: &GenerationClient,
        index: usize,
        writer: &mut ObjectWriter,
    ) -> Result<Vec<RangeDigest>, TrainError> {
        let table = &self.layout().tables()[index];
        let about = [("job", &self.spec().name[..]), ("table", &table.name)];
        let mut file = TableFile::new(table.width, &about)?;
        let mut digests = Vec::new();
        let (mut next, mut at_once, mut largest) = (0, 1, 1);
        while next < RANGES {
            let ranges = next..RANGES.min(next + at_once as u32);
            next = ranges.end;
            let reads = ranges.map(|range| generation.pservers().read_range(index, range));
            for rows in try_join_all(reads).await? {
                largest = largest.max(size_of_val(rows.ids()) + size_of_val(rows.values()));
                if !are_finite(rows.values()) {
                    let what = format!("a row of table {}", table.name);
                    return Err(TrainError::NotFinite { what });
                }
                digests.push(in_place(|| rows.digest()));
                let bytes = in_place(|| file.push(&rows).and_then(|()| file.take()))?;
                writer.push(&bytes).await?;
            }
            at_once = (RANGES_BYTES / largest).clamp(1, RANGES_AT_ONCE);
        }
        writer.push(&in_place(|| file.finish())?).await?;
        Ok(digests)
    }

    /// Computes the gradient of a batch, off the threads that serve connections. `into` is where it goes:
    /// memory of any content, or a sum so far.
    ///
    /// # Errors
    /// If the model returns an error, or the gradient is not finite.
    pub fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch<'_>,
        key: &MicroBatch,
        into: Destination,
    ) -> Result<Computed, TrainError> {
        let (computed, took) = self.timed(key.lane, batch.len(), |model| {
            let (loss_sum, mut gradient) = match into {
                Destination::Replaced(mut gradient) => {
                    (model.fresh_gradient(parameters, batch, key, &mut gradient)?, gradient)
                }
                Destination::Sum(mut sum) => {
                    (model.gradient(parameters, batch, key, &mut sum)?, sum)
                }
            };
            let weight = gradient.take_weight();
            self.check_weights(batch, weight.is_some())?;
            let MicroBatch { lane, step, pass, .. } = key;
            if let Some(weight) = weight.filter(|it| !it.is_finite() || *it < 0.0) {
                let message = format!(
                    "the records of lane {lane}, step {step} of pass {pass} count {weight}, which is not a finite \
                     number from 0 on"
                );
                return Err(ModelError::Failed { message }.into());
            }
            if gradient.is_finite() {
                return Ok(Computed { loss_sum, weight, gradient });
            }
            let what = format!("the gradient of lane {lane}, step {step} of pass {pass}");
            Err(TrainError::NotFinite { what })
        });
        self.note_computed(batch.len(), took);
        computed
    }

    /// Checks that the model has used the weights of the records, if they have some.
    fn check_weights(&self, batch: &Batch<'_>, are_used: bool) -> Result<(), ModelError> {
        if batch.weights.is_empty() || are_used {
            return Ok(());
        }
        let message = format!(
            "the model `{}` does not use the weights of the records, those of `dataset.weight`: let it return what the \
             records count beside their loss, or remove `dataset.weight`",
            self.spec().model.kind
        );
        Err(ModelError::Failed { message })
    }

    /// Computes the sum of the gradients of lanes at once, if the model can; sets `gradient` and returns the
    /// sum of the losses.
    ///
    /// # Errors
    /// If the model returns an error, as it does if the gradient of a lane is not finite.
    pub fn gradient_of_lanes(
        &self,
        parameters: &Parameters,
        batches: &LaneBatches<'_>,
        gradient: &mut Parameters,
    ) -> Result<Option<f64>, TrainError> {
        let Some((first, _)) = batches.lanes().first() else { return Ok(None) };
        let (computed, took) = self.timed(first.lane, batches.records(), |model| {
            Ok(model.gradient_of_lanes(parameters, batches, gradient)?)
        });
        // A model that cannot has computed nothing.
        if !matches!(computed, Ok(None)) {
            self.note_computed(batches.records(), took);
        }
        computed
    }

    /// Lets the model compute, and measures the time.
    fn timed<T>(
        &self,
        lane: Lane,
        records: usize,
        work: impl FnOnce(&dyn Model) -> T,
    ) -> (T, Duration) {
        let started = Instant::now();
        let span = info_span!(target: TRACE, "compute", lane = lane.0, records);
        let _traced = span.enter();
        let computed = in_place(|| self.hang_watch.computes(|| work(self.model.as_ref())));
        (computed, started.elapsed())
    }

    fn note_computed(&self, records: usize, took: Duration) {
        self.metrics.computed(records, took);
        self.activity
            .add_time(TimeBreakdown { compute: took.as_secs_f64(), ..TimeBreakdown::default() });
    }
}

/// The final state of training.
pub struct TrainedModel {
    pub parameters: Parameters,
    pub position: Position,
}
