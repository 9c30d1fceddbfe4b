//! The manifests of a job's passes: one for all of them, or of a stream one for each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::ids::Pass;
use steadfast_common::job::dataset::Manifest;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::stream::{StreamPassRecord, StreamRecord};
use steadfast_coord::{CoordError, Etcd, Mirror, Range};
use steadfast_host::task::spawn;
use steadfast_host::time::sleep;
use steadfast_store::Location;
use tracing::warn;

/// Pause before a manifest that cannot be loaded is loaded again.
const RETRY: Duration = Duration::from_secs(1);

/// Manifests of passes that are kept: the present one, the next, and those that tasks are still read of.
const KEPT_MAX: usize = 8;

/// The dataset of a job.
#[derive(Debug)]
pub struct Dataset {
    /// The manifest of all passes; of a stream, it has the columns alone.
    manifest: Arc<Manifest>,
    stream: Option<Arc<Stream>>,
}

/// The passes of a stream.
#[derive(Debug)]
struct Stream {
    etcd: Etcd,
    keys: Keys,
    job: String,
    store: Location,
    head: Mirror,
    /// The mutex guards only this field.
    manifests: Mutex<BTreeMap<Pass, Arc<Manifest>>>,
}

impl Dataset {
    /// Creates a dataset with the same records in every pass.
    pub fn of(manifest: Arc<Manifest>) -> Self {
        Self { manifest, stream: None }
    }

    /// Creates a dataset with other files in every pass; `manifest` has their columns.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn stream(
        manifest: Arc<Manifest>,
        etcd: &Etcd,
        keys: &Keys,
        job: &str,
        store: &Location,
    ) -> Result<Self, CoordError> {
        let stream = Stream {
            etcd: etcd.clone(),
            keys: keys.clone(),
            job: job.to_owned(),
            store: store.clone(),
            head: Mirror::start(etcd, Range::Key(keys.stream())).await?,
            manifests: Mutex::default(),
        };
        Ok(Self { manifest, stream: Some(stream.into()) })
    }

    /// Returns the manifest of all passes; of a stream, it has the columns alone.
    pub fn manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }

    /// Returns whether every pass has the same records.
    pub fn is_fixed(&self) -> bool {
        self.stream.is_none()
    }

    /// Returns the manifest of a pass, if it is loaded.
    pub fn loaded(&self, pass: Pass) -> Option<Arc<Manifest>> {
        match &self.stream {
            None => Some(self.manifest.clone()),
            Some(stream) => stream.loaded(pass),
        }
    }

    /// Loads the manifest of a pass.
    ///
    /// # Errors
    /// The reason; a later attempt may succeed.
    pub async fn load(&self, pass: Pass) -> Result<Arc<Manifest>, String> {
        match &self.stream {
            None => Ok(self.manifest.clone()),
            Some(stream) => stream.load(pass).await,
        }
    }

    /// Waits until a pass exists, and loads its manifest; `None` if training ends before it.
    pub async fn wait_for(&self, pass: Pass) -> Option<Arc<Manifest>> {
        let Some(stream) = &self.stream else { return Some(self.manifest.clone()) };
        let head = stream.wait_for(|head| pass < head.next || head.is_over(pass)).await;
        if head.next <= pass {
            return None;
        }
        loop {
            match stream.load(pass).await {
                Ok(manifest) => {
                    let next = Pass(pass.0 + 1);
                    if next < head.next && stream.loaded(next).is_none() {
                        let stream = stream.clone();
                        drop(spawn(async move { stream.load(next).await.map(drop) }));
                    }
                    return Some(manifest);
                }
                Err(error) => warn!(%pass, error, "cannot load the manifest of a pass"),
            }
            sleep(RETRY).await;
        }
    }

    /// Returns whether training ends before `pass`, as far as this trainer knows.
    pub fn is_over(&self, pass: Pass) -> bool {
        self.stream.as_ref().is_some_and(|stream| stream.head().is_over(pass))
    }

    /// Waits until the last pass of a stream is known; `None` without a stream.
    pub async fn end(&self) -> Option<Pass> {
        self.stream.as_ref()?.wait_for(|head| head.end.is_some()).await.end
    }
}

impl Stream {
    fn head(&self) -> StreamRecord {
        self.head.view().single().ok().flatten().unwrap_or_default()
    }

    async fn wait_for(&self, is_wanted: impl Fn(&StreamRecord) -> bool) -> StreamRecord {
        let mut changes = self.head.subscribe();
        loop {
            changes.mark_unchanged();
            let head = self.head();
            if is_wanted(&head) {
                return head;
            }
            if changes.changed().await.is_err() {
                // The mirror ends with the process.
                return std::future::pending().await;
            }
        }
    }

    fn loaded(&self, pass: Pass) -> Option<Arc<Manifest>> {
        self.manifests.lock().expect("no holder panics").get(&pass).cloned()
    }

    async fn load(&self, pass: Pass) -> Result<Arc<Manifest>, String> {
        if let Some(manifest) = self.loaded(pass) {
            return Ok(manifest);
        }
        let record = self.etcd.get_json::<StreamPassRecord>(&self.keys.stream_pass(pass)).await;
        let record = record.map_err(|error| error.to_string())?;
        let StreamPassRecord { manifest: digest, .. } =
            record.ok_or_else(|| format!("pass {pass} of the stream does not exist any more"))?;
        let name = StreamPassRecord::object_name(&self.job, pass, &digest);
        let manifest = steadfast_data::load_manifest_of(&self.store, &name, &digest).await;
        let manifest = Arc::new(manifest.map_err(|error| error.to_string())?);
        let mut manifests = self.manifests.lock().expect("no holder panics");
        manifests.insert(pass, manifest.clone());
        while KEPT_MAX < manifests.len() {
            // After a rollback, later ones are the old ones.
            let _ = match manifests.first_key_value().is_some_and(|(first, _)| *first == pass) {
                true => manifests.pop_last(),
                false => manifests.pop_first(),
            };
        }
        Ok(manifest)
    }
}
