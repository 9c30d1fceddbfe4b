//! Two servers that receive the same requests and must send the same replies.

use super::generate::{Known, NewWatch, Step};
use super::watches::{Position, Watches};
use crate::support;
use crate::support::embedded::Embedded;
use crate::support::raw::Raw;
use crate::support::real::RealEtcd;
use etcd_client::Client;
use etcd_client::proto::{
    PbCompactionResponse, PbDeleteRequest, PbDeleteResponse, PbLeaseGrantResponse,
    PbLeaseLeasesRequest, PbLeaseLeasesResponse, PbLeaseRevokeResponse, PbLeaseTimeToLiveResponse,
    PbPutRequest, PbPutResponse, PbRangeRequest, PbRangeResponse, PbResponseHeader,
    PbTxnOpResponse, PbTxnResponse,
};
use prost::Message;
use std::collections::BTreeMap;
use std::fmt::Debug;
use tempfile::TempDir;
use tonic::Status;

pub struct Pair {
    seed: u64,
    steps: u32,
    pub known: Known,
    /// The number of replies of each kind for each method: a comparison proves nothing about replies that
    /// did not occur.
    pub met: BTreeMap<String, u32>,
    real: Side,
    embedded: Side,
    /// The servers are dropped before the data directory.
    _servers: (RealEtcd, Embedded, TempDir),
}

struct Side {
    raw: Raw,
    client: Client,
    watches: Watches,
}

impl Side {
    async fn connect(address: std::net::SocketAddr) -> Self {
        let client = support::client(address).await;
        Side { raw: Raw::connect(address).await, client, watches: Watches::default() }
    }
}

impl Pair {
    pub async fn start(seed: u64) -> Self {
        let data_dir = tempfile::tempdir().unwrap();
        let real_etcd = RealEtcd::start().await;
        let embedded_etcd = Embedded::start(data_dir.path()).await;
        Pair {
            seed,
            steps: 0,
            known: Known { revision: 1, compacted: -1 },
            met: BTreeMap::new(),
            real: Side::connect(real_etcd.address).await,
            embedded: Side::connect(embedded_etcd.address).await,
            _servers: (real_etcd, embedded_etcd, data_dir),
        }
    }

    pub async fn step(&mut self, step: Step) {
        self.steps += 1;
        let what = format!("seed {}, step {}: {step:?}", self.seed, self.steps);
        match step {
            Step::Range(request) => {
                self.both::<_, PbRangeResponse>(&what, "KV/Range", request).await;
            }
            Step::Put(request) => {
                self.both::<_, PbPutResponse>(&what, "KV/Put", request).await;
            }
            Step::Delete(request) => {
                self.both::<_, PbDeleteResponse>(&what, "KV/DeleteRange", request).await;
            }
            Step::Txn(request) => {
                self.both::<_, PbTxnResponse>(&what, "KV/Txn", request).await;
            }
            Step::Compact(request) => {
                let to = request.revision;
                let reply =
                    self.both::<_, PbCompactionResponse>(&what, "KV/Compact", request).await;
                if reply.is_some() {
                    self.known.compacted = to;
                }
            }
            Step::Grant(request) => {
                self.both::<_, PbLeaseGrantResponse>(&what, "Lease/LeaseGrant", request).await;
            }
            Step::Revoke(request) => {
                self.both::<_, PbLeaseRevokeResponse>(&what, "Lease/LeaseRevoke", request).await;
            }
            Step::TimeToLive(request) => {
                let method = "Lease/LeaseTimeToLive";
                self.both::<_, PbLeaseTimeToLiveResponse>(&what, method, request).await;
            }
            Step::KeepAlive(id) => self.keep_alive(&what, id).await,
            Step::Leases => {
                let request = PbLeaseLeasesRequest::default();
                self.both::<_, PbLeaseLeasesResponse>(&what, "Lease/LeaseLeases", request).await;
            }
            Step::Watch(watch) => self.watch(&what, watch).await,
            Step::CancelWatch(choice) => self.cancel(&what, choice).await,
        }
    }

    /// Compares the final contents, and all events of the watchers.
    pub async fn compare_everything(&mut self) {
        let all = PbRangeRequest { key: vec![0], range_end: vec![0], ..Default::default() };
        self.step(Step::Range(all)).await;
        for id in self.real.watches.ids() {
            self.bring_up_to_date(id).await;
        }
    }

    async fn both<Q, R>(&mut self, what: &str, method: &'static str, request: Q) -> Option<R>
    where
        Q: Message + Clone + 'static,
        R: Message + Default + Clone + Reply + Debug + PartialEq + 'static,
    {
        let real: Result<R, Status> = self.real.raw.call(method, request.clone()).await;
        let embedded: Result<R, Status> = self.embedded.raw.call(method, request).await;
        let (real, embedded) = (comparable(real), comparable(embedded));
        assert_eq!(real, embedded, "left is real etcd; {what}");
        let answer = real.as_ref().map_or_else(|(_, text)| text.as_str(), |_| "ok");
        *self.met.entry(format!("{method} {answer}")).or_default() += 1;
        let reply = real.ok()?;
        self.known.revision = reply.revision().max(self.known.revision);
        Some(reply)
    }

    async fn keep_alive(&mut self, what: &str, id: i64) {
        let real = keep_alive(&mut self.real.client, id).await;
        let embedded = keep_alive(&mut self.embedded.client, id).await;
        assert_eq!(real, embedded, "left is real etcd; {what}");
    }

    /// Starts a watch on both and waits until both have caught up: a compaction may cancel a watch that has
    /// not, and the speed of a watch is not specified.
    async fn watch(&mut self, what: &str, watch: NewWatch) {
        let real = self.real.watches.start(&mut self.real.client, &watch).await;
        let embedded = self.embedded.watches.start(&mut self.embedded.client, &watch).await;
        assert_eq!(real, embedded, "left is real etcd; {what}");
        if real.canceled {
            return;
        }
        if watch.start_revision != 0 && watch.start_revision < self.known.compacted {
            let real = self.real.watches.lost().await;
            let embedded = self.embedded.watches.lost().await;
            return assert_eq!(real, embedded, "left is real etcd; {what}");
        }
        self.bring_up_to_date(real.id).await;
    }

    /// Cancels one of the watches.
    async fn cancel(&mut self, what: &str, choice: u64) {
        let ids = self.real.watches.ids();
        assert_eq!(ids, self.embedded.watches.ids());
        if ids.is_empty() {
            return;
        }
        let id = ids[usize::try_from(choice).unwrap() % ids.len()];
        self.bring_up_to_date(id).await;
        let real = self.real.watches.cancel(id).await;
        let embedded = self.embedded.watches.cancel(id).await;
        assert_eq!(real, embedded, "left is real etcd; {what}");
    }

    /// Changes the watched key, waits until both watchers have the events, and compares all of their
    /// events.
    async fn bring_up_to_date(&mut self, id: i64) {
        let watch = self.real.watches.request(id);
        let what = format!("seed {}, step {}, watch {watch:?}", self.seed, self.steps);
        let key = if watch.key.is_empty() { vec![0] } else { watch.key };
        let put = PbPutRequest { key: key.clone(), value: b"mark".into(), ..Default::default() };
        let put: Option<PbPutResponse> = self.both(&what, "KV/Put", put).await;
        let delete = PbDeleteRequest { key, ..Default::default() };
        let delete: Option<PbDeleteResponse> = self.both(&what, "KV/DeleteRange", delete).await;
        let mark = Position { put: put.unwrap().revision(), delete: delete.unwrap().revision() };
        let real = self.real.watches.events_up_to(id, mark).await;
        let embedded = self.embedded.watches.events_up_to(id, mark).await;
        for (real, embedded) in real.iter().zip(&embedded) {
            assert_eq!(real, embedded, "left is real etcd; {what}");
        }
        assert_eq!(real.len(), embedded.len(), "left is real etcd; {what}");
    }
}

/// Sends a keep-alive and returns the TTL of its reply.
async fn keep_alive(client: &mut Client, id: i64) -> Result<i64, String> {
    let (mut keeper, mut replies) =
        client.lease_keep_alive(id).await.map_err(|error| error.to_string())?;
    keeper.keep_alive().await.unwrap();
    let reply = replies.message().await.unwrap().unwrap();
    Ok(reply.ttl())
}

fn comparable<R: Reply>(reply: Result<R, Status>) -> Result<R, (tonic::Code, String)> {
    reply.map(Reply::normal).map_err(|status| (status.code(), status.message().to_string()))
}

/// A reply that can be compared without the ids of the servers.
pub trait Reply: Sized {
    fn normal(self) -> Self;
    fn revision(&self) -> i64;
}

fn normal_header(header: Option<PbResponseHeader>) -> Option<PbResponseHeader> {
    header.map(|header| PbResponseHeader {
        cluster_id: u64::from(header.cluster_id != 0),
        member_id: u64::from(header.member_id != 0),
        raft_term: u64::from(header.raft_term != 0),
        revision: header.revision,
    })
}

macro_rules! reply {
    ($($response:ty),*) => {$(
        impl Reply for $response {
            fn normal(mut self) -> Self {
                self.header = normal_header(self.header);
                self
            }

            fn revision(&self) -> i64 {
                self.header.as_ref().map_or(0, |header| header.revision)
            }
        }
    )*};
}

reply!(PbRangeResponse, PbPutResponse, PbDeleteResponse, PbCompactionResponse);
reply!(PbLeaseGrantResponse, PbLeaseRevokeResponse);

impl Reply for PbTxnResponse {
    fn normal(mut self) -> Self {
        self.header = normal_header(self.header);
        for operation in &mut self.responses {
            if let Some(PbTxnOpResponse::ResponseTxn(nested)) = &mut operation.response {
                *nested = std::mem::take(nested).normal();
            }
        }
        self
    }

    fn revision(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.revision)
    }
}

impl Reply for PbLeaseTimeToLiveResponse {
    /// The order of keys is random in real etcd, and the clocks of the servers differ.
    fn normal(mut self) -> Self {
        self.header = normal_header(self.header);
        self.keys.sort();
        self.ttl = self.ttl.signum();
        self
    }

    fn revision(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.revision)
    }
}

impl Reply for PbLeaseLeasesResponse {
    /// Real etcd sorts by remaining time.
    fn normal(mut self) -> Self {
        self.header = normal_header(self.header);
        self.leases.sort_by_key(|lease| lease.id);
        self
    }

    fn revision(&self) -> i64 {
        self.header.as_ref().map_or(0, |header| header.revision)
    }
}
