//! Revokes the leases of dead members before they expire.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use steadfast_coord::{Etcd, View};
use steadfast_host::task::{Task, spawn};
use steadfast_process::{is_on_this_host, until_dead};
use tracing::{debug, info};

/// One watcher for each key of a member.
#[derive(Debug)]
pub struct FailureDetector {
    etcd: Etcd,
    /// Whether the job runs on this host only. Otherwise a loopback address may be that of another host.
    one_host: bool,
    /// By key: the lease that it is bound to, and the task that watches its owner.
    watchers: BTreeMap<String, (i64, Task<()>)>,
    /// The views that were followed last.
    followed: Vec<Arc<View>>,
}

impl FailureDetector {
    /// Returns a failure detector without watchers. `own` is the address at which others reach this
    /// process.
    pub fn new(etcd: &Etcd, own: &str) -> Self {
        let one_host = is_on_this_host(own);
        Self { etcd: etcd.clone(), one_host, watchers: BTreeMap::new(), followed: Vec::new() }
    }

    /// Watches the owners of exactly the keys in the views. The owner of a key listens at the `liveness`
    /// address in its value, or else at the `admin` address.
    pub fn follow(&mut self, views: &[Arc<View>]) {
        let is_same = |(one, other): (&Arc<View>, &Arc<View>)| Arc::ptr_eq(one, other);
        if self.followed.len() == views.len() && self.followed.iter().zip(views).all(is_same) {
            return;
        }
        self.followed = views.to_vec();
        self.watchers.retain(|key, (lease, watcher)| {
            let entry = views.iter().find_map(|view| view.entries.get(key));
            let is_same = entry.is_some_and(|entry| entry.lease == *lease);
            if !is_same {
                watcher.abort();
            }
            is_same
        });
        for (key, entry) in views.iter().flat_map(|view| &view.entries) {
            if entry.lease == 0 || self.watchers.contains_key(key) {
                continue;
            }
            let Ok(member) = entry.json::<Value>() else { continue };
            let watched = member["liveness"].as_str().or_else(|| member["admin"].as_str());
            let Some(watched) = watched.filter(|address| !address.is_empty()) else { continue };
            // A member whose address is on another host has a loopback of its own.
            let is_here = |it: &str| is_on_this_host(it) && self.one_host;
            let is_elsewhere = member["address"].as_str().is_some_and(|it| !is_here(it));
            if is_on_this_host(watched) && (is_elsewhere || !self.one_host) {
                continue;
            }
            let watcher = watch(self.etcd.clone(), key.clone(), watched.to_owned(), entry.lease);
            self.watchers.insert(key.clone(), (entry.lease, spawn(watcher)));
        }
    }
}

impl Drop for FailureDetector {
    fn drop(&mut self) {
        self.watchers.values().for_each(|(_, watcher)| watcher.abort());
    }
}

async fn watch(etcd: Etcd, key: String, address: String, lease: i64) {
    until_dead(&address).await;
    info!(key, address, "member is dead; revoking its lease");
    // A false detection is safe: all writes of the member are fenced, and a live one registers again.
    if let Err(error) = etcd.revoke(lease).await {
        debug!(key, %error, "lease not revoked; it will expire");
    }
}
