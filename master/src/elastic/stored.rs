//! Reads the durable state of an elastic job from etcd.

use std::sync::Arc;

use steadfast_common::ids::Round;
use steadfast_common::keys::{Keys, TagKey};
use steadfast_common::rendezvous::{NodeRecord, ReleaseRecord, RoundRecord};
use steadfast_coord::{CoordError, Etcd};
use steadfast_master_core::rendezvous::{Fact, Rendezvous};
use tracing::warn;

/// Reads the state: the same facts that were committed.
///
/// # Errors
/// If etcd does not answer, or a value cannot be parsed.
pub(super) async fn read(etcd: &Etcd, keys: &Keys) -> Result<Rendezvous, CoordError> {
    let mut facts = Vec::new();
    let round: Option<RoundRecord> = etcd.get_json(&keys.formed_round()).await?;
    let number = round.as_ref().map_or(Round(0), |record| record.round);
    facts.extend(round.map(|record| Fact::Formed(Arc::new(record))));
    for (key, entry) in &etcd.list(&keys.nodes_prefix()).await?.entries {
        match keys.node_of(key) {
            Some(node) => facts.push(Fact::Node { node, record: entry.json::<NodeRecord>()? }),
            None => warn!(key, "unknown key ignored"),
        }
    }
    for (key, entry) in &etcd.list(&keys.tags_prefix(number)).await?.entries {
        match keys.tag_key_of(number, key) {
            Some(TagKey::Released { tag }) => {
                let ReleaseRecord { phase } = entry.json()?;
                facts.push(Fact::Released { round: number, tag, phase });
            }
            Some(TagKey::Entry { tag, phase, node }) => {
                let data = entry.value.as_slice().into();
                facts.push(Fact::Entered { round: number, tag, phase, node, data });
            }
            None => warn!(key, "unknown key ignored"),
        }
    }
    let shared = etcd.get_json(&keys.shared_state()).await?;
    facts.extend(shared.map(|record| Fact::Shared(Arc::new(record))));
    let result = etcd.get_json(&keys.result()).await?;
    facts.extend(result.map(|record| Fact::Ended(Arc::new(record))));
    Ok(Rendezvous::from_records(facts))
}
