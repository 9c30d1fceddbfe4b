//! Calls to whoever is the acting master, repeated until one answers.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, TrainerId};
use steadfast_coord::pauses;
use steadfast_host::net::{Wire, dial};
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

/// Longest wait for an answer, beyond what the call itself asks the master to wait.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The acting master, whoever it is at the moment.
#[derive(Clone, Debug)]
pub struct Master {
    cluster: Arc<Cluster>,
    trainer: TrainerId,
    /// The last connection; guards nothing but its own replacement.
    connection: Arc<Mutex<Option<Connection>>>,
}

/// A master's address, and the client that leads there.
type Connection = (String, MasterClient<Wire>);

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident($request:ty) -> $reply:ty;)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// A refusal of the master's, or the end of the job.
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
    /// Calls on behalf of `trainer`.
    pub fn new(cluster: Arc<Cluster>, trainer: TrainerId) -> Self {
        Self { cluster, trainer, connection: Arc::default() }
    }

    /// What every request begins with.
    pub fn caller(&self, generation: Generation) -> Option<Caller> {
        Some(Caller { trainer: self.trainer.to_string(), generation: generation.0 })
    }

    calls! {
        /// Offers to initialise the parameters.
        begin_init(BeginInitRequest) -> BeginInitReply;
        /// Says that the parameters are initialised.
        finish_init(FinishInitRequest) -> FinishInitReply;
        /// Reports on a task and takes the next one.
        next_task(NextTaskRequest) -> NextTaskReply;
        /// Says that a task of a lane cannot be computed.
        fail_task(FailTaskRequest) -> FailTaskReply;
        /// Says that gradients or parameters are not finite, which ends the job.
        report_divergence(ReportDivergenceRequest) -> ReportDivergenceReply;
        /// Offers to save the model.
        begin_save(BeginSaveRequest) -> BeginSaveReply;
        /// Says that the model is saved.
        finish_save(FinishSaveRequest) -> FinishSaveReply;
    }

    /// Reports figures on held-out data.
    ///
    /// # Errors
    /// A refusal of the master's, or the end of the job.
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

    /// Reports a position and waits (as long as the request says) for other lanes.
    ///
    /// # Errors
    /// A refusal of the master's, or the end of the job.
    pub async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ClientError> {
        let wait = Duration::from_millis(request.wait_ms);
        self.call(wait, move |mut client| {
            let request = request.clone();
            async move { client.follow(request).await }
        })
        .await
    }

    /// Waits (as long as the request says) until the slowest trainer is near enough.
    ///
    /// # Errors
    /// A refusal of the master's, or the end of the job.
    pub async fn advance(&self, request: AdvanceRequest) -> Result<AdvanceReply, ClientError> {
        let wait = Duration::from_millis(request.wait_ms);
        self.call(wait, move |mut client| {
            let request = request.clone();
            async move { client.advance(request).await }
        })
        .await
    }

    /// Calls until a master answers. Every request can be repeated: it either changes nothing or
    /// names what it changes.
    async fn call<T, F>(
        &self,
        wait: Duration,
        attempt: impl Fn(MasterClient<Wire>) -> F,
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
                    Err(_) => debug!("the master does not answer"),
                }
                // A connection that failed is not used again: it may lead to a former master.
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

    /// Whether the call is worth repeating.
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

    fn client(&self, address: &str) -> Option<MasterClient<Wire>> {
        let mut connection = self.connection.lock().expect("no holder panics");
        if let Some((known, client)) = &*connection
            && known == address
        {
            return Some(client.clone());
        }
        let wire = dial(address, Role::Master).ok()?;
        info!(address, "follows the master");
        let client = MasterClient::new(wire);
        *connection = Some((address.to_owned(), client.clone()));
        Some(client)
    }
}
