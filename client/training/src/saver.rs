//! The election of the saver, the trainer that evaluates and writes the final model.

use std::fmt;
use std::time::Duration;

use steadfast_common::records::EvaluationRecord;
use steadfast_common::records::position::Position;
use steadfast_coord::backoff;
use steadfast_host::time::sleep;
use steadfast_proto::v1;
use steadfast_proto::v1::begin_save_request::Stage;

use crate::generation::evaluation;
use crate::{ClientError, GenerationClient};

/// Interval at which a trainer that waits for the end of the job requests the role again: the saver may die
/// or fail.
const RETRY: Duration = Duration::from_secs(1);

/// A trainer's part in the election of the saver.
pub struct SaverElection {
    generation: GenerationClient,
    position: Position,
    /// Whether savers were lost one after another while they evaluated.
    evaluation_is_suspected: bool,
    /// The error of the last attempt to save, until it is reported; empty if none.
    error: String,
    /// The pause before the next request.
    pause: Duration,
    pauses: Box<dyn Iterator<Item = Duration> + Send>,
}

/// The model, once it is saved.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedModel {
    pub url: String,
    pub parameters_sha256: String,
    /// The evaluation on held-out records, if there are any.
    pub evaluation: Option<EvaluationRecord>,
}

impl fmt::Debug for SaverElection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SaverElection").field("position", &self.position).finish_non_exhaustive()
    }
}

impl SaverElection {
    pub(crate) fn new(generation: GenerationClient, position: Position) -> Self {
        let (error, pause, pauses) = (String::new(), Duration::ZERO, Box::new(backoff()));
        Self { generation, position, evaluation_is_suspected: false, error, pause, pauses }
    }

    /// Returns whether trainers that evaluated were lost one after another: a record may end the process that evaluates it.
    pub fn evaluation_is_suspected(&self) -> bool {
        self.evaluation_is_suspected
    }

    /// Waits until this trainer is elected (`true`) or the job has ended (`false`).
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job during a call.
    pub async fn is_elected(&mut self) -> Result<bool, ClientError> {
        let cluster = self.generation.pservers.cluster.clone();
        loop {
            if !self.pause.is_zero() {
                tokio::select! {
                    biased;
                    () = cluster.job_ended() => return Ok(false),
                    () = cluster.generation_after(self.generation.number()) => {
                        return Err(ClientError::NewGeneration);
                    }
                    () = sleep(self.pause) => {}
                }
            }
            self.pause = RETRY;
            let error = std::mem::take(&mut self.error);
            if self.request(Stage::Evaluates, error).await? {
                return Ok(true);
            }
        }
    }

    /// Returns whether this trainer still has the role after it has evaluated the model. It may write the model only
    /// then.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn may_write(&mut self) -> Result<bool, ClientError> {
        self.request(Stage::Writes, String::new()).await
    }

    /// Notes that the model could not be saved. The next request for the role reports it, after a pause that
    /// grows.
    pub fn failed(&mut self, error: impl fmt::Display) {
        self.error = error.to_string();
        self.pause = self.pauses.next().unwrap_or(RETRY);
    }

    /// Reports the saved model, which ends the job.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn finish(&mut self, model: SavedModel) -> Result<(), ClientError> {
        let request = v1::FinishSaveRequest {
            caller: self.generation.caller(),
            model: model.url,
            parameters_sha256: model.parameters_sha256,
            version: self.position.version.0,
            examples: self.position.examples,
            loss: self.position.loss,
            evaluation: model.evaluation.map(evaluation),
        };
        self.generation.master.finish_save(request).await.map(drop)
    }

    async fn request(&mut self, stage: Stage, error: String) -> Result<bool, ClientError> {
        let request = v1::BeginSaveRequest {
            caller: self.generation.caller(),
            stage: stage.into(),
            error,
            position: Some(self.position.into()),
        };
        let reply = self.generation.master.begin_save(request).await?;
        self.evaluation_is_suspected = reply.evaluation_is_suspected;
        Ok(reply.save)
    }
}
