//! The stores of this process: one client for each, shared by all its locations.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use object_store::ObjectStore;
use object_store::list::PaginatedListStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use tracing::warn;
use url::Url;

use crate::error::StoreError;

/// One store: a bucket, a server, the file system or a named in-memory store of this process.
pub(crate) struct Root {
    /// The mutex guards only this field.
    client: Mutex<Client>,
    connect: Box<Connect>,
    /// `scheme://authority/`, without secrets.
    pub base: Url,
    pub upload: Upload,
}

type Connect = dyn Fn(&Url) -> Result<Client, StoreError> + Send + Sync;

/// A client of a store. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Client {
    pub store: Arc<dyn ObjectStore>,
    /// The listings of the same store page by page, if it has names that cannot be paths.
    pub pages: Option<Arc<dyn PaginatedListStore>>,
    /// The files with its secrets.
    pub secrets: Vec<SecretFile>,
}

impl Client {
    /// Creates a client without secrets that may change.
    pub fn of(store: Arc<dyn ObjectStore>) -> Self {
        Self { store, pages: None, secrets: Vec::new() }
    }
}

/// A file with a secret that a client uses.
#[derive(Clone)]
pub(crate) struct SecretFile {
    pub path: PathBuf,
    /// What the file held when the client was created.
    pub text: String,
}

impl SecretFile {
    /// Returns whether the file holds another secret now. A file that cannot be read is being replaced and counts as
    /// unchanged.
    fn has_changed(&self) -> bool {
        fs::read_to_string(&self.path).is_ok_and(|text| text != self.text)
    }
}

/// How large objects are uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Upload {
    /// Objects are uploaded as a whole: the protocol has no parts.
    AlwaysWhole,
    /// Objects are uploaded as a whole, if the size is known.
    Whole,
    /// Objects are uploaded in parts, each with its own retries and time limit.
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
    let connect = move |_: &Url| Ok(Client::of(store.clone()));
    let root = Root::new(&base, Upload::Whole, connect)?;
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
        match base.scheme() {
            "file" if base.host().is_some() => Err(bad("a file URL has three slashes and no host")),
            "file" => {
                let store = || LocalFileSystem::new().with_fsync(true);
                Self::new(base, Upload::Whole, move |_| Ok(Client::of(Arc::new(store()))))
            }
            "memory" => {
                Self::new(base, Upload::Whole, |_| Ok(Client::of(Arc::new(InMemory::new()))))
            }
            "s3" | "s3a" | "gs" | "az" | "azure" | "adl" | "abfs" | "abfss" | "http" | "https"
                if base.host().is_none() =>
            {
                Err(bad("the name of the bucket or host is missing"))
            }
            "s3" | "s3a" | "gs" | "az" | "azure" | "adl" | "abfs" | "abfss" => {
                Self::new(base, Upload::InParts, cloud_client)
            }
            "http" | "https" => Self::new(base, Upload::AlwaysWhole, cloud_client),
            other => Err(bad(&format!("the scheme `{other}` is not supported"))),
        }
    }

    pub(crate) fn new(
        base: &Url,
        upload: Upload,
        connect: impl Fn(&Url) -> Result<Client, StoreError> + Send + Sync + 'static,
    ) -> Result<Self, StoreError> {
        let client = Mutex::new(connect(base)?);
        Ok(Self { client, connect: Box::new(connect), base: base.clone(), upload })
    }

    /// Returns the client for the next operation. It has the secrets that their files hold now, as credentials may
    /// end before the process does.
    pub fn client(&self) -> Client {
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        if client.secrets.iter().any(SecretFile::has_changed) {
            match (self.connect)(&self.base) {
                Ok(fresh) => *client = fresh,
                Err(error) => warn!(%error, "the earlier secrets of the store are used"),
            }
        }
        client.clone()
    }
}

#[cfg(feature = "cloud")]
fn cloud_client(base: &Url) -> Result<Client, StoreError> {
    crate::cloud::connect(base, std::env::vars_os())
}

#[cfg(not(feature = "cloud"))]
fn cloud_client(base: &Url) -> Result<Client, StoreError> {
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
