//! The life of a master: bind, check the order, wait for the lock, act, end.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::Parser;
use serde_json::json;
use steadfast_common::error::ErrorKind;
use steadfast_common::keys::Keys;
use steadfast_common::records::{LockRecord, MasterRecord};
use steadfast_coord::{CoordError, Etcd, Mirror, Op, Range, Reign, Session};
use steadfast_host::chance;
use steadfast_host::role::Role;
use steadfast_host::time::{sleep, timeout, unix_ms};
use steadfast_master_core::rate::Rate;
use steadfast_process::{
    Admin, AdminContent, CommonArgs, Failure, LogIdentity, Readiness, Shutdown, access, health,
    init_logging, linger, moved,
};
use steadfast_proto::MESSAGE_BYTES_MAX;
use steadfast_proto::v1::master_server::MasterServer;
use tokio::sync::watch;
use tonic::service::Routes;
use tracing::{info, warn};
use uuid::Uuid;

use crate::acting::{Acting, View};
use crate::checkpoints::Keeper;
use crate::desk::Desk;
use crate::job::{self, Order};
use crate::metrics::Metrics;
use crate::office::End;
use crate::page;
use crate::service::Service;
use crate::tensorboard::{Curves, ReignName};
use crate::vigils::Vigils;

/// How long calls in flight may take once we leave.
const DRAIN: Duration = Duration::from_secs(2);

/// Time between attempts at the lock while nothing tells of its release.
const RETRY: Duration = Duration::from_secs(1);

/// Settings of a master.
#[derive(Debug, Parser)]
#[command(name = "steadfast-master", version, about = "Owns the task queues of a job")]
pub struct Args {
    #[command(flatten)]
    pub common: CommonArgs,
    /// The job to run (TOML). Without it the master takes up the job that etcd holds.
    #[arg(long, value_name = "FILE")]
    pub job_file: Option<PathBuf>,
    /// URL below which the dataset manifest, checkpoints and the model are kept.
    #[arg(long, value_name = "URL", requires = "job_file")]
    pub store: Option<String>,
    /// Number of pserver slots, if the job has none yet.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pservers: u32,
    /// Folder of this machine for curves that TensorBoard reads.
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
}

/// Runs a master until the job is over, another one acts in its place, or it is told to leave.
///
/// # Errors
/// What a person has to act on.
pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    let (id, common) = (chance::uuid(), &args.common);
    let identity = init_logging("master", &common.job, id, &common.log)?;
    let shutdown = Shutdown::install()?;
    common.security.decide(Role::Master)?;
    let order = order(&args)?;
    live(args, order, id, identity, shutdown).await
}

/// The same for a process that gets its order, logs and is told to leave in ways of its own.
///
/// # Errors
/// As [`run`].
pub async fn live(
    args: Args,
    order: Option<Order>,
    id: Uuid,
    identity: LogIdentity,
    shutdown: Shutdown,
) -> Result<(), Failure> {
    let common = args.common.clone();
    if let Some(folder) = &args.tensorboard {
        std::fs::create_dir_all(folder)
            .map_err(|error| Failure::io(format!("--tensorboard {}", folder.display()), &error))?;
    }
    let listener = steadfast_process::bind(common.listen, "--listen").await?;
    let bound = listener.local_addr().map_err(|error| Failure::io("the port", &error))?;
    let admin = Admin::bind(common.admin_listen).await?;
    let record = MasterRecord {
        id,
        address: common.advertised(bound)?,
        admin: common.admin_advertised(admin.local_addr())?,
    };
    let readiness = Readiness::new("connects to etcd");
    let (acting, acting_rx) = watch::channel(None::<Acting>);
    let mut registry = prometheus_client::registry::Registry::default();
    Metrics::register(&mut registry, acting_rx.clone());
    let (shown, paged) = (acting_rx.clone(), acting_rx.clone());
    let _admin = admin.serve(AdminContent {
        role: "master",
        job: common.job.clone(),
        id: Box::new(move || id),
        readiness: readiness.clone(),
        metrics: registry,
        token: common.security.admin_token()?,
        shutdown: shutdown.clone(),
        status: Box::new(move || match &*shown.borrow() {
            Some(acting) => json!(acting.status()),
            None => json!({ "acting": false }),
        }),
        page: Some(Box::new(move || match &*paged.borrow() {
            Some(acting) => page::sections(&acting.status(), unix_ms()),
            None => page::standby(),
        })),
    });
    let (_health, health) = health("steadfast.v1.Master", &readiness).await;
    let server = MasterServer::new(Service { acting: acting_rx })
        .max_decoding_message_size(MESSAGE_BYTES_MAX);
    let stop = tokio_util::sync::CancellationToken::new();
    let routes = Routes::new(health).add_service(server);
    let mut serving = listener.serve(routes, access, stop.clone());

    let etcd = Etcd::connect(&common.etcd_options()?).await?;
    let keys = common.keys();
    job::check(&etcd, &keys, order.as_ref()).await?;
    let life = Life { etcd: &etcd, keys: &keys, order: order.as_ref(), args: &args, record };
    let ending = tokio::select! {
        biased;
        ending = life.live(&identity, &readiness, &acting, &shutdown) => ending,
        served = &mut serving => {
            return Err(Failure::internal(format!("the server ended: {served:?}")));
        }
    };
    stop.cancel();
    if timeout(DRAIN, serving).await.is_err() {
        warn!("calls in flight were cut off");
    }
    ending?;
    linger(&common, &readiness, &shutdown).await;
    Ok(())
}

fn order(args: &Args) -> Result<Option<Order>, Failure> {
    let Some(path) = &args.job_file else { return Ok(None) };
    let store = args.store.as_deref().ok_or_else(|| {
        Failure::invalid("--job-file needs --store: where shall checkpoints and the model go?")
    })?;
    let order = Order::read(path, store)?;
    if order.spec.name != args.common.job {
        return Err(Failure::invalid(format!(
            "{} describes the job `{}`, --job says `{}`",
            path.display(),
            order.spec.name,
            args.common.job
        )));
    }
    Ok(Some(order))
}

/// An etcd that does not answer, or has no space left, is waited for: the reign is over, the master
/// is not.
fn after_acting(error: CoordError) -> Failure {
    let kind = if error.is_transient() { ErrorKind::Stale } else { error.kind() };
    Failure::new(kind, error.to_string())
}

struct Life<'a> {
    etcd: &'a Etcd,
    keys: &'a Keys,
    order: Option<&'a Order>,
    args: &'a Args,
    record: MasterRecord,
}

impl Life<'_> {
    /// Stands by and acts, through losses of the lease, until the job is over, another master acts
    /// in our place, or we are told to leave.
    async fn live(
        &self,
        identity: &LogIdentity,
        readiness: &Readiness,
        acting: &watch::Sender<Option<Acting>>,
        shutdown: &Shutdown,
    ) -> Result<(), Failure> {
        let mut has_acted = false;
        loop {
            let session = tokio::select! {
                biased;
                session = Session::open_patiently(self.etcd, self.args.common.lease_ttl) => session?,
                () = shutdown.drain() => return Ok(()),
            };
            if has_acted {
                self.end_if_replaced().await?;
            }
            let ending = tokio::select! {
                biased;
                ending = self.lead(&session, identity, readiness, acting, shutdown) => ending,
                () = session.lost() => Err(CoordError::LeaseLost.into()),
                failure = moved(&self.args.common, &self.record.address) => Err(failure),
            };
            // What was decided and not committed is forgotten; callers are refused from now on.
            has_acted |= acting.send_replace(None).is_some();
            session.close(self.etcd).await;
            match ending {
                Err(failure) if failure.kind == ErrorKind::Stale => {
                    warn!(has_acted, reason = failure.message, "stands by again");
                    readiness.set_not_ready(format!("its reign is over: {}", failure.message));
                }
                ending => return ending,
            }
        }
    }

    /// Ends a master that acted, lost its lease, and finds another one acting.
    async fn end_if_replaced(&self) -> Result<(), Failure> {
        let lock = self.etcd.get_json::<LockRecord>(&self.keys.master_lock()).await?;
        match lock {
            Some(lock) if lock.holder != self.record.id => Err(Failure::new(
                ErrorKind::Unavailable,
                "the lease of this master is lost: another one acts",
            )),
            Some(_) | None => Ok(()),
        }
    }

    /// Waits for the lock, then acts.
    async fn lead(
        &self,
        session: &Session,
        identity: &LogIdentity,
        readiness: &Readiness,
        acting: &watch::Sender<Option<Acting>>,
        shutdown: &Shutdown,
    ) -> Result<(), Failure> {
        let result = Mirror::start(self.etcd, Range::Key(self.keys.result())).await?;
        let mut over = result.subscribe();
        let reign = tokio::select! {
            biased;
            reign = self.campaign(session, readiness) => reign?,
            () = shutdown.drain() => return Ok(()),
            _ = over.wait_for(|view| !view.entries.is_empty()) => {
                info!("the job is over");
                return Ok(());
            }
        };
        identity.set_incarnation(steadfast_common::ids::Incarnation(reign.epoch()));
        info!(epoch = reign.epoch(), "acts");
        self.act(reign, session, readiness, acting, shutdown).await
    }

    async fn campaign(&self, session: &Session, readiness: &Readiness) -> Result<Reign, Failure> {
        let key = self.keys.master_lock();
        let value = serde_json::to_vec(&LockRecord { holder: self.record.id })
            .map_err(|error| Failure::internal(error.to_string()))?;
        let lock = Mirror::start(self.etcd, Range::Key(key.clone())).await?;
        let address = Mirror::start(self.etcd, Range::Key(self.keys.master_addr())).await?;
        let (mut changes, mut addresses) = (lock.subscribe(), address.subscribe());
        // The address is bound to the same lease as the lock.
        let mut vigils = Vigils::new(self.etcd, &self.record.address);
        let mut told = String::new();
        loop {
            vigils.follow(&[addresses.borrow_and_update().clone()]);
            let held = changes.borrow_and_update().entries.get(&key).cloned();
            if held.is_none() {
                match Reign::seize(self.etcd, session, &key, &value).await {
                    Ok(Ok(reign)) => return Ok(reign),
                    Ok(Err(_)) => {}
                    Err(error) if error.is_transient() => warn!(%error, "lock not asked for"),
                    Err(error) => return Err(error.into()),
                }
            }
            let is_stuck = held.is_some_and(|lock| lock.lease == 0);
            let why = match is_stuck {
                true => format!(
                    "the lock `{key}` was put by hand and nobody can take it; `etcdctl del {key}` frees it"
                ),
                false => "stands by: another master acts".to_owned(),
            };
            if told != why {
                match is_stuck {
                    true => warn!("{why}"),
                    false => info!("{why}"),
                }
                told.clone_from(&why);
            }
            readiness.set_not_ready(why);
            tokio::select! {
                biased;
                _ = changes.changed() => {}
                _ = addresses.changed() => {}
                () = sleep(RETRY) => {}
            }
        }
    }

    async fn act(
        &self,
        mut reign: Reign,
        session: &Session,
        readiness: &Readiness,
        acting: &watch::Sender<Option<Acting>>,
        shutdown: &Shutdown,
    ) -> Result<(), Failure> {
        let job = job::open(self.etcd, self.keys, self.order).await?;
        let desired = serde_json::to_vec(&self.args.pservers)
            .map_err(|error| Failure::internal(error.to_string()))?;
        // An operator's number stays.
        let _ = self.etcd.create(&self.keys.ps_desired(), &desired, 0).await?;
        let address = serde_json::to_vec(&self.record)
            .map_err(|error| Failure::internal(error.to_string()))?;
        let announce = Op::put_leased(&self.keys.master_addr(), address, session.lease());
        let spec = job.record.spec.clone();
        let records = job.records;
        let store = steadfast_store::open(&job.record.store)
            .map_err(|error| Failure::invalid(format!("the store: {error}")))?;
        // Announced before recovery: callers wait at the port, which answers when all is loaded.
        reign.commit(self.etcd, &[announce], &[]).await?;
        let name = ReignName { epoch: reign.epoch(), master: self.record.id };
        let (desk, office) =
            Desk::open(self.etcd, self.keys, job, reign, &self.record.address).await?;
        let (keeper, checkpoints, requests) =
            Keeper::new(self.etcd.clone(), self.keys.clone(), spec.clone(), store, office.clone());
        let curves = self.args.tensorboard.clone();
        let curves = curves.map(|to| Curves::start(to, name, office.facts.clone()));
        acting.send_replace(Some(Acting {
            office,
            checkpoints,
            task_deadline: spec.tasks.deadline,
            max_staleness: spec.asynchronous.max_staleness,
            view: Arc::new(View {
                spec,
                address: self.record.address.clone(),
                records,
                rate: Mutex::new(Rate::default()),
            }),
        }));
        readiness.set_ready();
        tokio::select! {
            biased;
            ended = desk.run(shutdown.drain()) => match ended.map_err(after_acting)? {
                End::Over(result) => {
                    info!(state = ?result.state, "the job is over");
                    if let Some(curves) = curves {
                        curves.finish(result).await;
                    }
                    Ok(())
                }
                End::Left => Ok(()),
            },
            () = keeper.run(requests) => Err(Failure::internal("the checkpoint keeper ended")),
        }
    }
}
