//! The stores of this process: one client for each, shared by all its locations.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use object_store::ObjectStore;
use object_store::list::PaginatedListStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use url::Url;

use crate::error::StoreError;

/// One store: a bucket, a server, the file system or a named in-memory store of this process.
pub(crate) struct Root {
    pub store: Arc<dyn ObjectStore>,
    /// The listings of the same store page by page, if it has names that cannot be paths.
    pub pages: Option<Arc<dyn PaginatedListStore>>,
    /// `scheme://authority/`, without secrets.
    pub base: Url,
    pub upload: Upload,
}

/// A client of a network store.
pub(crate) struct Client {
    pub store: Arc<dyn ObjectStore>,
    pub pages: Option<Arc<dyn PaginatedListStore>>,
}

/// How large objects are uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Upload {
    /// As a whole: the protocol has no parts.
    AlwaysWhole,
    /// As a whole, if the size is known.
    Whole,
    /// In parts, each with its own retries and time limit.
    InParts,
}

/// The clients created so far. A client is a connection pool, and a `memory://` store is its content, so
/// the whole process shares them. There is one entry for each store that the process uses: a few.
static ROOTS: LazyLock<Mutex<BTreeMap<String, Arc<Root>>>> = LazyLock::new(Mutex::default);

thread_local! {
    /// Stores added by [`mount`].
    static MOUNTED: RefCell<BTreeMap<String, Arc<Root>>> = const { RefCell::new(BTreeMap::new()) };
}

/// A store mounted by the caller, for this thread, until this guard is dropped.
#[derive(Debug)]
pub struct Mounted {
    base: Url,
    /// Makes the guard `!Send`.
    _here: PhantomData<*const ()>,
}

/// Mounts `store` at `base` (`scheme://authority/`).
///
/// # Errors
/// If `base` is not a URL.
pub fn mount(base: &str, store: Arc<dyn ObjectStore>) -> Result<Mounted, StoreError> {
    let bad = |error: url::ParseError| StoreError::BadUrl {
        url: base.to_owned(),
        reason: error.to_string(),
    };
    let base = Url::parse(base).map_err(bad)?;
    let root = Root { store, pages: None, base: base.clone(), upload: Upload::Whole };
    MOUNTED.with_borrow_mut(|all| all.insert(base.as_str().to_owned(), Arc::new(root)));
    Ok(Mounted { base, _here: PhantomData })
}

impl Drop for Mounted {
    fn drop(&mut self) {
        MOUNTED.with_borrow_mut(|all| all.remove(self.base.as_str()));
    }
}

impl Root {
    /// Returns the client of the store at `base`; creates it on first use.
    pub fn shared(base: &Url) -> Result<Arc<Self>, StoreError> {
        if let Some(mounted) = MOUNTED.with_borrow(|all| all.get(base.as_str()).cloned()) {
            return Ok(mounted);
        }
        let mut roots = ROOTS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(root) = roots.get(base.as_str()) {
            return Ok(Arc::clone(root));
        }
        let root = Arc::new(Self::connect(base)?);
        roots.insert(base.as_str().to_owned(), Arc::clone(&root));
        Ok(root)
    }

    fn connect(base: &Url) -> Result<Self, StoreError> {
        let bad = |reason: &str| StoreError::BadUrl {
            url: base.as_str().to_owned(),
            reason: reason.to_owned(),
        };
        let base = base.clone();
        match base.scheme() {
            "file" if base.host().is_some() => Err(bad("a file URL has three slashes and no host")),
            "file" => {
                let store = Arc::new(LocalFileSystem::new().with_fsync(true));
                Ok(Self { store, pages: None, base, upload: Upload::Whole })
            }
            "memory" => {
                let store = Arc::new(InMemory::new());
                Ok(Self { store, pages: None, base, upload: Upload::Whole })
            }
            "s3" | "s3a" | "gs" | "az" | "azure" | "adl" | "abfs" | "abfss" | "http" | "https"
                if base.host().is_none() =>
            {
                Err(bad("the name of the bucket or host is missing"))
            }
            "s3" | "s3a" | "gs" | "az" | "azure" | "adl" | "abfs" | "abfss" => {
                let Client { store, pages } = cloud_store(&base)?;
                Ok(Self { store, pages, base, upload: Upload::InParts })
            }
            "http" | "https" => {
                let Client { store, pages } = cloud_store(&base)?;
                Ok(Self { store, pages, base, upload: Upload::AlwaysWhole })
            }
            other => Err(bad(&format!("the scheme `{other}` is not supported"))),
        }
    }
}

#[cfg(feature = "cloud")]
fn cloud_store(base: &Url) -> Result<Client, StoreError> {
    crate::cloud::connect(base, std::env::vars_os())
}

#[cfg(not(feature = "cloud"))]
fn cloud_store(base: &Url) -> Result<Client, StoreError> {
    Err(StoreError::CloudMissing { url: base.as_str().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Isolates the stores of simulations.
    #[test]
    fn a_mounted_store_exists_while_mounted_and_only_in_its_thread() {
        let base = Url::parse("simulated://it/").unwrap();
        let mounted = mount(base.as_str(), Arc::new(InMemory::new())).unwrap();
        assert!(Root::shared(&base).is_ok());
        let elsewhere = base.clone();
        let is_there = std::thread::spawn(move || Root::shared(&elsewhere).is_ok()).join();
        assert!(!is_there.unwrap());
        drop(mounted);
        assert!(Root::shared(&base).is_err());
    }
}
