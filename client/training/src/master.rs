//! A trainer's calls to the acting master.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, TrainerId};
use steadfast_master_client::CallError;
use steadfast_proto::v1;
use steadfast_proto::v1::master_client::MasterClient;
use tonic::Status;

use crate::{ClientError, Cluster};

/// How long one `Follow` waits at the master; also the interval of position reports.
pub(crate) const FOLLOW_WAIT: Duration = Duration::from_millis(100);

/// How long one `Advance` waits at the master.
pub(crate) const ADVANCE_WAIT: Duration = Duration::from_secs(1);

/// A trainer's client of the acting master; follows failovers. Its calls are the methods of
/// [`crate::GenerationClient`].
#[derive(Clone, Debug)]
pub struct Master {
    cluster: Arc<Cluster>,
    trainer: TrainerId,
    /// Pushes of the trainer that passed the staleness gate.
    pushes: Arc<AtomicU64>,
}

/// One method for each call. Requests are idempotent: each changes nothing, or names what it changes.
macro_rules! calls {
    ($($name:ident($request:ident) -> $reply:ident $(waits $wait:ident)?;)*) => {$(
        pub(crate) async fn $name(
            &self,
            request: v1::$request,
        ) -> Result<v1::$reply, ClientError> {
            let attempt = move |channel| {
                let request = request.clone();
                async move { MasterClient::new(channel).$name(request).await }
            };
            let called = self.cluster.acting().call(Duration::ZERO $(+ $wait)?, attempt).await;
            called.map_err(not_called)
        }
    )*};
}

impl Master {
    /// Creates a client that calls on behalf of `trainer`.
    pub fn new(cluster: Arc<Cluster>, trainer: TrainerId) -> Self {
        Self { cluster, trainer, pushes: Arc::default() }
    }

    /// Returns the caller field of requests.
    pub(crate) fn caller(&self, generation: Generation) -> Option<v1::Caller> {
        Some(v1::Caller { trainer: self.trainer.to_string(), generation: generation.0 })
    }

    /// Returns the counter of the trainer's pushes that passed the staleness gate, in all generations.
    pub(crate) fn pushes(&self) -> &AtomicU64 {
        &self.pushes
    }

    calls! {
        begin_init(BeginInitRequest) -> BeginInitReply;
        finish_init(FinishInitRequest) -> FinishInitReply;
        follow(FollowRequest) -> FollowReply waits FOLLOW_WAIT;
        next_task(NextTaskRequest) -> NextTaskReply;
        fail_task(FailTaskRequest) -> FailTaskReply;
        advance(AdvanceRequest) -> AdvanceReply waits ADVANCE_WAIT;
        report_evaluation(ReportEvaluationRequest) -> ReportEvaluationReply;
        report_divergence(ReportDivergenceRequest) -> ReportDivergenceReply;
        discard_record(DiscardRecordRequest) -> DiscardRecordReply;
        begin_save(BeginSaveRequest) -> BeginSaveReply;
        finish_save(FinishSaveRequest) -> FinishSaveReply;
    }
}

pub(crate) fn not_called(error: CallError) -> ClientError {
    match error {
        CallError::JobEnded => ClientError::JobEnded,
        CallError::Rejected(status) => rejected(&status),
    }
}

fn rejected(status: &Status) -> ClientError {
    match steadfast_proto::kind(status) {
        ErrorKind::Stale => ClientError::NewGeneration,
        kind => {
            let message = status.message().to_owned();
            ClientError::Rejected { peer: "the master", kind, message }
        }
    }
}
