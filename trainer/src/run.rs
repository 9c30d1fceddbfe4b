//! The lifecycle of a trainer: register, train through all generations, leave.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use clap::Parser;
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::json;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Lane, Pass, TrainerId};
use steadfast_common::job::dataset::{Manifest, ReadOptions};
use steadfast_common::job::schedule::{LaneSchedule, mini_batches};
use steadfast_common::job::spec::{JobSpec, Keep, Mode, Monitor};
use steadfast_common::records::keys::Keys;
use steadfast_common::role::Role;
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::layout::{ParamSpec, UpdateRule};
use steadfast_coord::{CoordError, Etcd};
use steadfast_host::random;
use steadfast_host::time::{sleep, timeout};
use steadfast_net::TlsIdentity;
use steadfast_process::{
    Admin, AdminContent, CommonArgs, Failure, LogIdentity, Readiness, Shutdown, exit_at_once,
    init_logging, wait_after_completion,
};
use steadfast_trainer_core::{Inputs, Model, Registry};
use steadfast_training_client::{
    ClientError, GenerationClient, Identity, RegisterError, Registration,
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use uuid::Uuid;

use crate::activity::SharedActivity;
use crate::async_loop::{self, Ending};
use crate::context::{Context, Pushing, TrainError};
use crate::course::Evaluations;
use crate::current::Current;
use crate::dataset::Dataset;
use crate::hang_watch::HangWatch;
use crate::metrics::Metrics;
use crate::sync_loop;
use crate::tasks::Tasks;
use crate::trial;

/// Timeout of pushes in flight when the process leaves.
const LAST_PUSH_MAX: Duration = Duration::from_secs(10);

/// Longest time that a trainer continues with its last task after it was told to leave.
const LAST_TASK_MAX: Duration = Duration::from_secs(30);

/// Settings of a trainer.
#[derive(Debug, Parser)]
#[command(name = "steadfast-trainer", version, about = "Computes gradients for a job")]
pub struct Args {
    #[command(flatten)]
    pub common: CommonArgs,
    /// Train the job's parameters further although the code of the model has changed; the status and the audit then
    /// say so.
    #[arg(long)]
    pub accept_code_change: bool,
}

/// Runs a trainer with the models in `registry` until the job is over or it is told to leave.
///
/// # Errors
/// Errors that require user action.
pub async fn run(args: Args, registry: Registry) -> Result<(), Failure> {
    let (id, common) = (random::uuid(), &args.common);
    let identity = init_logging("trainer", &common.job, id, &common.log)?;
    run_process(args, registry, id, identity, Shutdown::install()?, &Current::default()).await
}

/// Runs a trainer in a process that provides its own logging and shutdown signal, and may read the parameters through
/// `current`.
///
/// # Errors
/// As [`run`].
pub fn run_process(
    args: Args,
    registry: Registry,
    id: Uuid,
    identity: LogIdentity,
    shutdown: Shutdown,
    current: &Current,
) -> BoxFuture<'_, Result<(), Failure>> {
    // Boxed, so it is compiled here and not in each program that calls this.
    run_until_over(args, registry, id, identity, shutdown, current).boxed()
}

async fn run_until_over(
    args: Args,
    registry: Registry,
    id: Uuid,
    identity: LogIdentity,
    shutdown: Shutdown,
    current: &Current,
) -> Result<(), Failure> {
    if let Some(directory) = trial::directory() {
        return trial::compute(&directory, &registry).await;
    }
    let (id, accept_code_change, args) = (TrainerId(id), args.accept_code_change, args.common);
    let exposure = args.security.exposure(Role::Trainer)?;
    let tls = exposure.identity();
    let admin = Admin::bind(args.admin_listen, exposure).await?;
    let admin_address = args.admin_advertised(admin.local_addr())?;
    let readiness = Readiness::new("connecting to etcd");
    let mut metrics_registry = prometheus_client::registry::Registry::default();
    let metrics = Metrics::register(&mut metrics_registry);
    let activity = SharedActivity::new(id);
    let _admin =
        admin.serve(content(&args, &readiness, metrics_registry, &shutdown, activity.clone())?);

    let keys = args.keys();
    let Some(etcd) = args.connect_to_etcd(&readiness, &shutdown).await? else { return Ok(()) };
    readiness.set_not_ready(format!("waiting for {}", keys.job()));
    let program = Program {
        etcd: &etcd,
        keys: &keys,
        lease_ttl: args.lease_ttl,
        admin_address,
        tls,
        registry: &registry,
        accept_code_change,
        metrics,
        activity,
        current,
    };
    let leave = shutdown.token();
    // The first incarnation has the process's id; each lost lease begins another.
    let mut next = Some(id);
    loop {
        let id = next.take().unwrap_or_else(|| TrainerId(random::uuid()));
        let context = tokio::select! {
            biased;
            registered = program.register(id) => Arc::new(registered?),
            () = shutdown.drain() => return Ok(()),
        };
        let session = &context.session;
        identity.set_incarnation(session.incarnation());
        readiness.set_ready();
        let ending = tokio::select! {
            biased;
            trained = train(&context, &leave) => trained,
            () = session.lost() => Err(lease_lost()),
            () = session.job_ended() => Ok(()),
            () = leave_soon(&context, &leave) => Ok(()),
        };
        // Lanes and tasks are reassigned at once.
        session.close().await;
        current.leave();
        match ending {
            Err(TrainError::Client(ClientError::Coord(CoordError::LeaseLost))) => {
                // Work in progress is dropped; pushes that arrived count once.
                warn!(%id, "lease lost: its work is reassigned; registering again");
                readiness.set_not_ready("lease lost; waiting for etcd");
            }
            Err(TrainError::Client(ClientError::Amended)) => {
                info!(%id, "the job was extended or changed; registering again");
            }
            ending => {
                ending?;
                wait_after_completion(&args, &readiness, &shutdown).await;
                return Ok(());
            }
        }
    }
}

/// Returns the content of the admin port.
fn content(
    args: &CommonArgs,
    readiness: &Readiness,
    metrics: prometheus_client::registry::Registry,
    shutdown: &Shutdown,
    activity: SharedActivity,
) -> Result<AdminContent, Failure> {
    let present = activity.clone();
    Ok(AdminContent {
        role: "trainer",
        job: args.job.clone(),
        id: Box::new(move || present.activity().id.0),
        readiness: readiness.clone(),
        metrics,
        token: args.security.admin_token()?,
        shutdown: Some(shutdown.clone()),
        status: Box::new(move || json!(activity.activity())),
        page: None,
    })
}

fn lease_lost() -> TrainError {
    TrainError::Client(ClientError::Coord(CoordError::LeaseLost))
}

/// Completes after a request to leave, once no work of this trainer needs to finish.
///
/// In synchronous mode there is nothing to return: other trainers compute its lanes. But a step in
/// progress, with blocks that already have all lanes, cannot be checkpointed until it is complete. So
/// pushes in flight finish first: if all trainers leave at once, nothing is lost. In asynchronous mode the
/// current task is finished first: without the lease it is dispatched to another trainer, and records that
/// arrived count once.
///
/// Neither is waited for after a pserver is lost: the generation ends with its shard.
async fn leave_soon(context: &Context, leave: &CancellationToken) {
    leave.cancelled().await;
    let work = async {
        match context.spec().mode {
            Mode::Sync => drop(timeout(LAST_PUSH_MAX, context.pushing.none()).await),
            Mode::Async => sleep(LAST_TASK_MAX).await,
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        () = context.session.pserver_lost() => {}
    }
}

async fn train(context: &Arc<Context>, leave: &CancellationToken) -> Result<(), TrainError> {
    loop {
        match train_one_generation(context, leave).await {
            Ok(()) | Err(TrainError::Client(ClientError::JobEnded)) => return Ok(()),
            Err(TrainError::Client(ClientError::NewGeneration)) => {
                info!("the job began another generation");
            }
            Err(error) => return Err(error),
        }
    }
}

async fn train_one_generation(
    context: &Arc<Context>,
    leave: &CancellationToken,
) -> Result<(), TrainError> {
    let generation = context.join_generation().await?;
    context.current.begin(context, &generation);
    match train_with(context, &generation, leave).await {
        // Every other trainer would diverge in the same way.
        Err(error) if error.is_divergence() => {
            error!(%error, "training has diverged");
            Ok(generation.report_divergence(error.to_string()).await?)
        }
        // No trainer can write them again.
        Err(error @ TrainError::BestLost(..)) => {
            error!(%error, "the job cannot be finished");
            Ok(generation.report_divergence(error.to_string()).await?)
        }
        trained => trained,
    }
}

async fn train_with(
    context: &Arc<Context>,
    generation: &GenerationClient,
    leave: &CancellationToken,
) -> Result<(), TrainError> {
    let trained = match context.spec().mode {
        Mode::Sync => sync_loop::train(context, generation).await?,
        Mode::Async => match async_loop::train(context, generation, leave).await? {
            Ending::Trained(trained) => trained,
            Ending::Left => return Ok(()),
        },
    };
    context.current.finish(context, &trained)?;
    context.finish(generation, &trained).await
}

/// What stays the same in all registrations of this process.
struct Program<'a> {
    etcd: &'a Etcd,
    keys: &'a Keys,
    lease_ttl: Duration,
    admin_address: String,
    tls: TlsIdentity,
    registry: &'a Registry,
    accept_code_change: bool,
    metrics: Metrics,
    activity: SharedActivity,
    current: &'a Current,
}

impl Program<'_> {
    /// Waits for the job, checks that this machine and the model fit it, and registers.
    async fn register(&self, trainer: TrainerId) -> Result<Context, Failure> {
        self.activity.note(|activity| activity.id = trainer);
        let (admin, tls) = (self.admin_address.clone(), self.tls.clone());
        let identity = Identity { trainer, admin, tls };
        let registration = Registration::begin(self.etcd, self.keys, self.lease_ttl, identity)
            .await
            .map_err(not_registered)?;
        let job = registration.job();
        let store = steadfast_store::open(&job.store)
            .map_err(|error| Failure::invalid(error.to_string()))?;
        let manifest = steadfast_data::load_manifest(&store, &job.manifest)
            .await
            .map_err(|error| Failure::unavailable(error.to_string()))?;
        let manifest = Arc::new(manifest);
        let spec = &job.spec;
        let inputs = Inputs { features: manifest.features.len(), columns: manifest.columns.len() };
        let model = self
            .registry
            .build(&spec.model, inputs)
            .map_err(|error| Failure::new(error.kind(), error.to_string()))?;
        let model: Arc<dyn Model> = Arc::from(model);
        let parameters = model.parameters();
        let averaged = parameters.iter().find(|it| it.update == UpdateRule::AddMean);
        if let Some(averaged) = averaged
            && spec.gradients.codec() != Codec::Plain
        {
            return Err(Failure::invalid(format!(
                "`gradients.compression` would round the averaged buffer `{}` of the model; remove it",
                averaged.name
            )));
        }
        check_tables(spec, &parameters)?;
        check_metrics(spec, model.as_ref())?;
        check_records(spec, &manifest, model.min_records())?;
        let options = ReadOptions::new(&spec.dataset, &manifest);
        let in_use = match spec.mode {
            // A micro-batch may begin and end in the middle of a task.
            Mode::Sync => {
                let tasks = u64::from(spec.sync.micro_batch).div_ceil(manifest.mean_records());
                spec.sync.lanes as usize * (1 + tasks as usize)
            }
            Mode::Async => 2,
        };
        let dataset = match spec.dataset.follow {
            false => Dataset::of(manifest),
            true => Dataset::stream(manifest, self.etcd, self.keys, &spec.name, &store).await?,
        };
        let evaluations = Evaluations::follow(job, self.etcd, self.keys).await?;
        let tasks = Tasks::new(dataset, options, spec.seed, model.clone(), in_use);
        let checked = registration.check_code(&model.modules(), self.accept_code_change).await;
        checked.map_err(not_registered)?;
        let (limit, on_hang) = (spec.tasks.deadline, self.registry.on_hang);
        let session = registration.complete(parameters, model.numerics()).await;
        let session = session.map_err(not_registered)?;
        let watch = |what: &'static str| {
            HangWatch::start(limit, move || {
                error!(
                    what,
                    ?limit,
                    "the model has not returned within `tasks.deadline`; the process ends"
                );
                on_hang.iter().for_each(|call| call());
                exit_at_once(ErrorKind::Unavailable.exit_code())
            })
        };
        Ok(Context {
            session,
            model,
            tasks: Arc::new(tasks),
            store,
            metrics: self.metrics.clone(),
            activity: self.activity.clone(),
            current: self.current.clone(),
            pushing: Pushing::default(),
            evaluations,
            held_out_given_up: Mutex::default(),
            fixed: OnceLock::new(),
            trial: self.registry.trial.clone(),
            hang_watch: watch("a gradient"),
            evaluation_watch: watch("the evaluation of a task"),
        })
    }
}

/// Checks that the model has every table for which the job has settings.
fn check_tables(spec: &JobSpec, parameters: &[ParamSpec]) -> Result<(), Failure> {
    let tables = parameters.iter().filter(|param| param.table.is_some());
    if spec.evaluation.keep == Keep::Best && 0 < tables.clone().count() {
        let text = "`evaluation.keep` = \"best\" does not apply to a model with embedding tables; remove it";
        return Err(Failure::invalid(text));
    }
    if spec.average.is_some() && 0 < tables.clone().count() {
        let text = "`average` does not apply to a model with embedding tables, whose rows have no average; remove it";
        return Err(Failure::invalid(text));
    }
    let known: Vec<&str> = tables.map(|param| &param.name[..]).collect();
    let Some(unknown) = spec.tables.keys().find(|name| !known.contains(&&name[..])) else {
        return Ok(());
    };
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    Err(Failure::invalid(format!(
        "`tables.{unknown}`: the model has no such table; it has {known}"
    )))
}

/// Checks that the metrics of the model have different names, one of which is what the job file monitors.
fn check_metrics(spec: &JobSpec, model: &dyn Model) -> Result<(), Failure> {
    let mut names = vec![model.metric().name];
    for metric in model.further_metrics() {
        if names.contains(&metric.name) || ["", "loss", "metric"].contains(&metric.name) {
            let name = metric.name;
            let text = format!("the model has a second metric `{name}`; give it a name of its own");
            return Err(Failure::invalid(text));
        }
        names.push(metric.name);
    }
    match &spec.evaluation.monitor {
        Monitor::Named(name) if !names.contains(&&name[..]) => Err(Failure::invalid(format!(
            "`evaluation.monitor` is \"{name}\": the model has no such metric; it has {}",
            names.join(", ")
        ))),
        Monitor::Loss | Monitor::Metric | Monitor::Named(_) => Ok(()),
    }
}

/// Checks that the first pass has a step, and no micro-batch of fewer records than the model takes.
fn check_records(spec: &JobSpec, manifest: &Manifest, min: u32) -> Result<(), Failure> {
    let steps = || LaneSchedule::of(spec, manifest, Pass(0)).steps_of(Lane(0), &BTreeSet::new());
    if spec.mode == Mode::Sync && spec.sync.drop_last && steps() == 0 {
        return Err(Failure::invalid(format!(
            "`sync.drop_last` leaves out all records: no step of a pass has {} for each of {} lanes; lower \
             `sync.micro_batch`, `sync.lanes` or `dataset.records_per_task`",
            spec.sync.micro_batch, spec.sync.lanes
        )));
    }
    if min <= 1 {
        return Ok(());
    }
    let smallest = match spec.mode {
        Mode::Sync => LaneSchedule::of(spec, manifest, Pass(0)).records_min(),
        Mode::Async => {
            let (size, joined) = (spec.asynchronous.batch, spec.model.min_records());
            let tasks = manifest.training_tasks();
            let batches = tasks
                .iter()
                .flat_map(|task| mini_batches(manifest.records_of(*task) as u32, size, joined));
            batches.map(|range| u64::from(range.end - range.start)).min()
        }
    };
    match smallest {
        Some(smallest) if smallest < u64::from(min) => Err(Failure::invalid(format!(
            "the model needs {min} records for a gradient, and the pass would end with {smallest} in a micro-batch; \
             set `min_records = {min}` in `[model]`, and let tasks have as many"
        ))),
        Some(_) | None => Ok(()),
    }
}

fn not_registered(error: RegisterError) -> Failure {
    Failure::new(error.kind(), error.to_string())
}
