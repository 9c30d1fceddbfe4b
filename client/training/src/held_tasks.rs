//! The tasks of a trainer in asynchronous mode.

use std::collections::VecDeque;
use std::time::Duration;

use steadfast_common::ids::{Attempt, Pass, RequestId, TaskId, Version};
use steadfast_common::records::DispatchRecord;
use steadfast_common::status::TimeBreakdown;
use steadfast_host::random;
use steadfast_proto::v1;
use steadfast_proto::v1::next_task_reply::Next;
use steadfast_proto::v1::next_task_request::Report;
use tracing::{debug, info};

use crate::generation::time_breakdown;
use crate::{ClientError, GenerationClient};

/// Pause after a reply without content.
const RETRY: Duration = Duration::from_millis(100);

/// The tasks that a trainer holds, in the order in which it took them. Each is reported once it is over.
#[derive(Debug)]
pub struct HeldTasks {
    generation: GenerationClient,
    held: VecDeque<DispatchRecord>,
}

/// The outcome of a task.
#[derive(Clone, Debug, PartialEq)]
pub enum TaskOutcome {
    /// The task was computed, and every slot has acknowledged its pushes. `version` is the last version that was
    /// pulled.
    Finished { records: u64, loss_sum: f64, version: Version },
    /// The task cannot be computed.
    Failed { reason: String },
}

/// The master's answer to a request for a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextTask {
    Taken(DispatchRecord),
    /// No task is available yet.
    Later(Duration),
    /// All passes are over.
    AllDone,
}

/// Whether the trainer takes another task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Take {
    Another,
    Nothing,
}

impl HeldTasks {
    pub(crate) fn new(generation: GenerationClient) -> Self {
        Self { generation, held: VecDeque::new() }
    }

    /// Returns the task that was taken first, which is the one to compute.
    pub fn first(&self) -> Option<DispatchRecord> {
        self.held.front().copied()
    }

    pub fn len(&self) -> usize {
        self.held.len()
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Takes another task. `spent` is the time breakdown since the trainer's start.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn take(&mut self, spent: TimeBreakdown) -> Result<NextTask, ClientError> {
        self.request(None, Take::Another, spent).await
    }

    /// Reports the outcome of the first task and takes another one, in one call.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    ///
    /// # Panics
    /// If there are no tasks.
    pub async fn report(
        &mut self,
        outcome: TaskOutcome,
        spent: TimeBreakdown,
    ) -> Result<NextTask, ClientError> {
        let DispatchRecord { task, attempt, .. } = self.held.pop_front().expect("a task is held");
        let (attempt, task) = (attempt.0, task.0);
        let report = match outcome {
            TaskOutcome::Finished { records, loss_sum, version } => {
                let version = version.0;
                Report::Finished(v1::Finished { attempt, task, records, loss_sum, version })
            }
            TaskOutcome::Failed { reason } => Report::Failed(v1::Failed { attempt, task, reason }),
        };
        self.request(Some(report), Take::Another, spent).await
    }

    /// Returns the first task, if there is one, to the queue, which does not count as a failure. `unreachable` says
    /// why its data cannot be reached, if that is the reason.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn return_first(
        &mut self,
        unreachable: Option<String>,
        spent: TimeBreakdown,
    ) -> Result<(), ClientError> {
        let Some(DispatchRecord { task, attempt, .. }) = self.held.pop_front() else {
            return Ok(());
        };
        info!(%task, "task returned");
        let reason = unreachable.unwrap_or_default();
        let returned = v1::Returned { attempt: attempt.0, task: task.0, reason };
        self.request(Some(Report::Returned(returned)), Take::Nothing, spent).await?;
        Ok(())
    }

    /// Returns all tasks to the queue, which does not count as a failure.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn return_all(&mut self, spent: TimeBreakdown) -> Result<(), ClientError> {
        while !self.is_empty() {
            self.return_first(None, spent).await?;
        }
        Ok(())
    }

    async fn request(
        &mut self,
        report: Option<Report>,
        take: Take,
        spent: TimeBreakdown,
    ) -> Result<NextTask, ClientError> {
        let request = v1::NextTaskRequest {
            caller: self.generation.caller(),
            request_id: RequestId(random::uuid()).0.to_string(),
            report,
            more: take == Take::Another,
            time_breakdown: Some(time_breakdown(spent)),
            held: Some(v1::Held { attempts: self.held.iter().map(|it| it.attempt.0).collect() }),
        };
        let reply = self.generation.master.next_task(request).await?;
        Ok(match reply.next {
            Some(Next::Task(v1::Dispatch { task, attempt, pass, is_suspected, .. })) => {
                debug!(task, attempt, "task taken");
                let (task, attempt, pass) = (TaskId(task), Attempt(attempt), Pass(pass));
                let dispatch = DispatchRecord { task, attempt, pass, is_suspected };
                self.held.push_back(dispatch);
                NextTask::Taken(dispatch)
            }
            Some(Next::Later(later)) => NextTask::Later(Duration::from_millis(later.retry_ms)),
            Some(Next::AllDone(_)) => NextTask::AllDone,
            None => NextTask::Later(RETRY),
        })
    }
}
