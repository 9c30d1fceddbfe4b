//! What the launcher of a job has recorded in etcd, for the status.

use std::collections::BTreeMap;
use std::sync::Arc;

use steadfast_common::records::keys::Keys;
use steadfast_common::records::launch::{HostRecord, LauncherRecord};
use steadfast_common::status::{HostStatus, LauncherStatus};
use steadfast_coord::{CoordError, Etcd, Mirror, Range, View};
use steadfast_host::time::unix_ms;
use tracing::warn;

/// Follows the records of the launcher.
pub(super) struct Launch {
    keys: Keys,
    mirror: Mirror,
    /// The view from which the status was made.
    view: Arc<View>,
    status: Option<LauncherStatus>,
    /// The revision that put a host on the blacklist, and when it leaves it. Records hold lengths of time and no
    /// points in time, so a wait counts from when this master first sees it.
    ends: BTreeMap<String, (i64, u64)>,
}

impl Launch {
    pub async fn follow(etcd: &Etcd, keys: &Keys) -> Result<Self, CoordError> {
        let mirror = Mirror::start(etcd, Range::Prefix(keys.launch_prefix())).await?;
        let (view, ends) = (mirror.view(), BTreeMap::new());
        let mut launch = Self { keys: keys.clone(), mirror, view, status: None, ends };
        launch.read();
        Ok(launch)
    }

    /// Returns the state of the launcher, if the job has or had one.
    pub fn status(&mut self) -> Option<LauncherStatus> {
        let view = self.mirror.view();
        if !Arc::ptr_eq(&self.view, &view) {
            self.view = view;
            self.read();
        }
        self.status.clone()
    }

    fn read(&mut self) {
        self.status = launcher_status(&self.keys, &self.view);
        let mut before = std::mem::take(&mut self.ends);
        for it in self.status.iter_mut().flat_map(|status| &mut status.hosts) {
            let Some(cooldown_ms) = it.record.cooldown_ms else { continue };
            let entry = self.view.entries.get(&self.keys.launch_host(&it.host));
            let revision = entry.map_or(0, |entry| entry.mod_revision);
            let known = before.remove(&it.host).filter(|(since, _)| *since == revision);
            let end = known.unwrap_or_else(|| (revision, unix_ms().saturating_add(cooldown_ms)));
            it.blacklisted_until_unix_ms = Some(end.1);
            self.ends.insert(it.host.clone(), end);
        }
    }
}

/// Returns what the records say. Those that cannot be parsed are ignored: they are the launcher's to report.
pub(super) fn launcher_status(keys: &Keys, view: &View) -> Option<LauncherStatus> {
    let record: LauncherRecord = noted(view.entries.get(&keys.launch_state())?.json())?;
    let hosts = view.entries.iter().filter_map(|(key, entry)| {
        let host = keys.launch_host_of(key)?.to_owned();
        let record: HostRecord = noted(entry.json())?;
        Some(HostStatus { host, record, blacklisted_until_unix_ms: None })
    });
    let LauncherRecord { launches, resets, outcome, .. } = record;
    Some(LauncherStatus { launches, resets, outcome, hosts: hosts.collect() })
}

fn noted<T>(record: Result<T, CoordError>) -> Option<T> {
    record.inspect_err(|error| warn!(%error, "record of the launcher ignored")).ok()
}
