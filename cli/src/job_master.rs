//! Calls to a job's acting master, found through etcd anew for each call.

use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::keys::Keys;
use steadfast_common::records::MasterRecord;
use steadfast_common::status::JobStatus;
use steadfast_coord::Etcd;
use steadfast_process::Failure;
use steadfast_proto::MESSAGE_BYTES_MAX;
use steadfast_proto::v1::master_client::MasterClient;
use steadfast_proto::v1::{DrainRequest, StatusRequest};
use tonic::transport::{Channel, Endpoint};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const STATUS_TIMEOUT: Duration = Duration::from_secs(2);

/// The way to a job's acting master, whoever that is.
#[derive(Debug)]
pub struct JobMaster {
    etcd: Etcd,
    keys: Keys,
    /// The last connection, and the address that it goes to.
    open: Option<(String, MasterClient<Channel>)>,
}

impl JobMaster {
    /// Connects to nobody yet.
    pub fn new(etcd: Etcd, keys: Keys) -> Self {
        Self { etcd, keys, open: None }
    }

    /// Asks how the job stands.
    pub async fn status(&mut self) -> Result<JobStatus, Failure> {
        let mut client = self.client().await?;
        let asked = tokio::time::timeout(STATUS_TIMEOUT, client.status(StatusRequest {})).await;
        let reply = asked.map_err(|_| Failure::unavailable("the master does not answer"))??;
        serde_json::from_slice(&reply.into_inner().json).map_err(|error| {
            Failure::internal(format!("the master's status is of another version: {error}"))
        })
    }

    /// Asks for a checkpoint and the end of all dispatch; returns the checkpoint, if there is one.
    pub async fn drain(&mut self, patience: Duration) -> Result<Option<String>, Failure> {
        let drain = async {
            let mut client = self.client().await?;
            Ok::<_, Failure>(client.drain(DrainRequest {}).await?.into_inner().checkpoint)
        };
        let asked = tokio::time::timeout(patience, drain).await;
        let checkpoint = asked.map_err(|_| {
            Failure::unavailable(format!("the master did not drain within {patience:?}"))
        })??;
        Ok((!checkpoint.is_empty()).then_some(checkpoint))
    }

    async fn client(&mut self) -> Result<MasterClient<Channel>, Failure> {
        let record: Option<MasterRecord> = self.etcd.get_json(&self.keys.master_addr()).await?;
        let address = match record {
            Some(record) => record.address,
            None => {
                self.open = None;
                return Err(Failure::new(ErrorKind::NotYet, "no master acts for the job"));
            }
        };
        if let Some((open, client)) = &self.open
            && *open == address
        {
            return Ok(client.clone());
        }
        let endpoint = Endpoint::try_from(format!("http://{address}"))?;
        let channel = endpoint.connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true).connect_lazy();
        let client = MasterClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        self.open = Some((address, client.clone()));
        Ok(client)
    }
}
