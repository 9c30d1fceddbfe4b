//! Drives a state machine for one term of a leader: decides inputs, commits the facts in one transaction, and then
//! releases the effects.
//!
//! Requests that arrive during a commit are decided together, as many as fit into one transaction, so they share the
//! cost of a commit. An error ends the term and drops the machine: the outcome of its last commit may be unknown, so
//! its state may be ahead of etcd or behind it.

use std::collections::VecDeque;

use steadfast_common::machine::{Decision, Machine, Moment};
use steadfast_host::time::unix_ms;
use tokio::sync::mpsc;

use crate::{CoordError, Etcd, Leadership, OPS_MAX, Op, Transaction, now};

#[cfg(test)]
mod tests;

/// Capacity of the queue of requests; callers wait while it is full.
const REQUESTS_MAX: usize = 1024;

/// Commits transactions while this process leads.
pub trait Commit: Send {
    /// Commits `ops` in one transaction; returns its revision.
    ///
    /// # Errors
    /// When the term is lost, or the outcome is unknown. The caller ends its term and drops its state.
    fn commit(&mut self, ops: &[Op]) -> impl Future<Output = Result<i64, CoordError>> + Send;
}

/// The only writer of its keys in one term.
#[derive(Debug)]
pub struct Committer {
    etcd: Etcd,
    leadership: Leadership,
}

impl Committer {
    /// Creates a committer of the term that begins with `leadership`.
    pub fn new(etcd: Etcd, leadership: Leadership) -> Self {
        Self { etcd, leadership }
    }
}

impl Commit for Committer {
    async fn commit(&mut self, ops: &[Op]) -> Result<i64, CoordError> {
        self.leadership.commit(&self.etcd, ops).await
    }
}

/// What surrounds a machine in its process.
pub trait Host: Send {
    type Machine: Machine;
    type Error: From<CoordError>;

    /// Waits for the next input that is not a request: a change in etcd, a deadline, the end of a process. Can be
    /// cancelled.
    fn next(
        &mut self,
        machine: &Self::Machine,
    ) -> impl Future<Output = Result<InputOf<Self>, Self::Error>> + Send;

    /// Adds the key changes of a fact to a transaction.
    fn write(&self, fact: &<Self::Machine as Machine>::Fact, transaction: &mut Transaction);

    /// Performs an effect whose facts are committed. The machine decides the input that is returned before all others.
    fn perform(
        &mut self,
        machine: &Self::Machine,
        effect: <Self::Machine as Machine>::Effect,
    ) -> impl Future<Output = Result<Option<InputOf<Self>>, Self::Error>> + Send;
}

type InputOf<H> = <<H as Host>::Machine as Machine>::Input;

/// How a term ended.
#[derive(Debug)]
pub enum End<M> {
    /// All is decided.
    Over(M),
    /// The process leaves.
    Left(M),
}

/// A machine in one term of its leader, with its requests.
#[derive(Debug)]
pub struct Term<M: Machine, C = Committer> {
    machine: M,
    committer: C,
    requests: Requests<M::Input>,
    /// Inputs that come before all others: those that the term began with, or that effects led to.
    first: VecDeque<M::Input>,
    /// The revision of the latest commit.
    revision: i64,
}

impl<M: Machine, C: Commit> Term<M, C> {
    /// Creates a term of a machine that was recovered from etcd, and the queue of its requests.
    pub fn new(machine: M, committer: C) -> (Self, mpsc::Sender<M::Input>) {
        let (tx, inbox) = mpsc::channel(REQUESTS_MAX);
        let requests = Requests { inbox, left_over: None };
        (Self { machine, committer, requests, first: VecDeque::new(), revision: 0 }, tx)
    }

    /// Returns the machine, as it was recovered.
    pub fn machine(&self) -> &M {
        &self.machine
    }

    /// Decides `inputs` before anything is due.
    pub fn begin_with(mut self, inputs: impl IntoIterator<Item = M::Input>) -> Self {
        self.first.extend(inputs);
        self
    }

    /// Decides until all is decided or `leave` completes.
    ///
    /// # Errors
    /// When the term is lost, or etcd is unreachable for too long. What was not committed is dropped with the machine.
    pub async fn run<H>(
        mut self,
        host: &mut H,
        leave: impl Future<Output = ()>,
    ) -> Result<End<M>, H::Error>
    where
        H: Host<Machine = M>,
    {
        let mut leave = std::pin::pin!(leave);
        self.settle(host).await?;
        while !self.machine.is_over() {
            let work = tokio::select! {
                biased;
                // Requests come last: any number of them must not starve the other branches.
                () = &mut leave => return Ok(End::Left(self.machine)),
                input = host.next(&self.machine) => self.decide(host, input?),
                request = self.requests.next() => self.decide_waiting(host, request),
            };
            self.complete(host, work).await?;
            self.settle(host).await?;
        }
        Ok(End::Over(self.machine))
    }

    fn decide<H: Host<Machine = M>>(&mut self, host: &H, input: M::Input) -> Work<M> {
        let mut work = Work::default();
        self.machine.handle(self.moment(), input, &mut work.decision);
        work.write(host);
        work
    }

    /// Decides a request, and of those that wait as many as fit into the same transaction.
    fn decide_waiting<H: Host<Machine = M>>(&mut self, host: &H, request: M::Input) -> Work<M> {
        let mut work = self.decide(host, request);
        while let Some(request) = self
            .requests
            .take_if(|request| work.transaction.has_room(self.machine.size_max(request)))
        {
            self.machine.handle(self.moment(), request, &mut work.decision);
            work.write(host);
        }
        work
    }

    /// Decides and commits until nothing is due.
    async fn settle<H: Host<Machine = M>>(&mut self, host: &mut H) -> Result<(), H::Error> {
        loop {
            while let Some(input) = self.first.pop_front() {
                let work = self.decide(host, input);
                self.complete(host, work).await?;
            }
            let mut work = Work::default();
            self.machine.due(self.moment(), &mut work.decision);
            let is_settled = work.decision.facts.is_empty();
            work.write(host);
            self.complete(host, work).await?;
            if is_settled && self.first.is_empty() {
                return Ok(());
            }
        }
    }

    /// Commits the facts; then performs the effects.
    async fn complete<H: Host<Machine = M>>(
        &mut self,
        host: &mut H,
        work: Work<M>,
    ) -> Result<(), H::Error> {
        let Work { decision: Decision { effects: decided, .. }, ahead, transaction } = work;
        let mut effects = Vec::new();
        for list in ahead {
            for ops in list.into_ops().chunks(OPS_MAX) {
                self.revision = self.committer.commit(ops).await?;
            }
        }
        if !transaction.is_empty() {
            self.revision = self.committer.commit(&transaction.into_ops()).await?;
            self.machine.committed(self.moment(), &mut effects);
        }
        for effect in effects.into_iter().chain(decided) {
            let input = host.perform(&self.machine, effect).await?;
            self.first.extend(input);
        }
        Ok(())
    }

    fn moment(&self) -> Moment {
        moment(self.revision)
    }
}

/// Returns the present moment of a term whose latest commit is `revision`; 0 if there is none yet.
pub fn moment(revision: i64) -> Moment {
    Moment { now: now(), unix_ms: unix_ms(), revision }
}

/// What is decided and not committed.
struct Work<M: Machine> {
    /// Its facts are in the transactions.
    decision: Decision<M>,
    /// One for each list of facts; may be larger than one transaction of etcd.
    ahead: Vec<Transaction>,
    transaction: Transaction,
}

impl<M: Machine> Default for Work<M> {
    fn default() -> Self {
        let (ahead, transaction) = (Vec::new(), Transaction::default());
        Self { decision: Decision::default(), ahead, transaction }
    }
}

impl<M: Machine> Work<M> {
    fn write<H: Host<Machine = M>>(&mut self, host: &H) {
        for facts in self.decision.ahead.drain(..) {
            let mut list = Transaction::default();
            facts.iter().for_each(|fact| host.write(fact, &mut list));
            self.ahead.push(list);
        }
        for fact in self.decision.facts.drain(..) {
            host.write(&fact, &mut self.transaction);
        }
    }
}

/// Requests that wait for a decision, in the order of their arrival.
#[derive(Debug)]
struct Requests<I> {
    inbox: mpsc::Receiver<I>,
    /// A request for which the last transaction had no room.
    left_over: Option<I>,
}

impl<I> Requests<I> {
    /// Waits for a request. Can be cancelled.
    async fn next(&mut self) -> I {
        if let Some(request) = self.left_over.take() {
            return request;
        }
        match self.inbox.recv().await {
            Some(request) => request,
            // No one is left who could send one.
            None => std::future::pending().await,
        }
    }

    /// Returns the next request that waits, if it fits. Otherwise it comes next.
    fn take_if(&mut self, fits: impl FnOnce(&I) -> bool) -> Option<I> {
        let request = self.left_over.take().or_else(|| self.inbox.try_recv().ok())?;
        if fits(&request) {
            return Some(request);
        }
        self.left_over = Some(request);
        None
    }
}
