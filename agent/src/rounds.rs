//! One round after the other: starts, watches, keeps and stops the workers of this node.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::FutureExt;
use steadfast_client::{Change, Exited, NodeError, NodeSession, RoundOver, until_over};
use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Round;
use steadfast_process::{Failure, Shutdown};
use steadfast_proto::v1::NodeReport;
use steadfast_supervise::{Signal, WorkerSet};
use tokio::time::{Instant, interval, sleep, sleep_until, timeout};
use tracing::{error, info, warn};

use crate::args::RunArgs;
use crate::environment::{Past, Place};
use crate::hub::Hub;
use crate::metrics::{Counts, RunResult};
use crate::ports::HeldPorts;
use crate::run::{
    Agent, WORKERS_FAILED, describe, end_signal, failure, join, prefix, start_failure, unseen,
};

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

/// How a round ended for the workers of this node.
#[derive(Debug)]
enum RoundEnd {
    /// All workers have succeeded.
    Succeeded,
    /// The workers stay for the next round: all that run have left this one.
    Stay,
    /// The workers are stopped, and started again in the next round.
    Restart,
    /// A worker failed, and no restart is left.
    Exhausted,
    JobEnded,
    Refused(Failure),
    Interrupted,
}

/// The workers of this node.
#[derive(Default)]
struct Workers {
    set: WorkerSet,
    /// The workers that run, by local rank.
    running: BTreeSet<usize>,
    has_succeeded: bool,
    /// The registration was lost in this round.
    is_unregistered: bool,
    /// When the grace ends, once this node leaves.
    end_by: Option<Instant>,
    past: Past,
}

impl Agent<'_> {
    /// Runs one round after the other.
    pub async fn rounds(&mut self, shutdown: &Shutdown) -> Result<ExitCode, Failure> {
        let mut workers = Workers::default();
        let ended = self.rounds_of(&mut workers, shutdown).await;
        // First, so that the others know why their collectives fail while the workers here end.
        self.membership.leave().await;
        let left = workers.end_by.map(|by| by.saturating_duration_since(Instant::now()));
        workers.set.stop_by(end_signal(shutdown), left.unwrap_or(self.args.grace)).await;
        ended
    }

    async fn rounds_of(
        &mut self,
        workers: &mut Workers,
        shutdown: &Shutdown,
    ) -> Result<ExitCode, Failure> {
        let mut before: Option<Place> = None;
        loop {
            self.readiness.set_not_ready("joins a round");
            let joined = tokio::select! {
                biased;
                () = shutdown.drain() => return Ok(shutdown.exit_code()),
                joined = self.join_beside(workers) => joined,
            };
            let (place, held) = match joined {
                Err(failure) if failure.kind == ErrorKind::Stale => return self.job_ended().await,
                joined => match joined? {
                    Some(joined) => joined,
                    None => return Ok(self.give_up().await),
                },
            };
            self.note_round(&place);
            if before.is_some_and(|before| place.follows_a_failure_of_its_own(&before)) {
                let reason = format!(
                    "the workers left the round before {}: a collective failed, and no node or worker was lost",
                    place.record.round
                );
                self.counts.note_exit(reason.clone());
                if !may_go_on(self.args, &self.counts, &reason, &[], None) {
                    return Ok(self.give_up().await);
                }
            }
            drop(held);
            self.start(&place, workers).await?;
            self.readiness.set_ready();
            let ended = self.watch(&place, workers, shutdown).await;
            if std::mem::take(&mut workers.is_unregistered) {
                warn!("the registration was lost; registering again");
                workers.past.incidents += 1;
                self.membership.forget();
            }
            match ended {
                RoundEnd::Stay => {}
                RoundEnd::Restart => self.stop(workers, shutdown).await,
                RoundEnd::Succeeded => {
                    self.counts.note_run(RunResult::Success);
                    let exit = self.membership.exit(self.args.exit_barrier_timeout);
                    let exited = tokio::select! {
                        biased;
                        () = shutdown.drain() => {
                            self.note_success(place.record.round).await;
                            return Ok(shutdown.exit_code());
                        }
                        exited = exit => exited.map_err(|error| failure(&error))?,
                    };
                    match exited {
                        Exited::All => return self.job_ended().await,
                        Exited::Again => {}
                    }
                }
                RoundEnd::Exhausted => return Ok(self.give_up().await),
                RoundEnd::JobEnded => return self.job_ended().await,
                RoundEnd::Refused(failure) => return Err(failure),
                RoundEnd::Interrupted => return Ok(shutdown.exit_code()),
            }
            before = Some(place);
        }
    }

    /// Joins a round while workers of the last one wait for it. Counts those that fail meanwhile; returns `None` if no
    /// restart is left.
    async fn join_beside(
        &mut self,
        workers: &mut Workers,
    ) -> Result<Option<(Place, HeldPorts)>, Failure> {
        let Self { args, membership, host, base, hub, counts, .. } = self;
        let mut joining = std::pin::pin!(join(membership, args, host, *base, workers.past));
        loop {
            let (index, exit) = tokio::select! {
                biased;
                joined = &mut joining => return joined.map(Some),
                Some(ended) = workers.set.next_exit(), if !workers.running.is_empty() => ended,
            };
            workers.running.remove(&index);
            // The join in progress has told the others of the past before: they learn of this in the next one.
            workers.past.incidents += 1;
            hub.forget(index as u32);
            if exit.is_success() {
                continue;
            }
            let reason = format!("worker {index} of this node ended with {exit} between rounds");
            counts.note_exit(reason.clone());
            if !may_go_on(args, counts, &reason, unseen(args, index, &exit), None) {
                return Ok(None);
            }
        }
    }

    fn note_round(&self, place: &Place) {
        self.counts.rounds.fetch_add(1, Ordering::Relaxed);
        self.counts.round.store(place.record.round.0, Ordering::Relaxed);
        info!(
            round = place.record.round.0,
            rank = place.rank,
            nodes = place.record.members.len(),
            workers = place.record.world_size,
            "round begins"
        );
    }

    /// Starts the workers that do not run, and answers those that wait for the round.
    async fn start(&mut self, place: &Place, workers: &mut Workers) -> Result<(), Failure> {
        let specs = self.specs(place);
        for index in &workers.running {
            // Before the worker learns of the round: what it prints in it has its rank there.
            let rank = place.own().first_rank + *index as u32;
            workers.set.workers()[*index].set_prefix(&prefix(rank));
        }
        self.hub.begin(place);
        if workers.running.is_empty() {
            workers.set = self.supervisor.start_all(&specs).await.map_err(start_failure)?;
        } else {
            for (index, spec) in specs.iter().enumerate() {
                if !workers.running.contains(&index) {
                    let worker = self.supervisor.start(spec).map_err(start_failure)?;
                    workers.set.replace(index, worker);
                }
            }
        }
        workers.running = (0..specs.len()).collect();
        workers.has_succeeded = false;
        self.counts.workers.store(specs.len() as u32, Ordering::Relaxed);
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

    async fn stop(&self, workers: &mut Workers, shutdown: &Shutdown) {
        workers.set.stop_by(end_signal(shutdown), self.args.grace).await;
        workers.running.clear();
        (0..self.args.nproc_per_node).for_each(|local_rank| self.hub.forget(local_rank));
        self.counts.workers.store(0, Ordering::Relaxed);
    }

    /// Watches the workers of a round until all have succeeded, have left the round, or have to be stopped.
    async fn watch(&self, place: &Place, workers: &mut Workers, shutdown: &Shutdown) -> RoundEnd {
        let Some(session) = self.membership.session() else { return RoundEnd::Restart };
        let (round, counts) = (place.record.round, &self.counts);
        let report = || counts.report();
        let interval_ = self.args.monitor_interval;
        let mut over = std::pin::pin!(until_over(session, round, report, interval_).fuse());
        let lease_ttl = self.args.lease_ttl;
        let mut answering =
            std::pin::pin!(answer_suspicions(&self.hub, session, round, report, lease_ttl));
        let mut check = interval(HANG_CHECK);
        let mut said = self.hub.subscribe();
        // Set when the round is over: by then the workers have left it, or are killed.
        let mut leave_by: Option<Instant> = None;
        let mut is_over_known = false;
        // Set when this node is to leave, while its workers take part until their next commit or check.
        let mut drain_by: Option<Instant> = None;
        let mut killed = BTreeSet::new();
        let begun = Instant::now();
        loop {
            said.mark_unchanged();
            let ready = self.hub.ready(round);
            let is_ready = |index: &usize| ready.contains(&(*index as u32));
            let runs = !workers.running.is_empty();
            if drain_by.is_some() && runs && workers.running.iter().all(is_ready) {
                return RoundEnd::Interrupted;
            }
            if leave_by.is_none() && drain_by.is_none() && !ready.is_empty() {
                info!(round = round.0, "a worker left the round");
                workers.past.left += 1;
                leave_by = Some(Instant::now() + self.args.reset_timeout);
            }
            if leave_by.is_some() && workers.running.iter().all(is_ready) {
                return if workers.running.is_empty() { RoundEnd::Restart } else { RoundEnd::Stay };
            }
            let deadline = leave_by.unwrap_or_else(|| Instant::now() + NEVER);
            tokio::select! {
                biased;
                () = shutdown.drain(), if drain_by.is_none() => {
                    if workers.running.is_empty() && leave_by.is_none() {
                        return RoundEnd::Succeeded;
                    }
                    let has_others = 1 < place.record.members.len();
                    if !has_others || workers.running.is_empty() || !self.can_stay(workers) {
                        return RoundEnd::Interrupted;
                    }
                    info!("leaving; the workers take part until their next commit or check");
                    self.hub.note_own_change();
                    // The other half is for what they do after the signal.
                    drain_by = Some(Instant::now() + self.args.grace / 2);
                    workers.end_by = Some(Instant::now() + self.args.grace);
                }
                () = sleep_until(drain_by.unwrap_or(begun)), if drain_by.is_some() => {
                    warn!("the workers came to no commit or check within half the grace; others go back to their last one");
                    return RoundEnd::Interrupted;
                }
                exited = workers.set.next_exit() => {
                    let Some((index, exit)) = exited else { return RoundEnd::Succeeded };
                    workers.running.remove(&index);
                    let would_stay = self.hub.is_connected(index as u32);
                    self.hub.forget(index as u32);
                    if exit.is_success() {
                        workers.has_succeeded = true;
                        continue;
                    }
                    let rank = place.own().first_rank as usize + index;
                    let reason = format!("the worker of rank {rank} ended with {exit}");
                    counts.note_failure(round, format!("round {round}: {reason}"));
                    // A worker that was killed because it did not leave the round is no cause of that.
                    workers.past.incidents += u64::from(!killed.contains(&index));
                    self.hub.note_own_change();
                    // The other nodes learn of the failure from the report, which also reaches the master if this
                    // node gives up.
                    let asked = session.watch(round, 0, Some(report()), Duration::ZERO);
                    let asked = tokio::select! {
                        biased;
                        () = shutdown.drain() => return RoundEnd::Interrupted,
                        asked = timeout(CAUSE_TIMEOUT, asked) => asked,
                    };
                    let excuse = match asked {
                        _ if killed.contains(&index) => Some("it was killed".to_owned()),
                        Ok(Ok(change)) if change.nodes == 0 => None,
                        // Others may have left the round because of this failure. A worker that stays in such
                        // cases does not exit because of them.
                        Ok(Ok(change)) if 0 < change.nodes && would_stay => None,
                        Ok(Ok(change)) => Some(describe(&change)),
                        Ok(Err(error)) => Some(failure(&error).message),
                        Err(_) => Some("no master says whether the round changed".to_owned()),
                    };
                    let unseen = unseen(self.args, index, &exit);
                    if !may_go_on(self.args, &self.counts, &reason, unseen, excuse) {
                        return RoundEnd::Exhausted;
                    }
                    if !self.can_stay(workers) {
                        return RoundEnd::Restart;
                    }
                    leave_by.get_or_insert(Instant::now() + self.args.reset_timeout);
                }
                over = &mut over, if !is_over_known => {
                    is_over_known = true;
                    match over {
                        RoundOver::Changed(change) => {
                            info!(round = round.0, "round ends: {}", describe(&change));
                            self.counts.changes.fetch_add(1, Ordering::Relaxed);
                            self.hub.note(&change);
                        }
                        RoundOver::Unregistered => {
                            workers.is_unregistered = true;
                            self.hub.note_own_change();
                        }
                        RoundOver::JobEnded => return RoundEnd::JobEnded,
                        RoundOver::Failed(error) => return RoundEnd::Refused(failure(&error)),
                    }
                    if !self.can_stay(workers) {
                        return RoundEnd::Restart;
                    }
                    leave_by.get_or_insert(Instant::now() + self.args.reset_timeout);
                }
                _ = said.changed() => {}
                never = &mut answering => match never {},
                () = sleep_until(deadline) => {
                    for index in workers.running.iter().filter(|index| !is_ready(index)) {
                        let rank = place.own().first_rank as usize + index;
                        warn!(rank, "the worker did not leave the round in time; killing it");
                        killed.insert(*index);
                        workers.set.kill(*index);
                    }
                    leave_by = Some(Instant::now() + self.args.reset_timeout);
                }
                _ = check.tick(), if self.args.hang_timeout.is_some() && leave_by.is_none() => {
                    if let Some(reason) = self.hang(&workers.set, begun).await {
                        counts.note_failure(round, format!("round {round}: {reason}"));
                        let told = session.watch(round, 0, Some(report()), Duration::ZERO);
                        let _ = timeout(CAUSE_TIMEOUT, told).await;
                        workers.past.incidents += 1;
                        return match may_go_on(self.args, &self.counts, &reason, &[], None) {
                            true => RoundEnd::Restart,
                            false => RoundEnd::Exhausted,
                        };
                    }
                }
            }
        }
    }

    /// Tells the master that no restart is left: if too few nodes are left, the job fails.
    async fn give_up(&self) -> ExitCode {
        if let Some(session) = self.membership.session() {
            let report = self.counts.report();
            let reason = report.last_exit.clone();
            match timeout(CAUSE_TIMEOUT, session.give_up(&reason, report)).await {
                Ok(Ok(()) | Err(NodeError::JobEnded | NodeError::Unregistered)) => {}
                Ok(Err(error)) => warn!(%error, "the master does not know that this node gave up"),
                Err(_) => warn!("the master does not know that this node gave up: none answers"),
            }
        }
        ExitCode::from(WORKERS_FAILED)
    }

    /// Returns whether the workers that run can go on in the next round in the same process.
    fn can_stay(&self, workers: &Workers) -> bool {
        let mut running = workers.running.iter();
        !workers.has_succeeded && running.all(|index| self.hub.is_connected(*index as u32))
    }

    /// Returns a description if no worker has printed or reported anything for the time that the user set.
    async fn hang(&self, workers: &WorkerSet, begun: Instant) -> Option<String> {
        let limit = self.args.hang_timeout?;
        let last = workers.workers().iter().filter_map(|worker| worker.last_output()).max();
        // Before the round, workers waited for it.
        let last = last.max(self.hub.last_progress())?.max(begun);
        if last.elapsed() < limit {
            return None;
        }
        warn!(seconds = limit.as_secs_f64(), "no output; asking the workers for their stacks");
        self.supervisor.signaller().notify(Signal::SIGUSR1).await;
        sleep(DUMP_TIME).await;
        Some(format!("the workers hang: no output for {limit:?} (--hang-timeout)"))
    }
}

/// Answers workers that suspect that the round is over. When a lease has passed since, each node on which a worker
/// failed before has reported that, or is lost itself: if a master then knows of neither, the round goes on. The
/// loop that watches the round tells them otherwise.
async fn answer_suspicions(
    hub: &Hub,
    session: &NodeSession,
    round: Round,
    report: impl Fn() -> NodeReport,
    lease_ttl: Duration,
) -> Infallible {
    loop {
        hub.until_suspected(lease_ttl).await;
        let asked = session.watch(round, 0, Some(report()), Duration::ZERO);
        match timeout(CAUSE_TIMEOUT, asked).await {
            Ok(Ok(Change { nodes: 0, failed, .. })) if failed.is_empty() => {
                hub.refute_suspicions(lease_ttl);
            }
            Ok(_) | Err(_) => sleep(ANSWER_RETRY).await,
        }
    }
}

/// Counts a failure, unless the round changed at the same time; returns whether another try is left.
fn may_go_on(
    args: &RunArgs,
    counts: &Counts,
    reason: &str,
    last_lines: &[String],
    change: Option<String>,
) -> bool {
    if let Some(change) = change {
        info!("{reason}; not counted as a failure: {change}");
        return true;
    }
    let restarts = counts.restarts.fetch_add(1, Ordering::Relaxed) + 1;
    let restarts_max = args.max_restarts;
    last_lines.iter().for_each(|line| warn!("  {line}"));
    match restarts <= restarts_max {
        true => warn!(restarts, restarts_max, "restarting: {reason}"),
        false => {
            counts.note_run(RunResult::Failure);
            error!("{reason}; no restart is left (--max-restarts {restarts_max})");
        }
    }
    restarts <= restarts_max
}
