//! Ends the leases of members that are seen to be dead, so that nobody waits for them to expire.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use steadfast_coord::{Etcd, View};
use steadfast_host::task::{Task, spawn};
use steadfast_process::{gone, is_on_this_host};
use tracing::{debug, info};

/// One watcher for each key of a member.
#[derive(Debug)]
pub struct Vigils {
    etcd: Etcd,
    /// Whether everybody is on this host; otherwise a loopback address is that of another one.
    one_host: bool,
    /// By key: the lease that it is bound to, and who watches its owner.
    watchers: BTreeMap<String, (i64, Task<()>)>,
}

impl Vigils {
    /// Watches nobody yet. `own` is the address at which others reach us.
    pub fn new(etcd: &Etcd, own: &str) -> Self {
        let one_host = is_on_this_host(own);
        Self { etcd: etcd.clone(), one_host, watchers: BTreeMap::new() }
    }

    /// Watches those whose keys the views show, and nobody else any more. The owner of a key listens
    /// at the `admin` address of its value.
    pub fn follow(&mut self, views: &[Arc<View>]) {
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
            let Some(admin) = member["admin"].as_str() else { continue };
            // Who is reached elsewhere has a loopback of its own.
            let is_here = |it: &str| is_on_this_host(it) && self.one_host;
            let is_elsewhere = member["address"].as_str().is_some_and(|it| !is_here(it));
            if is_on_this_host(admin) && (is_elsewhere || !self.one_host) {
                continue;
            }
            let watcher = watch(self.etcd.clone(), key.clone(), admin.to_owned(), entry.lease);
            self.watchers.insert(key.clone(), (entry.lease, spawn(watcher)));
        }
    }
}

impl Drop for Vigils {
    fn drop(&mut self) {
        self.watchers.values().for_each(|(_, watcher)| watcher.abort());
    }
}

async fn watch(etcd: Etcd, key: String, admin: String, lease: i64) {
    gone(&admin).await;
    info!(key, admin, "its owner is gone; ends its lease");
    // Safe even if it is wrong: every write of its is fenced, and whoever lives takes part again.
    if let Err(error) = etcd.revoke(lease).await {
        debug!(key, %error, "lease not ended; it will expire");
    }
}
