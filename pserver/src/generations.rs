//! Follows the job's generations: joins those that name this incarnation of the slot, and loads the
//! checkpoint from which they start.

use std::sync::Arc;
use std::time::Duration;

use steadfast_checkpoint::BlockNames;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Generation;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{CheckpointRecord, GenerationRecord, PserverRecord, ShardRecord};
use steadfast_common::role::Role;
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::placement::PlacementRecord;
use steadfast_coord::{CoordError, Etcd, Mirror, backoff};
use steadfast_host::time::{sleep, timeout};
use steadfast_net::{Channel, TlsIdentity};
use steadfast_proto::v1::{ReadHandoverRequest, ReportDamageRequest};
use steadfast_proto::{TensorMethod, call, framed, status};
use tonic::Status;
use tracing::{error, info, warn};

use crate::event::{Begun, Event};
use crate::event_loop::EventLoopHandle;
use crate::master;
use crate::shard_file::{Assembly, LoadedShard, ShardError, ShardStore};
use crate::state;

/// Timeout of a damage report to the master.
const CALL_MAX: Duration = Duration::from_secs(5);

/// The longest time until a slot that hands its state over begins to answer.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// After so many attempts to read what slots hand over, the master is told that the checkpoint is needed.
const READS_MAX: u32 = 3;

/// The reason why a checkpoint could not be loaded.
#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error(transparent)]
    Coord(#[from] CoordError),
    #[error("the manifest is missing in etcd")]
    NoManifest,
    #[error(transparent)]
    Shard(#[from] ShardError),
}

impl LoadError {
    /// Returns whether a retry cannot succeed.
    fn is_permanent(&self) -> bool {
        match self {
            Self::NoManifest => true,
            Self::Coord(error) => !error.is_transient(),
            Self::Shard(error) => error.is_permanent(),
        }
    }
}

/// The reason why no generation is followed any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Followed {
    /// The process ends.
    Ended,
    /// A generation has settings of the job that this pserver does not know.
    JobChanged,
}

/// Reports every generation to `event_loop`, until dropped, or until one takes into account another number of changes of
/// the job's settings than `known`.
pub async fn follow(
    event_loop: EventLoopHandle,
    etcd: &Etcd,
    keys: &Keys,
    tls: &TlsIdentity,
    shards: &ShardStore,
    known: u32,
    record: Mirror,
) -> Followed {
    let mut changes = record.subscribe();
    loop {
        let seen = changes.borrow_and_update().single::<GenerationRecord>();
        match seen {
            Ok(Some(record)) if includes(&record, &event_loop) && record.changes != known => {
                warn!(generation = record.generation.0, "the job was changed; joining it anew");
                return Followed::JobChanged;
            }
            Ok(Some(record)) if includes(&record, &event_loop) => {
                let load = begin(&event_loop, etcd, keys, tls, shards, record);
                tokio::select! {
                    biased;
                    () = load => {}
                    // A new generation makes this checkpoint irrelevant.
                    changed = changes.changed() => match changed {
                        Ok(()) => continue,
                        Err(_) => return Followed::Ended,
                    },
                }
            }
            Ok(Some(_) | None) => {}
            Err(error) => error!(%error, "cannot read the generation"),
        }
        if changes.changed().await.is_err() {
            return Followed::Ended;
        }
    }
}

fn includes(record: &GenerationRecord, event_loop: &EventLoopHandle) -> bool {
    record.slots.get(event_loop.slot.0 as usize) == Some(&event_loop.incarnation)
}

/// Enters a generation with the values that the slot keeps, or with those of a checkpoint.
async fn begin(
    event_loop: &EventLoopHandle,
    etcd: &Etcd,
    keys: &Keys,
    tls: &TlsIdentity,
    shards: &ShardStore,
    record: GenerationRecord,
) {
    let (generation, placement) = (record.generation, record.placement.clone());
    let (checkpoint, handover) = (record.checkpoint.clone(), record.handover.clone());
    let begun = event_loop.call(|reply| Event::Generation { record, reply }).await;
    if begun != Ok(Begun::Empty) {
        return;
    }
    let mut pauses = backoff();
    if let Some(handover) = handover {
        let reader = Reader { event_loop, etcd, keys, tls, shards };
        let mut failures = 0;
        loop {
            match reader.read(generation, &handover, &placement).await {
                Ok(loaded) => {
                    event_loop.send(Event::Restored { generation, loaded }).await;
                    return;
                }
                Err(reason) => {
                    failures += 1;
                    warn!(reason, failures, "a state that other slots hand over was not read");
                    if READS_MAX <= failures {
                        // Retries until a generation begins from the checkpoint.
                        report_damage(etcd, keys, tls, generation, "", &reason).await;
                    }
                }
            }
            sleep(pauses.next().unwrap_or(CALL_MAX)).await;
        }
    }
    let Some(id) = checkpoint else { return };
    loop {
        match load(event_loop, etcd, keys, shards, &id, &placement).await {
            Ok(loaded) => {
                event_loop.send(Event::Restored { generation, loaded }).await;
                return;
            }
            Err(LoadError::Shard(ShardError::Storage(error))) => {
                event_loop.send(Event::StorageFailed { error }).await;
                return;
            }
            Err(error) if error.is_permanent() => {
                error!(checkpoint = id, %error, "cannot load the checkpoint");
                // Retries until a new generation begins from another checkpoint: the damage may be
                // limited to this machine.
                report_damage(etcd, keys, tls, generation, &id, &error.to_string()).await;
            }
            Err(error) => warn!(checkpoint = id, %error, "checkpoint not loaded yet; retrying"),
        }
        sleep(pauses.next().unwrap_or(CALL_MAX)).await;
    }
}

/// Reads what a slot needs of the states that the slots of the generation before hand over.
struct Reader<'a> {
    event_loop: &'a EventLoopHandle,
    etcd: &'a Etcd,
    keys: &'a Keys,
    tls: &'a TlsIdentity,
    shards: &'a ShardStore,
}

impl Reader<'_> {
    /// Reads the shard of the slot in `generation`.
    ///
    /// # Errors
    /// The reason, for a log.
    async fn read(
        &self,
        generation: Generation,
        handover: &CheckpointRecord,
        placement: &PlacementRecord,
    ) -> Result<LoadedShard, String> {
        let slot = self.event_loop.slot;
        let names = BlockNames::new(Arc::new(Layout::new(handover.params.clone())));
        let shard = self.shards.begin(&names, handover, slot, placement);
        let mut shard = shard.map_err(|error| error.to_string())?;
        let is_own = |source: &ShardRecord| source.incarnation == self.event_loop.incarnation;
        for source in &handover.shards {
            if is_own(source) && self.take_own(source, &mut shard, placement.slots()).await? {
                continue;
            }
            let request = ReadHandoverRequest {
                generation: generation.0,
                slot: slot.0,
                incarnation: source.incarnation.0,
                version: source.version.0,
                placement: serde_json::to_vec(placement).expect("records are plain data").into(),
            };
            let mut channel = self.dial(source).await?;
            let read = async {
                let request = vec![framed(&request)];
                let begun = call(&mut channel, TensorMethod::ReadHandover, request);
                let mut body = timeout(SILENCE_MAX, begun).await.map_err(|_| silent())??;
                state::receive_part(handover, &mut shard, &mut body).await
            };
            let failed = |status: Status| format!("slot {}: {}", source.slot, status.message());
            read.await.map_err(failed)?;
        }
        info!(version = handover.position.version.0, "read the shard from the slots before");
        state::end(shard).map_err(|status| status.message().to_owned())
    }

    /// Takes what this pserver hands over to itself; returns whether it could: rows are copied as those of others.
    async fn take_own(
        &self,
        source: &ShardRecord,
        shard: &mut Assembly<'_>,
        slots: u32,
    ) -> Result<bool, String> {
        let (version, reader) = (source.version, self.event_loop.slot);
        let own = self.event_loop.call(|reply| Event::ReadHandover { version, reply }).await;
        let snapshot = own.map_err(|error| error.to_string())?.snapshot;
        if !snapshot.tables.expire_after().is_empty() {
            return Ok(false);
        }
        let twice = |number| format!("block {number} is in another shard as well");
        shard.take(&snapshot.shard).map_err(twice)?;
        self.event_loop.send(Event::HandoverSent { reader, slots }).await;
        Ok(true)
    }

    /// Connects to the pserver that has the shard of a slot.
    async fn dial(&self, source: &ShardRecord) -> Result<Channel, String> {
        let entry = self.etcd.get(&self.keys.ps(source.slot)).await;
        let entry = entry.map_err(|error| error.to_string())?;
        let holder = entry.and_then(|it| Some((it.json::<PserverRecord>().ok()?, it)));
        let lost = || format!("slot {} has lost its memory", source.slot);
        let (record, entry) = holder.ok_or_else(lost)?;
        if record.incarnation(entry.create_revision) != source.incarnation {
            return Err(lost());
        }
        self.tls.dial(&record.address, Role::Pserver)
    }
}

fn silent() -> Status {
    status(ErrorKind::Unavailable, "no answer")
}

async fn load(
    event_loop: &EventLoopHandle,
    etcd: &Etcd,
    keys: &Keys,
    shards: &ShardStore,
    id: &str,
    placement: &PlacementRecord,
) -> Result<LoadedShard, LoadError> {
    let manifest: Option<CheckpointRecord> = etcd.get_json(&keys.checkpoint(id)).await?;
    let manifest = manifest.ok_or(LoadError::NoManifest)?;
    Ok(shards.load(&manifest, event_loop.slot, placement).await?)
}

/// Reports damage to the acting master, which rolls the job back to the previous checkpoint.
async fn report_damage(
    etcd: &Etcd,
    keys: &Keys,
    tls: &TlsIdentity,
    generation: Generation,
    id: &str,
    reason: &str,
) {
    let request = ReportDamageRequest {
        generation: generation.0,
        checkpoint: id.to_owned(),
        reason: reason.to_owned(),
    };
    let reported = async {
        let mut master = master::acting(etcd, keys, tls).await?;
        master.report_damage(request).await.map_err(|status| status.message().to_owned())
    };
    match timeout(CALL_MAX, reported).await {
        Ok(Ok(_)) => {}
        Ok(Err(reason)) => warn!(reason, "damage not reported yet"),
        Err(_) => warn!("damage not reported yet: timeout"),
    }
}
