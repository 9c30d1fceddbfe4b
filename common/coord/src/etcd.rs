//! A connection to etcd. Every call has a timeout; ranges are read in pages.

use std::path::PathBuf;
use std::time::Duration;

use etcd_client::{
    Channel, Client, Compare, CompareOp, ConnectOptions, GetOptions, GetResponse, KeyValue, Txn,
    TxnOp, TxnOpResponse,
};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::de::DeserializeOwned;
use steadfast_common::error::ErrorKind;
use steadfast_host::time::{Instant, sleep, timeout};
use steadfast_net::simulated;
use tower::util::BoxCloneSyncService;

use crate::login::{self, Login};
use crate::members::{Members, NotSent};
use crate::mirror::View;
use crate::{CoordError, Op, backoff, error_counters, op};

/// Timeout of one call.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// Attempts at a call whose causes of failure were removed.
const ATTEMPTS_MAX: u32 = 5;

/// Keys in one page of a listing; keeps replies far below the client's 4 MiB.
const PAGE: i64 = 500;

/// Keys in one page of a listing whose values may be as large as half a MiB.
const PAGE_OF_LARGE: i64 = 4;

/// How to reach etcd.
#[derive(Clone, Debug, Default)]
pub struct EtcdOptions {
    /// URLs of the cluster's members.
    pub endpoints: Vec<String>,
    /// A user with a password, and the file with it, which is read at each login.
    pub user: Option<String>,
    pub password_file: Option<PathBuf>,
    /// PEM file with the trusted CA certificates. All PEM files are read for each connection.
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

    /// Returns the value as text, for messages.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.value).into_owned()
    }
}

pub(crate) struct TxnOutcome {
    pub succeeded: bool,
    pub revision: i64,
    pub gets: Vec<Vec<Entry>>,
}

/// A connection to an etcd cluster. Cheap to clone; reconnects by itself to any member, and logs in again when
/// its token is not accepted any more.
#[derive(Clone)]
pub struct Etcd {
    client: Client,
    login: Option<Login>,
    /// Absent in a simulated network.
    members: Option<Members>,
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

    /// Connects as [`Etcd::connect`] does, but waits for etcd, which may start later; tells `waits` once why.
    ///
    /// # Errors
    /// If no member answers within `limit`, or etcd refuses the connection.
    pub async fn connect_within(
        options: &EtcdOptions,
        limit: Duration,
        waits: impl FnOnce(&CoordError),
    ) -> Result<Self, CoordError> {
        let deadline = Instant::now() + limit;
        let (mut pauses, mut waits) = (backoff(), Some(waits));
        loop {
            match Self::connect(options).await {
                Err(error) if error.is_transient() && Instant::now() < deadline => {
                    if let Some(waits) = waits.take() {
                        waits(&error);
                    }
                    sleep(pauses.next().unwrap_or(limit)).await;
                }
                connected => return connected,
            }
        }
    }

    async fn connect_to(options: &EtcdOptions) -> Result<Self, CoordError> {
        let unreachable = |reason: String| CoordError::Unreachable {
            endpoints: options.endpoints.join(", "),
            reason,
        };
        let client = match timeout(CALL_TIMEOUT, client(options)).await {
            Ok(connected) => connected?,
            Err(_) => return Err(unreachable("no answer in time".to_owned())),
        };
        let login = options.user.as_deref().zip(options.password_file.as_deref());
        let login = login.map(|(user, file)| Login::new(user, file));
        let (client, members) = client;
        let etcd = Self { client, login, members };
        if let Some(login) = &etcd.login {
            login
                .renew(&etcd.client, 0)
                .await
                .map_err(|error| error.or_unreachable(unreachable))?;
        }
        let get = || {
            let mut kv = etcd.client.kv_client();
            async move { kv.get("/", None).await }
        };
        match etcd.call("get", get).await {
            // An authenticated user may lack permission to read this key, but etcd answered.
            Ok(_) => Ok(etcd),
            Err(error) if error.kind() == ErrorKind::Denied => Ok(etcd),
            Err(error) => Err(error.or_unreachable(unreachable)),
        }
    }

    /// Returns the version that a member reports, such as `3.5.16`.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn version(&self) -> Result<String, CoordError> {
        let ask = || {
            let mut client = self.client.maintenance_client();
            async move { client.status().await }
        };
        Ok(self.call("status", ask).await?.version().to_owned())
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

    /// Reads all keys below `prefix`, as [`Etcd::list`] does, in smaller pages, for values of up to half a MiB.
    ///
    /// # Errors
    /// If etcd does not answer.
    pub async fn list_large(&self, prefix: &str) -> Result<View, CoordError> {
        self.list_in_pages(prefix, PAGE_OF_LARGE).await
    }

    async fn list_in_pages(&self, prefix: &str, mut page_keys: i64) -> Result<View, CoordError> {
        let mut view = View::default();
        let mut from = prefix.as_bytes().to_vec();
        let end = prefix_end(prefix.as_bytes());
        loop {
            let options = GetOptions::new().with_range(end.clone()).with_limit(page_keys);
            let options = options.with_revision(view.revision);
            let page = match self.read("list", &from, options).await {
                // The values are larger than was expected.
                Err(error) if error.is_too_large() && 1 < page_keys => {
                    page_keys = (page_keys / 4).max(1);
                    continue;
                }
                read => read?,
            };
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

    pub(crate) fn read<'a>(
        &'a self,
        operation: &'static str,
        key: &'a [u8],
        options: GetOptions,
    ) -> BoxFuture<'a, Result<GetResponse, CoordError>> {
        let get = move || {
            let (mut kv, options) = (self.client.kv_client(), options.clone());
            async move { kv.get(key, Some(options)).await }
        };
        retry(move || self.call(operation, get.clone())).boxed()
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
        let put = || {
            let mut kv = self.client.kv_client();
            async move { kv.put(key, value, None).await }
        };
        self.call("put", put).await.map(|_| ())
    }

    pub(crate) fn txn(
        &self,
        operation: &'static str,
        txn: Txn,
    ) -> BoxFuture<'_, Result<TxnOutcome, CoordError>> {
        self.run_txn(operation, txn).boxed()
    }

    async fn run_txn(&self, operation: &'static str, txn: Txn) -> Result<TxnOutcome, CoordError> {
        let send = || {
            let (mut kv, txn) = (self.client.kv_client(), txn.clone());
            async move { kv.txn(txn).await }
        };
        let response = self.call(operation, send).await?;
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
        let grant = || {
            let mut client = self.client.lease_client();
            async move { client.grant(seconds, None).await }
        };
        let granted = self.call("lease grant", grant).await?;
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
        let renew = || {
            let mut client = self.client.lease_client();
            // Opening the stream renews the lease; the client consumes the reply.
            async move { client.keep_alive(lease).await }
        };
        self.call("lease renewal", renew).await.map(|_| ())
    }

    /// Revokes a lease; etcd deletes its keys.
    ///
    /// # Errors
    /// If etcd does not answer or the lease does not exist.
    pub fn revoke(&self, lease: i64) -> BoxFuture<'_, Result<(), CoordError>> {
        let revoke = move || {
            let mut client = self.client.lease_client();
            async move { client.revoke(lease).await }
        };
        async move { self.call("lease revoke", revoke).await.map(|_| ()) }.boxed()
    }

    /// Compacts the history before `revision`.
    ///
    /// # Errors
    /// If etcd does not answer, or has already compacted that revision.
    pub async fn compact(&self, revision: i64) -> Result<(), CoordError> {
        let compact = || {
            let mut kv = self.client.kv_client();
            async move { kv.compact(revision, None).await }
        };
        self.call("compact", compact).await.map(|_| ())
    }

    /// Connects to another member with the next call, since this one does not answer.
    pub(crate) fn reconnect(&self) {
        if let Some(members) = &self.members {
            members.reconnect();
        }
    }

    /// Makes a call. Repeats it if it was not sent because the connection to the member had ended, or if etcd
    /// refused the token and accepts the login: users may change several times in a row.
    pub(crate) async fn call<T, F>(
        &self,
        operation: &'static str,
        attempt: impl Fn() -> F,
    ) -> Result<T, CoordError>
    where
        F: Future<Output = Result<T, etcd_client::Error>>,
    {
        let mut token = self.token();
        let mut answer = timeout(CALL_TIMEOUT, attempt()).await;
        for _ in 1..ATTEMPTS_MAX {
            match &answer {
                Ok(Err(error)) if self.clears(error, token).await? => {}
                Ok(_) | Err(_) => break,
            }
            token = self.token();
            answer = timeout(CALL_TIMEOUT, attempt()).await;
        }
        let failure = match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => CoordError::Refused { operation, source: Box::new(error) },
            Err(_) => CoordError::TimedOut { operation, after: CALL_TIMEOUT },
        };
        error_counters::call_failed();
        Err(failure)
    }

    /// Returns the number of the token with which calls are sent.
    pub(crate) fn token(&self) -> u64 {
        self.login.as_ref().map_or(0, Login::token)
    }

    /// Returns whether the cause of an error has been removed, so that a second attempt may succeed. Logs in again if
    /// etcd refused the token with the number `token`.
    pub(crate) async fn clears(
        &self,
        error: &etcd_client::Error,
        token: u64,
    ) -> Result<bool, CoordError> {
        match &self.login {
            Some(login) if login::is_stale(error) => {
                login.renew(&self.client, token).await.map(|()| true)
            }
            Some(_) | None => Ok(NotSent::caused(error)),
        }
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

async fn client(options: &EtcdOptions) -> Result<(Client, Option<Members>), CoordError> {
    let (channel, members) = match options.endpoints.first().and_then(|first| simulated(first)) {
        Some(channel) => (channel, None),
        None => {
            let members = Members::of(options)?;
            (BoxCloneSyncService::new(members.clone()), Some(members))
        }
    };
    let connect = ConnectOptions::new().with_require_leader(true);
    let client = Client::from_channel(Channel::Custom(channel), Some(connect)).await;
    let client = client
        .map_err(|error| CoordError::Refused { operation: "connect", source: Box::new(error) })?;
    Ok((client, members))
}

/// Returns the first key after all keys that begin with `prefix`, or `\0`, which etcd takes for the end of all keys.
pub(crate) fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}
