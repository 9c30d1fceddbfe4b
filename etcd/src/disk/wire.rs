//! The encoding of facts and images. Tags never change, because old files must stay readable.

use crate::core::{Change, Core, Fact, HistoryImage, Image, LeaseId, Revision, Write};
use etcd_client::proto::PbKeyValue;
use prost::{Message, Oneof};
use std::sync::Arc;

/// The reason why bytes with a valid checksum cannot be decoded.
pub type Reason = String;

/// The payload of one frame of the log.
#[derive(Clone, PartialEq, Message)]
pub struct LogBatch {
    #[prost(message, repeated, tag = "1")]
    pub facts: Vec<StoredFact>,
}

#[derive(Clone, PartialEq, Message)]
pub struct StoredFact {
    #[prost(oneof = "FactBody", tags = "1, 2, 3, 4")]
    body: Option<FactBody>,
}

#[derive(Clone, PartialEq, Oneof)]
enum FactBody {
    #[prost(message, tag = "1")]
    Written(WireWrite),
    #[prost(message, tag = "2")]
    LeaseGranted(WireLease),
    #[prost(message, tag = "3")]
    LeaseEnded(WireLeaseEnded),
    #[prost(int64, tag = "4")]
    Compacted(Revision),
}

#[derive(Clone, PartialEq, Message)]
pub struct WireWrite {
    #[prost(int64, tag = "1")]
    revision: Revision,
    #[prost(message, repeated, tag = "2")]
    changes: Vec<WireChange>,
}

#[derive(Clone, PartialEq, Message)]
struct WireChange {
    #[prost(oneof = "ChangeBody", tags = "1, 2")]
    body: Option<ChangeBody>,
}

#[derive(Clone, PartialEq, Oneof)]
enum ChangeBody {
    #[prost(message, tag = "1")]
    Put(PbKeyValue),
    #[prost(bytes, tag = "2")]
    Delete(Vec<u8>),
}

#[derive(Clone, PartialEq, Message)]
pub struct WireLease {
    #[prost(int64, tag = "1")]
    id: LeaseId,
    #[prost(int64, tag = "2")]
    ttl_s: i64,
}

#[derive(Clone, PartialEq, Message)]
struct WireLeaseEnded {
    #[prost(int64, tag = "1")]
    id: LeaseId,
    #[prost(message, optional, tag = "2")]
    write: Option<WireWrite>,
}

/// The payload of one frame of a snapshot: the next part of each list. Only the last frame of a snapshot
/// has an end.
#[derive(Clone, PartialEq, Message)]
pub struct SnapshotBatch {
    #[prost(message, repeated, tag = "1")]
    pub kept: Vec<PbKeyValue>,
    #[prost(message, repeated, tag = "2")]
    pub writes: Vec<WireWrite>,
    #[prost(message, repeated, tag = "3")]
    pub leases: Vec<WireLease>,
    #[prost(message, optional, tag = "4")]
    pub end: Option<SnapshotEnd>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SnapshotEnd {
    #[prost(int64, tag = "1")]
    pub revision: Revision,
    #[prost(int64, tag = "2")]
    pub compacted: Revision,
}

/// Appends a fact to an encoded [`LogBatch`]; encoded batches can be concatenated.
pub fn append_fact(batch: &mut Vec<u8>, fact: &Fact) {
    let one = LogBatch { facts: vec![StoredFact::from(fact)] };
    one.encode(batch).expect("a vector takes any number of bytes");
}

/// Folds the facts of an encoded [`LogBatch`] into a store.
pub fn fold(batch: &[u8], core: &mut Core) -> Result<(), Reason> {
    let batch = LogBatch::decode(batch).map_err(|error| error.to_string())?;
    for fact in batch.facts {
        let fact = Fact::try_from(fact)?;
        if !core.is_next(&fact) {
            return Err(format!("a record does not follow revision {}", core.revision()));
        }
        core.evolve(fact, 0);
    }
    Ok(())
}

impl From<&Fact> for StoredFact {
    fn from(fact: &Fact) -> Self {
        let body = match fact {
            Fact::Written(write) => FactBody::Written(write.into()),
            Fact::LeaseGranted { id, ttl_s } => {
                FactBody::LeaseGranted(WireLease { id: *id, ttl_s: *ttl_s })
            }
            Fact::LeaseEnded { id, write } => FactBody::LeaseEnded(WireLeaseEnded {
                id: *id,
                write: write.as_ref().map(WireWrite::from),
            }),
            Fact::Compacted { revision } => FactBody::Compacted(*revision),
        };
        StoredFact { body: Some(body) }
    }
}

impl TryFrom<StoredFact> for Fact {
    type Error = Reason;

    fn try_from(wire: StoredFact) -> Result<Self, Reason> {
        let body = wire.body.ok_or("a record has an unknown kind")?;
        Ok(match body {
            FactBody::Written(write) => Fact::Written(write.try_into()?),
            FactBody::LeaseGranted(WireLease { id, ttl_s }) => Fact::LeaseGranted { id, ttl_s },
            FactBody::LeaseEnded(WireLeaseEnded { id, write }) => {
                Fact::LeaseEnded { id, write: write.map(Write::try_from).transpose()? }
            }
            FactBody::Compacted(revision) => Fact::Compacted { revision },
        })
    }
}

impl From<&Write> for WireWrite {
    fn from(write: &Write) -> Self {
        let changes = write.changes.iter().map(|change| match change {
            Change::Put(kv) => ChangeBody::Put(kv.as_ref().clone()),
            Change::Delete(key) => ChangeBody::Delete(key.clone()),
        });
        let changes = changes.map(|body| WireChange { body: Some(body) }).collect();
        WireWrite { revision: write.revision, changes }
    }
}

impl TryFrom<WireWrite> for Write {
    type Error = Reason;

    fn try_from(wire: WireWrite) -> Result<Self, Reason> {
        let changes = wire.changes.into_iter().map(|change| match change.body {
            Some(ChangeBody::Put(kv)) => Ok(Change::Put(Arc::new(kv))),
            Some(ChangeBody::Delete(key)) => Ok(Change::Delete(key)),
            None => Err("a change has an unknown kind"),
        });
        Ok(Write { revision: wire.revision, changes: changes.collect::<Result<_, _>>()? })
    }
}

impl From<(LeaseId, i64)> for WireLease {
    fn from((id, ttl_s): (LeaseId, i64)) -> Self {
        WireLease { id, ttl_s }
    }
}

/// Assembles the frames of a snapshot into an image.
#[derive(Default)]
pub struct Assembly {
    kept: Vec<Arc<PbKeyValue>>,
    writes: Vec<Arc<Write>>,
    leases: Vec<(LeaseId, i64)>,
    end: Option<SnapshotEnd>,
}

impl Assembly {
    pub fn add(&mut self, batch: SnapshotBatch) -> Result<(), Reason> {
        if self.end.is_some() {
            return Err("data follow the end".into());
        }
        self.kept.extend(batch.kept.into_iter().map(Arc::new));
        for write in batch.writes {
            self.writes.push(Arc::new(write.try_into()?));
        }
        self.leases.extend(batch.leases.into_iter().map(|lease| (lease.id, lease.ttl_s)));
        self.end = batch.end;
        Ok(())
    }

    pub fn finish(self) -> Result<Image, Reason> {
        let end = self.end.ok_or("the end is missing")?;
        let SnapshotEnd { revision, compacted } = end;
        let history = HistoryImage { revision, compacted, kept: self.kept, writes: self.writes };
        if !history.is_sound() {
            return Err(format!("the history up to revision {revision} is not valid"));
        }
        Ok(Image { history, leases: self.leases })
    }
}
