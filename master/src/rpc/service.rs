//! The gRPC service of a master. A standby rejects calls, and callers look for the acting master.

use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{
    Attempt, Generation, Lane, Pass, RequestId, TaskId, TrainerId, Version,
};
use steadfast_common::job::job_file;
use steadfast_common::records::amendment::Amendment;
use steadfast_common::records::discarded_records::DiscardedRecord;
use steadfast_common::records::extension::More;
use steadfast_common::records::given_up::Discarded;
use steadfast_common::records::stream::LeftOut;
use steadfast_common::records::{EvaluationRecord, JobOutcome, KeptModel, ResultRecord};
use steadfast_common::status::TimeBreakdown;
use steadfast_host::time::{Instant, timeout, unix_ms};
use steadfast_master_core::election::InitReply;
use steadfast_master_core::ledger::{Next, Report, Request as TaskRequest, Wants};
use steadfast_master_core::saver::{SaveReply, Stage};
use steadfast_master_core::sync_tasks::{Cause, Failure};
use steadfast_proto::v1::master_server::Master;
use steadfast_proto::v1::next_task_request::Report as WireReport;
use steadfast_proto::v1::{
    AdvanceReply, AdvanceRequest, AllDone, AmendJobReply, AmendJobRequest, BeginInitReply,
    BeginInitRequest, BeginSaveReply, BeginSaveRequest, Caller, DiscardRecordReply,
    DiscardRecordRequest, Dispatch, DrainReply, DrainRequest, Evaluation, FailTaskReply,
    FailTaskRequest, FinishInitReply, FinishInitRequest, FinishSaveReply, FinishSaveRequest,
    FollowReply, FollowRequest, GivenUp as WireGivenUp, Later, NextTaskReply, NextTaskRequest,
    ReportDamageReply, ReportDamageRequest, ReportDivergenceReply, ReportDivergenceRequest,
    ReportEvaluationReply, ReportEvaluationRequest, RestoreCheckpointReply,
    RestoreCheckpointRequest, ScaleReply, ScaleRequest, StatusReply, StatusRequest,
    TakeCheckpointReply, TakeCheckpointRequest, amend_job_request, begin_init_reply,
    begin_save_request, fail_task_request, next_task_reply,
};
use steadfast_proto::{status, v1};
use tokio::sync::watch;
use tonic::{Request, Response, Status};
use tracing::warn;
use uuid::Uuid;

use crate::acting_handles::ActingHandles;
use crate::event_loop::handle::{
    ControlError, Event, GivenUp, Reply, SaveAnswer, SaveReport, TaskDone,
};
use crate::rpc::discarded_list;
use crate::scaling::{scale_reply, scale_wish};
use crate::status::status_snapshot::Assignments;

/// Maximum time that a call may block.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// Time to write the list of given-up tasks at the end of the job. Less than the caller's timeout: a call
/// that is repeated would begin again.
const LIST_TIMEOUT: Duration = Duration::from_secs(3);

/// Delay after which a trainer without a task retries.
const RETRY_MS: u64 = 50;

/// Maximum length of a failure's reason; the rest is truncated.
const REASON_BYTES_MAX: usize = 1000;

/// Serves calls while this master acts, and rejects them otherwise.
pub struct Service {
    pub acting: watch::Receiver<Option<ActingHandles>>,
}

fn reject(error: &ControlError) -> Status {
    status(error.kind(), error.to_string())
}

fn invalid(message: &str) -> Status {
    status(ErrorKind::Invalid, message)
}

/// Parses the trainer and the generation of a call.
fn caller(caller: Option<Caller>) -> Result<(TrainerId, Generation), Status> {
    let caller = caller.ok_or_else(|| invalid("the call lacks its caller"))?;
    let id: Uuid = caller.trainer.parse().map_err(|_| invalid("the trainer id is not a UUID"))?;
    Ok((TrainerId(id), Generation(caller.generation)))
}

fn request_id(text: &str) -> Result<RequestId, Status> {
    Ok(RequestId(text.parse().map_err(|_| invalid("the request id is not a UUID"))?))
}

/// Returns the beginning of a text that is shown as a reason.
pub(crate) fn reason(mut text: String) -> String {
    while REASON_BYTES_MAX < text.len() {
        text.pop();
    }
    text
}

impl Service {
    fn acting(&self) -> Result<ActingHandles, Status> {
        self.acting.borrow().clone().ok_or_else(|| reject(&ControlError::NotActing))
    }

    /// Sends a request to the acting master's event loop and waits for the reply.
    async fn ask<T>(&self, event: impl FnOnce(Reply<T>) -> Event) -> Result<T, Status> {
        self.acting()?.handle.ask(event).await.map_err(|error| reject(&error))
    }
}

#[tonic::async_trait]
impl Master for Service {
    async fn begin_init(
        &self,
        request: Request<BeginInitRequest>,
    ) -> Result<Response<BeginInitReply>, Status> {
        let (trainer, generation) = caller(request.into_inner().caller)?;
        let decision = self.ask(|reply| Event::BeginInit { generation, trainer, reply }).await?;
        let (answer, attempt) = match decision {
            InitReply::Elected { record } => (begin_init_reply::Answer::Initialize, record.attempt),
            InitReply::Wait => (begin_init_reply::Answer::Wait, 0),
            InitReply::Done => (begin_init_reply::Answer::Done, 0),
        };
        Ok(Response::new(BeginInitReply { answer: answer.into(), attempt }))
    }

    async fn finish_init(
        &self,
        request: Request<FinishInitRequest>,
    ) -> Result<Response<FinishInitReply>, Status> {
        let request = request.into_inner();
        let (trainer, generation) = caller(request.caller)?;
        let attempt = request.attempt;
        self.ask(|reply| Event::FinishInit { generation, trainer, attempt, reply }).await?;
        Ok(Response::new(FinishInitReply {}))
    }

    async fn follow(
        &self,
        request: Request<FollowRequest>,
    ) -> Result<Response<FollowReply>, Status> {
        let request = request.into_inner();
        let (trainer, generation) = caller(request.caller)?;
        let handle = self.acting()?.handle;
        let time_breakdown = request.time_breakdown.map(time_breakdown);
        if let Some(position) = request.position {
            let position = position.into();
            handle.notify(Event::Position { generation, trainer, position, time_breakdown });
        }
        let mut assignments = handle.assignments.clone();
        let known = request.assignment;
        let current = assignments.borrow_and_update().number;
        // The number of an earlier term never matches, so its caller is answered at once.
        if current == known {
            let wait = Duration::from_millis(request.wait_ms).min(WAIT_MAX);
            let _ = timeout(wait, assignments.changed()).await;
        }
        let assignments = assignments.borrow().clone();
        if generation < assignments.generation {
            let (found, present) = (generation, assignments.generation);
            return Err(reject(&ControlError::OtherGeneration { found, present }));
        }
        Ok(Response::new(follow_reply(&assignments, trainer)))
    }

    async fn next_task(
        &self,
        request: Request<NextTaskRequest>,
    ) -> Result<Response<NextTaskReply>, Status> {
        let request = request.into_inner();
        let (trainer, generation) = caller(request.caller)?;
        let acting = self.acting()?;
        let done = match &request.report {
            Some(WireReport::Finished(finished)) => Some(TaskDone {
                records: finished.records,
                loss_sum: finished.loss_sum,
                version: Version(finished.version),
            }),
            Some(WireReport::Failed(_) | WireReport::Returned(_)) | None => None,
        };
        let time_breakdown = request.time_breakdown.map(time_breakdown);
        let request = TaskRequest {
            id: request_id(&request.request_id)?,
            trainer,
            report: request.report.map(report),
            wants: if request.more { Wants::Task } else { Wants::Nothing },
            held: request.held.map(|it| it.attempts.into_iter().map(Attempt).collect()),
        };
        let answer = acting
            .handle
            .ask(|reply| Event::NextTask { generation, request, done, time_breakdown, reply })
            .await
            .map_err(|error| reject(&error))?;
        let next = match answer.next {
            Next::Task(dispatch) => next_task_reply::Next::Task(Dispatch {
                task: dispatch.task.0,
                attempt: dispatch.attempt.0,
                pass: dispatch.pass.0,
                deadline_ms: acting.task_deadline.as_millis() as u64,
                is_suspected: dispatch.is_suspected,
            }),
            Next::NotYet => next_task_reply::Next::Later(Later { retry_ms: RETRY_MS }),
            Next::AllDone => next_task_reply::Next::AllDone(AllDone {}),
            Next::AllFailed { pass } => return Err(reject(&ControlError::AllFailed { pass })),
        };
        Ok(Response::new(NextTaskReply { accepted: answer.accepted, next: Some(next) }))
    }

    async fn fail_task(
        &self,
        request: Request<FailTaskRequest>,
    ) -> Result<Response<FailTaskReply>, Status> {
        let request = request.into_inner();
        let cause = match request.cause() {
            fail_task_request::Cause::Transient => Cause::Transient,
            fail_task_request::Cause::Data => Cause::Data,
        };
        let (trainer, generation) = caller(request.caller)?;
        let failure = Failure {
            id: request_id(&request.request_id)?,
            trainer,
            pass: Pass(request.pass),
            task: TaskId(request.task),
            lane: Lane(request.lane),
            cause,
            reason: reason(request.reason),
        };
        let given_up = self.ask(|reply| Event::FailTask { generation, failure, reply }).await?;
        Ok(Response::new(FailTaskReply {
            given_up: given_up == GivenUp::Yes,
            elsewhere: given_up == GivenUp::Elsewhere,
        }))
    }

    async fn advance(
        &self,
        request: Request<AdvanceRequest>,
    ) -> Result<Response<AdvanceReply>, Status> {
        let request = request.into_inner();
        let (trainer, _) = caller(request.caller)?;
        let acting = self.acting()?;
        let Some(bound) = acting.max_staleness else {
            return Ok(Response::new(AdvanceReply { go: true, ahead: 0 }));
        };
        let wait = Duration::from_millis(request.wait_ms).min(WAIT_MAX);
        let deadline = Instant::now() + wait;
        let gate = &acting.handle.staleness_gate;
        let (go, ahead) = gate.pass(trainer, request.clock, bound, deadline).await;
        Ok(Response::new(AdvanceReply { go, ahead }))
    }

    async fn report_evaluation(
        &self,
        request: Request<ReportEvaluationRequest>,
    ) -> Result<Response<ReportEvaluationReply>, Status> {
        let request = request.into_inner();
        let (trainer, generation) = caller(request.caller)?;
        let wire = request.evaluation.ok_or_else(|| invalid("the call lacks its evaluation"))?;
        let evaluation = Box::new(evaluation(wire));
        self.ask(|reply| Event::Evaluated { generation, trainer, evaluation, reply }).await?;
        Ok(Response::new(ReportEvaluationReply {}))
    }

    async fn begin_save(
        &self,
        request: Request<BeginSaveRequest>,
    ) -> Result<Response<BeginSaveReply>, Status> {
        let request = request.into_inner();
        let stage = match request.stage() {
            begin_save_request::Stage::Evaluates => Stage::Evaluating,
            begin_save_request::Stage::Writes => Stage::Writing,
        };
        let (trainer, generation) = caller(request.caller)?;
        let error = Some(reason(request.error)).filter(|error| !error.is_empty());
        let report = SaveReport { stage, error, position: request.position.map(Into::into) };
        let SaveAnswer { reply, evaluation_is_suspected } =
            self.ask(|reply| Event::BeginSave { generation, trainer, report, reply }).await?;
        let save = reply == SaveReply::Save;
        Ok(Response::new(BeginSaveReply { save, evaluation_is_suspected }))
    }

    async fn finish_save(
        &self,
        request: Request<FinishSaveRequest>,
    ) -> Result<Response<FinishSaveReply>, Status> {
        let request = request.into_inner();
        let (_, generation) = caller(request.caller)?;
        let evaluated = request.evaluation.map(evaluation);
        let result = Box::new(ResultRecord {
            state: JobOutcome::Finished,
            reason: None,
            passes: evaluated.as_ref().map_or(0, |it| it.pass.0),
            steps: request.version,
            examples: request.examples,
            loss: evaluated.as_ref().map(|it| it.loss).or(request.loss),
            metric: evaluated.as_ref().map(|it| it.metric),
            metric_name: evaluated.as_ref().map(|it| it.metric_name.clone()),
            further_metrics: evaluated.map(|it| it.further_metrics).unwrap_or_default(),
            parameters_sha256: Some(request.parameters_sha256),
            model: Some(request.model),
            checkpoint: None,
            discarded: Discarded::default(),
            left_out: LeftOut::default(),
            ended_unix_ms: Some(unix_ms()),
            best: None,
        });
        let ActingHandles { handle, checkpoints, store, .. } = self.acting()?;
        let present = handle.snapshot.borrow().status.generation;
        if generation < present {
            // Taking the checkpoint would keep the saver of the present generation from its own.
            return Err(reject(&ControlError::OtherGeneration { found: generation, present }));
        }
        // The final checkpoint keeps the parameters and their position after the pservers exit. The job ends
        // even if it fails, because the model is already stored.
        let taken = checkpoints.take_final(generation, Version(request.version)).await;
        let mut result = match taken.error {
            None => Box::new(ResultRecord { checkpoint: taken.latest, ..*result }),
            Some(_) => result,
        };
        let given_up = self.ask(|reply| Event::GivenUp { reply }).await?;
        let written = timeout(LIST_TIMEOUT, discarded_list::write(&store, &given_up)).await;
        match written.map_err(|late| late.to_string()).map(|it| it.map_err(|it| it.to_string())) {
            Ok(Ok(list)) => result.discarded.list = list,
            Ok(Err(error)) | Err(error) => {
                warn!(%error, "cannot write the list of given-up tasks to the store; it is in etcd only");
            }
        }
        handle
            .ask(|reply| Event::FinishSave { generation, result, reply })
            .await
            .map_err(|error| reject(&error))?;
        Ok(Response::new(FinishSaveReply {}))
    }

    async fn take_checkpoint(
        &self,
        _: Request<TakeCheckpointRequest>,
    ) -> Result<Response<TakeCheckpointReply>, Status> {
        let taken = self.acting()?.checkpoints.take_now().await;
        Ok(Response::new(TakeCheckpointReply {
            checkpoint: taken.latest.unwrap_or_default(),
            error: taken.error.unwrap_or_default(),
        }))
    }

    async fn restore_checkpoint(
        &self,
        request: Request<RestoreCheckpointRequest>,
    ) -> Result<Response<RestoreCheckpointReply>, Status> {
        let RestoreCheckpointRequest { checkpoint, force } = request.into_inner();
        let generation = self.ask(|reply| Event::RollBack { checkpoint, force, reply }).await?;
        Ok(Response::new(RestoreCheckpointReply { generation: generation.0 }))
    }

    async fn scale_trainers(
        &self,
        request: Request<ScaleRequest>,
    ) -> Result<Response<ScaleReply>, Status> {
        let wish = scale_wish(request.get_ref())?;
        let record = self.ask(|reply| Event::Scale { wish, reply }).await?;
        Ok(Response::new(scale_reply(&record)?))
    }

    async fn amend_job(
        &self,
        request: Request<AmendJobRequest>,
    ) -> Result<Response<AmendJobReply>, Status> {
        let amendment = match request.into_inner().amendment {
            Some(amend_job_request::Amendment::Passes(passes @ 1..)) => {
                Amendment::Extend(More::Passes(passes))
            }
            Some(amend_job_request::Amendment::Steps(steps @ 1..)) => {
                Amendment::Extend(More::Steps(steps))
            }
            Some(amend_job_request::Amendment::JobFile(text)) => {
                let spec = job_file::parse(&text).map_err(|error| invalid(&error.to_string()))?;
                Amendment::Change(Box::new(spec))
            }
            Some(_) | None => return Err(invalid("the request has no passes, steps or job file")),
        };
        let amendment = Box::new(amendment);
        let generation = self.ask(|reply| Event::Amend { amendment, reply }).await?;
        Ok(Response::new(AmendJobReply { generation: generation.0 }))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        let stream = self.acting()?.stream.ok_or_else(|| {
            invalid("the job ends by itself: only one with `dataset.follow` is drained")
        })?;
        let waits_for = stream.drain();
        let ended = waits_for.is_none();
        Ok(Response::new(DrainReply { ended, waits_for: waits_for.unwrap_or_default() }))
    }

    async fn report_damage(
        &self,
        request: Request<ReportDamageRequest>,
    ) -> Result<Response<ReportDamageReply>, Status> {
        let request = request.into_inner();
        let (generation, checkpoint) = (Generation(request.generation), request.checkpoint);
        let reason = reason(request.reason);
        self.ask(|reply| Event::Damaged { generation, checkpoint, reason, reply }).await?;
        Ok(Response::new(ReportDamageReply {}))
    }

    async fn report_divergence(
        &self,
        request: Request<ReportDivergenceRequest>,
    ) -> Result<Response<ReportDivergenceReply>, Status> {
        let request = request.into_inner();
        let (trainer, generation) = caller(request.caller)?;
        let reason = format!("trainer {trainer}: {}", reason(request.reason));
        self.ask(|reply| Event::Diverged { generation, reason, reply }).await?;
        Ok(Response::new(ReportDivergenceReply {}))
    }

    async fn discard_record(
        &self,
        request: Request<DiscardRecordRequest>,
    ) -> Result<Response<DiscardRecordReply>, Status> {
        let request = request.into_inner();
        let (trainer, generation) = caller(request.caller)?;
        let record = DiscardedRecord {
            task: TaskId(request.task),
            record: request.record,
            from: Pass(request.pass),
            held_out: request.held_out,
            reason: reason(request.reason),
        };
        let version = Version(request.version);
        self.ask(|reply| Event::DiscardRecord { generation, trainer, record, version, reply })
            .await?;
        Ok(Response::new(DiscardRecordReply {}))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let status = self.acting()?.status();
        let json = serde_json::to_vec(&status)
            .map_err(|error| steadfast_proto::status(ErrorKind::Internal, error.to_string()))?;
        Ok(Response::new(StatusReply { json: json.into() }))
    }
}

/// Converts a time breakdown; invalid durations count as zero.
fn time_breakdown(wire: v1::TimeBreakdown) -> TimeBreakdown {
    let time = |seconds: f64| if seconds.is_finite() { seconds.max(0.0) } else { 0.0 };
    TimeBreakdown {
        data: time(wire.data),
        compute: time(wire.compute),
        push: time(wire.push),
        wait: time(wire.wait),
        pull: time(wire.pull),
        moved_bytes: wire.moved_bytes,
    }
}

fn report(report: WireReport) -> Report {
    match report {
        WireReport::Finished(it) => {
            Report::Finished { task: TaskId(it.task), attempt: Attempt(it.attempt) }
        }
        WireReport::Failed(it) => Report::Failed {
            task: TaskId(it.task),
            attempt: Attempt(it.attempt),
            reason: reason(it.reason),
        },
        WireReport::Returned(it) => Report::Returned {
            task: TaskId(it.task),
            attempt: Attempt(it.attempt),
            unreachable: (!it.reason.is_empty()).then(|| reason(it.reason)),
        },
    }
}

fn evaluation(wire: Evaluation) -> EvaluationRecord {
    EvaluationRecord {
        pass: Pass(wire.pass),
        version: Version(wire.version),
        records: wire.records,
        loss: wire.loss,
        metric: wire.metric,
        metric_name: wire.metric_name,
        further_metrics: wire.further_metrics.into_iter().map(|it| (it.name, it.value)).collect(),
        course: None,
        model: (!wire.model.is_empty()).then_some(KeptModel {
            url: wire.model,
            parameters_sha256: wire.parameters_sha256,
            file_sha256: wire.file_sha256,
        }),
    }
}

fn follow_reply(assignments: &Assignments, trainer: TrainerId) -> FollowReply {
    let lanes = assignments.lanes.get(&trainer).map_or(&[][..], Vec::as_slice);
    let given_up = assignments.given_up.iter().map(|(pass, tasks)| WireGivenUp {
        pass: pass.0,
        tasks: tasks.iter().map(|task| task.0).collect(),
    });
    FollowReply {
        assignment: assignments.number,
        lanes: lanes.iter().map(|Lane(lane)| *lane).collect(),
        given_up: given_up.collect(),
        suspected: lanes
            .iter()
            .filter(|lane| assignments.suspected.contains(lane))
            .map(|Lane(lane)| *lane)
            .collect(),
        evaluation_is_suspected: assignments.evaluation_is_suspected,
    }
}
