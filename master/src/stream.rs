//! Follows the files of a stream: divides new ones into passes, ends the stream when the job is drained, and forgets
//! passes that no checkpoint needs.
//!
//! The files of a pass are named in etcd before a trainer sees it, and the manifest of a pass never changes, so
//! each file is trained on once whatever fails. Only the acting master follows the files, and all it decides goes
//! through its event loop.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use sha2::{Digest, Sha256};
use steadfast_common::ids::Pass;
use steadfast_common::job::dataset::{Manifest, hex};
use steadfast_common::job::spec::DatasetSpec;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::stream::{
    ForgottenFiles, LeftOut, StreamFile, StreamPassRecord, StreamRecord,
};
use steadfast_common::records::{CheckpointRecord, JobRecord};
use steadfast_common::status::StreamStatus;
use steadfast_coord::{CoordError, Etcd, now};
use steadfast_data::{DataError, ErrorKind, ODD_NAME, StreamListing};
use steadfast_host::time::{sleep, unix_ms};
use steadfast_master_core::stream::{Watched, files_of_next};
use steadfast_process::Failure;
use steadfast_store::{Location, StoreError};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::checkpoint::coordinator::CheckpointError;
use crate::checkpoint::garbage_collection;
use crate::event_loop::handle::{ControlError, Event, EventLoopHandle};
use crate::job::{Job, data_failure};
use crate::rpc::service::reason;
use crate::status::status_snapshot::{StatusSnapshot, StreamSnapshot};

/// Time between two listings of the files; longer if they take long.
const LIST_EVERY: Duration = Duration::from_secs(1);

/// Minimum time between two listings, as a multiple of the duration of one.
const IDLE_FACTOR: u32 = 10;

/// Time after which the files that wait are shown again while passes are added.
const SHOW_EVERY: Duration = Duration::from_secs(1);

/// Passes that are forgotten together, so that the names of all files are seldom written.
const FORGOTTEN_AT_ONCE: u32 = 256;

/// How long a file must be missing in all listings before its name is forgotten. A directory that is not mounted for
/// a while must not make all its files new.
const GONE_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Files that are left out and listed in the status.
const LISTED_MAX: usize = 20;

/// The reason why files were not followed; a later attempt may succeed.
#[derive(Debug, thiserror::Error)]
enum FollowError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Coord(#[from] CoordError),
    #[error(transparent)]
    EventLoop(#[from] ControlError),
    #[error("{object} is damaged: {reason}")]
    Damaged { object: String, reason: String },
}

/// Waits for the first file of a stream, and shows in `shown` what it waits for; returns the columns of that file,
/// which all other files must have.
///
/// # Errors
/// If a source is invalid.
pub(crate) async fn first_columns(
    spec: &DatasetSpec,
    base: Option<&str>,
    shown: &watch::Sender<String>,
) -> Result<Manifest, Failure> {
    let mut watched = Watched::default();
    loop {
        let waits_for = match steadfast_data::stream_files(spec, base).await {
            Ok(listing) => {
                note(&mut watched, listing);
                let mut unread = None;
                for file in watched.complete(now().0) {
                    let files = std::slice::from_ref(&file);
                    match steadfast_data::plan_pass(spec, files, &Manifest::default()).await {
                        Ok(Manifest { features, columns, .. }) => {
                            return Ok(Manifest { features, columns, ..Manifest::default() });
                        }
                        Err(error) if error.kind() == ErrorKind::Permanent => {
                            warn!(file = file.url, %error, "file left out");
                            watched.leave_out(&file, reason(error.to_string()));
                        }
                        Err(error) => unread = Some(reason(error.to_string())),
                    }
                }
                match unread.as_ref().or(watched.left_out().values().next()) {
                    Some(reason) => format!("a file that can be read: {reason}"),
                    None => format!("the first file that matches {}", spec.source.join(", ")),
                }
            }
            Err(error) if error.kind() == ErrorKind::Permanent => return Err(data_failure(error)),
            Err(error) => error.to_string(),
        };
        shown.send_if_modified(|shown| {
            let is_new = *shown != waits_for;
            if is_new {
                info!(%waits_for, "the job waits");
                *shown = waits_for;
            }
            is_new
        });
        sleep(LIST_EVERY).await;
    }
}

/// Notes a listing. Files that cannot be read because of their names are left out, like others that cannot be used.
fn note(watched: &mut Watched, listing: StreamListing) {
    let StreamListing { mut files, skipped } = listing;
    let odd = |url| StreamFile { url, size_bytes: 0, modified_unix_ms: 0 };
    let odd: Vec<StreamFile> = skipped.into_iter().map(odd).collect();
    files.extend(odd.iter().cloned());
    watched.note(files, now().0);
    for file in odd {
        if !watched.left_out().contains_key(&file) {
            warn!(file = file.url, error = ODD_NAME, "file left out");
            watched.leave_out(&file, ODD_NAME.to_owned());
        }
    }
}

fn left_out(watched: &Watched) -> LeftOut {
    let all = watched.left_out();
    let listed = all.iter().take(LISTED_MAX);
    LeftOut {
        files: all.len() as u64,
        listed: listed.map(|(file, reason)| (file.url.clone(), reason.clone())).collect(),
    }
}

/// What the follower shows.
#[derive(Clone, Debug, Default)]
struct View {
    waiting: Vec<StreamFile>,
    left_out: LeftOut,
    error: Option<String>,
}

/// A handle to the follower of a stream.
#[derive(Clone, Debug)]
pub struct StreamHandle {
    view: watch::Receiver<Arc<View>>,
    is_draining: watch::Sender<bool>,
    event_loop: EventLoopHandle,
}

impl StreamHandle {
    /// Ends the stream after the files that are there; returns what the end waits for, or `None` if the stream has
    /// ended.
    pub fn drain(&self) -> Option<String> {
        self.is_draining.send_replace(true);
        let snapshot = self.event_loop.snapshot.borrow().clone();
        if snapshot.stream.as_ref().is_some_and(|it| it.record.end.is_some()) {
            return None;
        }
        let view = self.view.borrow().clone();
        Some(match (&view.error, view.waiting.first()) {
            (Some(error), _) => error.clone(),
            (None, Some(file)) if view.waiting.len() == 1 => format!("the file {}", file.url),
            (None, Some(file)) => format!("{} files, {} first", view.waiting.len(), file.url),
            (None, None) => "a listing of the files".to_owned(),
        })
    }

    pub(crate) fn status(&self, snapshot: &StatusSnapshot) -> StreamStatus {
        let view = self.view.borrow().clone();
        let passes = snapshot.stream.clone().unwrap_or_default();
        let StreamSnapshot { record, .. } = &passes;
        let waiting_files = view.waiting.iter().map(|file| file.modified_unix_ms);
        let oldest = waiting_files.chain(passes.oldest_unix_ms).min();
        // After the end no file is looked at.
        let LeftOut { files: left_out_files, listed: left_out } = match record.end {
            Some(_) => record.left_out.clone(),
            None => view.left_out.clone(),
        };
        StreamStatus {
            files: record.files,
            waiting_files: view.waiting.len() as u64,
            waiting_bytes: view.waiting.iter().map(|file| file.size_bytes).sum(),
            // Records that were given up are not among the examples.
            waiting_records: record.records
                - snapshot
                    .status
                    .examples
                    .clamp(passes.records_before.min(record.records), record.records),
            oldest_seconds: oldest.map_or(0.0, |at| unix_ms().saturating_sub(at) as f64 / 1000.0),
            left_out_files,
            left_out,
            is_draining: record.end.is_some() || *self.is_draining.borrow(),
            error: view.error.clone(),
        }
    }

    /// Returns why trainers wait for files, if they do.
    pub(crate) fn waiting(&self, snapshot: &StatusSnapshot) -> Option<String> {
        let record = &snapshot.stream.as_ref()?.record;
        if record.end.is_some() || snapshot.status.pass < record.next {
            return None;
        }
        let view = self.view.borrow();
        Some(match (&view.error, view.waiting.len()) {
            (Some(error), _) => format!("the stream is not read: {error}"),
            (None, 0) => "the stream has no new file".to_owned(),
            (None, 1) => "a file of the stream is not complete yet, or being read".to_owned(),
            (None, files) => {
                format!("{files} files of the stream are not complete yet, or being read")
            }
        })
    }
}

/// Follows the files of a stream for one term.
pub(crate) struct Follower {
    etcd: Etcd,
    keys: Keys,
    record: JobRecord,
    /// The columns of all files.
    columns: Arc<Manifest>,
    store: Location,
    event_loop: EventLoopHandle,
    view: watch::Sender<Arc<View>>,
    is_draining: watch::Receiver<bool>,
}

/// What the follower knows of the stream.
struct Known {
    stream: StreamRecord,
    passes: BTreeMap<Pass, StreamPassRecord>,
    watched: Watched,
    /// For each file that is taken, when it was last listed; of one not listed in this term, when the term began.
    listed: BTreeMap<String, u64>,
    /// The files that were there when the drain was first noticed.
    wanted: Option<BTreeSet<String>>,
}

impl Follower {
    pub fn new(
        etcd: Etcd,
        keys: Keys,
        job: &Job,
        store: Location,
        event_loop: EventLoopHandle,
    ) -> (Self, StreamHandle) {
        let (view, shown) = watch::channel(Arc::default());
        let (drain, is_draining) = watch::channel(false);
        let handle =
            StreamHandle { view: shown, is_draining: drain, event_loop: event_loop.clone() };
        let (record, columns) = (job.record.clone(), job.manifest.clone());
        (Self { etcd, keys, record, columns, store, event_loop, view, is_draining }, handle)
    }

    /// Follows the files until the stream has ended, and then waits for the end of the job.
    pub async fn run(self) {
        let (mut known, mut listing) = (None, Duration::ZERO);
        loop {
            let followed = self.follow(&mut known, &mut listing).boxed().await;
            let error = followed.err().map(|error| {
                // What is known may differ from what is committed.
                known = None;
                error.to_string()
            });
            if let Some(error) = &error
                && self.view.borrow().error.as_ref() != Some(error)
            {
                warn!(error, "cannot follow the stream");
            }
            self.show(known.as_ref(), error);
            sleep(LIST_EVERY.max(listing * IDLE_FACTOR)).await;
        }
    }

    fn show(&self, known: Option<&Known>, error: Option<String>) {
        let view = match known {
            Some(Known { watched, .. }) => View {
                waiting: watched.waiting().cloned().collect(),
                left_out: left_out(watched),
                error,
            },
            None => View { error, ..View::clone(&self.view.borrow()) },
        };
        self.view.send_replace(view.into());
    }

    /// Lists the files once, and acts on what has changed. Sets `listing` to the time that the listing took.
    async fn follow(
        &self,
        known: &mut Option<Known>,
        listing: &mut Duration,
    ) -> Result<(), FollowError> {
        if known.is_none() {
            *known = Some(self.load().await?);
        }
        let Some(known) = known else { return Ok(()) };
        if known.stream.end.is_some() {
            return Ok(());
        }
        let is_draining = *self.is_draining.borrow();
        let dataset = &self.record.spec.dataset;
        let began = now();
        let listed = steadfast_data::stream_files(dataset, self.record.base.as_deref()).await;
        *listing = Duration::from_millis(now().0.saturating_sub(began.0));
        let listed = listed?;
        for file in listed.files.iter().filter(|file| known.watched.taken().contains(&file.url)) {
            known.listed.insert(file.url.clone(), unix_ms());
        }
        note(&mut known.watched, listed);
        self.add_passes(known).await?;
        self.forget_passes(known).await?;
        if is_draining {
            let waiting = || known.watched.waiting().map(|file| file.url.clone()).collect();
            let wanted = known.wanted.get_or_insert_with(waiting);
            if known.watched.waiting().all(|file| !wanted.contains(&file.url)) {
                let left_out = left_out(&known.watched);
                let end = |reply| Event::EndStream { left_out, reply };
                known.stream = self.event_loop.ask(end).await?;
            }
        }
        Ok(())
    }

    async fn load(&self) -> Result<Known, FollowError> {
        let stream: StreamRecord =
            self.etcd.get_json(&self.keys.stream()).await?.unwrap_or_default();
        let mut passes = BTreeMap::new();
        for (key, entry) in &self.etcd.list(&self.keys.stream_passes_prefix()).await?.entries {
            if let Some(pass) = self.keys.stream_pass_of(key) {
                passes.insert(pass, entry.json::<StreamPassRecord>()?);
            }
        }
        let mut listed = BTreeMap::new();
        if let Some(digest) = &stream.forgotten {
            let name = ForgottenFiles::object_name(&self.record.spec.name, digest);
            let json = self.store.child(&name)?.read().await?;
            let damaged = |reason| FollowError::Damaged { object: name.clone(), reason };
            if hex(&Sha256::digest(&json)) != *digest {
                return Err(damaged("it has another SHA-256".to_owned()));
            }
            let forgotten: ForgottenFiles =
                serde_json::from_slice(&json).map_err(|error| damaged(error.to_string()))?;
            listed.extend(forgotten.files);
        }
        let files = passes.values().flat_map(|it| &it.files);
        listed.extend(files.map(|file| (file.url.clone(), unix_ms())));
        let watched = Watched::new(listed.keys().cloned().collect());
        Ok(Known { stream, passes, watched, listed, wanted: None })
    }

    /// Divides the files that are complete into passes.
    async fn add_passes(&self, known: &mut Known) -> Result<(), FollowError> {
        let (spec, name) = (&self.record.spec, &self.record.spec.name);
        // It takes as long as trainers keep up with the files that are there.
        let mut shown = now();
        loop {
            if SHOW_EVERY < Duration::from_millis(now().0.saturating_sub(shown.0)) {
                self.show(Some(known), None);
                shown = now();
            }
            let present = self.event_loop.snapshot.borrow().status.pass;
            let mut files = known.watched.complete(now().0);
            let pass = known.stream.next;
            files.truncate(files_of_next(spec.mode, files.len(), pass, present));
            if files.is_empty() {
                return Ok(());
            }
            let manifest = match self.plan(&files).await {
                Ok(manifest) => manifest,
                Err(error) if error.kind() == ErrorKind::Permanent => {
                    let before = known.watched.left_out().len();
                    self.leave_out(known, &files).await?;
                    match known.watched.left_out().len() == before {
                        true => return Err(error.into()),
                        false => continue,
                    }
                }
                Err(error) => return Err(error.into()),
            };
            let digest = manifest.digest();
            let object = StreamPassRecord::object_name(name, pass, &digest);
            steadfast_data::store_manifest_as(&self.store, &object, &manifest).await?;
            let record = StreamPassRecord {
                manifest: digest,
                files,
                tasks: manifest.task_count(),
                records: manifest.training_records(),
                records_before: known.stream.records,
            };
            let added = Box::new(record.clone());
            let add = |reply| Event::AddPass { pass, record: added, reply };
            known.stream = self.event_loop.ask(add).await?;
            known.watched.take(&record.files);
            known.listed.extend(record.files.iter().map(|file| (file.url.clone(), unix_ms())));
            info!(
                pass = pass.0,
                files = record.files.len(),
                records = record.records,
                "pass added"
            );
            known.passes.insert(pass, record);
        }
    }

    async fn plan(&self, files: &[StreamFile]) -> Result<Manifest, DataError> {
        steadfast_data::plan_pass(&self.record.spec.dataset, files, &self.columns).await
    }

    /// Finds the files that cannot be read among some.
    async fn leave_out(&self, known: &mut Known, files: &[StreamFile]) -> Result<(), FollowError> {
        for file in files {
            match self.plan(std::slice::from_ref(file)).await {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Permanent => {
                    warn!(file = file.url, %error, "file left out");
                    known.watched.leave_out(file, reason(error.to_string()));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Forgets the passes that no checkpoint needs.
    async fn forget_passes(&self, known: &mut Known) -> Result<(), FollowError> {
        let enough = known.stream.first.0.saturating_add(FORGOTTEN_AT_ONCE);
        if self.event_loop.snapshot.borrow().status.pass.0 < enough {
            return Ok(());
        }
        let to = self.first_needed().await?;
        if to.0 < enough {
            return Ok(());
        }
        let is_gone = |at: u64| at + (GONE_AFTER.as_millis() as u64) < unix_ms();
        known.listed.retain(|_, at| !is_gone(*at));
        let listed = &known.listed;
        known.watched.forget(|url| !listed.contains_key(url));
        let after = known.passes.range(to..).flat_map(|(_, it)| &it.files);
        let after: BTreeSet<&str> = after.map(|file| &*file.url).collect();
        let before = listed.iter().filter(|(url, _)| !after.contains(&***url));
        let files = ForgottenFiles { files: before.map(|(url, at)| (url.clone(), *at)).collect() };
        let json = Bytes::from(serde_json::to_vec(&files).expect("names are plain data"));
        let digest = hex(&Sha256::digest(&json));
        let name = &self.record.spec.name;
        self.store.child(&ForgottenFiles::object_name(name, &digest))?.write(json).await?;
        let old = known.stream.forgotten.clone().filter(|old| *old != digest);
        while known.stream.first < to {
            let forgotten = digest.clone();
            let forget = |reply| Event::ForgetPasses { to, forgotten, reply };
            known.stream = self.event_loop.ask(forget).await?;
            known.passes = known.passes.split_off(&known.stream.first);
        }
        let old = old.map(|old| ForgottenFiles::object_name(name, &old));
        if let Err(error) = self.delete_objects(known.stream.first, old).await {
            warn!(%error, "cannot delete the manifests of old passes");
        }
        Ok(())
    }

    /// Deletes an object, and the manifests of all passes before `first`. These include manifests written by a master
    /// that died before their pass was in etcd.
    async fn delete_objects(
        &self,
        first: Pass,
        old: Option<String>,
    ) -> Result<(), CheckpointError> {
        let folder = StreamPassRecord::folder(&self.record.spec.name);
        let mut objects = Vec::from_iter(old);
        for (object, _) in self.store.child(&folder)?.list().await? {
            if StreamPassRecord::pass_of(&object).is_some_and(|pass| pass < first) {
                objects.push(format!("{folder}/{object}"));
            }
        }
        garbage_collection::delete(&self.store, objects).await
    }

    /// Returns the first pass that a rollback to a checkpoint may need.
    async fn first_needed(&self) -> Result<Pass, FollowError> {
        let prefix = self.keys.checkpoints_prefix();
        let latest = self.keys.checkpoint_latest();
        let view = self.etcd.list(&prefix).await?;
        let manifests = view.entries.iter().filter(|(key, _)| **key != latest);
        // What an unreadable one needs is unknown.
        let first = manifests.map(|(_, entry)| {
            entry.json::<CheckpointRecord>().map_or(Pass(0), |record| record.first_pass())
        });
        Ok(first.min().unwrap_or(Pass(0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The end of a stream waits for the files that wait, which such a file is not.
    #[test]
    fn a_file_whose_name_cannot_be_a_path_is_left_out_and_not_waited_for() {
        let mut watched = Watched::default();
        let file = StreamFile { url: "f".to_owned(), size_bytes: 1, modified_unix_ms: 1 };
        let skipped = BTreeSet::from(["b\\n.csv".to_owned()]);
        for _ in 0..2 {
            note(
                &mut watched,
                StreamListing { files: vec![file.clone()], skipped: skipped.clone() },
            );
            assert_eq!(watched.waiting().collect::<Vec<_>>(), [&file]);
            let expected = ("b\\n.csv".to_owned(), ODD_NAME.to_owned());
            assert_eq!(left_out(&watched).listed, [expected]);
        }
        note(&mut watched, StreamListing { files: vec![file], skipped: BTreeSet::new() });
        assert_eq!(left_out(&watched).files, 0);
    }
}
