//! One round after the other: starts, watches, keeps and stops the workers of this node.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use steadfast_agent_core::round::{
    self, Action, Answer, End, Group, HangTimeout, Input, Limits, Next, Over, RoundMachine, View,
};
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Round;
use steadfast_common::records::commits::COMMIT_TAG;
use steadfast_elastic_client::{
    Change, Entered, Exited, NodeError, NodeSession, RoundOver, until_over,
};
use steadfast_host::time::{Instant, interval, sleep, sleep_until, timeout};
use steadfast_process::{Failure, Shutdown};
use steadfast_proto::v1::NodeReport;
use tracing::{error, info, warn};

use crate::args::RunArgs;
use crate::environment::RoundPlacement;
use crate::job_end::Ended;
use crate::metrics::{Counts, RunResult};
use crate::ports::HeldPorts;
use crate::processes::WorkerProcesses;
use crate::run::{Agent, describe, failure, join};
use crate::worker_service::{CommitOutcome, WorkerService};

/// How long workers may take to write their stacks.
const DUMP_TIME: Duration = Duration::from_secs(2);

/// How long the master is asked whether the round changed when a worker failed.
const CAUSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause after no master has answered whether a round goes on.
const ANSWER_RETRY: Duration = Duration::from_millis(500);

/// How often the time of the last output is checked.
const HANG_CHECK: Duration = Duration::from_millis(200);

/// A time that does not come.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// The workers of this node.
struct Workers<'p, P> {
    processes: &'p mut P,
    rounds: RoundMachine,
    /// When the grace ends, once this node leaves.
    end_by: Option<Instant>,
}

/// What actions have an effect on, besides the workers.
struct Surroundings<'a> {
    args: &'a RunArgs,
    counts: &'a Counts,
    service: &'a WorkerService,
}

impl Agent<'_> {
    /// Runs one round after the other.
    pub async fn rounds<P: WorkerProcesses>(
        &mut self,
        processes: &mut P,
        shutdown: &Shutdown,
    ) -> Result<Ended, Failure> {
        let limits = Limits {
            restarts_max: self.args.max_restarts,
            reset_timeout: self.args.reset_timeout,
            grace: self.args.grace,
            hang_timeout: self.args.hang_timeout,
        };
        let rounds = RoundMachine::new(limits);
        let mut workers = Workers { processes, rounds, end_by: None };
        let ended = self.rounds_of(&mut workers, shutdown).await;
        // First, so that the others know why their collectives fail while the workers here end.
        self.membership.leave().await;
        let left = workers.end_by.map_or(self.args.grace, Instant::remaining);
        workers.processes.stop(left).await;
        ended
    }

    async fn rounds_of<P: WorkerProcesses>(
        &mut self,
        workers: &mut Workers<'_, P>,
        shutdown: &Shutdown,
    ) -> Result<Ended, Failure> {
        loop {
            self.readiness.set_not_ready("joins a round");
            let joined = tokio::select! {
                biased;
                () = shutdown.drain() => return Ok(Ended::Interrupted),
                joined = self.join_beside(workers) => joined,
            };
            let (placement, held) = match joined {
                Err(failure) if failure.kind == ErrorKind::Stale => return self.job_ended().await,
                joined => match joined? {
                    Some(joined) => joined,
                    None => return Ok(self.give_up().await),
                },
            };
            self.note_round(&placement);
            let ended = self.watch(&placement, held, workers, shutdown).await?;
            if workers.rounds.is_unregistered() {
                warn!("the registration was lost; registering again");
                self.membership.forget();
            }
            match ended {
                End::Stay => {}
                End::Restart => self.stop(workers).await,
                End::Succeeded => {
                    self.counts.note_run(RunResult::Success);
                    let exit = self.membership.exit(self.args.exit_barrier_timeout);
                    let exited = tokio::select! {
                        biased;
                        () = shutdown.drain() => {
                            self.note_success(placement.record.round).await;
                            return Ok(Ended::Interrupted);
                        }
                        exited = exit => exited.map_err(|error| failure(&error))?,
                    };
                    match exited {
                        Exited::All => return self.job_ended().await,
                        Exited::Again => {}
                    }
                }
                End::Exhausted => return Ok(self.give_up().await),
                End::JobEnded => return self.job_ended().await,
                End::Refused { kind, message } => return Err(Failure { kind, message }),
                End::Interrupted => return Ok(Ended::Interrupted),
            }
        }
    }

    /// Joins a round while workers of the last one wait for it. Counts those that fail meanwhile; returns `None` if no
    /// restart is left.
    async fn join_beside<P: WorkerProcesses>(
        &mut self,
        workers: &mut Workers<'_, P>,
    ) -> Result<Option<(RoundPlacement, HeldPorts)>, Failure> {
        let Self { args, membership, host, base, service, counts, .. } = self;
        let surroundings = Surroundings { args, counts, service };
        let past = workers.rounds.past();
        let mut joining = std::pin::pin!(join(membership, args, host, *base, past));
        loop {
            let (local_rank, exit) = tokio::select! {
                biased;
                joined = &mut joining => return joined.map(Some),
                Some(ended) = workers.processes.next_exit(), if workers.rounds.runs() => ended,
            };
            let input = Input::Exited { local_rank, exit };
            if let Next::End(_) = surroundings.pass(&View::default(), input, workers) {
                return Ok(None);
            }
        }
    }

    fn note_round(&self, placement: &RoundPlacement) {
        self.counts.rounds.fetch_add(1, Ordering::Relaxed);
        self.counts.round.store(placement.record.round.0, Ordering::Relaxed);
        info!(
            round = placement.record.round.0,
            rank = placement.rank,
            nodes = placement.record.members.len(),
            workers = placement.record.world_size,
            "round begins"
        );
    }

    /// Starts the workers that are missing, and answers those that wait for the round.
    async fn start<P: WorkerProcesses>(
        &self,
        placement: &RoundPlacement,
        missing: &BTreeSet<u32>,
        processes: &mut P,
    ) -> Result<(), Failure> {
        let own = placement.own();
        for local_rank in (0..own.slots).filter(|it| !missing.contains(it)) {
            // Before the worker learns of the round: what it prints in it has its rank there.
            processes.rename(local_rank, own.first_rank + local_rank);
        }
        self.service.begin(placement);
        let starts = missing.iter().map(|local_rank| self.worker(placement, *local_rank));
        processes.start(starts.collect()).await?;
        self.counts.workers.store(own.slots, Ordering::Relaxed);
        Ok(())
    }

    /// Reports that all workers of this node have succeeded, so that the others need not run again without it.
    async fn note_success(&self, round: Round) {
        let Some(session) = self.membership.session() else { return };
        match timeout(CAUSE_TIMEOUT, session.succeed(round, Duration::ZERO)).await {
            Ok(Ok(_)) => info!("leaving; the master knows that the workers have succeeded"),
            Ok(Err(error)) => warn!(%error, "leaving; the master does not know of the success"),
            Err(_) => warn!("leaving; no master has answered the report of the success"),
        }
    }

    async fn stop<P: WorkerProcesses>(&self, workers: &mut Workers<'_, P>) {
        workers.processes.stop(self.args.grace).await;
        (0..self.args.nproc_per_node).for_each(|local_rank| self.service.forget(local_rank));
        self.counts.workers.store(0, Ordering::Relaxed);
    }

    /// Starts and watches the workers of a round until all have succeeded, have left the round, or have to be stopped.
    async fn watch<P: WorkerProcesses>(
        &self,
        placement: &RoundPlacement,
        held: HeldPorts,
        workers: &mut Workers<'_, P>,
        shutdown: &Shutdown,
    ) -> Result<End, Failure> {
        let session = self.membership.session().expect("a node that has joined is registered");
        let (round, counts) = (placement.record.round, &self.counts);
        let report = || self.report();
        let interval_ = self.args.monitor_interval;
        let mut over = std::pin::pin!(until_over(session, round, report, interval_).fuse());
        let lease_ttl = self.args.lease_ttl;
        let mut answering =
            std::pin::pin!(answer_suspicions(&self.service, session, round, report, lease_ttl));
        let mut deciding = std::pin::pin!(decide_commits(&self.service, session));
        let mut dealing = std::pin::pin!(deal_records(&self.service, session, round));
        let mut check = interval(HANG_CHECK);
        let mut told = self.service.subscribe();
        let surroundings = Surroundings { args: self.args, counts, service: &self.service };
        let mut held = Some(held);
        let mut begun = Instant::now();
        let mut input = Input::Joined(group(placement));
        loop {
            told.mark_unchanged();
            let view = self.view(round, begun, workers.processes.silence());
            input = match surroundings.pass(&view, input, workers) {
                Next::Start(missing) => {
                    drop(held.take());
                    self.start(placement, &missing, workers.processes).await?;
                    self.readiness.set_ready();
                    begun = Instant::now();
                    Input::Look
                }
                Next::Wait => {
                    let deadline = workers.rounds.deadline().unwrap_or(NEVER);
                    tokio::select! {
                        biased;
                        () = shutdown.drain(), if !workers.rounds.is_draining() => Input::Drain,
                        Some((local_rank, exit)) = workers.processes.next_exit() => {
                            Input::Exited { local_rank, exit }
                        }
                        over = &mut over => Input::Over(self.note_over(round, over)),
                        _ = told.changed() => Input::Look,
                        never = &mut answering => match never {},
                        never = &mut deciding => match never {},
                        never = &mut dealing => match never {},
                        () = sleep_until(begun + deadline) => Input::Look,
                        _ = check.tick(), if self.args.hang_timeout != HangTimeout::Off => Input::Look,
                    }
                }
                Next::Ask => tokio::select! {
                    biased;
                    () = shutdown.drain() => Input::Drain,
                    answer = self.ask(session, round) => Input::Answered(answer),
                },
                Next::AskForStacks => {
                    self.ask_for_stacks(workers.processes).await;
                    tokio::select! {
                        biased;
                        Some((local_rank, exit)) = workers.processes.next_exit() => {
                            Input::Exited { local_rank, exit }
                        }
                        () = sleep(DUMP_TIME) => Input::StacksAsked,
                    }
                }
                Next::ReportHang => {
                    let reported = session.watch(round, 0, Some(report()), Duration::ZERO);
                    let _ = timeout(CAUSE_TIMEOUT, reported).await;
                    Input::HangReported
                }
                Next::End(end) => return Ok(end),
            };
        }
    }

    /// Returns what the agent reports to the master.
    fn report(&self) -> NodeReport {
        NodeReport { busy_us: self.service.progress().busy_us(), ..self.counts.report() }
    }

    /// Returns what the workers do and have told so far.
    fn view(&self, round: Round, begun: Instant, silence: Option<Duration>) -> View {
        let now = begun.elapsed();
        let progress = self.service.progress();
        let reported = progress.last.map(|last| last.since(begun));
        let output = silence.map(|silence| now.saturating_sub(silence));
        View {
            now,
            left: self.service.ready(round),
            connected: self.service.connected(),
            // Before the round, workers waited for it.
            last_output: match progress.all_wait(self.args.nproc_per_node, Instant::now()) {
                true => Some(now),
                false => output.max(reported),
            },
            pause_max: progress.pause_max,
        }
    }

    /// Logs why a round is over, and tells the workers how its members change.
    fn note_over(&self, round: Round, over: RoundOver) -> Over {
        match over {
            RoundOver::Changed(change) => {
                info!(round = round.0, reason = describe(&change), "round ends");
                self.counts.changes.fetch_add(1, Ordering::Relaxed);
                self.service.note(&change);
                Over::Changed
            }
            RoundOver::Unregistered => Over::Unregistered,
            RoundOver::JobEnded => Over::JobEnded,
            RoundOver::Failed(error) => {
                let Failure { kind, message } = failure(&error);
                Over::Refused { kind, message }
            }
        }
    }

    /// Reports a failure to the master, and asks whether the round changed.
    async fn ask(&self, session: &NodeSession, round: Round) -> Answer {
        let asked = session.watch(round, 0, Some(self.report()), Duration::ZERO);
        match timeout(CAUSE_TIMEOUT, asked).await {
            Ok(Ok(change)) => match change.nodes {
                0 => Answer::Unchanged,
                1.. => Answer::Added(describe(&change)),
                ..0 => Answer::Removed(describe(&change)),
            },
            Ok(Err(error)) => Answer::Unknown(failure(&error).message),
            Err(_) => Answer::Unknown("no master says whether the round changed".to_owned()),
        }
    }

    /// Asks workers that hang for their stacks.
    async fn ask_for_stacks<P: WorkerProcesses>(&self, processes: &mut P) {
        warn!("no output; asking the workers for their stacks");
        processes.ask_for_stacks().await;
    }

    /// Tells the master that no restart is left: if too few nodes are left, the job fails.
    async fn give_up(&self) -> Ended {
        if let Some(session) = self.membership.session() {
            let report = self.report();
            let reason = report.last_exit.clone();
            match timeout(CAUSE_TIMEOUT, session.give_up(&reason, report)).await {
                Ok(Ok(()) | Err(NodeError::JobEnded | NodeError::Unregistered)) => {}
                Ok(Err(error)) => warn!(%error, "the master does not know that this node gave up"),
                Err(_) => warn!("the master does not know that this node gave up: none answers"),
            }
        }
        Ended::Exhausted
    }
}

/// Answers workers that suspect that the round is over. When a lease has passed since, each node on which a worker
/// failed before has reported that, or is lost itself: if a master then knows of neither, the round goes on. The
/// loop that watches the round tells them otherwise.
async fn answer_suspicions(
    service: &WorkerService,
    session: &NodeSession,
    round: Round,
    report: impl Fn() -> NodeReport,
    lease_ttl: Duration,
) -> Infallible {
    loop {
        service.until_suspected(lease_ttl).await;
        let asked = session.watch(round, 0, Some(report()), Duration::ZERO);
        match timeout(CAUSE_TIMEOUT, asked).await {
            Ok(Ok(Change { nodes: 0, failed, .. })) if failed.is_empty() => {
                service.refute_suspicions(lease_ttl);
            }
            Ok(_) | Err(_) => sleep(ANSWER_RETRY).await,
        }
    }
}

/// Decides the commits of the workers together with the other nodes, one after the other.
async fn decide_commits(service: &WorkerService, session: &NodeSession) -> Infallible {
    loop {
        let (id, data) = service.until_proposed().await;
        let data = Bytes::from(data);
        let outcome = loop {
            match session.enter(id.round, COMMIT_TAG, id.phase, data.clone()).await {
                Ok(Entered::Released(_)) if !service.is_dynamic() => {
                    break CommitOutcome::Decided(Bytes::new());
                }
                Ok(Entered::Released(_)) => match session.last_commit().await {
                    Ok(Some(last)) if last.id == id => {
                        let record = serde_json::to_vec(&last).expect("a commit is plain data");
                        break CommitOutcome::Decided(record.into());
                    }
                    Ok(_) => break CommitOutcome::Over,
                    Err(_) => sleep(ANSWER_RETRY).await,
                },
                Ok(Entered::Ended(_)) => break CommitOutcome::Over,
                Ok(Entered::Waits(_)) => {}
                Err(NodeError::Coord(_)) => sleep(ANSWER_RETRY).await,
                Err(error) => {
                    let Failure { kind, message } = failure(&error);
                    break match kind {
                        ErrorKind::Stale => CommitOutcome::Over,
                        _ => CommitOutcome::Refused { kind, message },
                    };
                }
            }
        };
        service.conclude(id, outcome);
    }
}

/// Gets records for the workers from the master, when they need some.
async fn deal_records(service: &WorkerService, session: &NodeSession, round: Round) -> Infallible {
    loop {
        let (total, wish) = service.until_wanted().await;
        let dealt = match session.deal(round, total, wish).await {
            Ok(dealt) => Ok(dealt),
            Err(error) => match error.kind() {
                // The round is over, which the loop that watches it finds, or its workers have not begun.
                ErrorKind::Stale | ErrorKind::NotYet | ErrorKind::Unavailable => {
                    sleep(ANSWER_RETRY).await;
                    continue;
                }
                kind => Err((kind, error.to_string())),
            },
        };
        service.deal(round, dealt);
    }
}

/// Returns the round as the machine sees it.
fn group(placement: &RoundPlacement) -> Group {
    Group {
        round: placement.record.round,
        nodes: placement.record.members.iter().map(|member| member.node).collect(),
        first_rank: placement.own().first_rank,
        workers: placement.own().slots,
        past: placement.past,
    }
}

impl Surroundings<'_> {
    /// Passes an input to the machine, and performs the actions.
    fn pass<P: WorkerProcesses>(
        &self,
        view: &View,
        input: Input,
        workers: &mut Workers<'_, P>,
    ) -> Next {
        let step = workers.rounds.handle(view, input);
        step.actions.into_iter().for_each(|action| self.perform(action, workers));
        step.next
    }

    fn perform<P: WorkerProcesses>(&self, action: Action, workers: &mut Workers<'_, P>) {
        let restarts_max = self.args.max_restarts;
        match action {
            Action::Forget(local_rank) => self.service.forget(local_rank),
            Action::NoteFailure { round: Some(round), what } => {
                self.counts.note_failure(round, what);
            }
            Action::NoteFailure { round: None, what } => self.counts.note_exit(what),
            Action::TellWorkers => self.service.note_own_change(),
            Action::Excuse { reason, change } => {
                info!(reason, change, "not counted as a failure");
            }
            Action::Retry { restarts, failure } => {
                let reason = self.count(restarts, failure);
                warn!(reason, restarts, restarts_max, "restarting");
            }
            Action::GiveUp { restarts, failure } => {
                let reason = self.count(restarts, failure);
                self.counts.note_run(RunResult::Failure);
                error!(reason, restarts_max, "no restart is left (--max-restarts)");
            }
            Action::NoteLeft(round) => info!(round = round.0, "a worker left the round"),
            Action::Leave => {
                info!("leaving; the workers take part until their next commit or check");
                self.service.note_own_change();
                workers.end_by = Some(Instant::now() + self.args.grace);
            }
            Action::NoteNoCommit => {
                warn!(
                    "the workers came to no commit or check within half the grace; others go back to their last one"
                );
            }
            Action::Kill { local_rank, rank } => {
                warn!(rank, "the worker did not leave the round in time; killing it");
                workers.processes.kill(local_rank);
            }
        }
    }

    /// Counts a failure, logs the last lines of the worker, and returns the reason.
    fn count(&self, restarts: u32, failure: round::Failure) -> String {
        self.counts.restarts.store(restarts, Ordering::Relaxed);
        failure.last_lines.iter().for_each(|line| warn!(%line, "last output"));
        failure.reason
    }
}
