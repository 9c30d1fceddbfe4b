//! A server without a port and a disk of its own, for simulations: the same core, node and services
//! as [`crate::Server`], with a log that is kept by whoever runs it.

use crate::core::{Change, Checked, Core, Retention, Revision, Span};
use crate::disk;
use crate::error::Error;
use crate::node::{Node, Stage};
use crate::server;
use etcd_client::proto::{PbKeyValue, PbPutRequest};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tonic::service::Routes;

/// A server between its start and its crash.
pub struct Simulated {
    node: Arc<Node>,
    address: SocketAddr,
}

/// Facts that wait to be written.
pub struct Unwritten(crate::node::Batch);

impl Unwritten {
    /// What the log is to be continued with.
    pub fn bytes(&self) -> &[u8] {
        &self.0.facts
    }

    /// The latest revision among them.
    pub fn revision(&self) -> Revision {
        self.0.revision
    }
}

/// A key that was put (with its value) or deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    pub key: Vec<u8>,
    /// Absent when the key was deleted.
    pub value: Option<Vec<u8>>,
    pub create_revision: Revision,
    pub version: i64,
}

impl Simulated {
    /// Starts with what a log holds. `address` is told to those who ask for the members.
    ///
    /// # Errors
    /// If the log is not what earlier servers have written.
    pub fn start(log: &[u8], address: SocketAddr) -> Result<Self, Error> {
        let mut core = Core::default();
        disk::fold(log, &mut core).map_err(|reason| Error::Corrupt {
            path: "log".into(),
            offset: 0,
            reason,
        })?;
        let node = Arc::new(Node::new(core, Retention::default(), log.len() as u64));
        Ok(Self { node, address })
    }

    /// The services.
    pub fn routes(&self) -> Routes {
        server::routes(&self.node, self.address, Duration::from_secs(600))
    }

    /// Ends leases whose time is over, for ever.
    pub async fn expire_leases(&self) {
        match server::expire_leases(&self.node).await {}
    }

    /// Waits for something to be written. Answers that tell of it wait for [`Simulated::written`].
    pub async fn unwritten(&self) -> Unwritten {
        loop {
            let stirred = self.node.stirred();
            if let Some(batch) = self.node.try_batch() {
                return Unwritten(batch);
            }
            stirred.await;
        }
    }

    /// The facts are on disk, which holds `disk_bytes` now.
    pub fn written(&self, unwritten: &Unwritten, disk_bytes: u64) {
        self.node.written(&unwritten.0, disk_bytes);
    }

    /// Ends all streams, as a server that loses its leader does.
    pub fn end(&self) {
        self.node.end(Stage::Stopped);
    }

    /// The changes of every revision after `known` that is not compacted, written or not.
    pub fn changes_after(&self, known: Revision) -> Vec<(Revision, Vec<Changed>)> {
        self.node.peek(|core| {
            let writes = core.history().writes(known + 1, core.revision());
            let of = |change: &Change| Changed {
                key: change.key().to_vec(),
                value: change.kv().map(|kv| kv.value.clone()),
                create_revision: change.kv().map_or(0, |kv| kv.create_revision),
                version: change.kv().map_or(0, |kv| kv.version),
            };
            writes.map(|write| (write.revision, write.changes.iter().map(of).collect())).collect()
        })
    }

    /// What a key holds now, written or not.
    pub fn get(&self, key: &[u8]) -> Option<Changed> {
        let of = |kv: &Arc<PbKeyValue>| Changed {
            key: kv.key.clone(),
            value: Some(kv.value.clone()),
            create_revision: kv.create_revision,
            version: kv.version,
        };
        self.node.peek(|core| core.history().get(key, Revision::MAX).map(of))
    }

    /// The keys that begin with `prefix` now, written or not.
    pub fn keys(&self, prefix: &[u8]) -> Vec<Vec<u8>> {
        self.node.peek(|core| {
            let all = core.history().scan(Span::From(prefix), Revision::MAX);
            let below = all.take_while(|kv| kv.key.starts_with(prefix));
            below.map(|kv| kv.key.clone()).collect()
        })
    }

    /// The latest revision, written or not.
    pub fn revision(&self) -> Revision {
        self.node.peek(Core::revision)
    }

    /// Drops history before `revision`, if there is any.
    pub fn compact(&self, revision: Revision) {
        self.node.decide(|core| core.compact(revision).ok().and_then(|it| it.fact));
    }

    /// Puts a key, as somebody with etcdctl does.
    pub fn put(&self, key: &[u8], value: &[u8]) {
        let (key, value) = (key.to_vec(), value.to_vec());
        let request = PbPutRequest { key, value, ..PbPutRequest::default() };
        let Ok(request) = Checked::new(request) else { return };
        self.node.decide(|core| core.put(&request).ok().and_then(|it| it.fact));
    }
}
