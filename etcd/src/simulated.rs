//! A server without port and disk, for simulations: the same core, node and services as
//! [`crate::Server`]; the caller stores the log.

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

/// A running server in a simulation.
pub struct Simulated {
    node: Arc<Node>,
    address: SocketAddr,
}

/// Facts that are not on disk yet.
pub struct Unwritten(crate::node::Batch);

impl Unwritten {
    /// Returns the bytes to append to the log.
    pub fn bytes(&self) -> &[u8] {
        &self.0.facts
    }

    /// Returns the latest revision among the facts to append.
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
    /// Starts a server with the contents of a log. `address` is the address in the member list.
    ///
    /// # Errors
    /// If the log is not one that earlier servers have written.
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

    pub fn routes(&self) -> Routes {
        server::routes(&self.node, self.address, Duration::from_secs(600))
    }

    /// Revokes expired leases; never returns.
    pub async fn expire_leases(&self) {
        match server::expire_leases(&self.node).await {}
    }

    /// Waits for facts to write. Replies that depend on them wait for [`Simulated::written`].
    pub async fn unwritten(&self) -> Unwritten {
        loop {
            let has_work = self.node.has_work();
            if let Some(batch) = self.node.try_batch() {
                return Unwritten(batch);
            }
            has_work.await;
        }
    }

    /// Reports that the facts are on disk, whose size is now `disk_bytes`.
    pub fn written(&self, unwritten: &Unwritten, disk_bytes: u64) {
        self.node.written(&unwritten.0, disk_bytes);
    }

    /// Ends all streams, like a server that loses its leader.
    pub fn end(&self) {
        self.node.end(Stage::Stopped);
    }

    /// Returns the changes of every revision after `known` that is not compacted, on disk or not.
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

    /// Returns the current value of a key, on disk or not.
    pub fn get(&self, key: &[u8]) -> Option<Changed> {
        let of = |kv: &Arc<PbKeyValue>| Changed {
            key: kv.key.clone(),
            value: Some(kv.value.clone()),
            create_revision: kv.create_revision,
            version: kv.version,
        };
        self.node.peek(|core| core.history().get(key, Revision::MAX).map(of))
    }

    /// Returns the current keys with `prefix`, on disk or not.
    pub fn keys(&self, prefix: &[u8]) -> Vec<Vec<u8>> {
        self.node.peek(|core| {
            let all = core.history().scan(Span::From(prefix), Revision::MAX);
            let below = all.take_while(|kv| kv.key.starts_with(prefix));
            below.map(|kv| kv.key.clone()).collect()
        })
    }

    /// Returns the latest revision, on disk or not.
    pub fn revision(&self) -> Revision {
        self.node.peek(Core::revision)
    }

    /// Compacts the history before `revision`, if possible.
    pub fn compact(&self, revision: Revision) {
        self.node.decide(|core| core.compact(revision).ok().and_then(|it| it.fact));
    }

    /// Puts a key without a client, like an operator with etcdctl.
    pub fn put(&self, key: &[u8], value: &[u8]) {
        let (key, value) = (key.to_vec(), value.to_vec());
        let request = PbPutRequest { key, value, ..PbPutRequest::default() };
        let Ok(request) = Checked::new(request) else { return };
        self.node.decide(|core| core.put(&request).ok().and_then(|it| it.fact));
    }
}
