//! The shared store: runs requests on the core and waits for the log.
//!
//! A request runs under one short lock: decide, append the fact to the current batch, evolve. Then it
//! waits, without the lock, until the log thread has synced that batch. While the thread syncs one batch,
//! the next one fills: many writers share one sync. Reads wait the same way for the writes that they may
//! have seen, so no reply reveals a change that a crash could undo.

use crate::core::{Core, Decided, Fact, LeaseId, Millis, Refusal, Retention, Revision};
use crate::disk;
use std::sync::{Condvar, Mutex, MutexGuard};
use steadfast_host::time::Instant;
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, watch};

/// The store, shared by all tasks.
pub struct Node {
    /// Guards the core and the batch: facts are logged in the order in which they are applied.
    state: Mutex<State>,
    /// Wakes the log thread when the batch is no longer empty, or when the node closes.
    work: Condvar,
    /// Wakes an asynchronous writer when the batch is no longer empty.
    has_work: Notify,
    progress: watch::Sender<Progress>,
    retention: Retention,
    started: Instant,
}

struct State {
    core: Core,
    /// Encoded facts that the writer has not taken yet.
    batch: Vec<u8>,
    /// Number of facts so far.
    position: u64,
    is_open: bool,
}

/// The durable position of the log, and the stage of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The number of facts on disk.
    pub position: u64,
    /// The latest revision on disk.
    pub revision: Revision,
    pub disk_bytes: u64,
    pub stage: Stage,
}

/// ```text
/// Serving ──> Draining ──> Stopped
///    └───────────┴───────> Failed
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Serving,
    /// Streams end; requests are still answered.
    Draining,
    Stopped,
    /// The log cannot be written.
    Failed,
}

/// The reason why a request got no reply from the core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeError {
    Refused(Refusal),
    Stopped,
}

/// The facts of one write to the log.
pub struct Batch {
    pub facts: Vec<u8>,
    pub position: u64,
    pub revision: Revision,
}

impl Node {
    pub fn new(core: Core, retention: Retention, disk_bytes: u64) -> Self {
        let revision = core.revision();
        let progress = Progress { position: 0, revision, disk_bytes, stage: Stage::Serving };
        let state = State { core, batch: Vec::new(), position: 0, is_open: true };
        Node {
            state: Mutex::new(state),
            work: Condvar::new(),
            has_work: Notify::new(),
            progress: watch::Sender::new(progress),
            retention,
            started: Instant::now(),
        }
    }

    /// Runs a request that may change the store, and waits until the change is on disk.
    pub async fn write<T>(
        &self,
        decide: impl FnOnce(&Core) -> Result<Decided<T>, Refusal>,
    ) -> Result<T, NodeError> {
        let (position, reply) = {
            let mut state = self.lock();
            if !state.is_open {
                return Err(NodeError::Stopped);
            }
            let decided = decide(&state.core);
            let reply = decided.map(|Decided { reply, fact }| {
                fact.into_iter().for_each(|fact| self.commit(&mut state, fact));
                reply
            });
            (state.position, reply)
        };
        self.durable(position).await?;
        reply.map_err(NodeError::Refused)
    }

    /// Runs a request that changes no durable state, and waits until everything that it saw is on disk.
    pub async fn read<T>(
        &self,
        read: impl FnOnce(&mut Core, Millis) -> Result<T, Refusal>,
    ) -> Result<T, NodeError> {
        let (position, reply) = {
            let mut state = self.lock();
            (state.position, read(&mut state.core, self.now()))
        };
        self.durable(position).await?;
        reply.map_err(NodeError::Refused)
    }

    /// Reads the store without waiting. The caller must not reveal changes beyond the revision in
    /// [`Progress`].
    pub fn peek<T>(&self, read: impl FnOnce(&Core) -> T) -> T {
        read(&self.lock().core)
    }

    /// Revokes every expired lease.
    pub fn expire_leases(&self) -> Vec<LeaseId> {
        let mut state = self.lock();
        if !state.is_open {
            return Vec::new();
        }
        let expired = state.core.expired_leases(self.now());
        for id in &expired {
            if let Ok(Decided { fact: Some(fact), .. }) = state.core.revoke(*id) {
                self.commit(&mut state, fact);
            }
        }
        expired
    }

    pub fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// Ends streams, so that connections can close.
    pub fn drain(&self) {
        self.progress.send_modify(|progress| {
            if progress.stage == Stage::Serving {
                progress.stage = Stage::Draining;
            }
        });
    }

    /// Rejects further writes and lets the log thread finish.
    pub fn close(&self) {
        self.lock().is_open = false;
        self.work.notify_all();
    }

    /// Waits for facts to write; `None` once the node is closed and all are written. Blocks: only for
    /// the log thread.
    pub fn next_batch(&self) -> Option<Batch> {
        let state = self.lock();
        let idle = |state: &mut State| state.batch.is_empty() && state.is_open;
        let mut state = self.work.wait_while(state, idle).expect(LOCK);
        if state.batch.is_empty() { None } else { Some(take_batch(&mut state)) }
    }

    /// Returns the facts to write without waiting; `None` if there are none.
    pub fn try_batch(&self) -> Option<Batch> {
        let mut state = self.lock();
        (!state.batch.is_empty()).then(|| take_batch(&mut state))
    }

    /// Completes when there are facts to write.
    pub fn has_work(&self) -> Notified<'_> {
        self.has_work.notified()
    }

    /// Commits a fact that is not part of a request.
    pub fn decide(&self, decide: impl FnOnce(&Core) -> Option<Fact>) {
        let mut state = self.lock();
        if let Some(fact) = decide(&state.core) {
            self.commit(&mut state, fact);
        }
    }

    /// Reads the whole store and takes the unwritten facts that it includes; once the result is on disk,
    /// they need not be written.
    pub fn take_with<T>(&self, read: impl FnOnce(&Core) -> T) -> (T, Batch) {
        let mut state = self.lock();
        let seen = read(&state.core);
        (seen, take_batch(&mut state))
    }

    /// Records that a batch is on disk, and wakes the requests that wait for it.
    pub fn written(&self, batch: &Batch, disk_bytes: u64) {
        self.progress.send_modify(|progress| {
            progress.position = batch.position;
            progress.revision = batch.revision;
            progress.disk_bytes = disk_bytes;
        });
    }

    /// Ends the node and wakes all requests that wait for the log. A failed node stays failed.
    pub fn end(&self, stage: Stage) {
        self.lock().is_open = false;
        self.progress.send_modify(|progress| {
            if progress.stage != Stage::Failed {
                progress.stage = stage;
            }
        });
    }

    fn commit(&self, state: &mut State, fact: Fact) {
        let now = self.now();
        push(state, fact, now);
        if let Some(compaction) = state.core.overdue_compaction(self.retention) {
            push(state, compaction, now);
        }
        self.work.notify_one();
        self.has_work.notify_one();
    }

    async fn durable(&self, position: u64) -> Result<(), NodeError> {
        let reached = |progress: &Progress| {
            progress.position >= position
                || matches!(progress.stage, Stage::Stopped | Stage::Failed)
        };
        let mut progress = self.progress.subscribe();
        let progress = progress.wait_for(reached).await.map_err(|_| NodeError::Stopped)?;
        if progress.position >= position { Ok(()) } else { Err(NodeError::Stopped) }
    }

    fn now(&self) -> Millis {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(LOCK)
    }
}

const LOCK: &str = "nothing panics while it holds the state, unless the core is broken";

fn push(state: &mut State, fact: Fact, now: Millis) {
    disk::append_fact(&mut state.batch, &fact);
    state.position += 1;
    state.core.evolve(fact, now);
}

fn take_batch(state: &mut State) -> Batch {
    Batch {
        facts: std::mem::take(&mut state.batch),
        position: state.position,
        revision: state.core.revision(),
    }
}
