//! The simulated object store: memory, with the troubles of a real one.

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

use crate::world::World;

/// How often the store does what to a request.
#[derive(Clone, Debug)]
pub struct StoreWeather {
    /// The least and the most that an answer takes.
    pub latency: (Duration, Duration),
    /// A request is refused and changes nothing.
    pub refused: f64,
    /// A change is made, and the answer says that it failed.
    pub answer_lost: f64,
    /// An upload fails and leaves the first half of the object under its name.
    pub torn: f64,
    /// No request comes to an answer.
    pub is_away: bool,
}

impl StoreWeather {
    /// Nothing goes wrong.
    pub fn fair(latency: (Duration, Duration)) -> Self {
        Self { latency, refused: 0.0, answer_lost: 0.0, torn: 0.0, is_away: false }
    }
}

/// The store. Cheap to clone.
#[derive(Clone)]
pub struct Store(Arc<Shared>);

struct Shared {
    world: World,
    memory: InMemory,
    weather: Mutex<StoreWeather>,
    /// When objects were written, by the world's clock.
    written: Mutex<BTreeMap<Path, Duration>>,
    deleted: Mutex<u64>,
}

const LOCK: &str = "one thread, and nothing panics while it holds this";

enum Fate {
    Whole,
    AnswerLost,
    Torn,
}

impl Store {
    /// An empty store.
    pub fn new(world: &World, weather: StoreWeather) -> Self {
        Self(Arc::new(Shared {
            world: world.clone(),
            memory: InMemory::new(),
            weather: Mutex::new(weather),
            written: Mutex::default(),
            deleted: Mutex::default(),
        }))
    }

    /// Changes how the store behaves from now on.
    pub fn change(&self, change: impl FnOnce(&mut StoreWeather)) {
        change(&mut self.0.weather.lock().expect(LOCK));
    }

    /// Puts an object there, whatever the weather.
    pub async fn lay(&self, name: &str, bytes: Bytes) {
        let path = Path::from(name);
        self.0.memory.put(&path, bytes.into()).await.expect("memory takes everything");
    }

    /// An object, whatever the weather.
    pub async fn read(&self, name: &str) -> Option<Bytes> {
        let found = self.0.memory.get(&Path::from(name)).await.ok()?;
        found.bytes().await.ok()
    }

    /// Whether there is such an object, whatever the weather.
    pub fn has(&self, name: &str) -> bool {
        // Memory answers at once.
        let found = self.0.memory.head(&Path::from(name)).now_or_never();
        found.is_some_and(|it| it.is_ok())
    }

    /// Deletions so far.
    pub fn deleted(&self) -> u64 {
        *self.0.deleted.lock().expect(LOCK)
    }

    /// Changes a byte of one of the objects below `prefix`, as a disk that rots does.
    pub async fn rot(&self, prefix: &str) {
        let path = Path::from(prefix);
        let found = self.0.memory.list(Some(&path)).try_collect::<Vec<ObjectMeta>>().await;
        let Ok(found) = found else { return };
        if found.is_empty() {
            return;
        }
        let path = self.0.world.roll(|dice| dice.one_of(&found).location.clone());
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

    /// Waits as a request does, and draws what becomes of it.
    async fn request(&self, what: &str) -> Result<Fate> {
        let latency = {
            let weather = self.0.weather.lock().expect(LOCK).clone();
            self.0.world.roll(|dice| dice.time(weather.latency.0, weather.latency.1))
        };
        self.0.world.sleep(latency).await;
        loop {
            let weather = self.0.weather.lock().expect(LOCK).clone();
            if !weather.is_away {
                let (refused, lost, torn) = (weather.refused, weather.answer_lost, weather.torn);
                let drawn = self.0.world.roll(|dice| dice.share());
                return match drawn {
                    _ if drawn < refused => Err(failed(what)),
                    _ if drawn < refused + lost => Ok(Fate::AnswerLost),
                    _ if drawn < refused + lost + torn => Ok(Fate::Torn),
                    _ => Ok(Fate::Whole),
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
        let fate = self.request("put").await?;
        let memory = &self.0.memory;
        match fate {
            Fate::Torn => {
                let bytes: Bytes = payload.into();
                let half = bytes.slice(..bytes.len() / 2);
                let torn = memory.put_opts(location, half.into(), options).await;
                self.note(location);
                torn.and(Err(failed("put")))
            }
            Fate::AnswerLost => {
                memory.put_opts(location, payload, options).await?;
                self.note(location);
                Err(failed("put"))
            }
            Fate::Whole => {
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
            Fate::Whole => self.0.memory.get_opts(location, options).await,
            Fate::AnswerLost | Fate::Torn => Err(failed("get")),
        }
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        match self.request("get").await? {
            Fate::Whole => self.0.memory.get_ranges(location, ranges).await,
            Fate::AnswerLost | Fate::Torn => Err(failed("get")),
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
                let (location, fate) = (location?, store.request("delete").await?);
                store.0.memory.delete(&location).await?;
                *store.0.deleted.lock().expect(LOCK) += 1;
                match fate {
                    Fate::Whole => Ok(location),
                    Fate::AnswerLost | Fate::Torn => Err(failed("delete")),
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
        self.0.memory.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.0.memory.copy_opts(from, to, options).await
    }
}
