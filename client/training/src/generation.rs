//! One generation, as a trainer takes part in it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use steadfast_common::ids::{Generation, Lane, Pass, RequestId, TaskId, Version};
use steadfast_common::records::EvaluationRecord;
use steadfast_common::records::discarded_records::{DiscardedRecord, LeftOutRecords};
use steadfast_common::records::position::Position;
use steadfast_common::status::TimeBreakdown;
use steadfast_host::random;
use steadfast_host::time::timeout;
use steadfast_proto::v1;
use steadfast_proto::v1::begin_init_reply::Answer;
use steadfast_proto::v1::fail_task_request::Cause;
use tracing::info;

use crate::master::ADVANCE_WAIT;
use crate::{ClientError, HeldTasks, InitialValues, LaneFollower, Master, Pservers, SaverElection};

/// Longest time between two looks at the record of the initializer.
const INIT_WAIT: Duration = Duration::from_millis(500);

/// One generation: its pservers, and the master's calls on its behalf. Each call fails with
/// [`ClientError::NewGeneration`] once another generation began. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GenerationClient {
    pub(crate) master: Master,
    pub(crate) pservers: Pservers,
    left_out: Arc<LeftOutRecords>,
}

/// A task of a lane, or a held-out task, that cannot be computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedTask {
    /// The pass; any for a held-out task.
    pub pass: Pass,
    pub task: TaskId,
    /// The lane; any for a held-out task.
    pub lane: Lane,
    pub cause: FailureCause,
    pub reason: String,
}

/// Whether every trainer would fail in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCause {
    /// The data is invalid.
    Data,
    /// The data is unreachable; a retry may succeed.
    Transient,
}

/// The master's decision on a failed task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureDecision {
    /// The task is left out: in the rest of the pass, or in all evaluations.
    GivenUp,
    /// Another trainer tries it: the lane was reassigned.
    Elsewhere,
    /// The caller retries it.
    Retry,
}

impl GenerationClient {
    /// Returns the client of `master` and `pservers` in the generation of the latter, which leaves out `left_out`.
    pub fn new(master: Master, pservers: Pservers, left_out: LeftOutRecords) -> Self {
        Self { master, pservers, left_out: left_out.into() }
    }

    pub fn number(&self) -> Generation {
        self.pservers.generation()
    }

    /// Returns whether this trainer's contributions have become void, because another generation began or its lease
    /// ended.
    pub fn is_over(&self) -> bool {
        self.pservers.is_over()
    }

    pub fn pservers(&self) -> &Pservers {
        &self.pservers
    }

    pub(crate) fn caller(&self) -> Option<v1::Caller> {
        self.master.caller(self.number())
    }

    /// Completes when another generation has begun.
    pub async fn over(&self) {
        self.pservers.cluster.generation_after(self.number()).await;
    }

    /// Returns which records the generation leaves out of training.
    pub fn left_out(&self) -> &LeftOutRecords {
        &self.left_out
    }

    /// Completes when the parameters have their initial values. Sets them to those of `values` if this trainer is
    /// elected as the initializer.
    ///
    /// # Errors
    /// The error of `values`, a rejection, another generation, or the end of the job.
    pub async fn initialize<E: From<ClientError>, V>(&self, values: impl Fn() -> V) -> Result<(), E>
    where
        V: Future<Output = Result<InitialValues, E>>,
    {
        let cluster = &self.pservers.cluster;
        while !cluster.is_initialized(self.number()) {
            let changed = cluster.init_changed();
            let request = v1::BeginInitRequest { caller: self.caller() };
            let reply = self.master.begin_init(request).await?;
            match reply.answer() {
                Answer::Initialize => {
                    let attempt = reply.attempt;
                    info!(attempt, "initializes the parameters");
                    self.pservers.init(attempt, values().await?).await?;
                    let request = v1::FinishInitRequest { caller: self.caller(), attempt };
                    self.master.finish_init(request).await?;
                }
                // The mirror may lag behind the master.
                Answer::Wait | Answer::Done => drop(timeout(INIT_WAIT, changed).await),
            }
            if cluster.generation().is_some_and(|it| self.number() < it.generation) {
                return Err(ClientError::NewGeneration.into());
            }
        }
        Ok(())
    }

    /// Starts to follow the lanes assigned to this trainer, in synchronous mode. Reports the time breakdown since the
    /// trainer's start to the master.
    pub fn follow_lanes(
        &self,
        time_breakdown: impl Fn() -> TimeBreakdown + Send + 'static,
    ) -> LaneFollower {
        LaneFollower::start(self.clone(), time_breakdown)
    }

    /// Returns the tasks of this trainer, none so far, in asynchronous mode.
    pub fn tasks(&self) -> HeldTasks {
        HeldTasks::new(self.clone())
    }

    /// Reports that a task of a lane, or a held-out task, cannot be computed.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn fail_task(&self, failed: FailedTask) -> Result<FailureDecision, ClientError> {
        let cause = match failed.cause {
            FailureCause::Data => Cause::Data,
            FailureCause::Transient => Cause::Transient,
        };
        let request = v1::FailTaskRequest {
            caller: self.caller(),
            request_id: RequestId(random::uuid()).0.to_string(),
            pass: failed.pass.0,
            task: failed.task.0,
            reason: failed.reason,
            cause: cause.into(),
            lane: failed.lane.0,
        };
        let reply = self.master.fail_task(request).await?;
        Ok(match (reply.given_up, reply.elsewhere) {
            (true, _) => FailureDecision::GivenUp,
            (false, true) => FailureDecision::Elsewhere,
            (false, false) => FailureDecision::Retry,
        })
    }

    /// Waits before a push while this trainer is too many pushes ahead of the slowest one, and counts the push.
    /// Required in asynchronous mode if the job has `max_staleness`.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn wait_at_staleness_gate(&self) -> Result<(), ClientError> {
        let pushes = self.master.pushes();
        let request = v1::AdvanceRequest {
            caller: self.caller(),
            clock: pushes.load(Ordering::Relaxed),
            wait_ms: ADVANCE_WAIT.as_millis() as u64,
        };
        while !self.master.advance(request.clone()).await?.go {}
        pushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Reports an evaluation on held-out data.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn report_evaluation(&self, record: EvaluationRecord) -> Result<(), ClientError> {
        let request = v1::ReportEvaluationRequest {
            caller: self.caller(),
            evaluation: Some(evaluation(record)),
        };
        self.master.report_evaluation(request).await.map(drop)
    }

    /// Reports that gradients or parameters are not finite, which ends the job.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn report_divergence(&self, reason: String) -> Result<(), ClientError> {
        let request = v1::ReportDivergenceRequest { caller: self.caller(), reason };
        self.master.report_divergence(request).await.map(drop)
    }

    /// Reports a record whose gradient ends the process that computes it, in the step from `version` (synchronous mode),
    /// or whose evaluation at `version` does: another generation begins without it.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn discard_record(
        &self,
        record: DiscardedRecord,
        version: Version,
    ) -> Result<(), ClientError> {
        let DiscardedRecord { task, record, from, held_out, reason } = record;
        let request = v1::DiscardRecordRequest {
            caller: self.caller(),
            pass: from.0,
            task: task.0,
            record,
            version: version.0,
            reason,
            held_out,
        };
        self.master.discard_record(request).await.map(drop)
    }

    /// Enters the election of the saver, once training has ended at `position`. Its pass is the number of
    /// passes.
    pub fn saver_election(&self, position: Position) -> SaverElection {
        SaverElection::new(self.clone(), position)
    }
}

pub(crate) fn evaluation(record: EvaluationRecord) -> v1::Evaluation {
    let kept = record.model.map(|it| (it.url, it.parameters_sha256, it.file_sha256));
    let (model, parameters_sha256, file_sha256) = kept.unwrap_or_default();
    let further = record.further_metrics.into_iter();
    v1::Evaluation {
        pass: record.pass.0,
        version: record.version.0,
        records: record.records,
        loss: record.loss,
        metric: record.metric,
        metric_name: record.metric_name,
        further_metrics: further.map(|(name, value)| v1::NamedValue { name, value }).collect(),
        model,
        parameters_sha256,
        file_sha256,
    }
}

pub(crate) fn time_breakdown(spent: TimeBreakdown) -> v1::TimeBreakdown {
    let TimeBreakdown { data, compute, push, wait, pull, moved_bytes } = spent;
    v1::TimeBreakdown { data, compute, push, wait, pull, moved_bytes }
}
