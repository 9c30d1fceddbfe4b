//! The lifecycle of a pserver: bind, claim a slot, serve, shut down.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use clap::Parser;
use futures::FutureExt;
use futures::future::BoxFuture;
use prometheus_client::registry::Registry;
use serde_json::json;
use steadfast_common::error::ErrorKind;
use steadfast_common::job::durations::parse;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{FollowerRecord, PROTOCOL, PserverRecord};
use steadfast_common::role::Role;
use steadfast_coord::{CoordError, Etcd, Mirror, Range, Session, wait_for_job};
use steadfast_host::random;
use steadfast_host::time::{Instant, sleep, timeout};
use steadfast_net::{Port, TlsIdentity};
use steadfast_process::{
    Admin, AdminContent, CommonArgs, Failure, LogIdentity, Readiness, Shutdown, address_changed,
    health, init_logging, wait_after_completion,
};
use steadfast_proto::access;
use steadfast_pserver_core::contribution::Refusal;
use steadfast_pserver_core::rules::Rules;
use steadfast_pserver_storage::{MemoryStores, RowStores, TieredStores, local_disks};
use tokio::sync::watch;
use tonic::service::Routes;
use tracing::{info, warn};
use uuid::Uuid;

use crate::event_loop::{EventLoopHandle, Published};
use crate::following::{Spare, TakenOver};
use crate::generations::Followed;
use crate::metrics::Metrics;
use crate::service::Service;
use crate::shard_file::ShardStore;
use crate::slot_lease::{Claim, Holder};
use crate::tensor_service::TensorService;
use crate::{follower_record, generations, master, norms, slot};

/// Timeout of calls in flight at shutdown.
const DRAIN: Duration = Duration::from_secs(5);

/// The least memory for rows of tables. A smaller number lacks its unit.
const TABLE_MEMORY_MIN: usize = 4 << 10;

/// The most memory for buffers and caches of the disk below rows of tables.
const DISK_MEMORY_MAX: usize = 256 << 20;

/// Settings of a pserver.
#[derive(Debug, Parser)]
#[command(name = "steadfast-pserver", version, about = "Holds one slot of a job's parameters")]
pub struct Args {
    #[command(flatten)]
    pub common: CommonArgs,
    /// How long the final checkpoint may take during a drain; a second signal ends the process at once.
    #[arg(long, value_name = "TIME", default_value = "45s", value_parser = parse)]
    pub drain_timeout: Duration,
    /// Memory for the rows of embedding tables, the others are on the local disk; without it, all are in memory.
    #[arg(long, value_name = "SIZE")]
    pub table_memory: Option<ByteSize>,
    /// Directory on the local disk for these rows; the default is that for temporary files. Not shared storage.
    #[arg(long, value_name = "DIR")]
    pub table_directory: Option<PathBuf>,
}

impl Args {
    /// Returns the stores that keep the rows of tables.
    ///
    /// # Errors
    /// If `--table-memory` is too small, or this build cannot keep rows on a local disk.
    fn stores(&self) -> Result<Arc<dyn RowStores>, Failure> {
        let Some(memory) = self.table_memory else { return Ok(Arc::new(MemoryStores)) };
        let memory = usize::try_from(memory.as_u64()).unwrap_or(usize::MAX);
        if memory < TABLE_MEMORY_MIN {
            let message =
                format!("--table-memory: {memory} bytes are too few; give a unit, as in 2GiB");
            return Err(Failure::invalid(message));
        }
        let directory = self.table_directory.clone().unwrap_or_else(std::env::temp_dir);
        // Buffers and caches of the disk have a quarter, and need no more than this.
        let of_disk = (memory / 4).min(DISK_MEMORY_MAX);
        let disks = local_disks(directory, of_disk)
            .map_err(|error| Failure::invalid(format!("--table-memory: {error}")))?;
        Ok(Arc::new(TieredStores::new(memory - of_disk, disks)))
    }
}

/// Runs a pserver until the job is over, its slot is lost, or it is drained. If the job reduces its number
/// of slots, a pserver of a removed slot releases it and becomes a spare.
///
/// # Errors
/// Errors that require user action.
pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    let (id, common) = (random::uuid(), &args.common);
    let identity = init_logging("pserver", &common.job, id, &common.log)?;
    let stores = args.stores()?;
    run_process(args, stores, id, identity, Shutdown::install()?).await
}

/// Runs a pserver in a process that provides its own stores for rows, logging and shutdown signal.
///
/// # Errors
/// As [`run`].
pub fn run_process(
    args: Args,
    stores: Arc<dyn RowStores>,
    id: Uuid,
    identity: LogIdentity,
    shutdown: Shutdown,
) -> BoxFuture<'static, Result<(), Failure>> {
    // Boxed, so it is compiled here and not in each program that calls this.
    run_until_over(args, stores, id, identity, shutdown).boxed()
}

async fn run_until_over(
    args: Args,
    stores: Arc<dyn RowStores>,
    id: Uuid,
    identity: LogIdentity,
    shutdown: Shutdown,
) -> Result<(), Failure> {
    let Args { common: args, drain_timeout, .. } = args;
    let exposure = args.security.exposure(Role::Pserver)?;
    let port = steadfast_process::bind(args.listen, "--listen", &exposure).await?;
    let admin = Admin::bind(args.admin_listen, exposure.clone()).await?;
    let admin_address = args.admin_advertised(admin.local_addr())?;
    let readiness = Readiness::new("connecting to etcd");
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let event_loop = watch::Sender::new(None::<EventLoopHandle>);
    let shown = event_loop.subscribe();
    Metrics::register_tables(&mut registry, event_loop.subscribe());
    let _admin = admin.serve(content(&args, id, &readiness, registry, &shutdown, shown)?);

    let keys = args.keys();
    let Some(etcd) = args.connect_to_etcd(&readiness, &shutdown).await? else { return Ok(()) };
    let result = Mirror::start(&etcd, Range::Key(keys.result())).await?;
    let process = PserverProcess {
        args: &args,
        tls: exposure.identity(),
        drain_timeout,
        stores,
        id,
        admin_address,
        identity,
        readiness: &readiness,
        metrics,
        event_loop,
        keys: &keys,
        etcd: &etcd,
        result,
        shutdown: &shutdown,
    };
    let mut port = port;
    loop {
        let bound = port.local_addr().map_err(|error| Failure::io("the gRPC port", &error))?;
        match process.serve_slot(port, bound).await? {
            SlotEnd::Final => break,
            // Calls to the old slot fail, and their callers look up its new holder.
            SlotEnd::Surplus | SlotEnd::JobChanged => {
                let same = SocketAddr::new(args.listen.ip(), bound.port());
                port = steadfast_process::bind(same, "--listen", &exposure).await?;
            }
        }
    }
    wait_after_completion(&args, &readiness, &shutdown).await;
    Ok(())
}

/// The reason why a pserver no longer holds its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotEnd {
    /// The job is over, or the process is drained.
    Final,
    /// The job has fewer slots now: the pserver becomes a spare.
    Surplus,
    /// The job has other settings now: the pserver reads them, and claims a slot anew.
    JobChanged,
}

/// The state that a process keeps across slots.
struct PserverProcess<'a> {
    args: &'a CommonArgs,
    tls: TlsIdentity,
    drain_timeout: Duration,
    /// Where rows of tables are kept.
    stores: Arc<dyn RowStores>,
    id: Uuid,
    admin_address: String,
    identity: LogIdentity,
    readiness: &'a Readiness,
    metrics: Metrics,
    /// The event_loop of the current shard, for the admin port.
    event_loop: watch::Sender<Option<EventLoopHandle>>,
    keys: &'a Keys,
    etcd: &'a Etcd,
    result: Mirror,
    shutdown: &'a Shutdown,
}

impl PserverProcess<'_> {
    /// Waits for a slot and serves it until it ends.
    async fn serve_slot(&self, mut port: Port, bound: SocketAddr) -> Result<SlotEnd, Failure> {
        let (args, etcd, keys, readiness) = (self.args, self.etcd, self.keys, self.readiness);
        // A pserver with `--advertise` must be reached at that address.
        let unix = args.advertise.is_none().then(|| format!("steadfast-{}", self.id));
        let record = PserverRecord {
            id: self.id,
            unix: unix.filter(|name| port.also_unix(name)),
            address: args.advertised(bound)?,
            admin: self.admin_address.clone(),
            memory_of: None,
            followed: None,
            protocol: PROTOCOL,
        };
        let mut joined = tokio::select! {
            biased;
            joined = self.join(&record) => joined?,
            () = self.shutdown.drain() => return Ok(SlotEnd::Final),
            () = job_over(&self.result) => return Ok(SlotEnd::Final),
            failure = address_changed(args, &record.address) => return Err(failure),
        };
        self.identity.set_incarnation(joined.event_loop.incarnation);
        self.event_loop.send_replace(Some(joined.event_loop.clone()));
        readiness.set_ready();
        let (_health, health) = health("steadfast.v1.Pserver", readiness).await;
        let routes = Routes::new(health).add_service(joined.service(self.metrics.clone()));
        let stop = tokio_util::sync::CancellationToken::new();
        let mut serving = port.serve(routes, access, &self.tls, stop.clone());
        let drained = self.drained(joined.event_loop.clone());
        let end = tokio::select! {
            biased;
            end = joined.hold(etcd, keys, &self.tls, readiness) => end,
            served = &mut serving => {
                return Err(Failure::internal(format!("the server ended: {served:?}")));
            }
            failure = address_changed(args, &record.address) => Err(failure),
            () = job_over(&self.result) => {
                info!("the job is over");
                Ok(SlotEnd::Final)
            }
            () = drained => Ok(SlotEnd::Final),
        };
        self.event_loop.send_replace(None);
        // Frees the slot for a successor at once; calls in flight are refused by the lease deadline.
        joined.session.close(etcd).await;
        stop.cancel();
        if timeout(DRAIN, serving).await.is_err() {
            warn!("calls in flight aborted");
        }
        let mut published = joined.event_loop.published();
        drop(joined);
        // Rows on the local disk are removed.
        let ended = async { while published.changed().await.is_ok() {} };
        let _ = timeout(DRAIN, ended).await;
        end
    }

    /// Waits for a slot, as a spare that follows one if the job has such.
    async fn join(&self, record: &PserverRecord) -> Result<Joined, Failure> {
        let (args, etcd, keys, readiness) = (self.args, self.etcd, self.keys, self.readiness);
        readiness.set_not_ready(format!("waiting for {}", keys.job()));
        let source = JobSource::read(etcd, keys, self.stores.clone()).await?;
        let job = source.context().await?;
        let followers = followers(etcd, keys, job.warm_spares).await?;
        let mut was_lost = false;
        loop {
            let session = Session::open_with_retry(etcd, args.lease_ttl).await?;
            // etcd was away, so the holders of slots may have lost their leases as well: they take their slots again.
            if was_lost {
                readiness.set_not_ready("spare: lets holders take their slots again");
                sleep(args.lease_ttl).await;
            }
            let spare = Spare {
                etcd,
                keys,
                tls: &self.tls,
                session: &session,
                record,
                source: &source,
                readiness,
            };
            let following = async {
                match source.warm_spares() {
                    0 => std::future::pending().await,
                    _ => spare.take_over().await,
                }
            };
            let taken = tokio::select! {
                biased;
                taken = following => taken?,
                claimed = slot::claim(etcd, &session, keys, record, followers.as_ref(), readiness) => match claimed {
                    Ok((slot, incarnation)) => {
                        let rules = job.shards.rules.clone();
                        let event_loop = EventLoopHandle::start(slot, incarnation, rules);
                        return Ok(Joined::new(session, record.clone(), args.lease_ttl, event_loop, job));
                    }
                    // A spare has no state that the job would lose.
                    Err(CoordError::LeaseLost) => {
                        warn!("lease of a spare lost; requesting another");
                        was_lost = true;
                        continue;
                    }
                    Err(error) => return Err(error.into()),
                },
            };
            let TakenOver { job, event_loop, followed } = taken;
            let record = PserverRecord { followed: Some(followed), ..record.clone() };
            return Ok(Joined::new(session, record, args.lease_ttl, event_loop, job));
        }
    }

    /// Completes after a request to drain, once the shard is safe: another pserver has a copy of it, or the final
    /// checkpoint was taken or has failed.
    async fn drained(&self, event_loop: EventLoopHandle) {
        self.shutdown.drain().await;
        let key = self.keys.follower(event_loop.slot);
        let follower = self.etcd.get_json::<FollowerRecord>(&key).await;
        let generation = event_loop.published().borrow().generation;
        let has_copy =
            |it: &FollowerRecord| it.generation == generation && it.of == event_loop.incarnation;
        if let Some(follower) = follower.ok().flatten().filter(has_copy) {
            info!(follower = %follower.id, "the slot goes to its follower");
            return;
        }
        let (limit, lease_ttl) = (self.drain_timeout, self.args.lease_ttl);
        master::take_final_checkpoint(self.etcd, self.keys, &self.tls, limit, lease_ttl).await;
    }
}

/// The job as a pserver needs it.
pub(crate) struct JobContext {
    pub shards: ShardStore,
    /// Number of changes of the job's settings that it takes into account.
    pub changes: u32,
    /// Number of spares that follow a slot.
    pub warm_spares: u32,
}

/// Where the job is read from, as its settings may change while a spare waits.
pub(crate) struct JobSource<'a> {
    etcd: &'a Etcd,
    keys: &'a Keys,
    stores: Arc<dyn RowStores>,
    warm_spares: u32,
}

impl<'a> JobSource<'a> {
    /// Waits for the job.
    ///
    /// # Errors
    /// If the job cannot be read.
    async fn read(
        etcd: &'a Etcd,
        keys: &'a Keys,
        stores: Arc<dyn RowStores>,
    ) -> Result<Self, Failure> {
        let warm_spares = wait_for_job(etcd, keys).await?.spec.warm_spares;
        Ok(Self { etcd, keys, stores, warm_spares })
    }

    /// Returns how many spares follow a slot; a change of the job does not change it.
    pub fn warm_spares(&self) -> u32 {
        self.warm_spares
    }

    /// Reads the job.
    ///
    /// # Errors
    /// If the job cannot be read, or its store is invalid.
    pub async fn context(&self) -> Result<JobContext, Failure> {
        let job = wait_for_job(self.etcd, self.keys).await?;
        let store = steadfast_store::open(&job.store)
            .map_err(|error| Failure::new(ErrorKind::Invalid, error.to_string()))?;
        let (changes, updates_before) = (job.changes.clone(), job.updates_before());
        let stores = self.stores.clone();
        let rules = Rules { stores, updates_before, changes, ..Rules::new(&job.spec) };
        let (changes, warm_spares) = (job.changes.len() as u32, job.spec.warm_spares);
        Ok(JobContext { shards: ShardStore::new(store, job, rules), changes, warm_spares })
    }
}

/// Returns the content of the admin port.
fn content(
    args: &CommonArgs,
    id: Uuid,
    readiness: &Readiness,
    metrics: Registry,
    shutdown: &Shutdown,
    event_loop: watch::Receiver<Option<EventLoopHandle>>,
) -> Result<AdminContent, Failure> {
    Ok(AdminContent {
        role: "pserver",
        job: args.job.clone(),
        id: Box::new(move || id),
        readiness: readiness.clone(),
        metrics,
        token: args.security.admin_token()?,
        shutdown: Some(shutdown.clone()),
        status: Box::new(move || event_loop.borrow().as_ref().map_or(json!({"slot": null}), show)),
        page: None,
    })
}

/// The state of a pserver that holds a slot.
struct Joined {
    session: Session,
    holder: Holder,
    record: PserverRecord,
    lease_ttl: Duration,
    event_loop: EventLoopHandle,
    shards: ShardStore,
    /// Number of changes of the job's settings that this pserver knows.
    changes: u32,
    warm_spares: u32,
}

impl Joined {
    fn new(
        session: Session,
        record: PserverRecord,
        lease_ttl: Duration,
        event_loop: EventLoopHandle,
        job: JobContext,
    ) -> Self {
        let JobContext { shards, changes, warm_spares } = job;
        let holder = Holder::new(&session, shards.rules.mode);
        Self { session, holder, record, lease_ttl, event_loop, shards, changes, warm_spares }
    }

    fn service(&self, metrics: Metrics) -> TensorService {
        TensorService::new(Service {
            event_loop: self.event_loop.clone(),
            slot_lease: self.holder.slot_lease(),
            shards: self.shards.clone(),
            metrics,
        })
    }

    /// Takes part in the job's generations until the slot is lost or no longer needed.
    async fn hold(
        &mut self,
        etcd: &Etcd,
        keys: &Keys,
        tls: &TlsIdentity,
        readiness: &Readiness,
    ) -> Result<SlotEnd, Failure> {
        let desired = Mirror::start(etcd, Range::Key(keys.ps_desired())).await?;
        let generation = Mirror::start(etcd, Range::Key(keys.generation())).await?;
        let begun = generation.subscribe();
        let peers = Mirror::start(etcd, Range::Prefix(keys.ps_prefix())).await?;
        let (event_loop, shards) = (self.event_loop.clone(), self.shards.clone());
        let failed = event_loop.clone();
        let following = generations::follow(
            event_loop.clone(),
            etcd,
            keys,
            tls,
            &shards,
            self.changes,
            generation,
        );
        let followers = followers(etcd, keys, self.warm_spares).await?;
        let (own, record, seen) = (event_loop.slot, self.record.clone(), peers.subscribe());
        let surplus = slot::surplus(event_loop.clone(), desired.subscribe(), begun);
        // Without spares that follow, no slot has a follower.
        let recording = async {
            let Some(followers) = &followers else { return std::future::pending().await };
            let seen = || followers.subscribe();
            let recorded = follower_record::keep(failed.clone(), etcd, keys, record.id, seen());
            tokio::join!(recorded, slot::stop_following(etcd, &record, seen()));
        };
        tokio::select! {
            biased;
            followed = following => match followed {
                Followed::JobChanged => return Ok(SlotEnd::JobChanged),
                Followed::Ended => {}
            },
            () = slot::release_other_slots(etcd, keys, own, &record, seen) => {}
            () = recording => {}
            () = norms::follow(event_loop, keys.clone(), peers, tls.clone()) => {}
            () = surplus => return Ok(SlotEnd::Surplus),
            failure = self.keep_slot(etcd, keys, readiness) => return Err(failure),
        }
        Err(match failed.failure() {
            // Another pserver, or this one started again, may have space.
            Some(Refusal::Storage(error)) => Failure::unavailable(error.to_string()),
            Some(error) => Failure::internal(error.to_string()),
            None => Failure::internal("the event loop ended"),
        })
    }

    /// Keeps the slot through losses of the lease; returns when it is lost for good.
    async fn keep_slot(&mut self, etcd: &Etcd, keys: &Keys, readiness: &Readiness) -> Failure {
        loop {
            self.session.lost().await;
            self.holder.suspend();
            warn!(slot = %self.event_loop.slot, "lease lost; refusing calls until the slot is reacquired");
            readiness.set_not_ready("lease lost; waiting for etcd");
            let claim = Claim {
                etcd,
                keys,
                record: &self.record,
                slot: self.event_loop.slot,
                incarnation: self.event_loop.incarnation,
                lease_ttl: self.lease_ttl,
            };
            match claim.renew().await {
                Ok(session) => self.session = session,
                Err(failure) => return failure,
            }
            self.holder.resume(&self.session);
            readiness.set_ready();
        }
    }
}

/// Returns a mirror of the followers of all slots, if the job is to have any.
async fn followers(
    etcd: &Etcd,
    keys: &Keys,
    warm_spares: u32,
) -> Result<Option<Mirror>, CoordError> {
    if warm_spares == 0 {
        return Ok(None);
    }
    Mirror::start(etcd, Range::Prefix(keys.followers_prefix())).await.map(Some)
}

async fn job_over(result: &Mirror) {
    let mut changes = result.subscribe();
    let _ = changes.wait_for(|view| !view.entries.is_empty()).await;
}

fn show(event_loop: &EventLoopHandle) -> serde_json::Value {
    let published: Arc<Published> = event_loop.published().borrow().clone();
    let shard = published.shard.as_ref().map(|shard| {
        json!({
            "version": shard.position.version,
            "pass": shard.position.pass,
            "examples": shard.position.examples,
            "loss": shard.position.loss,
            "blocks": shard.blocks.len(),
            "rows": BTreeMap::from_iter(shard.tables.names.iter().zip(&shard.rows)),
            "rows_in_memory": shard.usage.rows_in_memory,
            "rows_memory_bytes": shard.usage.memory_bytes,
            "rows_disk_bytes": shard.usage.disk_bytes,
            "rows_hits": shard.usage.hits,
            "rows_misses": shard.usage.misses,
            "values": shard.blocks.iter().map(|(_, block)| block.len).sum::<usize>(),
            "waits_for_lanes": shard.missing,
            "lanes_waited_seconds": shard.lags.seconds(&shard.missing, Instant::now()),
        })
    });
    json!({
        "slot": event_loop.slot,
        "incarnation": event_loop.incarnation,
        "generation": published.generation,
        "slots": published.placement.slots(),
        "checkpoint": published.checkpoint,
        "shard": shard,
        "follower": published.follower.as_ref().map(|it| json!({
            "id": it.applicant.id,
            "address": it.applicant.address,
            "is_recorded": it.is_following,
            "steps_behind": it.behind,
            "waited_seconds": it.waiting.map_or(0.0, |since| since.elapsed().as_secs_f64()),
        })),
    })
}
