//! A location in an object store, and its operations.

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{FutureExt, Stream, StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutPayload,
};
use steadfast_host::task::blocking;
use steadfast_host::time::timeout;
use url::Url;

use crate::address::{Address, QuestionMark};
use crate::error::StoreError;
use crate::listing::{self, Depth, Listing};
use crate::root::{Client, Root, Upload};

/// Time limit of an operation without data, including retries.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit of a listing, which takes as long as there are pages of names.
const LISTING_TIMEOUT: Duration = Duration::from_secs(3600);
/// The slowest transfer that is tolerated: at this rate, the parts in flight together arrive within the
/// client's limit for one request, see `cloud`.
const SLOWEST_BYTES_PER_SECOND: u64 = 512 * 1024;
/// Size of the parts in which large objects are uploaded.
pub(crate) const PART_BYTES: usize = 8 * 1024 * 1024;
/// The limit of the stores: objects beyond 78 GiB have larger parts.
const PARTS_MAX: usize = 10_000;
/// Parts uploaded concurrently.
pub(crate) const PARTS_IN_FLIGHT: usize = 4;
/// Size of the chunks in which large objects are read.
const CHUNK_BYTES: u64 = 4 * 1024 * 1024;
/// Chunks fetched concurrently.
const CHUNKS_IN_FLIGHT: usize = 4;

const READING: &str = "reading";
pub(crate) const WRITING: &str = "writing";
const LISTING: &str = "listing";

/// An object store and a path in it. Cheap to clone; all locations of a store share its client.
#[derive(Clone)]
pub struct Location {
    root: Arc<Root>,
    path: Path,
    url: String,
}

/// An object in a listing.
#[derive(Clone, Debug)]
pub struct Listed {
    pub location: Location,
    pub size_bytes: u64,
    /// The time of the last modification, by the store's clock.
    pub modified: SystemTime,
}

/// The outcome of [`Location::create`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Created {
    Now,
    /// The object already existed and is unchanged. After a retried request it may be the caller's own.
    Already,
}

/// Opens a path (relative to the working directory) or a URL, without access to the store.
///
/// Wildcards are not expanded, see [`crate::expand`].
pub fn open(url: &str) -> Result<Location, StoreError> {
    let address = Address::parse(url, QuestionMark::Refused)?;
    Ok(Location::new(Root::shared(&address.base)?, address.path))
}

impl Location {
    pub(crate) fn new(root: Arc<Root>, path: Path) -> Self {
        let url = render(&root.base, &path);
        Self { root, path, url }
    }

    /// Returns the location of `name` below this one; `name` may have several parts (`a/b`).
    pub fn child(&self, name: &str) -> Result<Self, StoreError> {
        let bad = || StoreError::BadName { url: self.url.clone(), name: name.to_owned() };
        if name.is_empty() || name.starts_with('/') || name.ends_with('/') {
            return Err(bad());
        }
        let below = Path::parse(name).map_err(|_| bad())?;
        Ok(self.join(below.as_ref()))
    }

    /// Returns the location `name` below this one. The name is from the store or already validated.
    pub(crate) fn join(&self, name: &str) -> Self {
        let path = match self.path.as_ref() {
            "" => name.to_owned(),
            path => format!("{path}/{name}"),
        };
        let path = Path::parse(path).expect("two valid paths make one");
        Self::new(Arc::clone(&self.root), path)
    }

    /// Returns the absolute URL, without secrets; [`open`] returns the same location for it.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Reads the whole object.
    pub async fn read(&self) -> Result<Bytes, StoreError> {
        self.get(GetOptions::default()).await.map(|(bytes, _)| bytes)
    }

    /// Reads a byte range of the object; fails if the object is shorter.
    pub async fn read_range(&self, range: Range<u64>) -> Result<Bytes, StoreError> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let options =
            GetOptions { range: Some(GetRange::Bounded(range.clone())), ..Default::default() };
        let (bytes, got) = self.get(options).await?;
        if got != range || bytes.len() as u64 != range.end - range.start {
            return Err(self.out_of_range(&range));
        }
        Ok(bytes)
    }

    /// Reads several ranges, adjacent ones in one request; the result has the order of `ranges`. The
    /// object must be long enough, because memory is allocated in advance.
    pub async fn read_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, StoreError> {
        if ranges.iter().all(Range::is_empty) {
            return Ok(vec![Bytes::new(); ranges.len()]);
        }
        let length = |range: &Range<u64>| range.end.saturating_sub(range.start);
        let total = ranges.iter().map(length).fold(0, u64::saturating_add);
        let store = self.store();
        let reading = store.get_ranges(&self.path, ranges);
        let found = self.within(time_for(total), READING, reading).await?;
        for (range, bytes) in ranges.iter().zip(&found) {
            if bytes.len() as u64 != length(range) {
                return Err(self.out_of_range(range));
            }
        }
        Ok(found)
    }

    /// Reads an object of `size` bytes in chunks, in order, and prefetches the next ones.
    pub fn read_in_chunks(
        &self,
        size: u64,
    ) -> impl Stream<Item = Result<Bytes, StoreError>> + Unpin + '_ {
        let starts = (0..size).step_by(CHUNK_BYTES as usize);
        let ranges = starts.map(move |start| start..size.min(start + CHUNK_BYTES));
        let reading = ranges.map(|range| self.read_range(range));
        Box::pin(stream::iter(reading).buffered(CHUNKS_IN_FLIGHT))
    }

    fn out_of_range(&self, range: &Range<u64>) -> StoreError {
        StoreError::OutOfRange { url: self.url.clone(), start: range.start, end: range.end }
    }

    fn get(&self, options: GetOptions) -> BoxFuture<'_, Result<(Bytes, Range<u64>), StoreError>> {
        let get = async move {
            let store = self.store();
            let answer = self.within(TIMEOUT, READING, store.get_opts(&self.path, options)).await?;
            let range = answer.range.clone();
            let limit = time_for(range.end.saturating_sub(range.start));
            let bytes = self.within(limit, READING, answer.bytes()).await?;
            Ok((bytes, range))
        };
        get.boxed()
    }

    /// Returns the object's size in bytes, or `None` if it does not exist.
    pub async fn size(&self) -> Result<Option<u64>, StoreError> {
        Ok(self.size_and_modified().await?.map(|(size, _)| size))
    }

    /// Returns the object's size in bytes and its modification time, by the store's clock, or `None` if it does not
    /// exist.
    pub async fn size_and_modified(&self) -> Result<Option<(u64, SystemTime)>, StoreError> {
        match self.within(TIMEOUT, "inspecting", self.store().head(&self.path)).await {
            Ok(meta) => Ok(Some((meta.size, meta.last_modified.into()))),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns whether this is a local directory, or a prefix of other objects' paths. Returns `false` after an error.
    pub async fn is_directory(&self) -> bool {
        if let Some(path) = self.local_path() {
            return blocking(move || path.is_dir()).await.unwrap_or(false);
        }
        let listed = self.listing(Depth::One).await;
        listed.is_ok_and(|found| !(found.objects.is_empty() && found.directories.is_empty()))
    }

    /// Returns the path in the file system, or `None` for other stores.
    fn local_path(&self) -> Option<PathBuf> {
        let local = Url::parse(&self.url).ok().filter(|url| url.scheme() == "file");
        local.and_then(|url| url.to_file_path().ok())
    }

    /// Writes or replaces the object atomically: readers see either the old or the new bytes. On return
    /// the new ones are durable.
    pub fn write(&self, bytes: Bytes) -> BoxFuture<'_, Result<(), StoreError>> {
        self.replace(bytes).boxed()
    }

    async fn replace(&self, bytes: Bytes) -> Result<(), StoreError> {
        if self.goes_in_parts(bytes.len()) {
            return self.write_in_parts(bytes.into()).await;
        }
        let limit = time_for(bytes.len() as u64);
        self.within(limit, WRITING, self.store().put(&self.path, bytes.into())).await?;
        Ok(())
    }

    fn goes_in_parts(&self, bytes: usize) -> bool {
        self.root.upload == Upload::InParts && PART_BYTES < bytes
    }

    async fn write_in_parts(&self, bytes: PutPayload) -> Result<(), StoreError> {
        let mut upload = self.begin_parts().await?;
        let size = PART_BYTES.max(bytes.content_length().div_ceil(PARTS_MAX));
        let sent = self.send_parts(&mut *upload, &bytes, size).await;
        self.end_parts(upload, sent).await
    }

    /// Returns whether an object of unknown size can be uploaded in parts.
    pub(crate) fn takes_parts(&self) -> bool {
        self.root.upload != Upload::AlwaysWhole
    }

    pub(crate) async fn begin_parts(&self) -> Result<Box<dyn MultipartUpload>, StoreError> {
        self.within(TIMEOUT, WRITING, self.store().put_multipart(&self.path)).await
    }

    /// Sends bytes in parts of `size` bytes, the last one shorter.
    pub(crate) async fn send_parts(
        &self,
        upload: &mut dyn MultipartUpload,
        bytes: &PutPayload,
        size: usize,
    ) -> Result<(), StoreError> {
        let mut parts: Vec<BoxFuture<'_, Result<(), StoreError>>> = Vec::new();
        for part in split(bytes, size) {
            let limit = time_for((part.content_length() * PARTS_IN_FLIGHT) as u64);
            let sending = upload.put_part(part);
            parts.push(Box::pin(self.within(limit, WRITING, sending)));
        }
        stream::iter(parts).buffer_unordered(PARTS_IN_FLIGHT).try_collect::<()>().await
    }

    /// Completes an upload whose parts were sent; aborts it after an error.
    pub(crate) async fn end_parts(
        &self,
        mut upload: Box<dyn MultipartUpload>,
        sent: Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let ended = match sent {
            Ok(()) => self.within(TIMEOUT, WRITING, upload.complete()).await.map(|_| ()),
            Err(error) => Err(error),
        };
        if ended.is_err() {
            self.abort_parts(upload).await;
        }
        ended
    }

    /// Aborts an upload. If that fails, the parts are left to the store's lifecycle rules: the caller needs the error
    /// of the upload.
    pub(crate) async fn abort_parts(&self, mut upload: Box<dyn MultipartUpload>) {
        let _ = self.within(TIMEOUT, WRITING, upload.abort()).await;
    }

    /// Writes the object if it does not exist.
    ///
    /// Not atomic for objects that are uploaded in parts: of two concurrent calls for the same object, the
    /// later one may replace the object of the other.
    pub fn create(
        &self,
        bytes: impl Into<PutPayload>,
    ) -> BoxFuture<'_, Result<Created, StoreError>> {
        self.put_new(bytes.into())
    }

    fn put_new(&self, bytes: PutPayload) -> BoxFuture<'_, Result<Created, StoreError>> {
        self.put_unless_exists(bytes).boxed()
    }

    async fn put_unless_exists(&self, bytes: PutPayload) -> Result<Created, StoreError> {
        if self.goes_in_parts(bytes.content_length()) {
            if self.size().await?.is_some() {
                return Ok(Created::Already);
            }
            return self.write_in_parts(bytes).await.map(|()| Created::Now);
        }
        let limit = time_for(bytes.content_length() as u64);
        let put = async {
            let store = self.store();
            match store.put_opts(&self.path, bytes, PutMode::Create.into()).await {
                Ok(_) => Ok(Created::Now),
                Err(
                    object_store::Error::AlreadyExists { .. }
                    | object_store::Error::Precondition { .. },
                ) => Ok(Created::Already),
                Err(error) => Err(error),
            }
        };
        self.within(limit, "creating", put).await
    }

    /// Deletes the object; succeeds if it does not exist.
    pub async fn delete(&self) -> Result<(), StoreError> {
        match self.within(TIMEOUT, "deleting", self.store().delete(&self.path)).await {
            Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Lists all objects below this location, sorted: their relative names and their sizes. Those whose names cannot
    /// be paths are left out.
    ///
    /// # Errors
    /// If the store fails.
    pub async fn list(&self) -> Result<Vec<(String, u64)>, StoreError> {
        let objects = self.listing(Depth::All).await?.objects;
        let mut found: Vec<_> = objects.into_iter().map(|it| (it.name, it.size_bytes)).collect();
        found.sort();
        Ok(found)
    }

    /// Lists all objects below this location, as [`Self::list`]: their relative names and modification times, by the
    /// store's clock.
    ///
    /// # Errors
    /// If the store fails.
    pub fn list_modified(&self) -> BoxFuture<'_, Result<Vec<(String, SystemTime)>, StoreError>> {
        let listing = async {
            let objects = self.listing(Depth::All).await?.objects;
            Ok(objects.into_iter().map(|it| (it.name, it.modified)).collect())
        };
        listing.boxed()
    }

    /// Lists what is below this location.
    pub(crate) async fn listing(&self, depth: Depth) -> Result<Listing, StoreError> {
        let listing = async {
            if let Some(path) = self.local_path() {
                let failed = |error: Box<dyn Error + Send + Sync>| object_store::Error::Generic {
                    store: "LocalFileSystem",
                    source: error,
                };
                let listed = blocking(move || listing::of_directory(&path, depth)).await;
                return listed
                    .map_err(|error| failed(error.to_string().into()))?
                    .map_err(|it| failed(it.into()));
            }
            let Client { store, pages, .. } = self.root.client();
            let listed = listing::of_store(&store, &self.path, depth).await;
            match (&listed, &pages) {
                (Err(error), Some(pages)) if listing::odd_name(error).is_some() => {
                    listing::of_pages(&**pages, &self.path, depth).await
                }
                _ => listed,
            }
        };
        self.within(LISTING_TIMEOUT, LISTING, listing).await
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn store(&self) -> Arc<dyn ObjectStore> {
        self.root.client().store
    }

    async fn within<T>(
        &self,
        limit: Duration,
        operation: &'static str,
        work: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, StoreError> {
        match timeout(limit, work).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(cause)) => Err(StoreError::sort(&self.url, operation, cause)),
            Err(_) => Err(StoreError::TimedOut { url: self.url.clone(), operation, limit }),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

// Not derived, because a store's client holds credentials.
impl fmt::Debug for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Location").field(&self.url).finish()
    }
}

fn render(base: &Url, path: &Path) -> String {
    let mut url = base.clone();
    if let Ok(mut segments) = url.path_segments_mut() {
        segments.pop_if_empty();
        segments.extend(path.parts());
    }
    url.into()
}

/// Splits `bytes` into parts of `size` bytes, the last one shorter, without copying.
fn split(bytes: &PutPayload, size: usize) -> Vec<PutPayload> {
    let (mut parts, mut part, mut room) = (Vec::new(), Vec::new(), size);
    for segment in bytes {
        let mut segment = segment.clone();
        while !segment.is_empty() {
            let taken = segment.split_to(segment.len().min(room));
            room -= taken.len();
            part.push(taken);
            if room == 0 {
                parts.push(PutPayload::from_iter(part.drain(..)));
                room = size;
            }
        }
    }
    if !part.is_empty() {
        parts.push(PutPayload::from_iter(part));
    }
    parts
}

fn time_for(bytes: u64) -> Duration {
    TIMEOUT + Duration::from_secs(bytes / SLOWEST_BYTES_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_equal_size_and_hold_all_bytes_in_order() {
        let all: Vec<u8> = (0..=255).collect();
        for segments in
            [vec![256], vec![1, 255], vec![0, 100, 0, 56, 100], vec![50, 50, 50, 50, 56]]
        {
            let mut left = Bytes::from(all.clone());
            let payload: PutPayload = segments.iter().map(|size| left.split_to(*size)).collect();
            for size in [1, 7, 50, 64, 255, 256, 1000] {
                let parts = split(&payload, size);
                assert_eq!(parts.len(), 256_usize.div_ceil(size));
                let (last, others) = parts.split_last().unwrap();
                assert!(others.iter().all(|part| part.content_length() == size));
                assert!(last.content_length() <= size);
                let bytes: Vec<u8> = parts.iter().flatten().flatten().copied().collect();
                assert_eq!(bytes, all);
            }
        }
        assert!(split(&PutPayload::new(), 8).is_empty());
    }
}
