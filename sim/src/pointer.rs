//! Checks that the pointer to the latest checkpoint names a complete checkpoint.

use std::collections::BTreeMap;

use futures::FutureExt;
use safetensors::SafeTensors;
use steadfast_audit::history::Revision;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{CheckpointRecord, ShardRecord};

use crate::store::Store;

/// The checkpoints in etcd.
#[derive(Debug, Default)]
pub struct Pointer {
    manifests: BTreeMap<String, CheckpointRecord>,
    latest: Option<String>,
    has_moved: bool,
}

impl Pointer {
    /// Applies a revision.
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

    /// Returns whether the pointer has changed since the last call.
    pub fn has_moved(&mut self) -> bool {
        std::mem::take(&mut self.has_moved)
    }

    /// Returns an error if the latest checkpoint contains a value that is not finite.
    pub fn has_diverged(&self, store: &Store) -> Option<String> {
        let latest = self.latest.as_ref()?;
        self.manifests.get(latest)?.shards.iter().flat_map(ShardRecord::objects).find_map(
            |object| {
                let bytes = store.read(&object).now_or_never()??;
                let tensors = SafeTensors::deserialize(&bytes).ok()?;
                let (name, _) = tensors.iter().find(|(_, tensor)| {
                    let mut values = tensor.data().as_chunks().0.iter();
                    values.any(|it| !f32::from_le_bytes(*it).is_finite())
                })?;
                Some(format!("I11: `{name}` is not finite in the committed checkpoint {latest}"))
            },
        )
    }

    /// Returns an error if an object of the latest checkpoint is missing.
    pub fn is_dangling(&self, store: &Store) -> Option<String> {
        let latest = self.latest.as_ref()?;
        let Some(record) = self.manifests.get(latest) else {
            return Some(format!("I9: the pointer names {latest}, which has no manifest"));
        };
        let mut objects = record.shards.iter().flat_map(ShardRecord::objects);
        let missing = objects.find(|object| !store.has(object))?;
        Some(format!("I9: the pointer names {latest}, whose object {missing} is missing"))
    }
}
