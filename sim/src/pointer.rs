//! Whether the pointer to the latest checkpoint names one that is whole.

use std::collections::BTreeMap;

use futures::FutureExt;
use safetensors::SafeTensors;
use steadfast_audit::history::Revision;
use steadfast_common::keys::Keys;
use steadfast_common::records::CheckpointRecord;

use crate::store::Store;

/// The checkpoints that etcd names.
#[derive(Debug, Default)]
pub struct Pointer {
    manifests: BTreeMap<String, CheckpointRecord>,
    latest: Option<String>,
    has_moved: bool,
}

impl Pointer {
    /// Takes a revision in.
    pub fn follow(&mut self, keys: &Keys, revision: &Revision) {
        for change in &revision.changes {
            if change.key == keys.checkpoint_latest() {
                let id = change.value.as_deref().and_then(|it| serde_json::from_str(it).ok());
                (self.latest, self.has_moved) = (id, true);
            } else if let Some(id) = change.key.strip_prefix(&keys.checkpoints_prefix()) {
                let record = change.value.as_deref().and_then(|it| serde_json::from_str(it).ok());
                match record {
                    Some(record) => drop(self.manifests.insert(id.to_owned(), record)),
                    None => drop(self.manifests.remove(id)),
                }
            }
        }
    }

    /// Whether it names another one since this was asked last.
    pub fn has_moved(&mut self) -> bool {
        std::mem::take(&mut self.has_moved)
    }

    /// What is not finite in the checkpoint that it names.
    pub fn has_diverged(&self, store: &Store) -> Option<String> {
        let latest = self.latest.as_ref()?;
        self.manifests.get(latest)?.shards.iter().find_map(|shard| {
            let bytes = store.read(&shard.object).now_or_never()??;
            let tensors = SafeTensors::deserialize(&bytes).ok()?;
            let (name, _) = tensors.iter().find(|(_, tensor)| {
                let mut values = tensor.data().as_chunks().0.iter();
                values.any(|it| !f32::from_le_bytes(*it).is_finite())
            })?;
            Some(format!("I11: `{name}` is not finite in {latest}, which is committed"))
        })
    }

    /// What is missing of the checkpoint that it names.
    pub fn is_dangling(&self, store: &Store) -> Option<String> {
        let latest = self.latest.as_ref()?;
        let Some(record) = self.manifests.get(latest) else {
            return Some(format!("I9: the pointer names {latest}, which has no manifest"));
        };
        let missing = record.shards.iter().find(|shard| !store.has(&shard.object))?;
        Some(format!("I9: the pointer names {latest}, whose shard {} is gone", missing.object))
    }
}
