//! A local copy of some keys, kept current by a watch.
//!
//! Lists the keys, watches from the next revision, and lists again whenever the watch ends
//! (compaction, broken connection, leader lost). The copy may be stale: where that matters, read
//! the key or compare it in a transaction.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{EventType, WatchOptions, WatchStream};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::de::DeserializeOwned;
use steadfast_host::task::{Task, spawn};
use steadfast_host::time::{Instant, sleep};
use tokio::sync::watch;
use tracing::{debug, warn};

use crate::{CoordError, Entry, Etcd};

/// Least time from one list to the next, while etcd does not answer, or a proxy ends each watch at once.
const RETRY: Duration = Duration::from_millis(200);

/// The keys that a mirror follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Range {
    Key(String),
    Prefix(String),
}

/// The keys at one revision.
#[derive(Clone, Debug, Default)]
pub struct View {
    pub revision: i64,
    pub entries: BTreeMap<String, Entry>,
}

impl View {
    /// Parses the only entry of a [`Range::Key`] mirror.
    ///
    /// # Errors
    /// If the value is not a `T`.
    pub fn single<T: DeserializeOwned>(&self) -> Result<Option<T>, CoordError> {
        self.entries.values().next().map(Entry::json).transpose()
    }
}

/// Keeps a [`View`] current until it is dropped.
#[derive(Debug)]
pub struct Mirror {
    view: watch::Receiver<Arc<View>>,
    task: Task<()>,
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Mirror {
    /// Lists `range` and starts to watch it.
    ///
    /// # Errors
    /// If the first listing fails.
    pub fn start(etcd: &Etcd, range: Range) -> BoxFuture<'_, Result<Self, CoordError>> {
        let start = async move {
            let first = list(etcd, &range).await?;
            let (tx, view) = watch::channel(Arc::new(first));
            let task = spawn(follow(etcd.clone(), range, tx));
            Ok(Self { view, task })
        };
        start.boxed()
    }

    /// Returns the latest view.
    pub fn view(&self) -> Arc<View> {
        self.view.borrow().clone()
    }

    /// Returns a receiver that is notified of every change.
    pub fn subscribe(&self) -> watch::Receiver<Arc<View>> {
        self.view.clone()
    }
}

async fn list(etcd: &Etcd, range: &Range) -> Result<View, CoordError> {
    match range {
        Range::Prefix(prefix) => etcd.list(prefix).await,
        Range::Key(key) => {
            let (revision, entry) = etcd.get_at(key).await?;
            let entries = entry.map(|entry| (entry.key.clone(), entry)).into_iter().collect();
            Ok(View { revision, entries })
        }
    }
}

async fn follow(etcd: Etcd, range: Range, tx: watch::Sender<Arc<View>>) {
    loop {
        let started = Instant::now();
        if let Err(error) = watch_on(&etcd, &range, &tx).await {
            debug!(?range, %error, "watch ended; listing again");
        }
        match list(&etcd, &range).await {
            Ok(view) => {
                tx.send_if_modified(|shown| {
                    let changed = shown.entries != view.entries;
                    *shown = Arc::new(view);
                    changed
                });
            }
            Err(error) => warn!(?range, %error, "cannot list; retrying"),
        }
        sleep(RETRY.saturating_sub(started.elapsed())).await;
    }
}

/// Applies watch events until the watch ends.
async fn watch_on(
    etcd: &Etcd,
    range: &Range,
    tx: &watch::Sender<Arc<View>>,
) -> Result<(), etcd_client::Error> {
    let from = tx.borrow().revision + 1;
    let mut stream = open(etcd, range, from).await?;
    while let Some(response) = stream.message().await? {
        if response.canceled() {
            return Ok(());
        }
        if response.events().is_empty() {
            continue;
        }
        let mut view = View::clone(&tx.borrow());
        for event in response.events() {
            let Some(kv) = event.kv() else { continue };
            let entry = Entry::from(kv);
            view.revision = view.revision.max(entry.mod_revision);
            match event.event_type() {
                EventType::Put => view.entries.insert(entry.key.clone(), entry),
                EventType::Delete => view.entries.remove(&entry.key),
            };
        }
        tx.send_replace(Arc::new(view));
    }
    Ok(())
}

async fn open(etcd: &Etcd, range: &Range, from: i64) -> Result<WatchStream, etcd_client::Error> {
    let options = WatchOptions::new().with_start_revision(from);
    let (key, options) = match range {
        Range::Key(key) => (key, options),
        Range::Prefix(prefix) => (prefix, options.with_prefix()),
    };
    etcd.client().watch(key.clone(), Some(options)).await
}

#[cfg(test)]
mod tests;
