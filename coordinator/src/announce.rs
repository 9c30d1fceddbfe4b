//! Workers that a coordinator finds in etcd: they announce their address there, as long as they run.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use steadfast_common::records::closures::WorkerRecord;
use steadfast_common::records::keys::Keys;
use steadfast_coord::{CoordError, Etcd, Mirror, Range, Session, View};
use steadfast_host::random;
use steadfast_host::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::workers::WorkerSet;

/// The pause after a failure of etcd.
const RETRY: Duration = Duration::from_millis(500);

/// Tells a worker where to announce itself.
#[derive(Clone, Debug)]
pub struct Announcement {
    pub etcd: Etcd,
    pub keys: Keys,
    /// `host:port` at which coordinators connect to the worker.
    pub address: String,
    pub lease_ttl: Duration,
}

impl Announcement {
    /// Keeps the worker announced until it leaves.
    pub(crate) async fn keep(self, leaves: CancellationToken) {
        loop {
            let lasts = tokio::select! {
                biased;
                () = leaves.cancelled() => return,
                session = self.announce() => session,
            };
            let session = match lasts {
                Ok(session) => session,
                Err(error) => {
                    warn!(%error, "the worker is not announced");
                    sleep(RETRY).await;
                    continue;
                }
            };
            info!(address = self.address, "the worker is announced");
            tokio::select! {
                biased;
                () = leaves.cancelled() => {
                    session.close(&self.etcd).await;
                    return;
                }
                () = session.lost() => {}
            }
        }
    }

    async fn announce(&self) -> Result<Session, CoordError> {
        let session = Session::open_with_retry(&self.etcd, self.lease_ttl).await?;
        let record = WorkerRecord { address: self.address.clone() };
        let value = serde_json::to_vec(&record).expect("records are plain data");
        let key = self.keys.closure_worker(random::uuid());
        // No other worker has the key.
        let _ = self.etcd.create(&key, &value, session.lease()).await?;
        Ok(session)
    }
}

/// Adds and stops workers as they are announced, for as long as the coordinator runs.
pub(crate) async fn discover(workers: Arc<WorkerSet>, etcd: Etcd, keys: Keys) {
    let mirror = loop {
        match Mirror::start(&etcd, Range::Prefix(keys.closure_workers_prefix())).await {
            Ok(mirror) => break mirror,
            Err(error) => {
                warn!(%error, "cannot find the workers of the job");
                sleep(RETRY).await;
            }
        }
    };
    let mut changes = mirror.subscribe();
    let mut known = BTreeSet::new();
    loop {
        let found = addresses(&changes.borrow_and_update());
        for address in found.difference(&known) {
            if let Err(failure) = workers.add(address) {
                warn!(address, %failure, "a worker is announced that cannot be added");
            }
        }
        for address in known.difference(&found) {
            // What it runs goes on: only etcd may have lost it.
            let _ = workers.remove(address);
        }
        known = found;
        if changes.changed().await.is_err() {
            return;
        }
    }
}

fn addresses(view: &View) -> BTreeSet<String> {
    let records = view.entries.iter().filter_map(|(key, entry)| {
        let record = entry.json::<WorkerRecord>();
        record.inspect_err(|error| warn!(key, %error, "cannot read a key")).ok()
    });
    records.map(|record| record.address).collect()
}
