//! A place in an object store, and what can be done there.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{Stream, StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode,
    PutPayload,
};
use steadfast_host::time::timeout;
use url::Url;

use crate::address::{Address, QuestionMark};
use crate::error::StoreError;
use crate::root::{Root, Upload};

/// How long a store may take for an answer of no size, its retries included.
const PATIENCE: Duration = Duration::from_secs(120);
/// The slowest transfer that still counts as working: the parts that are under way together are there within
/// what the client allows for one request, see `cloud`.
const SLOWEST_BYTES_PER_SECOND: u64 = 512 * 1024;
/// Size of the parts in which large objects are uploaded.
const PART_BYTES: usize = 8 * 1024 * 1024;
/// No store takes more: of objects beyond 78 GiB the parts are larger.
const PARTS_MAX: usize = 10_000;
/// Parts that are under way together.
const PARTS_IN_FLIGHT: usize = 4;
/// Size of the pieces in which large objects are read.
const PIECE_BYTES: u64 = 4 * 1024 * 1024;
/// Pieces that are under way together.
const PIECES_IN_FLIGHT: usize = 4;

const READING: &str = "reading";
const WRITING: &str = "writing";
const LISTING: &str = "listing";

/// An object store and a path in it. Cheap to clone; holds the store's client, shared by all
/// locations of that store.
#[derive(Clone)]
pub struct Location {
    root: Arc<Root>,
    path: Path,
    url: String,
}

/// Whether [`Location::create`] made the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Created {
    Now,
    /// It was there before, and is left as it was. After a retried request it can also be our own.
    Already,
}

/// Opens a path (relative ones start at the working directory) or a URL. Touches no object.
///
/// Wildcards mean nothing here, see [`crate::expand`].
pub fn open(url: &str) -> Result<Location, StoreError> {
    let address = Address::parse(url, QuestionMark::Refused)?;
    Ok(Location::new(Root::shared(&address.base)?, address.path))
}

impl Location {
    pub(crate) fn new(root: Arc<Root>, path: Path) -> Self {
        let url = render(&root.base, &path);
        Self { root, path, url }
    }

    /// The location of `name` below this one; `name` may have several parts (`a/b`).
    pub fn child(&self, name: &str) -> Result<Self, StoreError> {
        let bad = || StoreError::BadName { url: self.url.clone(), name: name.to_owned() };
        if name.is_empty() || name.starts_with('/') || name.ends_with('/') {
            return Err(bad());
        }
        let below = Path::parse(name).map_err(|_| bad())?;
        Ok(self.join(below.as_ref()))
    }

    /// The location below this one of a name that the store itself gave, or that was checked.
    pub(crate) fn join(&self, name: &str) -> Self {
        let path = match self.path.as_ref() {
            "" => name.to_owned(),
            path => format!("{path}/{name}"),
        };
        let path = Path::parse(path).expect("two valid paths make one");
        Self::new(Arc::clone(&self.root), path)
    }

    /// Its absolute URL, without secrets; [`open`] takes it back to the same place.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Reads the whole object.
    pub async fn read(&self) -> Result<Bytes, StoreError> {
        self.get(GetOptions::default()).await.map(|(bytes, _)| bytes)
    }

    /// Reads just these bytes of the object; an error if it has not all of them.
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

    /// Reads several ranges together, near ones in one request; in the order of `ranges`. The
    /// caller knows that the object is that long: memory is set aside beforehand.
    pub async fn read_ranges(&self, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, StoreError> {
        if ranges.iter().all(Range::is_empty) {
            return Ok(vec![Bytes::new(); ranges.len()]);
        }
        let length = |range: &Range<u64>| range.end.saturating_sub(range.start);
        let total = ranges.iter().map(length).fold(0, u64::saturating_add);
        let reading = self.root.store.get_ranges(&self.path, ranges);
        let pieces = self.within(time_for(total), READING, reading).await?;
        for (range, piece) in ranges.iter().zip(&pieces) {
            if piece.len() as u64 != length(range) {
                return Err(self.out_of_range(range));
            }
        }
        Ok(pieces)
    }

    /// Reads an object of `size` bytes in pieces, in their order; some are under way while the one
    /// before is looked at.
    pub fn read_in_pieces(
        &self,
        size: u64,
    ) -> impl Stream<Item = Result<Bytes, StoreError>> + Unpin + '_ {
        let starts = (0..size).step_by(PIECE_BYTES as usize);
        let ranges = starts.map(move |start| start..size.min(start + PIECE_BYTES));
        let reading = ranges.map(|range| self.read_range(range));
        Box::pin(stream::iter(reading).buffered(PIECES_IN_FLIGHT))
    }

    fn out_of_range(&self, range: &Range<u64>) -> StoreError {
        StoreError::OutOfRange { url: self.url.clone(), start: range.start, end: range.end }
    }

    async fn get(&self, options: GetOptions) -> Result<(Bytes, Range<u64>), StoreError> {
        let store = &self.root.store;
        let answer = self.within(PATIENCE, READING, store.get_opts(&self.path, options)).await?;
        let range = answer.range.clone();
        let limit = time_for(range.end.saturating_sub(range.start));
        let bytes = self.within(limit, READING, answer.bytes()).await?;
        Ok((bytes, range))
    }

    /// The object's size in bytes, or `None` if there is no object here.
    pub async fn size(&self) -> Result<Option<u64>, StoreError> {
        match self.within(PATIENCE, "looking at", self.root.store.head(&self.path)).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(StoreError::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the object, replacing what was there. Readers see the old bytes or the new ones,
    /// never a mixture; on return they are durable.
    pub async fn write(&self, bytes: Bytes) -> Result<(), StoreError> {
        if self.goes_in_parts(bytes.len()) {
            return self.write_in_parts(bytes.into()).await;
        }
        let limit = time_for(bytes.len() as u64);
        self.within(limit, WRITING, self.root.store.put(&self.path, bytes.into())).await?;
        Ok(())
    }

    fn goes_in_parts(&self, bytes: usize) -> bool {
        self.root.upload == Upload::InParts && PART_BYTES < bytes
    }

    async fn write_in_parts(&self, bytes: PutPayload) -> Result<(), StoreError> {
        let mut upload =
            self.within(PATIENCE, WRITING, self.root.store.put_multipart(&self.path)).await?;
        let sent = self.send_parts(&mut *upload, &bytes).await;
        let Err(error) = sent else { return Ok(()) };
        // Parts that cannot be taken back are left to the store's clean-up rules; what matters to
        // the caller is why the upload failed.
        let _ = self.within(PATIENCE, WRITING, upload.abort()).await;
        Err(error)
    }

    async fn send_parts(
        &self,
        upload: &mut dyn MultipartUpload,
        bytes: &PutPayload,
    ) -> Result<(), StoreError> {
        let mut parts: Vec<BoxFuture<'_, Result<(), StoreError>>> = Vec::new();
        let size = PART_BYTES.max(bytes.content_length().div_ceil(PARTS_MAX));
        for part in cut(bytes, size) {
            let limit = time_for((part.content_length() * PARTS_IN_FLIGHT) as u64);
            let sending = upload.put_part(part);
            parts.push(Box::pin(self.within(limit, WRITING, sending)));
        }
        stream::iter(parts).buffer_unordered(PARTS_IN_FLIGHT).try_collect::<()>().await?;
        self.within(PATIENCE, WRITING, upload.complete()).await?;
        Ok(())
    }

    /// Writes the object unless there is one.
    ///
    /// What a store takes in parts only is looked for first: of two who create such an object at the same
    /// time, the later one replaces the other's.
    pub async fn create(&self, bytes: impl Into<PutPayload>) -> Result<Created, StoreError> {
        let bytes = bytes.into();
        if self.goes_in_parts(bytes.content_length()) {
            if self.size().await?.is_some() {
                return Ok(Created::Already);
            }
            return self.write_in_parts(bytes).await.map(|()| Created::Now);
        }
        let limit = time_for(bytes.content_length() as u64);
        let put = async {
            let put = self.root.store.put_opts(&self.path, bytes, PutMode::Create.into());
            match put.await {
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

    /// Deletes the object; it is fine if there is none.
    pub async fn delete(&self) -> Result<(), StoreError> {
        match self.within(PATIENCE, "deleting", self.root.store.delete(&self.path)).await {
            Ok(()) | Err(StoreError::NotFound { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Lists all objects below this location: their names relative to it and their sizes, sorted.
    ///
    /// # Errors
    /// If the store does not answer.
    pub async fn list(&self) -> Result<Vec<(String, u64)>, StoreError> {
        let mut found = self.list_with(|meta| meta.size).await?;
        found.sort();
        Ok(found)
    }

    /// Lists all objects below this location: their names relative to it and when they were written,
    /// by the store's clock.
    ///
    /// # Errors
    /// If the store does not answer.
    pub async fn list_modified(&self) -> Result<Vec<(String, SystemTime)>, StoreError> {
        self.list_with(|meta| meta.last_modified.into()).await
    }

    async fn list_with<T>(
        &self,
        figure: impl Fn(&ObjectMeta) -> T + Send + Sync,
    ) -> Result<Vec<(String, T)>, StoreError> {
        let mut listing = self.root.store.list(Some(&self.path));
        let mut found = Vec::new();
        loop {
            let next = async { listing.next().await.transpose() };
            let Some(meta) = self.within(PATIENCE, LISTING, next).await? else { break };
            if let Some(name) = self.relative(&meta.location) {
                found.push((name, figure(&meta)));
            }
        }
        Ok(found)
    }

    /// Lists the objects and the folders directly in this location, by name.
    pub(crate) async fn list_folder(&self) -> Result<Folder, StoreError> {
        let listing = self.root.store.list_with_delimiter(Some(&self.path));
        let found = self.within(PATIENCE, LISTING, listing).await?;
        Ok(Folder {
            objects: found.objects.iter().filter_map(|o| self.relative(&o.location)).collect(),
            folders: found.common_prefixes.iter().filter_map(|p| self.relative(p)).collect(),
        })
    }

    fn relative(&self, path: &Path) -> Option<String> {
        let rest = path.as_ref().strip_prefix(self.path.as_ref())?;
        let name = rest.strip_prefix('/').unwrap_or(rest);
        (!name.is_empty()).then(|| name.to_owned())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
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

/// What lies directly in a location.
pub(crate) struct Folder {
    pub objects: Vec<String>,
    pub folders: Vec<String>,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.url)
    }
}

// By hand, because a store's client holds credentials.
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

/// Pieces of `bytes` of that size, by reference; the last one has the rest.
fn cut(bytes: &PutPayload, size: usize) -> Vec<PutPayload> {
    let (mut parts, mut part, mut room) = (Vec::new(), Vec::new(), size);
    for piece in bytes {
        let mut piece = piece.clone();
        while !piece.is_empty() {
            let taken = piece.split_to(piece.len().min(room));
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
    PATIENCE + Duration::from_secs(bytes / SLOWEST_BYTES_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_of_one_size_and_have_all_bytes_in_order() {
        let all: Vec<u8> = (0..=255).collect();
        for pieces in [vec![256], vec![1, 255], vec![0, 100, 0, 56, 100], vec![50, 50, 50, 50, 56]]
        {
            let mut left = Bytes::from(all.clone());
            let payload: PutPayload = pieces.iter().map(|size| left.split_to(*size)).collect();
            for size in [1, 7, 50, 64, 255, 256, 1000] {
                let parts = cut(&payload, size);
                assert_eq!(parts.len(), 256_usize.div_ceil(size));
                let (last, others) = parts.split_last().unwrap();
                assert!(others.iter().all(|part| part.content_length() == size));
                assert!(last.content_length() <= size);
                let bytes: Vec<u8> = parts.iter().flatten().flatten().copied().collect();
                assert_eq!(bytes, all);
            }
        }
        assert!(cut(&PutPayload::new(), 8).is_empty());
    }
}
