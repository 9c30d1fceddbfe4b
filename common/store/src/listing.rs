//! Listings of a location. Objects whose names cannot be paths are left out, and named: one of them must not hide all
//! others.

use std::io;
use std::path::Path as LocalPath;
use std::time::{Duration, SystemTime};

use futures::{FutureExt, StreamExt};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::{Error as PathError, Path};
use object_store::{ObjectMeta, ObjectStore};
use steadfast_host::time::timeout;
use walkdir::{DirEntry, WalkDir};

/// Time limit of an answer with some names, including retries.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Objects and directories that are asked for at once.
const PAGE_MAX: usize = 1000;

/// The character that sorts after all names that begin with the characters before it.
const LAST: char = char::MAX;

/// The objects below a location.
#[derive(Debug, Default)]
pub(crate) struct Listing {
    pub objects: Vec<Object>,
    /// The directories; only with [`Depth::One`].
    pub directories: Vec<String>,
    /// The names that cannot be paths.
    pub odd: Vec<Odd>,
}

/// A name that cannot be a path, as it can be shown.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Odd {
    Object(String),
    /// Nothing in it is listed.
    Directory(String),
}

impl Odd {
    pub fn name(&self) -> &str {
        match self {
            Self::Object(name) | Self::Directory(name) => name,
        }
    }
}

/// An object, by its name below the location that was listed.
#[derive(Debug)]
pub(crate) struct Object {
    pub name: String,
    pub size_bytes: u64,
    pub modified: SystemTime,
}

/// The levels that a listing includes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    One,
    All,
}

/// Lists a local directory; one that does not exist is empty.
pub(crate) fn of_directory(directory: &LocalPath, depth: Depth) -> io::Result<Listing> {
    let mut walk = WalkDir::new(directory).min_depth(1).follow_links(true);
    if depth == Depth::One {
        walk = walk.max_depth(1);
    }
    let (mut listing, mut entries) = (Listing::default(), walk.into_iter());
    while let Some(entry) = entries.next() {
        let entry = match entry {
            Ok(entry) => entry,
            // It was deleted, or is a link to nothing.
            Err(error) if is_gone(&error) => continue,
            Err(error) => return Err(error.into()),
        };
        let is_directory = entry.file_type().is_dir();
        let below = entry.path().strip_prefix(directory).unwrap_or(entry.path());
        match below.to_str().filter(|name| Path::parse(name).is_ok()) {
            None => {
                let name = below.to_string_lossy().escape_debug().to_string();
                if is_directory {
                    entries.skip_current_dir();
                    listing.odd.push(Odd::Directory(name));
                } else {
                    listing.odd.push(Odd::Object(name));
                }
            }
            Some(name) if is_directory && depth == Depth::One => {
                listing.directories.push(name.to_owned());
            }
            Some(name) if entry.file_type().is_file() && !is_unfinished(name) => {
                listing.objects.extend(object(name, &entry)?);
            }
            Some(_) => {}
        }
    }
    Ok(listing)
}

fn object(name: &str, entry: &DirEntry) -> io::Result<Option<Object>> {
    match entry.metadata() {
        Ok(found) => {
            let (size_bytes, modified) = (found.len(), found.modified()?);
            Ok(Some(Object { name: name.to_owned(), size_bytes, modified }))
        }
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn is_gone(error: &walkdir::Error) -> bool {
    error.io_error().is_some_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Returns whether an object is being written under this name, in which `#` and a number follow the object's final
/// name.
fn is_unfinished(name: &str) -> bool {
    let suffix = name.rsplit('/').next().and_then(|name| name.split_once('#'));
    suffix.is_some_and(|(_, it)| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Lists the objects below `prefix` in a store; fails if the name of one object cannot be a path.
pub(crate) async fn of_store(
    store: &dyn ObjectStore,
    prefix: &Path,
    depth: Depth,
) -> object_store::Result<Listing> {
    let mut listing = Listing::default();
    match depth {
        Depth::One => {
            let found = answered(store.list_with_delimiter(Some(prefix))).await?;
            listing.add(prefix, found.objects);
            listing.directories = named(prefix, found.common_prefixes);
        }
        Depth::All => {
            let mut objects = store.list(Some(prefix));
            while let Some(found) = answered(objects.next().map(Option::transpose)).await? {
                listing.add(prefix, [found]);
            }
        }
    }
    Ok(listing)
}

/// Waits for the answer of a store; fails if it does not arrive in time.
async fn answered<T>(
    answer: impl Future<Output = object_store::Result<T>>,
) -> object_store::Result<T> {
    timeout(TIMEOUT, answer).await.unwrap_or_else(|_| {
        let source = format!("no answer within {TIMEOUT:?}; is the store reachable?").into();
        Err(object_store::Error::Generic { store: "listing", source })
    })
}

/// Lists objects as [`of_store`] does, but leaves out those whose names cannot be paths. The client refuses a whole
/// page because of one such name, so smaller and smaller pages are requested, until the name stands alone and the next
/// page begins after it.
pub(crate) async fn of_pages(
    store: &dyn PaginatedListStore,
    prefix: &Path,
    depth: Depth,
) -> object_store::Result<Listing> {
    let below = if prefix.as_ref().is_empty() { String::new() } else { format!("{prefix}/") };
    let (mut listing, mut names_max) = (Listing::default(), PAGE_MAX);
    let (mut offset, mut page_token) = (None, None);
    loop {
        let options = PaginatedListOptions {
            offset: offset.clone(),
            page_token: page_token.clone(),
            max_keys: Some(names_max),
            delimiter: (depth == Depth::One).then(|| "/".into()),
            ..Default::default()
        };
        match answered(store.list_paginated(Some(&below), options)).await {
            Ok(page) => {
                listing.add(prefix, page.result.objects);
                listing.directories.extend(named(prefix, page.result.common_prefixes));
                if page.page_token.is_none() {
                    return Ok(listing);
                }
                (offset, page_token) = (None, page.page_token);
                names_max = PAGE_MAX.min(names_max * 2);
            }
            Err(error) => {
                let Some(name) = odd_name(&error) else { return Err(error) };
                if 1 < names_max {
                    names_max /= 2;
                    continue;
                }
                let shown = name.strip_prefix(&below).unwrap_or(&name).escape_debug().to_string();
                let after = if name.ends_with('/') {
                    listing.odd.push(Odd::Directory(shown));
                    format!("{name}{LAST}")
                } else {
                    listing.odd.push(Odd::Object(shown));
                    name
                };
                (offset, page_token) = (Some(after), None);
            }
        }
    }
}

/// Returns the name that cannot be a path, because of which a store was not listed.
pub(crate) fn odd_name(error: &object_store::Error) -> Option<String> {
    let object_store::Error::InvalidPath { source } = error else { return None };
    match source {
        PathError::EmptySegment { path } | PathError::BadSegment { path, .. } => Some(path.clone()),
        _ => None,
    }
}

impl Listing {
    fn add(&mut self, prefix: &Path, found: impl IntoIterator<Item = ObjectMeta>) {
        for meta in found {
            if let Some(name) = relative(prefix, &meta.location) {
                let (size_bytes, modified) = (meta.size, meta.last_modified.into());
                self.objects.push(Object { name, size_bytes, modified });
            }
        }
    }
}

fn named(prefix: &Path, directories: Vec<Path>) -> Vec<String> {
    directories.iter().filter_map(|directory| relative(prefix, directory)).collect()
}

fn relative(prefix: &Path, path: &Path) -> Option<String> {
    let rest = path.as_ref().strip_prefix(prefix.as_ref())?;
    let name = rest.strip_prefix('/').unwrap_or(rest);
    (!name.is_empty()).then(|| name.to_owned())
}
