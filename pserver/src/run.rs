//! The life of a pserver: bind, claim, serve, end.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::Parser;
use prometheus_client::registry::Registry;
use serde_json::json;
use steadfast_common::durations::parse;
use steadfast_common::error::ErrorKind;
use steadfast_common::keys::Keys;
use steadfast_common::records::PserverRecord;
use steadfast_coord::{CoordError, Etcd, Mirror, Range, Session};
use steadfast_host::chance;
use steadfast_host::role::Role;
use steadfast_host::time::timeout;
use steadfast_process::{
    Admin, AdminContent, CommonArgs, Failure, LogIdentity, Readiness, Shutdown, access, health,
    init_logging, linger, moved, wait_for_job,
};
use steadfast_pserver_core::shard::Rules;
use tonic::service::Routes;
use tracing::{info, warn};
use uuid::Uuid;

use crate::engine::{Engine, Published};
use crate::exchange::Exchange;
use crate::metrics::Metrics;
use crate::service::Service;
use crate::shard_file::ShardStore;
use crate::tenure::{Claim, Holder};
use crate::{generations, master, norms, slot};

/// How long calls in flight may take once we leave.
const DRAIN: Duration = Duration::from_secs(5);

/// Settings of a pserver.
#[derive(Debug, Parser)]
#[command(name = "steadfast-pserver", version, about = "Holds one slot of a job's parameters")]
pub struct Args {
    #[command(flatten)]
    pub common: CommonArgs,
    /// How long a checkpoint may take once the process shall leave; another signal ends it at once.
    #[arg(long, value_name = "TIME", default_value = "45s", value_parser = parse)]
    pub drain_timeout: Duration,
}

/// Runs a pserver until the job is over, its slot is another's, or it is told to leave.
///
/// # Errors
/// What a person has to act on.
pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    let (id, common) = (chance::uuid(), &args.common);
    let identity = init_logging("pserver", &common.job, id, &common.log)?;
    common.security.decide(Role::Pserver)?;
    live(args, id, identity, Shutdown::install()?).await
}

/// The same for a process that logs and is told to leave in ways of its own.
///
/// # Errors
/// As [`run`].
pub async fn live(
    args: Args,
    id: Uuid,
    identity: LogIdentity,
    shutdown: Shutdown,
) -> Result<(), Failure> {
    let Args { common: args, drain_timeout } = args;
    let mut listener = steadfast_process::bind(args.listen, "--listen").await?;
    let bound = listener.local_addr().map_err(|error| Failure::io("the port", &error))?;
    let admin = Admin::bind(args.admin_listen).await?;
    // Whoever advertises another address wants to be reached by it.
    let unix = args.advertise.is_none().then(|| format!("steadfast-{id}"));
    let record = PserverRecord {
        id,
        unix: unix.filter(|name| listener.also_unix(name)),
        address: args.advertised(bound)?,
        admin: args.admin_advertised(admin.local_addr())?,
        memory_of: None,
    };
    let readiness = Readiness::new("connects to etcd");
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let status = Arc::new(OnceLock::<Engine>::new());
    let _admin = admin.serve(content(&args, id, &readiness, registry, &shutdown, status.clone())?);

    let keys = args.keys();
    let etcd = Etcd::connect(&args.etcd_options()?).await?;
    let result = Mirror::start(&etcd, Range::Key(keys.result())).await?;
    let mut joined = tokio::select! {
        biased;
        joined = join(&etcd, &keys, &args, &record, &readiness) => joined?,
        () = shutdown.drain() => return Ok(()),
        () = over(&result) => {
            linger(&args, &readiness, &shutdown).await;
            return Ok(());
        }
        failure = moved(&args, &record.address) => return Err(failure),
    };
    identity.set_incarnation(joined.engine.incarnation);
    let _ = status.set(joined.engine.clone());
    readiness.set_ready();
    let (_health, health) = health("steadfast.v1.Pserver", &readiness).await;
    let server = joined.service(metrics);
    let routes = Routes::new(health).add_service(server);
    let stop = tokio_util::sync::CancellationToken::new();
    let mut serving = listener.serve(routes, access, stop.clone());
    let ending = tokio::select! {
        biased;
        ending = joined.hold(&etcd, &keys, &readiness) => ending,
        served = &mut serving => {
            return Err(Failure::internal(format!("the server ended: {served:?}")));
        }
        failure = moved(&args, &record.address) => Err(failure),
        () = over(&result) => {
            info!("the job is over");
            Ok(())
        }
        () = drained(&shutdown, &etcd, &keys, drain_timeout) => Ok(()),
    };
    // The slot is free for a successor at once; calls in flight are refused by the deadline.
    joined.session.close(&etcd).await;
    stop.cancel();
    if timeout(DRAIN, serving).await.is_err() {
        warn!("calls in flight were cut off");
    }
    ending?;
    linger(&args, &readiness, &shutdown).await;
    Ok(())
}

/// What the admin port shows.
fn content(
    args: &CommonArgs,
    id: Uuid,
    readiness: &Readiness,
    metrics: Registry,
    shutdown: &Shutdown,
    engine: Arc<OnceLock<Engine>>,
) -> Result<AdminContent, Failure> {
    Ok(AdminContent {
        role: "pserver",
        job: args.job.clone(),
        id: Box::new(move || id),
        readiness: readiness.clone(),
        metrics,
        token: args.security.admin_token()?,
        shutdown: shutdown.clone(),
        status: Box::new(move || engine.get().map_or(json!({"slot": null}), show)),
        page: None,
    })
}

/// A pserver that holds a slot.
struct Joined {
    session: Session,
    holder: Holder,
    record: PserverRecord,
    lease_ttl: Duration,
    engine: Engine,
    shards: ShardStore,
}

impl Joined {
    fn service(&self, metrics: Metrics) -> Exchange {
        Exchange::new(Service {
            engine: self.engine.clone(),
            tenure: self.holder.tenure(),
            shards: self.shards.clone(),
            metrics,
        })
    }

    /// Takes part in the job's generations until the slot is another's.
    async fn hold(
        &mut self,
        etcd: &Etcd,
        keys: &Keys,
        readiness: &Readiness,
    ) -> Result<(), Failure> {
        let generation = Mirror::start(etcd, Range::Key(keys.generation())).await?;
        let peers = Mirror::start(etcd, Range::Prefix(keys.ps_prefix())).await?;
        let (engine, shards) = (self.engine.clone(), self.shards.clone());
        let following =
            generations::follow(engine.clone(), etcd.clone(), keys.clone(), shards, generation);
        let (own, record, seen) = (engine.slot, self.record.clone(), peers.subscribe());
        tokio::select! {
            biased;
            () = following => {}
            () = slot::give_back_others(etcd, keys, own, &record, seen) => {}
            () = norms::follow(engine, keys.clone(), peers) => {}
            failure = self.keep_slot(etcd, keys, readiness) => return Err(failure),
        }
        Err(Failure::internal("the loop of the shard ended"))
    }

    /// Keeps the slot through losses of the lease; ends when it is lost for good.
    async fn keep_slot(&mut self, etcd: &Etcd, keys: &Keys, readiness: &Readiness) -> Failure {
        loop {
            self.session.lost().await;
            self.holder.suspend();
            warn!(slot = %self.engine.slot, "the lease is lost; serves nobody until the slot is taken again");
            readiness.set_not_ready("its lease is lost; waits for etcd");
            let claim = Claim {
                etcd,
                keys,
                record: &self.record,
                slot: self.engine.slot,
                incarnation: self.engine.incarnation,
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

async fn join(
    etcd: &Etcd,
    keys: &Keys,
    args: &CommonArgs,
    record: &PserverRecord,
    readiness: &Readiness,
) -> Result<Joined, Failure> {
    readiness.set_not_ready(format!("waits for {}", keys.job()));
    let job = wait_for_job(etcd, keys).await?;
    let store = steadfast_store::open(&job.store)
        .map_err(|error| Failure::new(ErrorKind::Invalid, error.to_string()))?;
    let rules = Rules::new(&job.spec);
    let shards = ShardStore::new(store, job);
    let (session, (slot, incarnation)) = loop {
        let session = Session::open_patiently(etcd, args.lease_ttl).await?;
        match slot::claim(etcd, &session, keys, record, readiness).await {
            Ok(claimed) => break (session, claimed),
            // Nothing is lost with the lease of a spare.
            Err(CoordError::LeaseLost) => warn!("the lease of a spare is lost; asks for another"),
            Err(error) => return Err(error.into()),
        }
    };
    let engine = Engine::start(slot, incarnation, rules);
    let (holder, record) = (Holder::new(&session), record.clone());
    Ok(Joined { session, holder, record, lease_ttl: args.lease_ttl, engine, shards })
}

/// Completes when we shall leave and our memory was saved, as far as that is to be had.
async fn drained(shutdown: &Shutdown, etcd: &Etcd, keys: &Keys, most: Duration) {
    shutdown.drain().await;
    master::save_before_leaving(etcd, keys, most).await;
}

async fn over(result: &Mirror) {
    let mut changes = result.subscribe();
    let _ = changes.wait_for(|view| !view.entries.is_empty()).await;
}

fn show(engine: &Engine) -> serde_json::Value {
    let published: Arc<Published> = engine.published().borrow().clone();
    let shard = published.shard.as_ref().map(|shard| {
        json!({
            "version": shard.position.version,
            "pass": shard.position.pass,
            "examples": shard.position.examples,
            "loss": shard.position.loss,
            "blocks": shard.blocks.len(),
            "values": shard.blocks.iter().map(|(_, block)| block.len).sum::<usize>(),
            "waits_for_lanes": shard.missing,
        })
    });
    json!({
        "slot": engine.slot,
        "incarnation": engine.incarnation,
        "generation": published.generation,
        "slots": published.slots,
        "checkpoint": published.checkpoint,
        "shard": shard,
    })
}
