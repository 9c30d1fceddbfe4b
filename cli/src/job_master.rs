//! Calls to a job's acting master, found through etcd anew for each call.

use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Generation;
use steadfast_common::keys::Keys;
use steadfast_common::records::MasterRecord;
use steadfast_common::status::JobStatus;
use steadfast_coord::Etcd;
use steadfast_host::net::{Wire, dial};
use steadfast_host::role::Role;
use steadfast_process::Failure;
use steadfast_proto::MESSAGE_BYTES_MAX;
use steadfast_proto::v1::master_client::MasterClient;
use steadfast_proto::v1::{RestoreCheckpointRequest, StatusRequest, TakeCheckpointRequest};

const STATUS_TIMEOUT: Duration = Duration::from_secs(2);

/// The way to a job's acting master, whoever that is.
#[derive(Debug)]
pub struct JobMaster {
    etcd: Etcd,
    keys: Keys,
    /// The last connection, and the address that it goes to.
    open: Option<(String, MasterClient<Wire>)>,
}

/// What came of asking for a checkpoint.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The checkpoint that the job would resume from.
    pub latest: Option<String>,
    /// Why it is not a new one.
    pub trouble: Option<String>,
}

/// Whether steps that were trained since may be thrown away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Force {
    Yes,
    No,
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

    /// Asks for a checkpoint now; returns the latest one's id, if there is one, and why it is not a
    /// new one.
    pub async fn take_checkpoint(&mut self, patience: Duration) -> Result<Taken, Failure> {
        let take = async {
            let mut client = self.client().await?;
            Ok::<_, Failure>(client.take_checkpoint(TakeCheckpointRequest {}).await?.into_inner())
        };
        let asked = tokio::time::timeout(patience, take).await;
        let reply = asked.map_err(|_| {
            Failure::unavailable(format!("the master took no checkpoint within {patience:?}"))
        })??;
        let some = |text: String| (!text.is_empty()).then_some(text);
        Ok(Taken { latest: some(reply.checkpoint), trouble: some(reply.trouble) })
    }

    /// Sends the job back to a checkpoint; returns the generation that begins from it.
    pub async fn restore_checkpoint(
        &mut self,
        checkpoint: &str,
        force: Force,
        patience: Duration,
    ) -> Result<Generation, Failure> {
        let force = match force {
            Force::Yes => true,
            Force::No => false,
        };
        let request = RestoreCheckpointRequest { checkpoint: checkpoint.to_owned(), force };
        let restore = async {
            let mut client = self.client().await?;
            Ok::<_, Failure>(client.restore_checkpoint(request).await?.into_inner())
        };
        let asked = tokio::time::timeout(patience, restore).await;
        let reply = asked.map_err(|_| {
            Failure::unavailable(format!(
                "the master did not say within {patience:?} whether it went back to {checkpoint}; \
                 see `steadfast status`"
            ))
        })??;
        Ok(Generation(reply.generation))
    }

    async fn client(&mut self) -> Result<MasterClient<Wire>, Failure> {
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
        let wire = dial(&address, Role::Master).map_err(Failure::internal)?;
        let client = MasterClient::new(wire).max_decoding_message_size(MESSAGE_BYTES_MAX);
        self.open = Some((address, client.clone()));
        Ok(client)
    }
}
