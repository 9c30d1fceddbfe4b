//! The simulated object store: in memory, with the failures of a real one.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use crate::cluster::Member;
use crate::world::World;

/// The store model: latency, and the probability of each failure.
#[derive(Clone, Debug)]
pub struct StoreModel {
    /// Minimum and maximum latency of a reply.
    pub latency: (Duration, Duration),
    /// Probability that a request is refused and changes nothing.
    pub refused: f64,
    /// Probability that a change is made although the reply is an error.
    pub answer_lost: f64,
    /// Probability that an upload fails and leaves the first half of the object.
    pub torn: f64,
    /// Whether the store is unavailable.
    pub is_away: bool,
}

impl StoreModel {
    /// Returns a model without failures.
    pub fn fair(latency: (Duration, Duration)) -> Self {
        Self { latency, refused: 0.0, answer_lost: 0.0, torn: 0.0, is_away: false }
    }
}

/// The store. Cheap to clone.
#[derive(Clone)]
pub struct Store(Arc<Shared>);

struct Shared {
    world: World,
    memory: Arc<InMemory>,
    model: Mutex<StoreModel>,
    /// Simulated times at which objects were written.
    written: Mutex<BTreeMap<Path, Duration>>,
    deleted: Mutex<u64>,
    /// Name prefix of the processes that may not write, if any.
    forbidden: Mutex<Option<String>>,
}

const LOCK: &str = "single thread; no holder panics";

enum StoreOutcome {
    Whole,
    AnswerLost,
    Torn,
}

impl Store {
    /// Creates an empty store.
    pub fn new(world: &World, model: StoreModel) -> Self {
        Self(Arc::new(Shared {
            world: world.clone(),
            memory: Arc::default(),
            model: Mutex::new(model),
            written: Mutex::default(),
            deleted: Mutex::default(),
            forbidden: Mutex::default(),
        }))
    }

    pub fn change(&self, change: impl FnOnce(&mut StoreModel)) {
        change(&mut self.0.model.lock().expect(LOCK));
    }

    /// Denies writes to all processes of this member.
    pub fn forbid(&self, member: Member) {
        // A process name consists of its member and a start counter.
        *self.0.forbidden.lock().expect(LOCK) = Some(format!("{member}."));
    }

    fn is_forbidden(&self) -> bool {
        let forbidden = self.0.forbidden.lock().expect(LOCK);
        forbidden.as_ref().is_some_and(|name| crate::trace::is_turn_of(name))
    }

    /// Returns the store without its model.
    pub fn memory(&self) -> Arc<dyn ObjectStore> {
        self.0.memory.clone()
    }

    /// Writes an object, bypassing the model.
    pub async fn lay(&self, name: &str, bytes: Bytes) {
        let path = Path::from(name);
        self.note(&path);
        self.0
            .memory
            .put(&path, bytes.into())
            .await
            .expect("the in-memory store accepts all writes");
    }

    /// Returns an object, bypassing the model.
    pub async fn read(&self, name: &str) -> Option<Bytes> {
        let found = self.0.memory.get(&Path::from(name)).await.ok()?;
        found.bytes().await.ok()
    }

    /// Returns whether an object exists, bypassing the model.
    pub fn has(&self, name: &str) -> bool {
        // The in-memory store never waits.
        let found = self.0.memory.head(&Path::from(name)).now_or_never();
        found.is_some_and(|it| it.is_ok())
    }

    /// Returns the number of deletions so far.
    pub fn deleted(&self) -> u64 {
        *self.0.deleted.lock().expect(LOCK)
    }

    /// Changes a byte of one of the objects below `prefix`, as bit rot does.
    pub async fn rot(&self, prefix: &str) {
        let path = Path::from(prefix);
        let found = self.0.memory.list(Some(&path)).try_collect::<Vec<ObjectMeta>>().await;
        let Ok(found) = found else { return };
        if found.is_empty() {
            return;
        }
        let path = self.0.world.roll(|rng| rng.one_of(&found).location.clone());
        let Ok(found) = self.0.memory.get(&path).await else { return };
        let Ok(bytes) = found.bytes().await else { return };
        let mut bytes = bytes.to_vec();
        if let Some(middle) = bytes.len().checked_div(2)
            && middle < bytes.len()
        {
            bytes[middle] ^= 0x10;
        }
        let _ = self.0.memory.put(&path, bytes.into()).await;
    }

    /// Waits for the latency of a request and draws its outcome.
    async fn request(&self, what: &str) -> Result<StoreOutcome> {
        let latency = {
            let model = self.0.model.lock().expect(LOCK).clone();
            self.0.world.roll(|rng| rng.time(model.latency.0, model.latency.1))
        };
        self.0.world.sleep(latency).await;
        loop {
            let model = self.0.model.lock().expect(LOCK).clone();
            if !model.is_away {
                let (refused, lost, torn) = (model.refused, model.answer_lost, model.torn);
                let drawn = self.0.world.roll(|rng| rng.share());
                return match drawn {
                    _ if drawn < refused => Err(failed(what)),
                    _ if drawn < refused + lost => Ok(StoreOutcome::AnswerLost),
                    _ if drawn < refused + lost + torn => Ok(StoreOutcome::Torn),
                    _ => Ok(StoreOutcome::Whole),
                };
            }
            self.0.world.sleep(Duration::from_millis(500)).await;
        }
    }

    fn note(&self, path: &Path) {
        let now = self.0.world.now();
        self.0.written.lock().expect(LOCK).insert(path.clone(), now);
    }

    fn dated(&self, mut meta: ObjectMeta) -> ObjectMeta {
        let written = self.0.written.lock().expect(LOCK).get(&meta.location).copied();
        let calendar = crate::host::CALENDAR + written.unwrap_or_default();
        let at: SystemTime = UNIX_EPOCH + calendar;
        meta.last_modified = at.into();
        meta
    }
}

fn failed(what: &str) -> Error {
    Error::Generic { store: "simulated", source: format!("{what}: 503").into() }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Store")
    }
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("simulated")
    }
}

#[async_trait]
impl ObjectStore for Store {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        let outcome = self.request("put").await?;
        if self.is_forbidden() {
            let path = location.to_string();
            return Err(Error::PermissionDenied { path, source: "write permission denied".into() });
        }
        let memory = &self.0.memory;
        match outcome {
            StoreOutcome::Torn => {
                let bytes: Bytes = payload.into();
                let half = bytes.slice(..bytes.len() / 2);
                let torn = memory.put_opts(location, half.into(), options).await;
                self.note(location);
                torn.and(Err(failed("put")))
            }
            StoreOutcome::AnswerLost => {
                memory.put_opts(location, payload, options).await?;
                self.note(location);
                Err(failed("put"))
            }
            StoreOutcome::Whole => {
                let put = memory.put_opts(location, payload, options).await?;
                self.note(location);
                Ok(put)
            }
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.0.memory.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        match self.request("get").await? {
            StoreOutcome::Whole => {
                let found = self.0.memory.get_opts(location, options).await?;
                Ok(GetResult { meta: self.dated(found.meta), ..found })
            }
            StoreOutcome::AnswerLost | StoreOutcome::Torn => Err(failed("get")),
        }
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        match self.request("get").await? {
            StoreOutcome::Whole => self.0.memory.get_ranges(location, ranges).await,
            StoreOutcome::AnswerLost | StoreOutcome::Torn => Err(failed("get")),
        }
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let deleted = locations.then(move |location| {
            let store = store.clone();
            async move {
                let (location, outcome) = (location?, store.request("delete").await?);
                store.0.memory.delete(&location).await?;
                *store.0.deleted.lock().expect(LOCK) += 1;
                match outcome {
                    StoreOutcome::Whole => Ok(location),
                    StoreOutcome::AnswerLost | StoreOutcome::Torn => Err(failed("delete")),
                }
            }
        });
        deleted.boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (store, prefix) = (self.clone(), prefix.cloned());
        let listed = async move {
            store.request("list").await?;
            let found: Vec<ObjectMeta> = store.0.memory.list(prefix.as_ref()).try_collect().await?;
            let dated: Vec<_> = found.into_iter().map(|meta| Ok(store.dated(meta))).collect();
            Ok::<_, Error>(futures::stream::iter(dated))
        };
        futures::stream::once(listed).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.request("list").await?;
        let mut listed = self.0.memory.list_with_delimiter(prefix).await?;
        listed.objects = listed.objects.into_iter().map(|meta| self.dated(meta)).collect();
        Ok(listed)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.memory.copy_opts(from, to, options).await
    }
}
