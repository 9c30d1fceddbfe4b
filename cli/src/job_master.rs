//! Client of a job's acting master, whose address is read from etcd for each call.

use std::time::Duration;

use serde::de::DeserializeOwned;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Generation;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::scale::ScaleRecord;
use steadfast_common::records::{MasterRecord, WaitsRecord};
use steadfast_common::role::Role;
use steadfast_common::status::ElasticStatus;
use steadfast_common::status::JobStatus;
use steadfast_coord::Etcd;
use steadfast_net::{Channel, TlsIdentity};
use steadfast_process::Failure;
use steadfast_proto::MESSAGE_BYTES_MAX;
use steadfast_proto::v1::elastic_client::ElasticClient;
use steadfast_proto::v1::master_client::MasterClient;
use steadfast_proto::v1::{
    AmendJobRequest, DrainRequest, ElasticStatusRequest, RestoreCheckpointRequest, ScaleRequest,
    StatusRequest, TakeCheckpointRequest, amend_job_request,
};
use tonic::{Response, Status};

const STATUS_TIMEOUT: Duration = Duration::from_secs(2);

/// The master reads all manifests before it begins a generation.
const AMEND_TIMEOUT: Duration = Duration::from_secs(60);

/// Client of a job's acting master.
#[derive(Debug)]
pub struct JobMaster {
    etcd: Etcd,
    keys: Keys,
    tls: TlsIdentity,
    /// The last connection, with its address.
    open: Option<(String, Channel)>,
}

/// Outcome of a checkpoint request.
#[derive(Clone, Debug)]
pub struct CheckpointOutcome {
    /// The latest checkpoint, from which the job would resume.
    pub latest: Option<String>,
    /// Why no new checkpoint was taken.
    pub error: Option<String>,
}

/// Whether steps trained after the checkpoint may be discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Force {
    Yes,
    No,
}

impl JobMaster {
    /// Creates a client that is not connected yet.
    pub fn new(etcd: Etcd, keys: Keys, tls: TlsIdentity) -> Self {
        Self { etcd, keys, tls, open: None }
    }

    pub async fn status(&mut self) -> Result<JobStatus, Failure> {
        let mut client = self.client().await?;
        parsed(&answer(client.status(StatusRequest {})).await?.json)
    }

    pub async fn elastic_status(&mut self) -> Result<ElasticStatus, Failure> {
        let channel = self.channel().await?;
        let mut client = ElasticClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let asked = client.elastic_status(ElasticStatusRequest {});
        parsed(&answer(asked).await?.json)
    }

    /// Says how many workers the rounds of an elastic job are to have, and who decides that.
    pub async fn scale(&mut self, request: ScaleRequest) -> Result<ScaleRecord, Failure> {
        let mut client = ElasticClient::new(self.channel().await?);
        parsed(&answer(client.scale(request)).await?.json)
    }

    /// Says how many trainers of a training job work, and who decides that.
    pub async fn scale_trainers(&mut self, request: ScaleRequest) -> Result<ScaleRecord, Failure> {
        let mut client = self.client().await?;
        parsed(&answer(client.scale_trainers(request)).await?.json)
    }

    /// Requests a checkpoint now, and waits for its outcome for at most `limit`.
    pub async fn take_checkpoint(&mut self, limit: Duration) -> Result<CheckpointOutcome, Failure> {
        let take = async {
            let mut client = self.client().await?;
            Ok::<_, Failure>(client.take_checkpoint(TakeCheckpointRequest {}).await?.into_inner())
        };
        let answer = tokio::time::timeout(limit, take).await;
        let reply = answer.map_err(|_| {
            Failure::unavailable(format!("the master took no checkpoint within {limit:?}"))
        })??;
        let some = |text: String| (!text.is_empty()).then_some(text);
        Ok(CheckpointOutcome { latest: some(reply.checkpoint), error: some(reply.error) })
    }

    /// Rolls the job back to a checkpoint, and waits for at most `limit` until that is confirmed; returns the
    /// generation that starts from it.
    pub async fn restore_checkpoint(
        &mut self,
        checkpoint: &str,
        force: Force,
        limit: Duration,
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
        let answer = tokio::time::timeout(limit, restore).await;
        let reply = answer.map_err(|_| {
            Failure::unavailable(format!(
                "the master did not confirm the rollback to {checkpoint} within {limit:?}; check \
                 `steadfast status`"
            ))
        })??;
        Ok(Generation(reply.generation))
    }

    /// Extends the job, or gives it other settings; returns the generation that begins with them.
    pub async fn amend_job(
        &mut self,
        amendment: amend_job_request::Amendment,
    ) -> Result<Generation, Failure> {
        let request = AmendJobRequest { amendment: Some(amendment) };
        let amend = async {
            let mut client = self.client().await?;
            Ok::<_, Failure>(client.amend_job(request).await?.into_inner())
        };
        let answer = tokio::time::timeout(AMEND_TIMEOUT, amend).await;
        let reply = answer.map_err(|_| Failure::unavailable("the master does not answer"))??;
        Ok(Generation(reply.generation))
    }

    /// Drains a stream; returns what its end still waits for. The caller repeats the request until this is `None`.
    pub async fn drain(&mut self) -> Result<Option<String>, Failure> {
        let mut client = self.client().await?;
        let reply = answer(client.drain(DrainRequest {})).await?;
        Ok((!reply.ended).then_some(reply.waits_for))
    }

    async fn client(&mut self) -> Result<MasterClient<Channel>, Failure> {
        let channel = self.channel().await?;
        Ok(MasterClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX))
    }

    async fn channel(&mut self) -> Result<Channel, Failure> {
        let record: Option<MasterRecord> = self.etcd.get_json(&self.keys.master_addr()).await?;
        let address = match record {
            Some(record) => record.address,
            None => {
                self.open = None;
                let waits: Option<WaitsRecord> =
                    self.etcd.get_json(&self.keys.master_waits()).await?;
                let message = waits.map_or_else(
                    || "the job has no acting master".to_owned(),
                    |it| format!("the master waits for {}", it.waits_for),
                );
                return Err(Failure::new(ErrorKind::NotYet, message));
            }
        };
        if let Some((open, channel)) = &self.open
            && *open == address
        {
            return Ok(channel.clone());
        }
        let channel = self.tls.dial(&address, Role::Master).map_err(Failure::internal)?;
        self.open = Some((address, channel.clone()));
        Ok(channel)
    }
}

/// Waits for the reply to a request for the status.
async fn answer<T>(asked: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Failure> {
    let answer = tokio::time::timeout(STATUS_TIMEOUT, asked).await;
    let reply = answer.map_err(|_| Failure::unavailable("the master does not answer"))??;
    Ok(reply.into_inner())
}

fn parsed<T: DeserializeOwned>(json: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(json).map_err(|error| {
        Failure::internal(format!(
            "cannot parse the master's status: {error}; use the `steadfast` of the master's version"
        ))
    })
}
