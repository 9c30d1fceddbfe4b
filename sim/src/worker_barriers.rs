//! The barriers of the master, by which the simulated workers of all nodes take steps together.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{NodeId, Round};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::RoundRecord;
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_host::time::sleep;
use steadfast_master_client::{ActingMaster, CallError};
use steadfast_net::TlsIdentity;
use steadfast_proto::v1::elastic_client::ElasticClient;
use steadfast_proto::v1::{EnterRequest, Entries, Node, enter_reply};

use crate::checks::Observed;

/// How long one call waits at the master.
const WAIT: Duration = Duration::from_secs(5);

/// Pause after etcd has not answered.
const RETRY: Duration = Duration::from_millis(200);

/// How long etcd may be away.
const ETCD_TIMEOUT: Duration = Duration::from_secs(3600);

/// The round is over, or this node is not a member of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundLost;

/// The barriers of the rounds of a job, as one node enters them.
pub struct Barriers {
    etcd: Etcd,
    keys: Keys,
    acting: ActingMaster,
    node: NodeId,
    observed: Arc<Mutex<Observed>>,
}

impl Barriers {
    /// Connects to etcd, and follows the master.
    pub async fn connect(
        endpoint: &str,
        job: &str,
        node: NodeId,
        observed: Arc<Mutex<Observed>>,
    ) -> Self {
        let endpoints = vec![format!("http://{endpoint}")];
        let options = EtcdOptions { endpoints, ..EtcdOptions::default() };
        let keys = Keys::of_job(job);
        loop {
            let connected = Etcd::connect_within(&options, ETCD_TIMEOUT, |_| ()).await;
            if let Ok(etcd) = connected
                && let Ok(acting) = ActingMaster::follow(&etcd, &keys, TlsIdentity::default()).await
            {
                return Self { etcd, keys, acting, node, observed };
            }
            sleep(RETRY).await;
        }
    }

    /// Returns the record of a round, of which this node was told.
    pub async fn record(&self, round: Round) -> Result<RoundRecord, RoundLost> {
        loop {
            let stored: Result<Option<RoundRecord>, _> =
                self.etcd.get_json(&self.keys.formed_round()).await;
            match stored {
                Ok(Some(record)) if record.round == round => return Ok(record),
                Ok(Some(record)) if round < record.round => return Err(RoundLost),
                Ok(stored) => {
                    let stored = stored.map(|record| record.round);
                    self.broken(format!("a worker is in round {round}; stored is {stored:?}"));
                    return Err(RoundLost);
                }
                Err(_) => sleep(RETRY).await,
            }
        }
    }

    /// Enters a barrier of a round; returns the data of all members.
    pub async fn enter(
        &self,
        record: &RoundRecord,
        tag: &str,
        phase: u64,
        data: impl std::fmt::Display,
    ) -> Result<BTreeMap<String, Bytes>, RoundLost> {
        let member = record.members.iter().find(|member| member.node == self.node);
        let incarnation = member.ok_or(RoundLost)?.incarnation.0;
        let request = EnterRequest {
            node: Some(Node { id: self.node.to_string(), incarnation }),
            round: record.round.0,
            tag: tag.to_owned(),
            phase,
            data: Bytes::from(data.to_string()),
            wait_ms: WAIT.as_millis() as u32,
        };
        loop {
            let called = self.acting.call(WAIT, |channel| {
                let request = request.clone();
                async move { ElasticClient::new(channel).enter(request).await }
            });
            let reply = match called.await {
                Ok(reply) => reply,
                Err(CallError::JobEnded) => return Err(RoundLost),
                Err(CallError::Rejected(status)) => {
                    if let ErrorKind::Invalid | ErrorKind::Internal | ErrorKind::Denied =
                        steadfast_proto::kind(&status)
                    {
                        self.broken(format!("a barrier is rejected: {}", status.message()));
                    }
                    return Err(RoundLost);
                }
            };
            match reply.outcome() {
                enter_reply::Outcome::Waiting => {}
                enter_reply::Outcome::Ended => return Err(RoundLost),
                enter_reply::Outcome::Released => {
                    let entries = Entries::decode(reply.entries).map_err(|_| RoundLost)?;
                    return Ok(entries.data.into_iter().collect());
                }
            }
        }
    }

    pub fn broken(&self, broken: String) {
        self.observed.lock().expect("one thread").broken.push(broken);
    }
}
