//! The members of the job, as recorded in etcd.

use std::sync::Arc;

use steadfast_common::ids::{Generation, Slot};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{GenerationRecord, InitRecord, PserverRecord};
use steadfast_coord::{CoordError, Etcd, Mirror, Range, View};
use steadfast_master_client::ActingMaster;
use steadfast_net::TlsIdentity;
use tracing::warn;

use crate::ClientError;

/// Mirrors of the keys that a client needs.
#[derive(Debug)]
pub struct Cluster {
    keys: Keys,
    acting: ActingMaster,
    slots: Mirror,
    generation: Mirror,
    init: Mirror,
}

/// The pservers of one generation: one for each slot, as the generation names them.
#[derive(Clone, Debug, PartialEq)]
pub struct PserverSet {
    pub record: GenerationRecord,
    /// The record of the pserver of each slot.
    pub holders: Vec<PserverRecord>,
}

impl Cluster {
    /// Starts to mirror the job's keys. Connections to members use the identity `tls`.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn join(etcd: &Etcd, keys: Keys, tls: TlsIdentity) -> Result<Self, CoordError> {
        let follow = |key: String| Mirror::start(etcd, Range::Key(key));
        Ok(Self {
            acting: ActingMaster::follow(etcd, &keys, tls).await?,
            slots: Mirror::start(etcd, Range::Prefix(keys.ps_prefix())).await?,
            generation: follow(keys.generation()).await?,
            init: follow(keys.init()).await?,
            keys,
        })
    }

    /// Returns the identity for connections to members.
    pub fn tls(&self) -> &TlsIdentity {
        self.acting.tls()
    }

    pub(crate) fn acting(&self) -> &ActingMaster {
        &self.acting
    }

    /// Completes when the job has ended.
    pub async fn job_ended(&self) {
        self.acting.job_ended().await;
    }

    /// Returns the newest generation.
    pub fn generation(&self) -> Option<GenerationRecord> {
        read(&self.generation.view())
    }

    /// Completes when a generation after `known` begins.
    pub async fn generation_after(&self, known: Generation) {
        let mut changes = self.generation.subscribe();
        let is_newer = |view: &Arc<View>| {
            read::<GenerationRecord>(view).is_some_and(|it| known < it.generation)
        };
        let _ = changes.wait_for(is_newer).await;
    }

    /// Returns whether the parameters of a generation have their initial values, from a checkpoint or from the
    /// initializer.
    pub fn is_initialized(&self, generation: Generation) -> bool {
        let init: Option<InitRecord> = read(&self.init.view());
        let is_restored = |it: GenerationRecord| it.generation == generation && it.has_values();
        self.generation().is_some_and(is_restored)
            || init.is_some_and(|init| init.generation == generation && init.done)
    }

    /// Returns a future that completes when the init record changes after this call.
    pub fn init_changed(&self) -> impl Future<Output = ()> + use<> {
        let mut changes = self.init.subscribe();
        changes.mark_unchanged();
        async move {
            let _ = changes.changed().await;
        }
    }

    /// Waits until every slot is held by the pserver that the newest generation names: training requires
    /// the complete set.
    ///
    /// # Errors
    /// If the job ended meanwhile.
    pub async fn pserver_set(&self) -> Result<PserverSet, ClientError> {
        let (mut slots, mut generation) = (self.slots.subscribe(), self.generation.subscribe());
        loop {
            let present = self.present(&slots.borrow_and_update(), &generation.borrow_and_update());
            if let Some(pserver_set) = present {
                return Ok(pserver_set);
            }
            tokio::select! {
                biased;
                _ = slots.changed() => {}
                _ = generation.changed() => {}
                () = self.job_ended() => return Err(ClientError::JobEnded),
            }
        }
    }

    /// Completes when a slot is no longer held by the incarnation that the newest generation names: pushes to
    /// that slot can no longer succeed.
    pub async fn pserver_lost(&self) {
        let (mut slots, mut generation) = (self.slots.subscribe(), self.generation.subscribe());
        loop {
            let present = self.present(&slots.borrow_and_update(), &generation.borrow_and_update());
            if present.is_none() {
                return;
            }
            tokio::select! {
                biased;
                _ = slots.changed() => {}
                _ = generation.changed() => {}
            }
        }
    }

    fn present(&self, slots: &View, generation: &View) -> Option<PserverSet> {
        let record: GenerationRecord = read(generation)?;
        let mut holders = Vec::new();
        for (slot, incarnation) in record.slots.iter().enumerate() {
            let entry = slots.entries.get(&self.keys.ps(Slot(slot as u32)))?;
            let holder: PserverRecord = entry.json().ok()?;
            if holder.incarnation(entry.create_revision) != *incarnation {
                return None;
            }
            holders.push(holder);
        }
        Some(PserverSet { record, holders })
    }
}

/// Reads the only entry of a view. An invalid entry counts as absent and is logged.
fn read<T: serde::de::DeserializeOwned>(view: &View) -> Option<T> {
    view.single().unwrap_or_else(|error| {
        warn!(%error, "cannot read a key");
        None
    })
}
