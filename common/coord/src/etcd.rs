//! A connection to etcd. Every call has a timeout; ranges are read in pages.

use std::path::PathBuf;
use std::time::Duration;

use etcd_client::{
    Certificate, Channel, Client, Compare, CompareOp, ConnectOptions, GetOptions, GetResponse,
    Identity, KeyValue, TlsOptions, Txn, TxnOp, TxnOpResponse,
};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::de::DeserializeOwned;
use steadfast_host::time::{Instant, sleep, timeout};
use steadfast_net::simulated;

use crate::mirror::View;
use crate::{CoordError, Op, backoff, error_counters, op};

/// Timeout of one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Keys in one page of a listing; keeps replies far below the client's 4 MiB.
const PAGE: i64 = 500;

/// The same if a value may be as large as half a MiB.
const PAGE_OF_LARGE: i64 = 4;

/// How to reach etcd.
#[derive(Clone, Debug, Default)]
pub struct EtcdOptions {
    /// URLs of the cluster's members.
    pub endpoints: Vec<String>,
    pub user: Option<String>,
    pub password: Option<String>,
    /// PEM file with the trusted CA certificates.
    pub ca_file: Option<PathBuf>,
    /// PEM files with the client certificate and key.
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
}

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: String,
    pub value: Vec<u8>,
    pub create_revision: i64,
    pub mod_revision: i64,
    /// Puts since the key was created, from 1.
    pub version: i64,
    pub lease: i64,
}

impl From<&KeyValue> for Entry {
    fn from(kv: &KeyValue) -> Self {
        Self {
            key: String::from_utf8_lossy(kv.key()).into_owned(),
            value: kv.value().to_vec(),
            create_revision: kv.create_revision(),
            mod_revision: kv.mod_revision(),
            version: kv.version(),
            lease: kv.lease(),
        }
    }
}

impl Entry {
    /// Reads the value as JSON.
    ///
    /// # Errors
    /// [`CoordError::BadValue`] naming the key.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, CoordError> {
        serde_json::from_slice(&self.value).map_err(|error| CoordError::BadValue {
            key: self.key.clone(),
            reason: error.to_string(),
        })
    }
}

pub(crate) struct TxnOutcome {
    pub succeeded: bool,
    pub revision: i64,
    pub gets: Vec<Vec<Entry>>,
}

/// A connection to an etcd cluster. Cheap to clone; reconnects by itself to any member.
#[derive(Clone)]
pub struct Etcd {
    client: Client,
}

/// A key and its expected mod-revision; 0 means that it does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unchanged {
    pub key: String,
    pub mod_revision: i64,
}

impl std::fmt::Debug for Etcd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Etcd")
    }
}

impl Etcd {
    /// Connects, and verifies that a member answers.
    ///
    /// # Errors
    /// If no member answers, or a certificate file cannot be read.
    pub fn connect(options: &EtcdOptions) -> BoxFuture<'_, Result<Self, CoordError>> {
        Self::connect_to(options).boxed()
    }

    async fn connect_to(options: &EtcdOptions) -> Result<Self, CoordError> {
        let unreachable = |reason: String| CoordError::Unreachable {
            endpoints: options.endpoints.join(", "),
            reason,
        };
        let connect = connect_options(options)?;
        let client = match timeout(CALL_TIMEOUT, client(&options.endpoints, connect)).await {
            Ok(connected) => connected.map_err(|error| unreachable(deepest(&error)))?,
            Err(_) => return Err(unreachable("no answer in time".to_owned())),
        };
        let etcd = Self { client };
        // No retries: report a wrong address at once.
        match call("get", etcd.client.kv_client().get("/", None)).await {
            // An authenticated user may lack permission to read this key, but etcd answered.
            Ok(_) => Ok(etcd),
            Err(error) if error.kind() == steadfast_common::error::ErrorKind::Denied => Ok(etcd),
            Err(CoordError::Refused { source, .. }) => Err(unreachable(deepest(&source))),
            Err(_) => Err(unreachable("no answer in time".to_owned())),
        }
    }

    /// Returns the version that a member reports, such as `3.5.16`.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn version(&self) -> Result<String, CoordError> {
        let status = call("status", self.client.maintenance_client().status()).await?;
        Ok(status.version().to_owned())
    }

    pub(crate) fn client(&self) -> Client {
        self.client.clone()
    }

    /// Reads one key (linearizable).
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn get(&self, key: &str) -> Result<Option<Entry>, CoordError> {
        Ok(self.get_at(key).await?.1)
    }

    /// Reads one key; also returns the store revision of the read.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn get_at(&self, key: &str) -> Result<(i64, Option<Entry>), CoordError> {
        let response = self.read("get", key.as_bytes(), GetOptions::new()).await?;
        let revision = response.header().map_or(0, |header| header.revision());
        Ok((revision, response.kvs().first().map(Entry::from)))
    }

    /// Reads one key as JSON.
    ///
    /// # Errors
    /// If etcd does not answer, or the value is not a `T`.
    pub async fn get_json<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, CoordError> {
        self.get(key).await?.as_ref().map(Entry::json).transpose()
    }

    /// Reads all keys below `prefix` as they were at one revision, page by page.
    ///
    /// # Errors
    /// If etcd does not answer, or compacted the revision meanwhile.
    pub async fn list(&self, prefix: &str) -> Result<View, CoordError> {
        self.list_in_pages(prefix, PAGE).await
    }

    /// The same for keys whose values have up to half a MiB.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn list_large(&self, prefix: &str) -> Result<View, CoordError> {
        self.list_in_pages(prefix, PAGE_OF_LARGE).await
    }

    async fn list_in_pages(&self, prefix: &str, page_keys: i64) -> Result<View, CoordError> {
        let mut view = View::default();
        let mut from = prefix.as_bytes().to_vec();
        let end = prefix_end(prefix.as_bytes());
        loop {
            let options = GetOptions::new().with_range(end.clone()).with_limit(page_keys);
            let options = options.with_revision(view.revision);
            let page = self.read("list", &from, options).await?;
            if view.revision == 0 {
                view.revision = page.header().map_or(0, |header| header.revision());
            }
            for kv in page.kvs() {
                from = [kv.key(), &[0]].concat();
                let entry = Entry::from(kv);
                view.entries.insert(entry.key.clone(), entry);
            }
            if !page.more() {
                return Ok(view);
            }
        }
    }

    fn read<'a>(
        &'a self,
        operation: &'static str,
        key: &'a [u8],
        options: GetOptions,
    ) -> BoxFuture<'a, Result<GetResponse, CoordError>> {
        let attempt = move || {
            let (mut kv, options) = (self.client.kv_client(), options.clone());
            async move { call(operation, kv.get(key, Some(options))).await }
        };
        retry(attempt).boxed()
    }

    /// Creates `key` unless it exists; returns its create-revision, or the existing entry.
    ///
    /// A retry after a lost reply finds the entry of the first attempt: same lease, same value.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn create(
        &self,
        key: &str,
        value: &[u8],
        lease: i64,
    ) -> Result<Result<i64, Entry>, CoordError> {
        let put = Op::put_leased(key, value.to_vec(), lease);
        let txn = Txn::new()
            .when(vec![Compare::create_revision(key, CompareOp::Equal, 0)])
            .and_then(vec![op::to_txn(&put)])
            .or_else(vec![TxnOp::get(key, None)]);
        let outcome = retry(|| self.txn("create", txn.clone())).await?;
        if outcome.succeeded {
            return Ok(Ok(outcome.revision));
        }
        match outcome.gets.into_iter().flatten().next() {
            Some(found) if lease != 0 && found.lease == lease && found.value == value => {
                Ok(Ok(found.create_revision))
            }
            Some(found) => Ok(Err(found)),
            None => Err(CoordError::BadValue {
                key: key.to_owned(),
                reason: "the key was reported as existing, but the reply has no entry".to_owned(),
            }),
        }
    }

    /// Puts a key if no key of `unchanged` has changed; returns the revision of the put, or `None`.
    ///
    /// # Errors
    /// If etcd does not answer; the put may still have been applied.
    pub async fn put_if(
        &self,
        op: &Op,
        unchanged: &[Unchanged],
    ) -> Result<Option<i64>, CoordError> {
        let compare = |it: &Unchanged| {
            Compare::mod_revision(it.key.clone(), CompareOp::Equal, it.mod_revision)
        };
        let compares: Vec<Compare> = unchanged.iter().map(compare).collect();
        let txn = Txn::new().when(compares).and_then(vec![op::to_txn(op)]);
        let outcome = self.txn("put", txn).await?;
        Ok(outcome.succeeded.then_some(outcome.revision))
    }

    /// Puts a key unconditionally.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn put(&self, key: &str, value: &[u8]) -> Result<(), CoordError> {
        let mut kv = self.client.kv_client();
        call("put", kv.put(key, value, None)).await.map(|_| ())
    }

    pub(crate) fn txn(
        &self,
        operation: &'static str,
        txn: Txn,
    ) -> BoxFuture<'_, Result<TxnOutcome, CoordError>> {
        self.run_txn(operation, txn).boxed()
    }

    async fn run_txn(&self, operation: &'static str, txn: Txn) -> Result<TxnOutcome, CoordError> {
        let mut kv = self.client.kv_client();
        let response = call(operation, kv.txn(txn)).await?;
        let gets = response.op_responses().into_iter().filter_map(|response| match response {
            TxnOpResponse::Get(get) => Some(get.kvs().iter().map(Entry::from).collect()),
            TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_) => None,
        });
        Ok(TxnOutcome {
            succeeded: response.succeeded(),
            revision: response.header().map_or(0, |header| header.revision()),
            gets: gets.collect(),
        })
    }

    /// Grants a lease; returns its id and the time to live that etcd granted.
    pub(crate) async fn grant(&self, ttl: Duration) -> Result<(i64, Duration), CoordError> {
        let seconds = i64::try_from(ttl.as_secs_f64().ceil() as u64).unwrap_or(i64::MAX);
        let mut client = self.client.lease_client();
        let granted = call("lease grant", client.grant(seconds, None)).await?;
        Ok((granted.id(), Duration::from_secs(u64::try_from(granted.ttl()).unwrap_or(0))))
    }

    /// Grants a lease that is renewed by [`Etcd::renew_once`] only; returns its id.
    ///
    /// # Errors
    /// If etcd does not grant it.
    pub async fn grant_unattended(&self, ttl: Duration) -> Result<i64, CoordError> {
        Ok(self.grant(ttl).await?.0)
    }

    /// Renews a lease once.
    ///
    /// # Errors
    /// If etcd does not answer, or the lease does not exist.
    pub async fn renew_once(&self, lease: i64) -> Result<(), CoordError> {
        let mut client = self.client.lease_client();
        // Opening the stream renews the lease; the client consumes the reply.
        call("lease renewal", client.keep_alive(lease)).await.map(|_| ())
    }

    /// Revokes a lease; etcd deletes its keys.
    ///
    /// # Errors
    /// If etcd does not answer or the lease does not exist.
    pub fn revoke(&self, lease: i64) -> BoxFuture<'_, Result<(), CoordError>> {
        let revoke = async move {
            let mut client = self.client.lease_client();
            call("lease revoke", client.revoke(lease)).await.map(|_| ())
        };
        revoke.boxed()
    }

    /// Compacts the history before `revision`.
    ///
    /// # Errors
    /// If etcd does not answer, or has already compacted that revision.
    pub async fn compact(&self, revision: i64) -> Result<(), CoordError> {
        let mut kv = self.client.kv_client();
        call("compact", kv.compact(revision, None)).await.map(|_| ())
    }
}

/// Retries an idempotent operation until it succeeds or [`CALL_TIMEOUT`] passes, so that the loss of
/// one etcd member is not an error.
async fn retry<T, F>(attempt: impl Fn() -> F) -> Result<T, CoordError>
where
    F: Future<Output = Result<T, CoordError>>,
{
    let deadline = Instant::now() + CALL_TIMEOUT;
    let mut backoff = backoff();
    loop {
        let answer = attempt().await;
        let pause = backoff.next().unwrap_or(CALL_TIMEOUT);
        let is_late = deadline <= Instant::now() + pause;
        match answer {
            Err(error) if error.is_transient() && !is_late => sleep(pause).await,
            answer => return answer,
        }
    }
}

async fn client(
    endpoints: &[String],
    options: ConnectOptions,
) -> Result<Client, etcd_client::Error> {
    match endpoints.first().and_then(|first| simulated(first)) {
        None => Client::connect(endpoints, Some(options)).await,
        Some(channel) => Client::from_channel(Channel::Custom(channel), Some(options)).await,
    }
}

pub(crate) async fn call<T>(
    operation: &'static str,
    future: impl Future<Output = Result<T, etcd_client::Error>>,
) -> Result<T, CoordError> {
    let failure = match timeout(CALL_TIMEOUT, future).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(error)) => CoordError::Refused { operation, source: Box::new(error) },
        Err(_) => CoordError::TimedOut { operation, after: CALL_TIMEOUT },
    };
    error_counters::call_failed();
    Err(failure)
}

fn connect_options(options: &EtcdOptions) -> Result<ConnectOptions, CoordError> {
    let mut connect = ConnectOptions::new()
        .with_connect_timeout(Duration::from_secs(2))
        .with_keep_alive(Duration::from_secs(3), Duration::from_secs(3))
        .with_keep_alive_while_idle(true)
        .with_require_leader(true);
    if let (Some(user), Some(password)) = (&options.user, &options.password) {
        connect = connect.with_user(user, password);
    }
    if options.ca_file.is_some() || options.cert_file.is_some() {
        let mut tls = TlsOptions::new();
        if let Some(path) = &options.ca_file {
            tls = tls.ca_certificate(Certificate::from_pem(read(path)?));
        }
        if let (Some(cert), Some(key)) = (&options.cert_file, &options.key_file) {
            tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
        }
        connect = connect.with_tls(tls);
    }
    Ok(connect)
}

fn read(path: &PathBuf) -> Result<Vec<u8>, CoordError> {
    std::fs::read(path).map_err(|error| CoordError::BadFile {
        path: path.display().to_string(),
        reason: error.to_string(),
    })
}

/// The first key after all keys that begin with `prefix`.
fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}

/// Returns the root cause of an error, which is more specific than its wrappers.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    let text = cause.to_string();
    match text.find("tcp connect error") {
        Some(_) => "connection refused".to_owned(),
        None => text,
    }
}
