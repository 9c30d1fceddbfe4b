//! The life of a trainer: register, train through all generations, leave.

use std::collections::BTreeSet;
use std::sync::Arc;
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
use steadfast_host::chance;
use steadfast_host::role::Role;
use steadfast_host::time::{sleep, timeout};
use steadfast_process::{
    Admin, AdminContent, CommonArgs, Failure, LogIdentity, Readiness, Shutdown, init_logging,
    linger, wait_for_job,
};
use steadfast_proto::v1::ReportDivergenceRequest;
use steadfast_trainer_core::{Model, Registry, fingerprint};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use uuid::Uuid;

use crate::async_loop::{self, Ending};
use crate::context::{Context, Interrupt, Pushing};
use crate::metrics::Metrics;
use crate::sync_loop;
use crate::tasks::Tasks;
use crate::view::View;

/// How long pushes that were begun may take when we leave.
const LAST_PUSH_MAX: Duration = Duration::from_secs(10);

/// How long a trainer that shall leave may still work at its last task.
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
/// What a person has to act on.
pub async fn run(args: Args, registry: Registry) -> Result<(), Failure> {
    let (id, common) = (chance::uuid(), &args.common);
    let identity = init_logging("trainer", &common.job, id, &common.log)?;
    common.security.decide(Role::Trainer)?;
    live(args, registry, id, identity, Shutdown::install()?).await
}

/// The same for a process that logs and is told to leave in ways of its own.
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
    let readiness = Readiness::new("connects to etcd");
    let mut metrics_registry = prometheus_client::registry::Registry::default();
    let metrics = Metrics::register(&mut metrics_registry);
    let view = View::new(id);
    let _admin =
        admin.serve(content(&args, &readiness, metrics_registry, &shutdown, view.clone())?);

    let keys = args.keys();
    let etcd = Etcd::connect(&args.etcd_options()?).await?;
    readiness.set_not_ready(format!("waits for {}", keys.job()));
    let entry = Entry {
        etcd: &etcd,
        keys: &keys,
        lease_ttl: args.lease_ttl,
        admin_address,
        registry: &registry,
        metrics,
        view,
    };
    let leave = shutdown.token();
    // The first life has the process's id; each lease that was lost begins another one.
    let mut next = Some(id);
    loop {
        let id = next.take().unwrap_or_else(|| TrainerId(chance::uuid()));
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
        // Lanes and tasks go to others at once.
        session.close(&etcd).await;
        match ending {
            Err(Interrupt::Client(ClientError::Coord(CoordError::LeaseLost))) => {
                // Whatever was under way is forgotten; if it arrived, it counts once.
                warn!(%id, "the lease is lost: its work goes to others; registers anew");
                readiness.set_not_ready("its lease is lost; waits for etcd");
            }
            ending => {
                ending?;
                linger(&args, &readiness, &shutdown).await;
                return Ok(());
            }
        }
    }
}

/// What the admin port shows.
fn content(
    args: &CommonArgs,
    readiness: &Readiness,
    metrics: prometheus_client::registry::Registry,
    shutdown: &Shutdown,
    view: View,
) -> Result<AdminContent, Failure> {
    let present = view.clone();
    Ok(AdminContent {
        role: "trainer",
        job: args.job.clone(),
        id: Box::new(move || present.facts().id.0),
        readiness: readiness.clone(),
        metrics,
        token: args.security.admin_token()?,
        shutdown: shutdown.clone(),
        status: Box::new(move || json!(view.facts())),
        page: None,
    })
}

fn lease_lost() -> Interrupt {
    Interrupt::Client(ClientError::Coord(CoordError::LeaseLost))
}

/// In synchronous mode there is nothing to hand back: whoever gets our lanes computes them. But a step of
/// which some blocks are done on all lanes has no checkpoint before all are, so pushes that were begun come to
/// their end: if everybody leaves at once, nothing is lost. In asynchronous
/// mode a task is finished first, if nothing is in its way: without its lease it goes to another trainer, and
/// what of it arrived counts once.
async fn leave_soon(context: &Context, leave: &CancellationToken) {
    leave.cancelled().await;
    match context.job.spec.mode {
        // Longer than that only a pserver that is gone takes.
        Mode::Sync => drop(timeout(LAST_PUSH_MAX, context.pushing.none()).await),
        Mode::Async => sleep(LAST_TASK_MAX).await,
    }
}

async fn train(context: &Arc<Context>, leave: &CancellationToken) -> Result<(), Interrupt> {
    let mut clock = 0;
    loop {
        match train_one_generation(context, &mut clock, leave).await {
            Ok(()) | Err(Interrupt::Client(ClientError::JobOver)) => return Ok(()),
            Err(Interrupt::Client(ClientError::NewGeneration)) => {
                info!("the job began another generation");
            }
            // Reading and writing of data is worth another try; the job waits for it meanwhile.
            Err(error @ (Interrupt::Store(_) | Interrupt::HeldOut(_))) => {
                warn!(%error, "trying again");
                sleep(Duration::from_secs(1)).await;
            }
            Err(error) => return Err(error),
        }
    }
}

async fn train_one_generation(
    context: &Arc<Context>,
    clock: &mut u64,
    leave: &CancellationToken,
) -> Result<(), Interrupt> {
    let pservers = context.pservers().await?;
    match train_with(context, &pservers, clock, leave).await {
        // All others would come to the same, again and again.
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
) -> Result<(), Interrupt> {
    let last = match context.job.spec.mode {
        Mode::Sync => sync_loop::train(context, pservers).await?,
        Mode::Async => match async_loop::train(context, pservers, clock, leave).await? {
            Ending::Trained(last) => last,
            Ending::Left => return Ok(()),
        },
    };
    context.finish(pservers.generation(), &last).await
}

/// A trainer on its way into the job.
struct Entry<'a> {
    etcd: &'a Etcd,
    keys: &'a Keys,
    lease_ttl: Duration,
    admin_address: String,
    registry: &'a Registry,
    metrics: Metrics,
    view: View,
}

impl Entry<'_> {
    /// Waits for the job, makes sure that this machine and this model fit it, and registers.
    async fn join(&self, id: TrainerId) -> Result<(Session, Arc<Context>, Incarnation), Failure> {
        let (etcd, keys) = (self.etcd, self.keys);
        self.view.note(|facts| facts.id = id);
        // First of all, because it is what waits for an etcd that is away.
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
        let revision = created.map_err(|_| Failure::internal("another trainer has our id"))?;

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
            view: self.view.clone(),
            pushing: Pushing::default(),
            job,
        };
        Ok((session, Arc::new(context), Incarnation(revision)))
    }
}

/// Makes sure that this machine computes the same bits as the job's others; the first trainer
/// decides which those are.
async fn check_numerics(etcd: &Etcd, keys: &Keys) -> Result<String, Failure> {
    let own = fingerprint();
    let value = serde_json::to_vec(&own).expect("a string is plain data");
    match etcd.create(&keys.numerics(), &value, 0).await? {
        Ok(_) => Ok(own),
        Err(found) if found.value == value => Ok(own),
        Err(found) => Err(Failure::new(
            ErrorKind::Denied,
            format!(
                "this machine computes other bits than the job's (numerics {own}, the job has {}); \
                 use a machine of the same kind",
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
        return Err(Failure::invalid(format!("a model of {total} values cannot be trained")));
    }
    Ok(Layout::new(params))
}
