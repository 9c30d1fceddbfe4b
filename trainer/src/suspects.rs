//! Looks for the records with which other trainers were lost, before this trainer computes or evaluates them.

use std::time::Duration;

use steadfast_common::records::discarded_records::DiscardedRecord;
use steadfast_common::records::position::Position;
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::Rows;
use steadfast_host::task::in_place;
use steadfast_host::time::sleep;
use steadfast_trainer_core::record_search::RecordName;
use steadfast_trainer_core::{Batch, MicroBatch, Parameters};
use steadfast_training_client::{ClientError, GenerationClient};
use tracing::{info, warn};

use crate::context::{Context, TrainError};
use crate::trial::{TrialBatch, Trials};

/// Pause before the master is told again of a record.
const RETRY: Duration = Duration::from_secs(1);

/// A record that ends its process, and how it does so.
type Found = (RecordName, String);

/// The surroundings of batches with which trainers were lost.
pub(crate) struct Suspects<'a> {
    pub context: &'a Context,
    pub generation: &'a GenerationClient,
    pub position: Position,
    pub parameters: &'a Parameters,
}

/// The ids of the rows that some batches read, by table.
pub(crate) struct IdsRead(Vec<Vec<u64>>);

impl IdsRead {
    pub fn new(context: &Context) -> Self {
        Self(vec![Vec::new(); context.layout().tables().len()])
    }

    /// Adds those of a batch.
    ///
    /// # Errors
    /// As [`Context::ids`].
    pub fn add(
        &mut self,
        context: &Context,
        batch: &Batch<'_>,
        key: Option<&MicroBatch>,
    ) -> Result<(), TrainError> {
        for (all, of_table) in self.0.iter_mut().zip(context.ids(batch, key)?) {
            all.extend_from_slice(of_table.ids.as_slice());
        }
        Ok(())
    }

    /// Returns the present rows of each table.
    async fn rows(self, generation: &GenerationClient) -> Result<Vec<Rows>, ClientError> {
        let wanted = self.0.into_iter().map(RowIds::distinct).collect();
        let pulled = generation.pservers().pull_rows(None, wanted).await?;
        Ok(pulled.expect("without a version, none is past").rows)
    }
}

impl Suspects<'_> {
    /// Lets processes of their own compute batches of one pass. If a record ends them, waits until training goes on
    /// without it, in another generation. `ids` is awaited once processes have survived the same code.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn search(
        &self,
        batches: &[TrialBatch],
        ids: impl Future<Output = Result<IdsRead, TrainError>>,
    ) -> Result<(), TrainError> {
        let Some(first) = batches.first() else { return Ok(()) };
        let (context, generation) = (self.context, self.generation);
        let TrialBatch { held_out, .. } = *first;
        context.activity.note(|activity| {
            activity.description = "looking for a record that ends its process";
        });
        let found = tokio::select! {
            biased;
            () = generation.over() => return Err(ClientError::NewGeneration.into()),
            () = context.session.job_ended() => return Err(ClientError::JobEnded.into()),
            found = self.search_both(batches, ids) => found?,
        };
        let goes_on = if held_out { "evaluating" } else { "training" };
        context.activity.note(|activity| activity.description = goes_on);
        match found {
            Ok((name, how)) => self.leave_out(first, name, how).await,
            Err(reason) => {
                info!(reason, "no record was found that ends its process");
                Ok(())
            }
        }
    }

    /// Reports a record until training goes on without it, in another generation.
    async fn leave_out(
        &self,
        of: &TrialBatch,
        name: RecordName,
        how: String,
    ) -> Result<(), TrainError> {
        let (context, generation) = (self.context, self.generation);
        let TrialBatch { pass, held_out, .. } = *of;
        let RecordName { task, record } = name;
        let what = if held_out { "evaluated" } else { "computed the gradient of" };
        let reason = format!("{how} when it {what} the record, twice");
        // The master does not know the files of a stream's passes.
        let reason = match context.tasks.dataset() {
            dataset if held_out || dataset.is_fixed() => reason,
            dataset => {
                let manifest = dataset.loaded(pass);
                let named = manifest.and_then(|it| it.record_named(task, record.into()));
                let named = named.map(|it| format!("record {} of {}: ", it.first + 1, it.file));
                named.unwrap_or_default() + &reason
            }
        };
        warn!(%task, record, reason, "the record is to be left out");
        let record = DiscardedRecord { task, record, from: pass, held_out, reason };
        loop {
            // The master may be lost before it has begun the generation.
            generation.discard_record(record.clone(), self.position.version).await?;
            tokio::select! {
                biased;
                () = generation.over() => return Err(ClientError::NewGeneration.into()),
                () = context.session.job_ended() => return Err(ClientError::JobEnded.into()),
                () = sleep(RETRY) => {}
            }
        }
    }

    /// Finds the record that ends processes which name the rows of `batches`, or which compute them.
    async fn search_both(
        &self,
        batches: &[TrialBatch],
        ids: impl Future<Output = Result<IdsRead, TrainError>>,
    ) -> Result<Result<Found, String>, TrainError> {
        let context = self.context;
        if context.layout().tables().is_empty() {
            return Ok(self.find(batches, Some(&[])).await);
        }
        if context.trial.is_none()
            && let Ok(found) = self.find(batches, None).await
        {
            return Ok(Ok(found));
        }
        let rows = ids.await?.rows(self.generation).await?;
        Ok(self.find(batches, Some(&rows)).await)
    }

    /// Finds the record that ends processes which compute `batches` with these rows of each table, or without any only
    /// name the ids of the rows.
    async fn find(&self, batches: &[TrialBatch], rows: Option<&[Rows]>) -> Result<Found, String> {
        let (context, dataset) = (self.context, self.context.tasks.dataset());
        let manifest = match batches[0].held_out {
            true => dataset.manifest().clone(),
            false => dataset.loaded(batches[0].pass).ok_or("the pass is not known")?,
        };
        let (stand_in, job) = (context.trial.as_ref(), context.session.job());
        // It writes all the parameters.
        let trials = in_place(|| Trials::new(stand_in, job, &manifest, self.parameters, rows));
        let trials = trials.map_err(|error| {
            // Without it, the record ends one trainer after another.
            warn!(%error, "cannot look for a record that ends its process");
            format!("cannot write a file: {error}")
        });
        trials?.find(batches).await
    }
}
