//! The parameters of the job, for the program in whose process a trainer runs.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use steadfast_checkpoint::{ModelFile, encode_model};
use steadfast_common::error::ErrorKind;
use steadfast_common::job::spec::Mode;
use steadfast_common::records::position::Position;
use steadfast_process::Failure;
use steadfast_store::StoreError;
use steadfast_trainer_core::Parameters;
use steadfast_training_client::{ClientError, GenerationClient};

use crate::context::{Context, TrainError, TrainedModel};

/// Access to the parameters that a trainer trains, or has trained to the end. Cheap to clone.
#[derive(Clone, Default)]
pub struct Current(Arc<Mutex<Stage>>);

#[derive(Clone, Default)]
enum Stage {
    /// In no generation of the job.
    #[default]
    Outside,
    Training(Arc<Context>, GenerationClient),
    Trained(Snapshot),
}

impl fmt::Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match self.stage() {
            Stage::Outside => "outside",
            Stage::Training(..) => "training",
            Stage::Trained(_) => "trained",
        };
        f.debug_tuple("Current").field(&stage).finish()
    }
}

impl Current {
    fn stage(&self) -> Stage {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, stage: Stage) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = stage;
    }

    pub(crate) fn begin(&self, context: &Arc<Context>, generation: &GenerationClient) {
        self.set(Stage::Training(Arc::clone(context), generation.clone()));
    }

    pub(crate) fn finish(
        &self,
        context: &Context,
        trained: &TrainedModel,
    ) -> Result<(), TrainError> {
        let TrainedModel { parameters, position } = trained;
        self.set(Stage::Trained(Snapshot::new(context, parameters.clone(), *position)?));
        Ok(())
    }

    /// Notes that the trainer leaves the job. Parameters that were trained to the end stay available.
    pub(crate) fn leave(&self) {
        if matches!(self.stage(), Stage::Training(..)) {
            self.set(Stage::Outside);
        }
    }

    /// Pulls the parameters from the parameter servers: in synchronous mode those of one version, in asynchronous
    /// mode the newest values of each block. After the last pass, returns the final ones.
    ///
    /// # Errors
    /// [`ErrorKind::NotYet`] before the first gradient, and after the trainer has left a job in its middle;
    /// [`ErrorKind::Unavailable`] while the job begins another generation; otherwise the rejection of a parameter
    /// server.
    pub async fn pull(&self) -> Result<Snapshot, Failure> {
        let (context, generation) = match self.stage() {
            Stage::Training(context, generation) => (context, generation),
            Stage::Trained(snapshot) => return Ok(snapshot),
            Stage::Outside => {
                return Err(Failure::new(
                    ErrorKind::NotYet,
                    "the trainer has no parameters: ask between its first work and its end",
                ));
            }
        };
        let mut parameters = Parameters::zeros(context.layout().clone());
        let (spec, pservers) = (context.spec(), generation.pservers());
        let values = parameters.values_mut();
        let pulled = match spec.mode {
            // Slots keep an earlier version for a while: ask for that of the work in progress.
            Mode::Sync => {
                let version = context.activity.activity().version;
                pservers.pull_step(version, values).await
            }
            Mode::Async => pservers.pull(values).await,
        };
        match pulled {
            Ok(pulled) => Ok(Snapshot::new(&context, parameters, pulled.position)?),
            Err(ClientError::NewGeneration | ClientError::Coord(_)) => Err(Failure::unavailable(
                "the job begins another generation: ask again with the next work",
            )),
            Err(ClientError::JobEnded) => {
                Err(Failure::unavailable("the job has ended: ask again after the last work"))
            }
            Err(error) => Err(TrainError::from(error).into()),
        }
    }
}

/// The parameters of a job at one time, without rows of tables. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub parameters: Parameters,
    /// The position of the job; in asynchronous mode, of the slot that is least advanced.
    pub position: Position,
    job: String,
    kind: String,
    /// The tensors that the model has beside its parameters. The model itself would keep a loop of one's own waiting for
    /// work.
    fixed: Option<Arc<Vec<u8>>>,
}

impl Snapshot {
    fn new(
        context: &Context,
        parameters: Parameters,
        position: Position,
    ) -> Result<Self, TrainError> {
        let (spec, fixed) = (context.spec(), context.fixed()?);
        let (job, kind) = (spec.name.clone(), spec.model.kind.clone());
        Ok(Self { parameters, position, job, kind, fixed })
    }

    /// Writes the parameters as a model file (safetensors), whole or not at all, and replaces an earlier one. Returns
    /// their SHA-256. `place` is a path or a URL. After the last pass, the file has the bytes of the model that the
    /// job saves, unless that is an earlier one (`evaluation.keep`).
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] if the model has tables, or `place` is invalid or cannot be written;
    /// [`ErrorKind::Unavailable`] if another attempt may succeed.
    pub async fn save(&self, place: &str) -> Result<String, Failure> {
        let layout = self.parameters.layout();
        if let Some(table) = layout.tables().first() {
            return Err(Failure::invalid(format!(
                "the model has the table `{}`, whose rows change while others are read; write a checkpoint with \
                 `steadfast checkpoint now`, and its model with `steadfast checkpoint export`",
                table.name
            )));
        }
        let sha256 = layout.digest(self.parameters.values(), &[]);
        let about = ModelFile { job: &self.job, model: &self.kind, parameters_sha256: &sha256 };
        let fixed = self.fixed.as_ref().map(|fixed| fixed.as_slice());
        let file = encode_model(layout, self.parameters.values(), about, fixed);
        let file = file.map_err(|error| Failure::invalid(error.to_string()))?;
        let failed = |error: StoreError| {
            let kind = match error.kind() {
                steadfast_store::ErrorKind::Permanent => ErrorKind::Invalid,
                steadfast_store::ErrorKind::Transient => ErrorKind::Unavailable,
            };
            Failure::new(kind, format!("cannot write the model: {error}"))
        };
        let place = steadfast_store::open(place).map_err(failed)?;
        place.write(file).await.map_err(failed)?;
        Ok(sha256)
    }
}
