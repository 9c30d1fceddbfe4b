//! Audits each checkpoint that a run commits, with the evidence that `steadfast audit` would read.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use futures::FutureExt;
use steadfast_audit::history::Revision;
use steadfast_audit::{CheckpointEvidence, Evidence, Group, Severity, SlotCounts, audit};
use steadfast_checkpoint::{AppliedToBlocks, CheckpointError, applied_by_slot, verify};
use steadfast_common::job::dataset::Manifest;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::stream::StreamPassRecord;
use steadfast_common::records::{CheckpointRecord, JobRecord};
use steadfast_store::{Location, Mounted};

use crate::cluster::PERSON;
use crate::fault::Scene;
use crate::host::{Addresses, Simulated, enter};
use crate::world::Clock;

/// URL at which the objects of the simulated store can be read at once and without failures.
const STORE: &str = "audited://store/";

/// Everything that an audit reads of a run.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// The manifest of the dataset; without records if it is a stream.
    pub manifest: Manifest,
    /// All revisions of etcd.
    pub revisions: Vec<Revision>,
    /// The evidence at each commit of a checkpoint, and at the end of the job.
    pub evidence: Vec<Evidence>,
}

/// Follows etcd and audits the latest checkpoint whenever there is a new one.
pub struct Auditor<'a> {
    keys: &'a Keys,
    /// Holds the values of etcd by key.
    values: BTreeMap<String, String>,
    /// Whether the latest checkpoint or the result has changed since the last audit.
    is_due: bool,
    host: Arc<Simulated>,
    store: Location,
    _mounted: Mounted,
    /// Number of audits so far.
    pub audits: u64,
    /// Collects what was read so far, if it is wanted.
    pub recording: Option<Recording>,
}

impl<'a> Auditor<'a> {
    /// Creates an auditor of the job with `keys`, which does nothing of its own in the simulated world.
    ///
    /// # Panics
    /// Never; the URL is valid.
    pub fn new(keys: &'a Keys, scene: &Scene, recording: Option<Recording>) -> Self {
        let process = scene.world.begin("auditor".to_owned(), Clock::right());
        let (world, net) = (&scene.world, &scene.net);
        let host = Simulated::new(world, net, process, PERSON, Addresses::ManyHosts, 0);
        let mounted = steadfast_store::mount(STORE, scene.store.memory());
        Self {
            keys,
            values: BTreeMap::new(),
            is_due: false,
            host: Arc::new(host),
            store: steadfast_store::open(STORE).expect("the URL is valid"),
            _mounted: mounted.expect("the URL is valid"),
            audits: 0,
            recording,
        }
    }

    /// Applies a revision.
    pub fn follow(&mut self, revision: &Revision) {
        for change in &revision.changes {
            let is_news =
                change.key == self.keys.checkpoint_latest() || change.key == self.keys.result();
            self.is_due |= is_news;
            match &change.value {
                Some(value) => drop(self.values.insert(change.key.clone(), value.clone())),
                None => drop(self.values.remove(&change.key)),
            }
        }
        if let Some(recording) = &mut self.recording {
            recording.revisions.push(revision.clone());
        }
    }

    /// Audits the latest checkpoint, or the final one, if it is new; returns the violations.
    pub fn check(&mut self) -> Vec<String> {
        if !std::mem::take(&mut self.is_due) {
            return Vec::new();
        }
        // The store in memory never waits.
        let read = enter(&self.host.clone(), || self.evidence().now_or_never());
        let evidence = match read.expect("the store in memory never waits") {
            Ok(Some(evidence)) => evidence,
            Ok(None) => return Vec::new(),
            // A fault has corrupted it; the programs that restore it find that.
            Err(Unread::Checkpoint(CheckpointError::Damaged { .. })) => return Vec::new(),
            Err(error) => return vec![format!("the evidence of an audit: {error}")],
        };
        let report = audit(&evidence);
        self.audits += 1;
        let found = report.of(Severity::Violation).map(|it| format!("audit: {}", it.text));
        let found = found.collect();
        if let Some(recording) = &mut self.recording {
            recording.evidence.push(evidence);
        }
        found
    }

    /// Reads the evidence of the latest or the final checkpoint, if there is one.
    async fn evidence(&self) -> Result<Option<Evidence>, Unread> {
        let Some(latest) = self.value::<String>(&self.keys.checkpoint_latest()) else {
            return Ok(None);
        };
        let Some(job) = self.value::<JobRecord>(&self.keys.job()) else { return Ok(None) };
        let values = self.values.iter().map(|(key, value)| (key.as_str(), value.as_bytes()));
        let mut evidence = Evidence::of_etcd(self.keys, job.spec.clone(), values)?;
        evidence.manifest =
            self.manifest(&Manifest::object_name(&job.manifest), &job.manifest).await?;
        for (pass, (record, manifest)) in evidence.stream.iter_mut().flat_map(|it| &mut it.passes) {
            let object = StreamPassRecord::object_name(&job.spec.name, *pass, &record.manifest);
            *manifest = self.manifest(&object, &record.manifest).await?;
        }
        let last = evidence.result.as_ref().and_then(|it| it.checkpoint.clone());
        let id = last.clone().unwrap_or(latest);
        let record: Option<CheckpointRecord> = self.value(&self.keys.checkpoint(&id));
        let record = record.ok_or_else(|| Unread::Missing(self.keys.checkpoint(&id)))?;
        let applied = applied_by_slot(&self.store, &record).await?;
        let slots = applied.into_iter().map(|(slot, applied)| {
            let group = |AppliedToBlocks { counted, blocks }| Group { counted, blocks };
            SlotCounts { slot, groups: applied.into_iter().map(group).collect() }
        });
        let mut checkpoint = CheckpointEvidence::new(id, record.clone(), slots.collect());
        if last.is_some() {
            checkpoint.parameters_sha256 =
                Some(verify(&self.store, &record).await?.parameters_sha256);
        }
        Ok(Some(Evidence { checkpoint: Some(checkpoint), ..evidence }))
    }

    async fn manifest(&self, object: &str, digest: &str) -> Result<Manifest, Unread> {
        let json = self.store.child(object)?.read().await?;
        Manifest::parse(VecDeque::from([json]), digest).map_err(Unread::Manifest)
    }

    fn value<T: serde::de::DeserializeOwned>(&self, key: &str) -> Option<T> {
        serde_json::from_str(self.values.get(key)?).ok()
    }
}

/// Says why the evidence cannot be read.
#[derive(Debug, thiserror::Error)]
enum Unread {
    #[error(transparent)]
    Value(#[from] steadfast_audit::BadValue),
    #[error("there is no `{0}`")]
    Missing(String),
    #[error("a manifest is damaged: {0}")]
    Manifest(String),
    #[error(transparent)]
    Store(#[from] steadfast_store::StoreError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}
