//! The server of a worker; receives closures from coordinators, and passes them to the threads that run them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::registry::Registry;
use serde_json::json;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Generation;
use steadfast_common::records::keys::Keys;
use steadfast_common::tensor::layout::{Layout, ParamSpec};
use steadfast_coord::{Etcd, EtcdOptions};
use steadfast_host::random;
use steadfast_host::task::{Task, spawn};
use steadfast_host::time::{sleep, timeout};
use steadfast_net::TlsIdentity;
use steadfast_process::{
    Admin, AdminContent, AdminServer, Exposure, Failure, Readiness, Shutdown, bind,
};
use steadfast_proto::v1::closures_server::{Closures, ClosuresServer};
use steadfast_proto::v1::{
    AttendRequest, CancelReply, CancelRequest, DropReply, DropRequest, EndOfData, Raised, RunReply,
    RunRequest, WorkerState, run_reply,
};
use steadfast_proto::{MESSAGE_BYTES_MAX, access, status};
use steadfast_training_client::{ClientError, ParameterClient};
use tokio::sync::{oneshot, watch};
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tracing::info;
use uuid::Uuid;

use crate::admin::register_load;
use crate::announce::Announcement;

/// Time between looks at the closures that run, when the worker leaves.
const LEAVE_POLL: Duration = Duration::from_millis(20);

/// Time between looks at whether the outcome of a closure that pulls or pushes is wanted.
const WANTED_POLL: Duration = Duration::from_millis(50);

/// Limits how long a push goes on whose closure is not wanted any more.
const UNWANTED_MAX: Duration = Duration::from_secs(10);

/// The maximum time to find the job of a coordinator in etcd.
const JOIN_MAX: Duration = Duration::from_secs(10);

/// Limits the values that wait to be dropped.
const DROPPED_MAX: usize = 1 << 20;

/// A closure that a coordinator wants to be run.
#[derive(Debug)]
pub struct Call {
    pub request: RunRequest,
    reply: oneshot::Sender<RunReply>,
    is_cancelled: Arc<AtomicBool>,
    /// Absent if closures of the coordinator train no parameters.
    parameters: Option<Arc<ParameterClient>>,
    _counted: Counted,
}

impl Call {
    /// Returns whether the coordinator still waits for the outcome.
    pub fn is_wanted(&self) -> bool {
        !self.reply.is_closed() && !self.is_cancelled.load(Ordering::SeqCst)
    }

    /// Returns the layout of the parameters, and of a gradient.
    ///
    /// # Errors
    /// If closures of the coordinator train no parameters.
    pub fn layout(&self) -> Result<&Arc<Layout>, Failure> {
        self.pushes().map(|(client, _)| client.layout())
    }

    /// Pulls the newest values of all parameters, flat; waits for parameter servers that are away.
    ///
    /// # Errors
    /// If there are none, their rejection, or that the outcome is not wanted any more.
    pub async fn pull(&self) -> Result<Vec<f32>, Failure> {
        let (client, _) = self.pushes()?;
        self.while_wanted(client.pull(), Duration::ZERO).await
    }

    /// Pushes a mean gradient, flat, under the number of the closure, to all parameter servers; returns the generation
    /// in which all have applied it. Waits for those that are away.
    ///
    /// # Errors
    /// As [`Call::pull`]; some parameter servers may have applied it.
    pub async fn push(&self, gradient: Vec<f32>) -> Result<Generation, Failure> {
        let (client, number) = self.pushes()?;
        // A part of the servers may have it: a coordinator that is gone does not end the push at once.
        self.while_wanted(client.push(number, gradient), UNWANTED_MAX).await
    }

    fn pushes(&self) -> Result<(&ParameterClient, u32), Failure> {
        let none = || {
            let message =
                "the coordinator has no parameters: give it some, `Coordinator(…, parameters={…})`";
            Failure::invalid(message)
        };
        self.parameters.as_deref().zip(self.request.push).ok_or_else(none)
    }

    async fn while_wanted<T>(
        &self,
        work: impl Future<Output = Result<T, ClientError>>,
        more: Duration,
    ) -> Result<T, Failure> {
        let unwanted = async {
            while self.is_wanted() {
                sleep(WANTED_POLL).await;
            }
            sleep(more).await;
        };
        tokio::select! {
            biased;
            done = work => done.map_err(|error| Failure::new(error.kind(), error.to_string())),
            () = unwanted => Err(Failure::unavailable("the coordinator does not wait for the closure any more")),
        }
    }

    /// Replies with an encoded `Value`, and the generation in which what the closure has pushed is applied.
    pub fn returned(self, value: bytes::Bytes, pushed: Option<Generation>) {
        let outcome = Some(run_reply::Outcome::Value(value));
        self.reply(RunReply { outcome, pushed_in: pushed.map(|it| it.0) });
    }

    /// Replies that the function has no more data.
    pub fn end_of_data(self) {
        let outcome = Some(run_reply::Outcome::EndOfData(EndOfData {}));
        self.reply(RunReply { outcome, pushed_in: None });
    }

    /// Replies with an exception.
    pub fn raised(self, exception: String, message: String, traceback: String) {
        let outcome = Some(run_reply::Outcome::Raised(Raised { exception, message, traceback }));
        self.reply(RunReply { outcome, pushed_in: None });
    }

    fn reply(self, reply: RunReply) {
        // The coordinator may be gone.
        let _ = self.reply.send(reply);
    }
}

/// The closures that a worker has taken.
#[derive(Debug)]
pub(crate) struct Load {
    /// Limits the closures that run at once.
    pub threads: u32,
    /// Maps running attempts, by coordinator and number, to a flag that is set when the outcome no longer counts.
    running: Mutex<BTreeMap<(String, u64), Arc<AtomicBool>>>,
    /// Counts the replies.
    answered: AtomicU64,
}

impl Load {
    /// Returns how many closures the worker has taken and not replied to.
    pub fn running(&self) -> usize {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns how many closures it has replied to.
    pub fn answered(&self) -> u64 {
        self.answered.load(Ordering::Relaxed)
    }
}

/// Keeps an attempt among those that run until it is dropped.
#[derive(Debug)]
struct Counted {
    load: Arc<Load>,
    attempt: (String, u64),
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.load.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.attempt);
    }
}

/// The phase of a worker's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serves,
    /// It ends after the closures that it has taken.
    Leaves,
    Ended,
}

/// A coordinator that uses the worker.
#[derive(Debug, Default)]
struct Present {
    streams: usize,
    /// The parameters that its closures train.
    parameters: Option<Arc<ParameterClient>>,
}

/// Coordinators that use the worker.
type Coordinators = Arc<Mutex<BTreeMap<String, Present>>>;

/// Values that no closure needs any more, by coordinator and number.
type Dropped = Arc<Mutex<Vec<(String, u64)>>>;

/// A worker that listens.
#[derive(Debug)]
pub struct WorkerServer {
    address: SocketAddr,
    calls: Mutex<Receiver<Call>>,
    load: Arc<Load>,
    coordinators: Coordinators,
    dropped: Dropped,
    phase: watch::Sender<Phase>,
    stop: CancellationToken,
    /// Cancelled when the worker leaves.
    leaves: CancellationToken,
    serving: Mutex<Option<Task<Result<(), tonic::transport::Error>>>>,
    /// Distinguishes it from other processes at the same address.
    process: Uuid,
    readiness: Readiness,
}

impl WorkerServer {
    /// Listens on `address`, for `threads` closures at once.
    ///
    /// # Errors
    /// If the port is taken, or may not be opened without TLS.
    pub async fn start(
        address: SocketAddr,
        exposure: &Exposure,
        threads: u32,
        etcd: EtcdOptions,
    ) -> Result<Self, Failure> {
        let port = bind(address, "--listen", exposure).await?;
        let address = port
            .local_addr()
            .map_err(|error| Failure::io("cannot read the address of the port", &error))?;
        let (sender, calls) = channel();
        let (phase, _) = watch::channel(Phase::Serves);
        let load =
            Arc::new(Load { threads, running: Mutex::default(), answered: AtomicU64::new(0) });
        let (coordinators, dropped) = (Coordinators::default(), Dropped::default());
        let process = random::uuid();
        let service = Service {
            process,
            sender: Mutex::new(sender),
            load: load.clone(),
            phase: phase.clone(),
            coordinators: coordinators.clone(),
            dropped: dropped.clone(),
            etcd,
            tls: exposure.identity(),
        };
        let service = ClosuresServer::new(service)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let stop = CancellationToken::new();
        let identity: TlsIdentity = exposure.identity();
        let serving = port.serve(Routes::new(service), access, &identity, stop.clone());
        let (calls, serving) = (Mutex::new(calls), Mutex::new(Some(serving)));
        let leaves = CancellationToken::new();
        let readiness = Readiness::new("");
        readiness.set_ready();
        Ok(Self {
            address,
            calls,
            load,
            coordinators,
            dropped,
            phase,
            stop,
            leaves,
            serving,
            process,
            readiness,
        })
    }

    /// Lets the coordinator of a job find the worker, until it leaves.
    pub fn announce(&self, announcement: Announcement) {
        drop(spawn(announcement.keep(self.leaves.clone())));
    }

    /// Returns the address, with the port that was picked if it was 0.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for the next closure that a coordinator still wants, but no longer than `limit`. Blocks the thread.
    pub fn next(&self, limit: Duration) -> Option<Call> {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match calls.recv_timeout(limit) {
                Ok(call) if call.is_wanted() => return Some(call),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Returns whether a coordinator uses the worker.
    pub fn is_attended_by(&self, coordinator: &str) -> bool {
        let coordinators = self.coordinators.lock().unwrap_or_else(PoisonError::into_inner);
        coordinators.contains_key(coordinator)
    }

    /// Takes the values that no closure needs any more, by coordinator and number.
    pub fn take_dropped(&self) -> Vec<(String, u64)> {
        std::mem::take(&mut self.dropped.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Says to all coordinators that the worker takes no more closures. Those that it has go on.
    pub fn leave(&self) {
        let begins = self.phase.send_if_modified(|phase| {
            let begins = *phase == Phase::Serves;
            if begins {
                *phase = Phase::Leaves;
            }
            begins
        });
        self.leaves.cancel();
        self.readiness.set_not_ready("it leaves after the closures that it runs");
        if begins {
            info!("the worker leaves after the closures that it runs");
        }
    }

    /// Returns whether the worker leaves.
    pub fn is_leaving(&self) -> bool {
        *self.phase.borrow() != Phase::Serves
    }

    /// Returns how many closures the worker has taken and not replied to.
    pub fn running(&self) -> usize {
        self.load.running()
    }

    /// Serves the admin port until the result is dropped. The worker leaves when `shutdown` is triggered there.
    pub fn serve_admin(
        &self,
        admin: Admin,
        job: String,
        token: Option<String>,
        shutdown: Shutdown,
    ) -> AdminServer {
        let (id, load) = (self.process, self.load.clone());
        let mut metrics = Registry::default();
        register_load(load.clone(), &mut metrics);
        let status = move || json!({ "running": load.running(), "answered": load.answered() });
        admin.serve(AdminContent {
            role: "worker",
            job,
            id: Box::new(move || id),
            readiness: self.readiness.clone(),
            metrics,
            token,
            shutdown: Some(shutdown),
            status: Box::new(status),
            page: None,
        })
    }

    /// Ends the server once all replies are sent.
    pub async fn close(&self) {
        self.leave();
        while 0 < self.running() {
            sleep(LEAVE_POLL).await;
        }
        // Ends the streams of coordinators, for which the server would wait.
        self.phase.send_replace(Phase::Ended);
        self.stop.cancel();
        let serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(serving) = serving {
            // An error of the transport is no more than the end of a connection.
            let _ = serving.await;
        }
    }
}

struct Service {
    process: Uuid,
    sender: Mutex<Sender<Call>>,
    load: Arc<Load>,
    phase: watch::Sender<Phase>,
    coordinators: Coordinators,
    dropped: Dropped,
    /// Where the jobs of coordinators are.
    etcd: EtcdOptions,
    tls: TlsIdentity,
}

impl Service {
    /// Joins the job of a coordinator, unless another stream of it has.
    async fn join(&self, request: &AttendRequest) -> Result<Option<Arc<ParameterClient>>, Status> {
        if request.root.is_empty() {
            return Ok(None);
        }
        let known = {
            let all = self.coordinators.lock().unwrap_or_else(PoisonError::into_inner);
            all.get(&request.coordinator).and_then(|it| it.parameters.clone())
        };
        if known.is_some() {
            return Ok(known);
        }
        let params = request.params.iter().cloned().map(ParamSpec::from).collect();
        let joining = async {
            let etcd = Etcd::connect(&self.etcd).await?;
            let keys = Keys::below(&request.root);
            let joined = ParameterClient::join(&etcd, &keys, self.tls.clone(), params).await;
            joined.map_err(|error| Failure::new(error.kind(), error.to_string()))
        };
        let late = "it does not answer, or there is no such job";
        let late = |_| Err(Failure::unavailable(late));
        let joined = timeout(JOIN_MAX, joining).await.unwrap_or_else(late);
        joined.map(|it| Some(Arc::new(it))).map_err(|failure| {
            let (root, endpoints) = (&request.root, self.etcd.endpoints.join(", "));
            let message = format!(
                "the worker cannot find {root}/job in etcd at {endpoints}: {failure}; start it with --etcd-endpoints"
            );
            status(failure.kind, message)
        })
    }
}

/// Counts a stream of a coordinator until it is dropped.
struct Attended {
    coordinators: Coordinators,
    coordinator: String,
}

impl Drop for Attended {
    fn drop(&mut self) {
        let mut all = self.coordinators.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(present) = all.get_mut(&self.coordinator) {
            present.streams -= 1;
            if present.streams == 0 {
                all.remove(&self.coordinator);
            }
        }
    }
}

#[tonic::async_trait]
impl Closures for Service {
    type AttendStream = Pin<Box<dyn Stream<Item = Result<WorkerState, Status>> + Send>>;

    async fn attend(
        &self,
        request: Request<AttendRequest>,
    ) -> Result<Response<Self::AttendStream>, Status> {
        let request = request.into_inner();
        let parameters = self.join(&request).await?;
        let coordinator = request.coordinator;
        info!(coordinator, "a coordinator is connected");
        let attended = Attended { coordinators: self.coordinators.clone(), coordinator };
        {
            let mut all = self.coordinators.lock().unwrap_or_else(PoisonError::into_inner);
            let present = all.entry(attended.coordinator.clone()).or_default();
            present.streams += 1;
            present.parameters = parameters;
        }
        let (threads, process) = (self.load.threads, self.process.to_string());
        let phases = WatchStream::new(self.phase.subscribe());
        let states = phases.take_while(|phase| *phase != Phase::Ended).map(move |phase| {
            let _lives_as_long = &attended;
            Ok(WorkerState { threads, leaves: phase != Phase::Serves, process: process.clone() })
        });
        Ok(Response::new(Box::pin(states)))
    }

    async fn run(&self, request: Request<RunRequest>) -> Result<Response<RunReply>, Status> {
        let (reply, outcome) = oneshot::channel();
        let request = request.into_inner();
        let attempt = (request.coordinator.clone(), request.attempt);
        let is_cancelled = Arc::new(AtomicBool::new(false));
        let counted = {
            let mut running = self.load.running.lock().unwrap_or_else(PoisonError::into_inner);
            running.insert(attempt.clone(), is_cancelled.clone());
            Counted { load: self.load.clone(), attempt }
        };
        if *self.phase.borrow() != Phase::Serves {
            return Err(status(ErrorKind::NotYet, "the worker leaves"));
        }
        let parameters = {
            let all = self.coordinators.lock().unwrap_or_else(PoisonError::into_inner);
            all.get(&request.coordinator).and_then(|it| it.parameters.clone())
        };
        if request.push.is_some() && parameters.is_none() {
            return Err(status(ErrorKind::NotYet, "the coordinator's connection has just ended"));
        }
        let call = Call { request, reply, is_cancelled, parameters, _counted: counted };
        let sent = self.sender.lock().unwrap_or_else(PoisonError::into_inner).send(call);
        sent.map_err(|_| Status::unavailable("the worker ends"))?;
        let reply = outcome.await.map_err(|_| Status::unavailable("the worker has dropped it"))?;
        self.load.answered.fetch_add(1, Ordering::Relaxed);
        Ok(Response::new(reply))
    }

    async fn cancel(
        &self,
        request: Request<CancelRequest>,
    ) -> Result<Response<CancelReply>, Status> {
        let CancelRequest { coordinator, attempt } = request.into_inner();
        let running = self.load.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(is_cancelled) = running.get(&(coordinator, attempt)) {
            is_cancelled.store(true, Ordering::SeqCst);
        }
        Ok(Response::new(CancelReply {}))
    }

    async fn drop(&self, request: Request<DropRequest>) -> Result<Response<DropReply>, Status> {
        let DropRequest { coordinator, number } = request.into_inner();
        let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        if dropped.len() < DROPPED_MAX {
            dropped.push((coordinator, number));
        }
        Ok(Response::new(DropReply {}))
    }
}
