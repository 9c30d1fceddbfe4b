//! The lifecycle of a trainer: register, train through all generations, leave.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::Parser;
use serde_json::json;
use steadfast_client::{ClientError, Cluster, Master, Pservers};
use steadfast_common::dataset::ReadOptions;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Incarnation, TrainerId};
use steadfast_common::keys::Keys;
use steadfast_common::layout::Layout;
use steadfast_common::records::TrainerRecord;
use steadfast_common::spec::Mode;
use steadfast_coord::{CoordError, Etcd, Session};
use steadfast_host::random;
use steadfast_host::role::Role;
use steadfast_host::time::{sleep, timeout};
use steadfast_process::{
    Admin, AdminContent, CommonArgs, Failure, LogIdentity, Readiness, Shutdown, init_logging,
    wait_after_completion, wait_for_job,
};
use steadfast_proto::v1::ReportDivergenceRequest;
use steadfast_trainer_core::{Model, Registry, fingerprint};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use uuid::Uuid;

use crate::activity::SharedActivity;
use crate::async_loop::{self, Ending};
use crate::context::{Context, Pushing, TrainError};
use crate::metrics::Metrics;
use crate::sync_loop;
use crate::tasks::Tasks;

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
}

/// Runs a trainer with the models in `registry` until the job is over or it is told to leave.
///
/// # Errors
/// Errors that require user action.
pub async fn run(args: Args, registry: Registry) -> Result<(), Failure> {
    let (id, common) = (random::uuid(), &args.common);
    let identity = init_logging("trainer", &common.job, id, &common.log)?;
    common.security.decide(Role::Trainer)?;
    live(args, registry, id, identity, Shutdown::install()?).await
}

/// Runs a trainer in a process that provides its own logging and shutdown signal.
///
/// # Errors
/// As [`run`].
pub async fn live(
    args: Args,
    registry: Registry,
    id: Uuid,
    identity: LogIdentity,
    shutdown: Shutdown,
) -> Result<(), Failure> {
    let (id, args) = (TrainerId(id), args.common);
    let admin = Admin::bind(args.admin_listen).await?;
    let admin_address = args.admin_advertised(admin.local_addr())?;
    let readiness = Readiness::new("connecting to etcd");
    let mut metrics_registry = prometheus_client::registry::Registry::default();
    let metrics = Metrics::register(&mut metrics_registry);
    let activity = SharedActivity::new(id);
    let _admin =
        admin.serve(content(&args, &readiness, metrics_registry, &shutdown, activity.clone())?);

    let keys = args.keys();
    let etcd = Etcd::connect(&args.etcd_options()?).await?;
    readiness.set_not_ready(format!("waiting for {}", keys.job()));
    let entry = Entry {
        etcd: &etcd,
        keys: &keys,
        lease_ttl: args.lease_ttl,
        admin_address,
        registry: &registry,
        metrics,
        activity,
    };
    let leave = shutdown.token();
    // The first incarnation has the process's id; each lost lease begins another.
    let mut next = Some(id);
    loop {
        let id = next.take().unwrap_or_else(|| TrainerId(random::uuid()));
        let (session, context, incarnation) = tokio::select! {
            biased;
            joined = entry.join(id) => joined?,
            () = shutdown.drain() => return Ok(()),
        };
        identity.set_incarnation(incarnation);
        readiness.set_ready();
        let ending = tokio::select! {
            biased;
            trained = train(&context, &leave) => trained,
            () = session.lost() => Err(lease_lost()),
            () = context.cluster.over() => Ok(()),
            () = leave_soon(&context, &leave) => Ok(()),
        };
        // Lanes and tasks are reassigned at once.
        session.close(&etcd).await;
        match ending {
            Err(TrainError::Client(ClientError::Coord(CoordError::LeaseLost))) => {
                // Work in progress is dropped; pushes that arrived count once.
                warn!(%id, "lease lost: its work is reassigned; registering again");
                readiness.set_not_ready("lease lost; waiting for etcd");
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
        shutdown: shutdown.clone(),
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
        match context.job.spec.mode {
            Mode::Sync => drop(timeout(LAST_PUSH_MAX, context.pushing.none()).await),
            Mode::Async => sleep(LAST_TASK_MAX).await,
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        () = context.cluster.pserver_lost() => {}
    }
}

async fn train(context: &Arc<Context>, leave: &CancellationToken) -> Result<(), TrainError> {
    let mut clock = 0;
    loop {
        match train_one_generation(context, &mut clock, leave).await {
            Ok(()) | Err(TrainError::Client(ClientError::JobOver)) => return Ok(()),
            Err(TrainError::Client(ClientError::NewGeneration)) => {
                info!("the job began another generation");
            }
            Err(error) => return Err(error),
        }
    }
}

async fn train_one_generation(
    context: &Arc<Context>,
    clock: &mut u64,
    leave: &CancellationToken,
) -> Result<(), TrainError> {
    let pservers = context.pservers().await?;
    match train_with(context, &pservers, clock, leave).await {
        // Every other trainer would diverge in the same way.
        Err(error) if error.is_divergence() => {
            error!(%error, "training has diverged");
            let caller = context.master.caller(pservers.generation());
            let request = ReportDivergenceRequest { caller, reason: error.to_string() };
            context.master.report_divergence(request).await?;
            Ok(())
        }
        trained => trained,
    }
}

async fn train_with(
    context: &Arc<Context>,
    pservers: &Pservers,
    clock: &mut u64,
    leave: &CancellationToken,
) -> Result<(), TrainError> {
    let last = match context.job.spec.mode {
        Mode::Sync => sync_loop::train(context, pservers).await?,
        Mode::Async => match async_loop::train(context, pservers, clock, leave).await? {
            Ending::Trained(last) => last,
            Ending::Left => return Ok(()),
        },
    };
    context.finish(pservers.generation(), &last).await
}

/// Registers a trainer with the job.
struct Entry<'a> {
    etcd: &'a Etcd,
    keys: &'a Keys,
    lease_ttl: Duration,
    admin_address: String,
    registry: &'a Registry,
    metrics: Metrics,
    activity: SharedActivity,
}

impl Entry<'_> {
    /// Waits for the job, checks that this machine and the model fit it, and registers.
    async fn join(&self, id: TrainerId) -> Result<(Session, Arc<Context>, Incarnation), Failure> {
        let (etcd, keys) = (self.etcd, self.keys);
        self.activity.note(|activity| activity.id = id);
        // First, because this waits for an unavailable etcd.
        let session = Session::open_patiently(etcd, self.lease_ttl).await?;
        let job = wait_for_job(etcd, keys).await?;
        let numerics = check_numerics(etcd, keys).await?;
        let store = steadfast_store::open(&job.store)
            .map_err(|error| Failure::new(ErrorKind::Invalid, error.to_string()))?;
        let manifest = steadfast_data::load_manifest(&store, &job.manifest)
            .await
            .map_err(|error| Failure::new(ErrorKind::Unavailable, error.to_string()))?;
        let manifest = Arc::new(manifest);
        let model = self
            .registry
            .build(&job.spec.model, manifest.features.len())
            .map_err(|error| Failure::new(error.kind(), error.to_string()))?;
        let model: Arc<dyn Model> = Arc::from(model);
        let layout = Arc::new(checked_layout(model.as_ref())?);

        let record = TrainerRecord { admin: self.admin_address.clone(), numerics };
        let value = serde_json::to_vec(&record).expect("records are plain data");
        let created = etcd.create(&keys.trainer(id), &value, session.lease()).await?;
        let revision = created.map_err(|_| Failure::internal("another trainer has the same id"))?;

        let cluster = Arc::new(Cluster::join(etcd, keys.clone()).await?);
        let options = ReadOptions::new(&job.spec.dataset, &manifest);
        let in_use = match job.spec.mode {
            // A micro-batch may begin and end in the middle of a task.
            Mode::Sync => {
                let tasks = u64::from(job.spec.sync.micro_batch).div_ceil(manifest.mean_records());
                job.spec.sync.lanes as usize * (1 + tasks as usize)
            }
            Mode::Async => 2,
        };
        let tasks = Tasks::new(manifest, options, job.spec.seed, model.clone(), in_use);
        let context = Context {
            master: Master::new(cluster.clone(), id),
            cluster,
            model,
            layout,
            tasks: Arc::new(tasks),
            store,
            deadline: session.deadline(),
            metrics: self.metrics.clone(),
            activity: self.activity.clone(),
            pushing: Pushing::default(),
            held_out_given_up: Mutex::default(),
            job,
        };
        Ok((session, Arc::new(context), Incarnation(revision)))
    }
}

/// Checks that this machine computes the same bits as the other trainers; the first trainer sets the
/// reference.
async fn check_numerics(etcd: &Etcd, keys: &Keys) -> Result<String, Failure> {
    let own = fingerprint();
    let value = serde_json::to_vec(&own).expect("a string is plain data");
    match etcd.create(&keys.numerics(), &value, 0).await? {
        Ok(_) => Ok(own),
        Err(found) if found.value == value => Ok(own),
        Err(found) => Err(Failure::new(
            ErrorKind::Denied,
            format!(
                "the numerics fingerprint {own} of this machine differs from that of the job, {}; \
                 use a machine of the same type",
                String::from_utf8_lossy(&found.value)
            ),
        )),
    }
}

fn checked_layout(model: &dyn Model) -> Result<Layout, Failure> {
    let params = model.parameters();
    let names: BTreeSet<&str> = params.iter().map(|param| param.name.as_str()).collect();
    if names.len() != params.len() {
        return Err(Failure::invalid("the model has two parameters of the same name"));
    }
    let total = params.iter().fold(0_usize, |sum, param| sum.saturating_add(param.len()));
    if total == 0 || 1 << 32 < total {
        return Err(Failure::invalid(format!(
            "the model has {total} values; the range is 1 to 2^32"
        )));
    }
    Ok(Layout::new(params))
}
