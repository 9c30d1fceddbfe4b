//! Calls to the acting master, repeated until one answers.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, TrainerId};
use steadfast_coord::pauses;
use steadfast_host::net::{Channel, dial};
use steadfast_host::role::Role;
use steadfast_host::time::{sleep, timeout};
use steadfast_proto::v1::master_client::MasterClient;
use steadfast_proto::v1::{
    AdvanceReply, AdvanceRequest, BeginInitReply, BeginInitRequest, BeginSaveReply,
    BeginSaveRequest, Caller, Evaluation, FailTaskReply, FailTaskRequest, FinishInitReply,
    FinishInitRequest, FinishSaveReply, FinishSaveRequest, FollowReply, FollowRequest,
    NextTaskReply, NextTaskRequest, ReportDivergenceReply, ReportDivergenceRequest,
    ReportEvaluationReply, ReportEvaluationRequest,
};
use tonic::{Response, Status};
use tracing::{debug, info};

use crate::{ClientError, Cluster};

/// Timeout of a call, in addition to the time that the request asks the master to wait.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A client of the acting master that follows failovers.
#[derive(Clone, Debug)]
pub struct Master {
    cluster: Arc<Cluster>,
    trainer: TrainerId,
    /// The last connection; the mutex guards only its replacement.
    connection: Arc<Mutex<Option<Connection>>>,
}

/// The address of a master, and a client connected to it.
type Connection = (String, MasterClient<Channel>);

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident($request:ty) -> $reply:ty;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// A refusal by the master, or the end of the job.
        pub async fn $name(&self, request: $request) -> Result<$reply, ClientError> {
            self.call(Duration::ZERO, move |mut client| {
                let request = request.clone();
                async move { client.$name(request).await }
            })
            .await
        }
    )*};
}

impl Master {
    /// Creates a client that calls on behalf of `trainer`.
    pub fn new(cluster: Arc<Cluster>, trainer: TrainerId) -> Self {
        Self { cluster, trainer, connection: Arc::default() }
    }

    /// Returns the caller field of requests.
    pub fn caller(&self, generation: Generation) -> Option<Caller> {
        Some(Caller { trainer: self.trainer.to_string(), generation: generation.0 })
    }

    calls! {
        /// Offers to initialise the parameters.
        begin_init(BeginInitRequest) -> BeginInitReply;
        /// Reports that the parameters are initialised.
        finish_init(FinishInitRequest) -> FinishInitReply;
        /// Reports on a task and takes the next one.
        next_task(NextTaskRequest) -> NextTaskReply;
        /// Reports that a task of a lane cannot be computed.
        fail_task(FailTaskRequest) -> FailTaskReply;
        /// Reports that gradients or parameters are not finite, which ends the job.
        report_divergence(ReportDivergenceRequest) -> ReportDivergenceReply;
        /// Offers to save the model.
        begin_save(BeginSaveRequest) -> BeginSaveReply;
        /// Reports that the model is saved.
        finish_save(FinishSaveRequest) -> FinishSaveReply;
    }

    /// Reports an evaluation on held-out data.
    ///
    /// # Errors
    /// A refusal by the master, or the end of the job.
    pub async fn report_evaluation(
        &self,
        generation: Generation,
        evaluation: Evaluation,
    ) -> Result<ReportEvaluationReply, ClientError> {
        let caller = self.caller(generation);
        let request = ReportEvaluationRequest { caller, evaluation: Some(evaluation) };
        self.call(Duration::ZERO, move |mut client| {
            let request = request.clone();
            async move { client.report_evaluation(request).await }
        })
        .await
    }

    /// Reports a position and waits (up to the time in the request) for other lanes.
    ///
    /// # Errors
    /// A refusal by the master, or the end of the job.
    pub async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ClientError> {
        let wait = Duration::from_millis(request.wait_ms);
        self.call(wait, move |mut client| {
            let request = request.clone();
            async move { client.follow(request).await }
        })
        .await
    }

    /// Waits (up to the time in the request) until the slowest trainer is close enough.
    ///
    /// # Errors
    /// A refusal by the master, or the end of the job.
    pub async fn advance(&self, request: AdvanceRequest) -> Result<AdvanceReply, ClientError> {
        let wait = Duration::from_millis(request.wait_ms);
        self.call(wait, move |mut client| {
            let request = request.clone();
            async move { client.advance(request).await }
        })
        .await
    }

    /// Calls until a master answers. Every request is idempotent: it changes nothing, or names what it
    /// changes.
    async fn call<T, F>(
        &self,
        wait: Duration,
        attempt: impl Fn(MasterClient<Channel>) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let mut pauses = pauses();
        loop {
            let (address, mut changes) = self.cluster.master();
            if let Some(client) = address.and_then(|address| self.client(&address)) {
                match timeout(wait + TIMEOUT, attempt(client)).await {
                    Ok(Ok(reply)) => return Ok(reply.into_inner()),
                    Ok(Err(status)) => self.judge(&status)?,
                    Err(_) => debug!("call to the master timed out"),
                }
                // Drops a failed connection: it may lead to a former master.
                self.connection.lock().expect("no holder panics").take();
            }
            tokio::select! {
                biased;
                () = sleep(pauses.next().unwrap_or(TIMEOUT)) => {}
                _ = changes.changed() => {}
                () = self.cluster.over() => return Err(ClientError::JobOver),
            }
        }
    }

    /// Decides whether to repeat the call.
    fn judge(&self, status: &Status) -> Result<(), ClientError> {
        let kind = steadfast_proto::kind(status);
        match kind {
            ErrorKind::Unavailable | ErrorKind::NotYet => {
                debug!(message = status.message(), "the master is not ready");
                Ok(())
            }
            ErrorKind::Stale => Err(ClientError::NewGeneration),
            ErrorKind::Invalid
            | ErrorKind::NotFound
            | ErrorKind::Conflict
            | ErrorKind::TooLarge
            | ErrorKind::Denied
            | ErrorKind::Internal => Err(ClientError::Refused {
                what: "the master",
                kind,
                message: status.message().to_owned(),
            }),
        }
    }

    fn client(&self, address: &str) -> Option<MasterClient<Channel>> {
        let mut connection = self.connection.lock().expect("no holder panics");
        if let Some((known, client)) = &*connection
            && known == address
        {
            return Some(client.clone());
        }
        let channel = dial(address, Role::Master).ok()?;
        info!(address, "following the acting master");
        let client = MasterClient::new(channel);
        *connection = Some((address.to_owned(), client.clone()));
        Some(client)
    }
}
