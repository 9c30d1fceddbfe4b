//! Reads the durable state of an elastic job from etcd, and writes its facts.

use std::collections::BTreeMap;
use std::sync::Arc;

use steadfast_common::ids::{Incarnation, NodeId, Round};
use steadfast_common::job::elastic::AnyJobRecord;
use steadfast_common::records::commits::DealtRecord;
use steadfast_common::records::keys::{Keys, TagKey};
use steadfast_common::records::rendezvous::{AgentRecord, NodeRecord, ReleaseRecord, RoundRecord};
use steadfast_common::status::ElasticStatus;
use steadfast_coord::{CoordError, Etcd, Op, Transaction, now};
use steadfast_master_core::rendezvous::{Fact, InvalidRecord, Rendezvous, Timers};
use steadfast_process::Failure;
use tracing::warn;

use super::launch::launcher_status;
use super::{settings, status};

/// Reads the status of an elastic job from etcd, for when no master answers because of `error`. Waits begin now,
/// as for a new master. Returns `None` if etcd has no elastic job.
///
/// # Errors
/// If etcd does not answer, or a value cannot be parsed.
pub async fn stored_elastic_status(
    etcd: &Etcd,
    keys: &Keys,
    error: String,
) -> Result<Option<ElasticStatus>, Failure> {
    let record: Option<AnyJobRecord> = etcd.get_json(&keys.job()).await?;
    let spec = match record {
        Some(AnyJobRecord::Elastic(record)) => record.spec,
        Some(AnyJobRecord::Training(_)) | None => return Ok(None),
    };
    let settings = settings(&spec, keys)?;
    let mut state = read(etcd, keys).await?;
    let mut live: BTreeMap<(NodeId, Incarnation), AgentRecord> = BTreeMap::new();
    for (key, entry) in &etcd.list(&keys.agents_prefix()).await?.entries {
        if let Some(node) = keys.agent_of(key) {
            live.insert((node, Incarnation(entry.create_revision)), entry.json()?);
        }
    }
    if state.result().is_none() {
        // What the next master does first.
        let lost: Vec<_> = state.known().filter(|known| !live.contains_key(known)).collect();
        lost.into_iter().for_each(|(node, _)| state.evolve(&Fact::Removed { node }));
    }
    let mut timers = Timers::default();
    timers.follow(now(), &state, &settings);
    let mut status = status::of(&spec.name, &settings, &state, &timers);
    for node in &mut status.nodes {
        if let Some(record) = live.get(&(node.node, node.incarnation)) {
            status::add_registration(node, record);
        }
    }
    status.launcher = launcher_status(keys, &etcd.list(&keys.launch_prefix()).await?);
    status.error = Some(error);
    Ok(Some(status))
}

/// Reads the records of a job, and applies them as the facts that were committed.
///
/// # Errors
/// If etcd does not answer, or a value cannot be parsed.
pub(super) async fn read(etcd: &Etcd, keys: &Keys) -> Result<Rendezvous, CoordError> {
    let mut facts = Vec::new();
    // Before the round: no node asked for a later one, whatever the master does meanwhile.
    for (key, entry) in &etcd.list(&keys.nodes_prefix()).await?.entries {
        match keys.node_of(key) {
            Some(node) => facts.push(Fact::Node { node, record: entry.json::<NodeRecord>()? }),
            None => warn!(key, "unknown key ignored"),
        }
    }
    let round: Option<RoundRecord> = etcd.get_json(&keys.formed_round()).await?;
    let number = round.as_ref().map_or(Round(0), |record| record.round);
    facts.extend(round.map(|record| Fact::Formed(Arc::new(record))));
    for (key, entry) in &etcd.list_large(&keys.tags_prefix(number)).await?.entries {
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
    for (key, entry) in &etcd.list_large(&keys.dealt_prefix(number)).await?.entries {
        match keys.dealt_to(number, key) {
            Some(node) => {
                let record = Arc::new(entry.json::<DealtRecord>()?);
                facts.push(Fact::Dealt { round: number, node, record });
            }
            None => warn!(key, "unknown key ignored"),
        }
    }
    let commit = etcd.get_json(&keys.commit()).await?;
    facts.extend(commit.map(|record| Fact::Committed(Arc::new(record))));
    let scale = etcd.get_json(&keys.workers_desired()).await?;
    facts.extend(scale.map(|record| Fact::Scaled(Arc::new(record))));
    let shared = etcd.get_json(&keys.shared_state()).await?;
    facts.extend(shared.map(|record| Fact::Shared(Arc::new(record))));
    let result = etcd.get_json(&keys.result()).await?;
    facts.extend(result.map(|record| Fact::Ended(Arc::new(record))));
    Rendezvous::from_records(facts).map_err(|error| {
        let key = match &error {
            InvalidRecord::Slots { node, .. } | InvalidRecord::FutureRound { node, .. } => {
                keys.node(*node)
            }
            InvalidRecord::Round(_) => keys.formed_round(),
            InvalidRecord::Phase { tag, .. } => keys.released(number, tag),
            InvalidRecord::Dealt { node, .. } | InvalidRecord::DealtTwice { node } => {
                keys.dealt(number, *node)
            }
            InvalidRecord::Commit { .. } => keys.commit(),
            InvalidRecord::Token(_) => keys.shared_state(),
        };
        CoordError::BadValue { key, reason: error.to_string() }
    })
}

/// Adds the key changes of a fact to a transaction.
pub(super) fn write(keys: &Keys, fact: &Fact, to: &mut Transaction) {
    match fact {
        Fact::Node { node, record } => to.add(Op::put(&keys.node(*node), record)),
        Fact::Removed { node } => to.add(Op::delete(&keys.node(*node))),
        Fact::Formed(record) => to.add(Op::put(&keys.formed_round(), &**record)),
        Fact::TagsDeleted { round } => to.delete_all(&keys.tags_prefix(*round)),
        Fact::Entered { round, tag, phase, node, data } => {
            let key = keys.entry(*round, tag, *phase, *node);
            to.add(Op::put_leased(&key, data.to_vec(), 0));
        }
        Fact::Released { round, tag, phase } => {
            to.add(Op::put(&keys.released(*round, tag), &ReleaseRecord { phase: *phase }));
        }
        Fact::EntriesDeleted { round, tag, phase } => {
            to.delete_all(&keys.entries_prefix(*round, tag, *phase));
        }
        Fact::Dealt { round, node, record } => {
            to.add(Op::put(&keys.dealt(*round, *node), &**record));
        }
        Fact::DealtDeleted { round } => to.delete_all(&keys.dealt_prefix(*round)),
        Fact::Committed(record) => to.add(Op::put(&keys.commit(), &**record)),
        Fact::Scaled(record) => to.add(Op::put(&keys.workers_desired(), &**record)),
        Fact::Shared(record) => to.add(Op::put(&keys.shared_state(), &**record)),
        Fact::Ended(record) => to.add(Op::put(&keys.result(), &**record)),
    }
}
