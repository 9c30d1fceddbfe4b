//! Calls to the acting master, repeated until one answers.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{Generation, TrainerId};
use steadfast_common::role::Role;
use steadfast_coord::backoff;
use steadfast_host::time::{sleep, timeout};
use steadfast_net::Channel;
use steadfast_proto::v1;
use steadfast_proto::v1::master_client::MasterClient;
use tonic::{Response, Status};
use tracing::{debug, info};

use crate::{ClientError, Cluster};

/// Timeout of a call, in addition to the time that the request asks the master to wait.
const TIMEOUT: Duration = Duration::from_secs(5);

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
    /// The last connection; the mutex guards only its replacement.
    connection: Arc<Mutex<Option<Connection>>>,
    /// Pushes of the trainer that passed the staleness gate.
    pushes: Arc<AtomicU64>,
}

/// The address of a master, and a client connected to it.
type Connection = (String, MasterClient<Channel>);

/// One method for each call. Requests are idempotent: each changes nothing, or names what it changes.
macro_rules! calls {
    ($($name:ident($request:ident) -> $reply:ident $(waits $wait:ident)?;)*) => {$(
        pub(crate) async fn $name(
            &self,
            request: v1::$request,
        ) -> Result<v1::$reply, ClientError> {
            self.call(Duration::ZERO $(+ $wait)?, move |mut client| {
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
        Self { cluster, trainer, connection: Arc::default(), pushes: Arc::default() }
    }

    /// Returns the caller field of requests.
    pub(crate) fn caller(&self, generation: Generation) -> Option<v1::Caller> {
        Some(v1::Caller { trainer: self.trainer.to_string(), generation: generation.0 })
    }

    /// The number of pushes that passed the staleness gate, in all generations.
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
        begin_save(BeginSaveRequest) -> BeginSaveReply;
        finish_save(FinishSaveRequest) -> FinishSaveReply;
    }

    async fn call<T, F>(
        &self,
        wait: Duration,
        attempt: impl Fn(MasterClient<Channel>) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let mut pauses = backoff();
        loop {
            let (address, mut changes) = self.cluster.master();
            if let Some(client) = address.and_then(|address| self.client(&address)) {
                match timeout(wait + TIMEOUT, attempt(client)).await {
                    Ok(Ok(reply)) => return Ok(reply.into_inner()),
                    Ok(Err(status)) => check_retryable(&status)?,
                    Err(_) => debug!("call to the master timed out"),
                }
                // Drops a failed connection: it may lead to a former master.
                self.connection.lock().expect("no holder panics").take();
            }
            tokio::select! {
                biased;
                () = sleep(pauses.next().unwrap_or(TIMEOUT)) => {}
                _ = changes.changed() => {}
                () = self.cluster.job_ended() => return Err(ClientError::JobEnded),
            }
        }
    }

    fn client(&self, address: &str) -> Option<MasterClient<Channel>> {
        let mut connection = self.connection.lock().expect("no holder panics");
        if let Some((known, client)) = &*connection
            && known == address
        {
            return Some(client.clone());
        }
        let channel = self.cluster.tls().dial(address, Role::Master).ok()?;
        info!(address, "following the acting master");
        let client = MasterClient::new(channel);
        *connection = Some((address.to_owned(), client.clone()));
        Some(client)
    }
}

/// Returns the error of a call that must not be repeated.
fn check_retryable(status: &Status) -> Result<(), ClientError> {
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
        | ErrorKind::Internal => {
            let message = status.message().to_owned();
            Err(ClientError::Rejected { peer: "the master", kind, message })
        }
    }
}
