//! Drives the machine of a coordinator: in one term of the lock after the other, or without etcd in a single one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Generation;
use steadfast_common::records::closures::{ClosureName, ClosureRecord, PushesRecord};
use steadfast_common::records::keys::Keys;
use steadfast_coord::term::{Commit, Committer, Host, Term};
use steadfast_coord::{CoordError, Etcd, Leadership, Op, Session, Transaction};
use steadfast_coordinator_core::{
    ClosureId, CoordinatorMachine, Effect, Fact, Input, PushNumber, Pushes, RESULT_BYTES_MAX,
    Reply, Settings, WorkerIndex,
};
use steadfast_host::task::spawn;
use steadfast_host::time::{Instant, sleep};
use steadfast_net::Channel;
use steadfast_process::Failure;
use steadfast_proto::v1::closures_client::ClosuresClient;
use steadfast_proto::v1::{CancelRequest, Raised, RunReply, RunRequest, run_reply};
use steadfast_proto::{MESSAGE_BYTES_MAX, kind};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tracing::{debug, info, warn};
use uuid::Uuid;

use crate::parameters::Parameters;
use crate::table::Shared;

/// Reserves room in a message for its other fields.
const ARGUMENTS_ROOM: usize = 64 << 10;

/// The maximum size of a closure's arguments in bytes.
pub(crate) const ARGUMENTS_BYTES_MAX: usize = MESSAGE_BYTES_MAX - ARGUMENTS_ROOM;

/// Limits the wait for the end of a connection on which a call was lost; the second is the time between checks.
const LINK_END_MAX: Duration = Duration::from_millis(100);
const LINK_END_POLL: Duration = Duration::from_millis(2);

/// The pause before a coordinator that has lost its lock acquires it again.
const REACQUIRE_PAUSE: Duration = Duration::from_millis(200);

/// Identifies the lock of a job's coordinator, and the keys that it protects: the results of named closures.
#[derive(Clone, Debug)]
pub struct Lock {
    pub etcd: Etcd,
    pub keys: Keys,
    pub lease_ttl: Duration,
}

impl Lock {
    /// Acquires the lock; waits for the end of the lease of a coordinator that was killed.
    ///
    /// # Errors
    /// `Conflict` if another coordinator keeps the lock, and errors of etcd.
    pub(crate) async fn acquire(&self, holder: Uuid) -> Result<(Session, Leadership), Failure> {
        let key = self.keys.coordinator_lock();
        let holder = holder.to_string();
        let acquired =
            Leadership::acquire_within_a_lease(&self.etcd, self.lease_ttl, &key, &holder).await?;
        acquired.map_err(|held| {
            let message = format!("another coordinator runs this job: {}", held.text());
            Failure::new(ErrorKind::Conflict, message)
        })
    }

    async fn remembered(&self) -> Result<BTreeMap<ClosureName, ClosureRecord>, CoordError> {
        let found = self.etcd.list_large(&self.keys.closure_results_prefix()).await?;
        let records = found.entries.iter().filter_map(|(key, entry)| {
            // A key that no coordinator has written.
            let name = self.keys.closure_of(key)?;
            Some(entry.json().map(|record| (name, record)))
        });
        records.collect()
    }
}

/// The inputs and outputs of a coordinator's driver.
pub(crate) struct Driver {
    pub id: Uuid,
    pub settings: Settings,
    pub lock: Option<Lock>,
    pub parameters: Option<Parameters>,
    pub shared: Arc<Shared>,
    pub inbox: mpsc::UnboundedReceiver<Input>,
    pub outbox: mpsc::UnboundedSender<Input>,
    pub leave: oneshot::Receiver<()>,
    /// Cancelled when the coordinator is closed.
    pub closing: CancellationToken,
}

impl Driver {
    /// Drives until the program leaves, or another coordinator has the lock.
    pub async fn run(mut self, first: Option<(Session, Leadership)>) {
        let ended = match self.lock.clone() {
            None => self.without_etcd().await,
            Some(lock) => self.terms(&lock, first).await,
        };
        let ended =
            ended.err().unwrap_or_else(|| Failure::unavailable("the coordinator is closed"));
        self.shared.change(|table| table.end(ended));
    }

    async fn without_etcd(&mut self) -> Result<(), Failure> {
        self.term(None, NoStore, BTreeMap::new(), None).await.map_err(Failure::from)
    }

    async fn terms(
        &mut self,
        lock: &Lock,
        mut first: Option<(Session, Leadership)>,
    ) -> Result<(), Failure> {
        loop {
            let acquired = match first.take() {
                Some(acquired) => Ok(acquired),
                None => tokio::select! {
                    biased;
                    _ = &mut self.leave => return Ok(()),
                    acquired = lock.acquire(self.id) => acquired,
                },
            };
            let lost = match acquired {
                Ok((session, leadership)) => {
                    let ended = self.term_of(lock, &session, leadership).await;
                    session.close(&lock.etcd).await;
                    match ended {
                        Ok(()) => return Ok(()),
                        Err(failure) => failure,
                    }
                }
                Err(failure) => failure,
            };
            match lost.kind {
                ErrorKind::Stale | ErrorKind::Unavailable => {
                    warn!(reason = %lost, "the coordinator acquires its lock again");
                }
                ErrorKind::Invalid
                | ErrorKind::NotFound
                | ErrorKind::Conflict
                | ErrorKind::NotYet
                | ErrorKind::TooLarge
                | ErrorKind::Denied
                | ErrorKind::Internal => return Err(lost),
            }
            sleep(REACQUIRE_PAUSE).await;
        }
    }

    async fn term_of(
        &mut self,
        lock: &Lock,
        session: &Session,
        leadership: Leadership,
    ) -> Result<(), Failure> {
        let pushes = match &self.parameters {
            None => None,
            Some(parameters) => tokio::select! {
                biased;
                _ = &mut self.leave => return Ok(()),
                () = session.lost() => return Err(CoordError::LeaseLost.into()),
                pushes = parameters.pushes() => Some(pushes?),
            },
        };
        let remembered = lock.remembered().await?;
        let committer = Committer::new(lock.etcd.clone(), leadership);
        Ok(self.term(Some((lock, session)), committer, remembered, pushes).await?)
    }

    /// Drives the machine until the program leaves.
    async fn term<C: Commit>(
        &mut self,
        lock: Option<(&Lock, &Session)>,
        committer: C,
        remembered: BTreeMap<ClosureName, ClosureRecord>,
        pushes: Option<Pushes>,
    ) -> Result<(), CoordError> {
        let (attempts, mut first) = {
            let mut table = self.shared.lock();
            table.has_begun = true;
            (table.attempts, table.inputs())
        };
        first.extend(pushes.as_ref().map(|it| Input::Counted(it.counted().clone())));
        info!(results = remembered.len(), "the coordinator begins");
        let machine = CoordinatorMachine::new(self.settings, remembered, attempts, pushes);
        let (term, requests) = Term::new(machine, committer);
        let mut host = CoordinatorHost {
            id: self.id,
            lock,
            shared: self.shared.clone(),
            outbox: self.outbox.clone(),
            closing: self.closing.clone(),
        };
        let leave = async { drop((&mut self.leave).await) };
        let inbox = &mut self.inbox;
        // What is lost with a term is in the table, with which the next one begins.
        let forward = async {
            while let Some(input) = inbox.recv().await {
                if requests.send(input).await.is_err() {
                    break;
                }
            }
            std::future::pending().await
        };
        tokio::select! {
            biased;
            ended = term.begin_with(first).run(&mut host, leave) => ended.map(drop),
            never = forward => never,
        }
    }
}

/// Commits nothing: a coordinator without etcd remembers results as long as it runs.
#[derive(Debug)]
struct NoStore;

impl Commit for NoStore {
    async fn commit(&mut self, _: &[Op]) -> Result<i64, CoordError> {
        Ok(0)
    }
}

/// Connects the machine to its surroundings for one term.
struct CoordinatorHost<'a> {
    id: Uuid,
    lock: Option<(&'a Lock, &'a Session)>,
    shared: Arc<Shared>,
    outbox: mpsc::UnboundedSender<Input>,
    closing: CancellationToken,
}

impl Host for CoordinatorHost<'_> {
    type Machine = CoordinatorMachine;
    type Error = CoordError;

    async fn next(&mut self, _: &CoordinatorMachine) -> Result<Input, CoordError> {
        match self.lock {
            Some((_, session)) => session.lost().await,
            None => std::future::pending().await,
        }
        Err(CoordError::LeaseLost)
    }

    fn write(&self, fact: &Fact, transaction: &mut Transaction) {
        let Some((Lock { keys, .. }, _)) = self.lock else { return };
        match fact {
            Fact::Remembered { name, record } => {
                transaction.add(Op::put(&keys.closure_result(name), record));
            }
            Fact::Unremembered(name) => transaction.add(Op::delete(&keys.closure_result(name))),
            Fact::Reserved(next) => {
                transaction.add(Op::put(&keys.closure_pushes(), &PushesRecord { next: *next }));
            }
            Fact::Forgotten => transaction.delete_all(&keys.closure_results_prefix()),
        }
    }

    async fn perform(
        &mut self,
        _: &CoordinatorMachine,
        effect: Effect,
    ) -> Result<Option<Input>, CoordError> {
        match effect {
            Effect::Run { worker, attempt, id, push } => self.run(worker, attempt, id, push),
            Effect::Cancel { worker, attempt } => self.cancel(worker, attempt),
            Effect::Settled { id, outcome, push } => {
                for id in self.shared.change(|table| table.settle(id, outcome, push)) {
                    send(&self.outbox, Input::Forgotten(id));
                }
            }
            Effect::Repeats(id) => self.shared.change(|table| table.repeats(id)),
            Effect::Counted(generation) => {
                self.shared.change(|table| table.counted = Some(generation));
            }
            Effect::AtRest(worker) => self.shared.change(|table| {
                if let Some(worker) = table.workers.get_mut(&worker) {
                    worker.is_at_rest = worker.is_stopped;
                }
            }),
            Effect::ResultsForgotten => self.shared.change(|table| table.forgets_results = false),
        }
        Ok(None)
    }
}

impl CoordinatorHost<'_> {
    /// Asks a worker to run a closure.
    fn run(&self, worker: WorkerIndex, attempt: u64, id: ClosureId, push: Option<PushNumber>) {
        let (channel, request) = {
            let mut table = self.shared.lock();
            table.begun(id, worker, attempt, push);
            let channel = table.workers.get(&worker).map(|it| it.channel.clone());
            let request = table.closures.get(&id).map(|entry| RunRequest {
                coordinator: self.id.to_string(),
                worker: worker.0,
                closure: id.0,
                attempt,
                key: match &entry.call.name {
                    Some(name) => name.to_string(),
                    None => format!("{}/{}", self.id, id.0),
                },
                function: entry.call.function.clone(),
                arguments: entry.arguments.clone(),
                results: table.results_for(id),
                push: push.map(|it| it.0),
                result_bytes_max: entry.call.name.is_some().then_some(RESULT_BYTES_MAX as u64),
            });
            (channel, request)
        };
        let (shared, outbox) = (self.shared.clone(), self.outbox.clone());
        let closing = self.closing.clone();
        spawn(async move {
            let running = async {
                match (channel, request) {
                    (Some(channel), Some(request)) => run_there(channel, request).await,
                    _ => Reply::Lost,
                }
            };
            let reply = tokio::select! {
                biased;
                // The worker learns of it by the end of the call.
                () = closing.cancelled() => return,
                reply = running => reply,
            };
            if reply == Reply::Lost {
                until_link_ends(&shared, worker).await;
            }
            shared.change(|table| table.replied(worker, attempt, id, &reply));
            send(&outbox, Input::Finished { worker, attempt, reply });
        });
    }

    /// Tells a worker that the outcome of an attempt does not count. It need not arrive.
    fn cancel(&self, worker: WorkerIndex, attempt: u64) {
        let channel = self.shared.lock().workers.get(&worker).map(|it| it.channel.clone());
        let request = CancelRequest { coordinator: self.id.to_string(), attempt };
        if let Some(channel) = channel {
            spawn(async move {
                if let Err(status) = ClosuresClient::new(channel).cancel(request).await {
                    debug!(%worker, reason = status.message(), "the worker was not told of a cancelled closure");
                }
            });
        }
    }
}

/// Waits until the connection to a worker is marked as lost after a call on it failed, so that the worker does not get
/// the closure again. The wait is short, because only the call may have failed.
async fn until_link_ends(shared: &Shared, worker: WorkerIndex) {
    let begun = Instant::now();
    let is_open = || shared.lock().workers.get(&worker).is_some_and(|it| it.threads.is_some());
    while is_open() && begun.elapsed() < LINK_END_MAX {
        sleep(LINK_END_POLL).await;
    }
}

async fn run_there(channel: Channel, request: RunRequest) -> Reply {
    let results: usize = request.results.iter().map(Bytes::len).sum();
    let (bytes, limit) = (request.arguments.len() + results, ARGUMENTS_BYTES_MAX);
    if limit < bytes {
        return Reply::Refused(format!(
            "its arguments have {bytes} bytes together with the results among them; a closure takes at most {limit}"
        ));
    }
    let mut client = ClosuresClient::new(channel)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX);
    reply_of(client.run(request).await)
}

/// Sends an input to the driver; after the end of the driver it is dropped.
pub(crate) fn send(outbox: &mpsc::UnboundedSender<Input>, input: Input) {
    let _ = outbox.send(input);
}

fn reply_of(answer: Result<tonic::Response<RunReply>, Status>) -> Reply {
    let status = match answer {
        Ok(reply) => {
            let RunReply { outcome, pushed_in } = reply.into_inner();
            let pushed = pushed_in.map(Generation);
            return match outcome {
                Some(run_reply::Outcome::Value(value)) => Reply::Returned { value, pushed },
                Some(run_reply::Outcome::EndOfData(_)) => Reply::EndOfData,
                Some(run_reply::Outcome::Raised(Raised { exception, message, traceback })) => {
                    Reply::Raised { exception, message, traceback }
                }
                None => Reply::Refused("the worker's reply has no outcome".to_owned()),
            };
        }
        Err(status) => status,
    };
    match kind(&status) {
        ErrorKind::Invalid | ErrorKind::TooLarge | ErrorKind::Denied | ErrorKind::Internal => {
            Reply::Refused(status.message().to_owned())
        }
        ErrorKind::NotYet => Reply::Declined,
        ErrorKind::NotFound | ErrorKind::Conflict | ErrorKind::Stale | ErrorKind::Unavailable => {
            Reply::Lost
        }
    }
}
