//! Lifecycle of a master: bind, check the job request, acquire the lock, act, exit.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use clap::Parser;
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::Serialize;
use steadfast_common::error::ErrorKind;
use steadfast_common::job::durations;
use steadfast_common::job::elastic::ElasticSpec;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{LockRecord, MasterRecord, ResultRecord, WaitsRecord};
use steadfast_common::role::Role;
use steadfast_coord::{CoordError, Entry, Etcd, Leadership, Mirror, Op, Range, Session};
use steadfast_host::random;
use steadfast_host::time::{sleep, timeout, unix_ms};
use steadfast_master_core::rate::Rate;
use steadfast_net::TlsIdentity;
use steadfast_process::{
    Admin, AdminContent, CommonArgs, Failure, LogIdentity, Readiness, Shutdown, address_changed,
    health, init_logging, wait_after_completion,
};
use steadfast_proto::MESSAGE_BYTES_MAX;
use steadfast_proto::access;
use steadfast_proto::v1::elastic_server::ElasticServer;
use steadfast_proto::v1::master_server::MasterServer;
use tokio::sync::watch;
use tonic::service::Routes;
use tracing::{info, warn};
use uuid::Uuid;

use crate::acting_handles::{ActingHandles, StatusSource};
use crate::checkpoint::coordinator::CheckpointCoordinator;
use crate::checkpoint::handover::HandoverCoordinator;
use crate::elastic::agentless::{AgentlessNodes, Informed};
use crate::elastic::service::Serving;
use crate::elastic::{self, ElasticLoop};
use crate::event_loop::EventLoop;
use crate::failure_detector::FailureDetector;
use crate::job::{self, Job, Opened, Request};
use crate::rpc::service::Service;
use crate::status::metrics::Metrics;
use crate::status::page;
use crate::status::tensorboard::{Curves, TermName};
use crate::status::view::StatusView;
use crate::stream::Follower;
use crate::table_watch::TableWatch;

/// Maximum time for calls in flight to complete during shutdown.
const DRAIN: Duration = Duration::from_secs(2);

/// Time between attempts to acquire the lock when no watch event reports its release.
const RETRY: Duration = Duration::from_secs(1);

/// Settings of a master.
#[derive(Debug, Parser)]
#[command(name = "steadfast-master", version, about = "Owns the task queues of a job")]
pub struct Args {
    #[command(flatten)]
    pub common: CommonArgs,
    /// The job to run (TOML). Without it the master continues the job that etcd holds.
    #[arg(long, value_name = "FILE")]
    pub job_file: Option<PathBuf>,
    /// How long a master without --job-file waits for another one to write the job.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = durations::parse)]
    pub start_timeout: Duration,
    /// URL below which the dataset manifest, checkpoints and the model are kept.
    #[arg(long, value_name = "URL", requires = "job_file")]
    pub store: Option<String>,
    /// Number of pserver slots, if the job has none yet.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pservers: u32,
    /// Local directory for TensorBoard event files.
    #[arg(long, value_name = "DIR")]
    pub tensorboard: Option<PathBuf>,
}

/// Runs a master until the job is over, another master has replaced it, or shutdown is requested.
///
/// # Errors
/// Every error that needs user action.
pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    let (id, common) = (random::uuid(), &args.common);
    let identity = init_logging("master", &common.job, id, &common.log)?;
    let shutdown = Shutdown::install()?;
    let request = request(&args)?;
    run_process(args, request, id, identity, shutdown).await
}

/// Runs a master in a process that supplies the job request, the log identity and the shutdown signal itself.
///
/// # Errors
/// See [`run`].
pub fn run_process(
    args: Args,
    request: Option<Request>,
    id: Uuid,
    identity: LogIdentity,
    shutdown: Shutdown,
) -> BoxFuture<'static, Result<(), Failure>> {
    // Boxed, so it is compiled here and not in each program that calls this.
    run_until_over(args, request, id, identity, shutdown).boxed()
}

async fn run_until_over(
    args: Args,
    request: Option<Request>,
    id: Uuid,
    identity: LogIdentity,
    shutdown: Shutdown,
) -> Result<(), Failure> {
    let common = args.common.clone();
    if let Some(directory) = &args.tensorboard {
        std::fs::create_dir_all(directory).map_err(|error| {
            Failure::io(format!("--tensorboard {}", directory.display()), &error)
        })?;
    }
    let exposure = common.security.exposure(Role::Master)?;
    let tls = exposure.identity();
    let listener = steadfast_process::bind(common.listen, "--listen", &exposure).await?;
    let bound = listener.local_addr().map_err(|error| Failure::io("the port", &error))?;
    let admin = Admin::bind(common.admin_listen, exposure).await?;
    let record = MasterRecord {
        id,
        address: common.advertised(bound)?,
        admin: common.admin_advertised(admin.local_addr())?,
    };
    let readiness = Readiness::new("connects to etcd");
    let (acting, acting_rx) = watch::channel(None::<ActingHandles>);
    let (elastic_job, serving_rx) = watch::channel(Serving::default());
    let mut registry = prometheus_client::registry::Registry::default();
    let waits = watch::Sender::new(None::<String>);
    let status = StatusView {
        job: common.job.clone(),
        acting: acting_rx.clone(),
        elastic: serving_rx.clone(),
        waits: waits.subscribe(),
    };
    let paged = status.clone();
    registry.register_collector(Box::new(Metrics { status: status.clone() }));
    let _admin = admin.serve(AdminContent {
        role: "master",
        job: common.job.clone(),
        id: Box::new(move || id),
        readiness: readiness.clone(),
        metrics: registry,
        token: common.security.admin_token()?,
        shutdown: Some(shutdown.clone()),
        status: Box::new(move || status.json()),
        page: Some(Box::new(move || page::sections(&paged.document(), unix_ms()))),
    });
    let (_health, health) = health("steadfast.v1.Master", &readiness).await;
    let server = MasterServer::new(Service { acting: acting_rx })
        .max_decoding_message_size(MESSAGE_BYTES_MAX);
    let stop = tokio_util::sync::CancellationToken::new();
    let elastic = ElasticServer::new(elastic::service::Service::new(serving_rx));
    let routes = Routes::new(health).add_service(server).add_service(elastic);
    let mut serving = listener.serve(routes, access, &tls, stop.clone());

    let Some(etcd) = common.connect_to_etcd(&readiness, &shutdown).await? else { return Ok(()) };
    let keys = common.keys();
    job::check(&etcd, &keys, request.as_ref()).await?;
    let process = MasterProcess {
        etcd: &etcd,
        keys: &keys,
        request: request.as_ref(),
        args: &args,
        tls,
        record,
        elastic_job,
        waits,
    };
    let ending = tokio::select! {
        biased;
        ending = process.run(&identity, &readiness, &acting, &shutdown) => ending,
        served = &mut serving => {
            return Err(Failure::internal(format!("the server ended: {served:?}")));
        }
    };
    stop.cancel();
    if timeout(DRAIN, serving).await.is_err() {
        warn!("shutdown aborted calls in flight");
    }
    ending?;
    wait_after_completion(&common, &readiness, &shutdown).await;
    Ok(())
}

fn request(args: &Args) -> Result<Option<Request>, Failure> {
    let Some(path) = &args.job_file else { return Ok(None) };
    let request = Request::read(path, args.store.as_deref())?;
    if request.name() != args.common.job {
        return Err(Failure::invalid(format!(
            "{} describes the job `{}`, but --job is `{}`",
            path.display(),
            request.name(),
            args.common.job
        )));
    }
    Ok(Some(request))
}

/// Returns whether the lock may be acquired under a lease, given who holds it. A request whose reply was lost may have
/// acquired it.
fn may_be_acquired(held: Option<&Entry>, lease: i64) -> bool {
    held.is_none_or(|lock| lock.lease == lease)
}

fn to_json<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).expect("records are plain data")
}

/// Maps transient etcd errors (no answer, no space left) to `Stale`: they end the term, and the master
/// returns to standby.
fn after_acting(error: CoordError) -> Failure {
    let kind = if error.is_transient() { ErrorKind::Stale } else { error.kind() };
    Failure::new(kind, error.to_string())
}

struct MasterProcess<'a> {
    etcd: &'a Etcd,
    keys: &'a Keys,
    request: Option<&'a Request>,
    args: &'a Args,
    tls: TlsIdentity,
    record: MasterRecord,
    elastic_job: watch::Sender<Serving>,
    /// What this master waits for, if it would act.
    waits: watch::Sender<Option<String>>,
}

impl MasterProcess<'_> {
    /// Waits as a standby and acts, across lost leases, until the job is over, another master has replaced
    /// this one, or shutdown is requested.
    async fn run(
        &self,
        identity: &LogIdentity,
        readiness: &Readiness,
        acting: &watch::Sender<Option<ActingHandles>>,
        shutdown: &Shutdown,
    ) -> Result<(), Failure> {
        let mut has_acted = false;
        tokio::select! {
            biased;
            written = self.until_job_is_written(readiness) => written?,
            () = shutdown.drain() => return Ok(()),
        }
        loop {
            let session = tokio::select! {
                biased;
                session = Session::open_with_retry(self.etcd, self.args.common.lease_ttl) => session?,
                () = shutdown.drain() => return Ok(()),
            };
            if has_acted {
                self.end_if_replaced().await?;
            }
            let ending = tokio::select! {
                biased;
                ending = self.lead(&session, identity, readiness, acting, shutdown) => ending,
                () = session.lost() => Err(CoordError::LeaseLost.into()),
                failure = address_changed(&self.args.common, &self.record.address) => Err(failure),
            };
            // Uncommitted decisions are dropped, and callers are rejected from here on.
            has_acted |= acting.send_replace(None).is_some() | self.stop_serving();
            self.waits.send_replace(None);
            session.close(self.etcd).await;
            match ending {
                Err(failure) if failure.kind == ErrorKind::Stale => {
                    warn!(has_acted, reason = failure.message, "returns to standby");
                    readiness.set_not_ready(format!("leadership lost: {}", failure.message));
                }
                ending => return ending,
            }
        }
    }

    /// Waits for the job of a master that was started without one. It must not hold the lock meanwhile: the master
    /// that has the job would wait for it.
    async fn until_job_is_written(&self, readiness: &Readiness) -> Result<(), Failure> {
        if self.request.is_some() {
            return Ok(());
        }
        let job = Mirror::start(self.etcd, Range::Key(self.keys.job())).await?;
        let mut changes = job.subscribe();
        if changes.borrow_and_update().entries.is_empty() {
            let why = "waits for a master with --job-file to write the job";
            info!(reason = why, "not ready");
            readiness.set_not_ready(why.to_owned());
        }
        let is_written = changes.wait_for(|view| !view.entries.is_empty());
        let limit = self.args.start_timeout;
        match timeout(limit, is_written).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Failure::new(
                ErrorKind::NotFound,
                format!(
                    "there is no job at {} after {limit:?} (--start-timeout); start a master with --job-file",
                    self.keys.job()
                ),
            )),
        }
    }

    /// Rejects calls from here on; returns whether this master served an elastic job.
    fn stop_serving(&self) -> bool {
        let mut has_served = false;
        self.elastic_job.send_if_modified(|serving| {
            has_served = matches!(serving, Serving::Job(_));
            if has_served {
                *serving = Serving::Nothing;
            }
            has_served
        });
        has_served
    }

    /// Fails if another master holds the lock. A master that acted and lost its lease calls this.
    async fn end_if_replaced(&self) -> Result<(), Failure> {
        let lock = self.etcd.get_json::<LockRecord>(&self.keys.master_lock()).await?;
        match lock {
            Some(lock) if lock.holder != self.record.id => Err(Failure::new(
                ErrorKind::Unavailable,
                "this master lost its lease, and another one acts",
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
        acting: &watch::Sender<Option<ActingHandles>>,
        shutdown: &Shutdown,
    ) -> Result<(), Failure> {
        let result = Mirror::start(self.etcd, Range::Key(self.keys.result())).await?;
        let mut over = result.subscribe();
        let leadership = tokio::select! {
            biased;
            leadership = self.campaign(session, readiness) => leadership?,
            () = shutdown.drain() => return Ok(()),
            ended = over.wait_for(|view| !view.entries.is_empty()) => {
                let result = ended.ok().and_then(|view| view.single::<ResultRecord>().ok()?);
                let how = result.map_or_else(String::new, |result| result.describe());
                info!(how, "the job is over");
                return Ok(());
            }
        };
        identity.set_incarnation(steadfast_common::ids::Incarnation(leadership.epoch()));
        info!(epoch = leadership.epoch(), "this master acts");
        self.act(leadership, session, readiness, acting, shutdown).await
    }

    async fn campaign(
        &self,
        session: &Session,
        readiness: &Readiness,
    ) -> Result<Leadership, Failure> {
        let key = self.keys.master_lock();
        let value = to_json(&LockRecord { holder: self.record.id });
        let lock = Mirror::start(self.etcd, Range::Key(key.clone())).await?;
        let address = Mirror::start(self.etcd, Range::Key(self.keys.master_addr())).await?;
        let (mut changes, mut addresses) = (lock.subscribe(), address.subscribe());
        // The address key has the same lease as the lock, so revoking the lease frees the lock.
        let mut failure_detector = FailureDetector::new(self.etcd, &self.record.address);
        let mut logged = String::new();
        loop {
            failure_detector.follow(&[addresses.borrow_and_update().clone()]);
            let held = changes.borrow_and_update().entries.get(&key).cloned();
            if may_be_acquired(held.as_ref(), session.lease()) {
                match Leadership::acquire(self.etcd, session, &key, &value).await {
                    Ok(Ok(leadership)) => return Ok(leadership),
                    Ok(Err(_)) => {}
                    Err(error) if error.is_transient() => warn!(%error, "cannot acquire the lock"),
                    Err(error) => return Err(error.into()),
                }
            }
            let is_stuck = held.is_some_and(|lock| lock.lease == 0);
            let why = match is_stuck {
                true => format!(
                    "the lock `{key}` has no lease, so no master can acquire it; `etcdctl del {key}` releases it"
                ),
                false => "standby: another master acts".to_owned(),
            };
            if logged != why {
                match is_stuck {
                    true => warn!(reason = why, "not ready"),
                    false => info!(reason = why, "not ready"),
                }
                logged.clone_from(&why);
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
        mut leadership: Leadership,
        session: &Session,
        readiness: &Readiness,
        acting: &watch::Sender<Option<ActingHandles>>,
        shutdown: &Shutdown,
    ) -> Result<(), Failure> {
        // A stream may have no file for long.
        let (waits_for, mut waiting) = watch::channel(String::new());
        let waits = self.keys.master_waits();
        let mut opening = pin!(job::open(self.etcd, self.keys, self.request, &waits_for));
        let opened = loop {
            tokio::select! {
                biased;
                opened = &mut opening => break opened?,
                () = shutdown.drain() => return Ok(()),
                _ = waiting.changed() => {
                    let waits_for = waiting.borrow_and_update().clone();
                    readiness.set_not_ready(format!("the master waits for {waits_for}"));
                    self.waits.send_replace(Some(waits_for.clone()));
                    let record = WaitsRecord { waits_for };
                    let show = Op::put_leased(&waits, to_json(&record), session.lease());
                    leadership.commit(self.etcd, &[show]).await.map_err(after_acting)?;
                }
            }
        };
        self.waits.send_replace(None);
        let address = self.keys.master_addr();
        let announce = Op::put_leased(&address, to_json(&self.record), session.lease());
        // Announced before recovery, so that callers know the address when the state is loaded.
        let ops = [announce, Op::delete(&waits)];
        leadership.commit(self.etcd, &ops).await.map_err(after_acting)?;
        match opened {
            Opened::Training(job) => {
                self.train(*job, leadership, readiness, acting, shutdown).await
            }
            Opened::Elastic(spec) => self.gather(&spec, leadership, readiness, shutdown).await,
        }
    }

    /// Acts for an elastic job.
    async fn gather(
        &self,
        spec: &ElasticSpec,
        leadership: Leadership,
        readiness: &Readiness,
        shutdown: &Shutdown,
    ) -> Result<(), Failure> {
        let own_address = &self.record.address;
        let (event_loop, handle) =
            ElasticLoop::open(self.etcd, self.keys, spec, leadership, own_address).await?;
        let (etcd, keys) = (self.etcd.clone(), self.keys.clone());
        let informed = Informed::default();
        let nodes = AgentlessNodes { etcd, keys, handle, informed };
        self.elastic_job.send_replace(Serving::Job(Box::new(nodes)));
        readiness.set_ready();
        if let Some(result) = event_loop.run(shutdown.drain()).await.map_err(after_acting)? {
            info!(state = ?result.state, "the job is over");
            self.elastic_job.send_replace(Serving::Over);
        }
        Ok(())
    }

    /// Acts for a training job.
    async fn train(
        &self,
        job: Job,
        leadership: Leadership,
        readiness: &Readiness,
        acting: &watch::Sender<Option<ActingHandles>>,
        shutdown: &Shutdown,
    ) -> Result<(), Failure> {
        let desired = to_json(&self.args.pservers);
        // `create` keeps a number that an operator has set.
        let _ = self.etcd.create(&self.keys.ps_desired(), &desired, 0).await?;
        let spec = job.record.spec.clone();
        let followed = job.clone();
        let records = job.records;
        let store = steadfast_store::open(&job.record.store)
            .map_err(|error| Failure::invalid(format!("the store: {error}")))?;
        let name = TermName { epoch: leadership.epoch(), master: self.record.id };
        let (event_loop, handle) =
            EventLoop::open(self.etcd, self.keys, job, leadership, &self.record.address).await?;
        let (coordinator, checkpoints, requests) = CheckpointCoordinator::new(
            self.etcd.clone(),
            self.keys.clone(),
            self.tls.clone(),
            spec.clone(),
            store.clone(),
            handle.clone(),
        );
        let handovers = HandoverCoordinator {
            etcd: self.etcd.clone(),
            keys: self.keys.clone(),
            tls: self.tls.clone(),
            handle: handle.clone(),
        };
        let (follower, stream) = match spec.dataset.follow {
            true => {
                let (follower, stream) = Follower::new(
                    self.etcd.clone(),
                    self.keys.clone(),
                    &followed,
                    store.clone(),
                    handle.clone(),
                );
                (Some(follower), Some(stream))
            }
            false => (None, None),
        };
        let follower = async {
            match follower {
                Some(follower) => follower.run().await,
                None => std::future::pending().await,
            }
        };
        let (table_watch, tables) = TableWatch::new(self.tls.clone(), handle.clone());
        let curves = self.args.tensorboard.clone();
        let curves = curves.map(|to| Curves::start(to, name, handle.snapshot.clone()));
        acting.send_replace(Some(ActingHandles {
            handle,
            checkpoints,
            store,
            task_deadline: spec.tasks.deadline,
            max_staleness: spec.asynchronous.max_staleness,
            source: Arc::new(StatusSource {
                address: self.record.address.clone(),
                records,
                has_closures: spec.model.has_closures(),
                rate: Mutex::new(Rate::default()),
            }),
            stream,
            tables,
        }));
        readiness.set_ready();
        tokio::select! {
            biased;
            ended = event_loop.run(shutdown.drain()) => match ended.map_err(after_acting)? {
                Some(result) => {
                    info!(state = ?result.state, "the job is over");
                    if let Some(curves) = curves {
                        curves.finish(result).await;
                    }
                    Ok(())
                }
                None => Ok(()),
            },
            () = table_watch.run() => Err(Failure::internal("the watch of the tables ended")),
            () = handovers.run() => Err(Failure::internal("the handover of states ended")),
            () = follower => Err(Failure::internal("the follower of the stream ended")),
            () = coordinator.run(requests) => Err(Failure::internal("the checkpoint coordinator ended")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// I12: a master whose request for the lock was executed, and never answered, does not wait for itself.
    #[test]
    fn a_lock_that_an_unanswered_request_acquired_is_ones_own() {
        let held = |lease| Entry {
            key: "lock".to_owned(),
            value: Vec::new(),
            create_revision: 3,
            mod_revision: 3,
            version: 1,
            lease,
        };
        assert!(may_be_acquired(None, 7) && may_be_acquired(Some(&held(7)), 7));
        assert!(!may_be_acquired(Some(&held(8)), 7) && !may_be_acquired(Some(&held(0)), 7));
    }
}
