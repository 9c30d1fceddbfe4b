//! The state machine of the workers of a node: decides what follows from their ends, from what they tell their agent,
//! from the master's answers, and from the time.
//!
//! ```text
//!                 joined                    all have succeeded, all have left,
//!                 ──────▶                   or they have to be restarted
//!   between rounds        in a round ─────────────────────────────────────────▶ between rounds
//!                           │    ▲
//!          a worker failed  ▼    │  the master answered
//!                      the cause is asked for
//! ```
//!
//! A failure counts unless the round changed at the same time. It ends this node's part in the job when no restart is
//! left, in a round and between rounds.
//!
//! Nothing of this is durable, because the workers end with their agent: the caller performs each step at once.

mod group;
mod input;
mod step;

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use steadfast_common::job::durations;

pub use group::{Group, Past};
pub use input::{Answer, Input, Over, View, WorkerExit};
pub use step::{Action, End, Failure, Next, Step};

/// Limits that the user has set.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Failures after which workers are started again.
    pub restarts_max: u32,
    /// Workers that have not left a round that is over by then are stopped.
    pub reset_timeout: Duration,
    /// Workers have this time to end when this node leaves. Half of it is for their next commit or check.
    pub grace: Duration,
    /// When workers are taken to hang.
    pub hang_timeout: HangTimeout,
}

/// Workers that report progress, and have stopped to do so, are taken to hang after this time.
const PROGRESS_TIMEOUT: Duration = Duration::from_secs(600);

/// Workers hang no sooner than after this multiple of the longest time between two of their reports.
const PAUSES: u32 = 4;

/// When the workers of a node are taken to hang.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HangTimeout {
    Off,
    /// When they report progress, and then print and report nothing for ten minutes, or for several times their longest
    /// pause between two reports.
    #[default]
    Progress,
    /// When they print and report nothing for this time.
    Silence(Duration),
}

impl HangTimeout {
    /// Returns after which silence the workers hang, if ever.
    fn limit(self, view: &View) -> Option<Duration> {
        match self {
            Self::Off => None,
            Self::Progress => view.pause_max.map(|it| PROGRESS_TIMEOUT.max(it * PAUSES)),
            Self::Silence(limit) => Some(limit),
        }
    }
}

impl FromStr for HangTimeout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "progress" => Ok(Self::Progress),
            text => match durations::parse(text) {
                Ok(limit) if !limit.is_zero() => Ok(Self::Silence(limit)),
                Ok(_) => Err("use a time longer than 0, or `off`".to_owned()),
                Err(error) => Err(format!("{error}, `progress` or `off`")),
            },
        }
    }
}

impl fmt::Display for HangTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Progress => f.write_str("progress"),
            Self::Silence(limit) => write!(f, "{}ms", limit.as_millis()),
        }
    }
}

/// The workers of a node, in one round after the other.
#[derive(Clone, Debug)]
pub struct RoundMachine {
    limits: Limits,
    /// Failures that have counted.
    restarts: u32,
    past: Past,
    running: BTreeSet<u32>,
    /// The registration was lost in the last round.
    is_unregistered: bool,
    /// The last round, after it has ended.
    before: Option<Group>,
    /// The round, until it ends.
    watch: Option<Watch>,
}

/// A round, and what has happened in it.
#[derive(Clone, Debug)]
struct Watch {
    group: Group,
    has_succeeded: bool,
    /// Set when the round is over: by then the workers have left it, or are killed.
    leave_by: Option<Duration>,
    /// Set when this node is to leave, while its workers take part until their next commit or check.
    drain_by: Option<Duration>,
    killed: BTreeSet<u32>,
    /// The failure whose cause is asked for.
    asked: Option<Asked>,
    /// The hang for which the workers are asked for their stacks, or which is reported.
    hang: Option<Failure>,
}

#[derive(Clone, Debug)]
struct Asked {
    failure: Failure,
    /// The worker was killed because it did not leave the round.
    was_killed: bool,
    /// The worker does not exit because others leave the round.
    would_stay: bool,
}

impl RoundMachine {
    /// Creates the machine of a node that has no workers yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            restarts: 0,
            past: Past::default(),
            running: BTreeSet::new(),
            is_unregistered: false,
            before: None,
            watch: None,
        }
    }

    /// Decides an input. While the caller waits for an answer, it passes only that, or [`Input::Drain`].
    pub fn handle(&mut self, view: &View, input: Input) -> Step {
        let mut actions = Vec::new();
        let mut next = match input {
            Input::Joined(group) => self.joined(group, &mut actions),
            Input::Exited { local_rank, exit } => self.exited(local_rank, exit, view, &mut actions),
            Input::Answered(answer) => self.answered(answer, view, &mut actions),
            Input::StacksAsked => self.stacks_asked(&mut actions),
            Input::HangReported => self.hang_reported(&mut actions),
            Input::Over(over) => self.over(over, view, &mut actions),
            Input::Drain => self.drain(view, &mut actions),
            Input::Look => Next::Wait,
        };
        if next == Next::Wait {
            next = self.look(view, &mut actions);
        }
        if let Next::End(end) = &next {
            self.before = self.watch.take().map(|watch| watch.group);
            if *end == End::Restart {
                self.running.clear();
            }
        }
        Step { actions, next }
    }

    /// Returns when the caller passes [`Input::Look`], if nothing happens before.
    pub fn deadline(&self) -> Option<Duration> {
        let watch = self.watch.as_ref()?;
        watch.leave_by.into_iter().chain(watch.drain_by).min()
    }

    /// Returns whether a worker runs.
    pub fn runs(&self) -> bool {
        !self.running.is_empty()
    }

    /// Returns whether this node leaves as soon as its workers have come to a commit or check.
    pub fn is_draining(&self) -> bool {
        self.watch.as_ref().is_some_and(|watch| watch.drain_by.is_some())
    }

    /// Returns whether the registration was lost in the last round.
    pub fn is_unregistered(&self) -> bool {
        self.is_unregistered
    }

    /// Returns what the other nodes are told of the rounds so far.
    pub fn past(&self) -> Past {
        self.past
    }

    fn joined(&mut self, group: Group, actions: &mut Vec<Action>) -> Next {
        self.is_unregistered = false;
        if self.before.as_ref().is_some_and(|before| group.follows_a_failure_of_its_own(before)) {
            let reason = format!(
                "the workers left the round before {}: a collective failed, and no node or worker was lost",
                group.round
            );
            actions.push(Action::NoteFailure { round: None, what: reason.clone() });
            if !self.count(Failure { reason, last_lines: Vec::new() }, actions) {
                return Next::End(End::Exhausted);
            }
        }
        let workers = 0..group.workers;
        let missing = workers.clone().filter(|it| !self.running.contains(it)).collect();
        self.running = workers.collect();
        self.watch = Some(Watch::new(group));
        Next::Start(missing)
    }

    fn exited(
        &mut self,
        local_rank: u32,
        exit: WorkerExit,
        view: &View,
        actions: &mut Vec<Action>,
    ) -> Next {
        self.running.remove(&local_rank);
        actions.push(Action::Forget(local_rank));
        let Some(watch) = &mut self.watch else {
            return self.exited_between_rounds(local_rank, exit, actions);
        };
        // They were about to end.
        watch.hang = None;
        let WorkerExit::Failed { how, last_lines } = exit else {
            watch.has_succeeded = true;
            return Next::Wait;
        };
        let rank = watch.group.first_rank + local_rank;
        let reason = format!("the worker of rank {rank} ended with {how}");
        actions.push(watch.failure(&reason));
        actions.push(Action::TellWorkers);
        let was_killed = watch.killed.contains(&local_rank);
        // A worker that was killed because it did not leave the round is no cause of that.
        self.past.incidents += u64::from(!was_killed);
        let would_stay = view.connected.contains(&local_rank);
        let failure = Failure { reason, last_lines };
        watch.asked = Some(Asked { failure, was_killed, would_stay });
        // The other nodes learn of the failure from the report, which also reaches the master if this node gives up.
        Next::Ask
    }

    fn exited_between_rounds(
        &mut self,
        local_rank: u32,
        exit: WorkerExit,
        actions: &mut Vec<Action>,
    ) -> Next {
        // The join in progress has told the others of the past before: they learn of this in the next one.
        self.past.incidents += 1;
        let WorkerExit::Failed { how, last_lines } = exit else { return Next::Wait };
        let reason = format!("worker {local_rank} of this node ended with {how} between rounds");
        actions.push(Action::NoteFailure { round: None, what: reason.clone() });
        match self.count(Failure { reason, last_lines }, actions) {
            true => Next::Wait,
            false => Next::End(End::Exhausted),
        }
    }

    fn answered(&mut self, answer: Answer, view: &View, actions: &mut Vec<Action>) -> Next {
        let asked = self.watch.as_mut().and_then(|watch| watch.asked.take());
        let Some(Asked { failure, was_killed, would_stay }) = asked else { return Next::Wait };
        let change = match answer {
            _ if was_killed => Some("it was killed".to_owned()),
            Answer::Unchanged => None,
            // Others may have left the round because of this failure. A worker that stays in such cases does not exit
            // because of them.
            Answer::Added(_) if would_stay => None,
            Answer::Added(change) | Answer::Removed(change) | Answer::Unknown(change) => {
                Some(change)
            }
        };
        if let Some(change) = change {
            actions.push(Action::Excuse { reason: failure.reason, change });
        } else if !self.count(failure, actions) {
            return Next::End(End::Exhausted);
        }
        self.leave_round(view)
    }

    fn stacks_asked(&mut self, actions: &mut Vec<Action>) -> Next {
        let Some(watch) = &self.watch else { return Next::Wait };
        let Some(hang) = &watch.hang else { return Next::Wait };
        actions.push(watch.failure(&hang.reason));
        Next::ReportHang
    }

    fn hang_reported(&mut self, actions: &mut Vec<Action>) -> Next {
        let hang = self.watch.as_mut().and_then(|watch| watch.hang.take());
        let Some(hang) = hang else { return Next::Wait };
        self.past.incidents += 1;
        match self.count(hang, actions) {
            true => Next::End(End::Restart),
            false => Next::End(End::Exhausted),
        }
    }

    fn over(&mut self, over: Over, view: &View, actions: &mut Vec<Action>) -> Next {
        if self.watch.is_none() {
            return Next::Wait;
        }
        match over {
            Over::Changed => {}
            Over::Unregistered => {
                self.is_unregistered = true;
                self.past.incidents += 1;
                actions.push(Action::TellWorkers);
            }
            Over::JobEnded => return Next::End(End::JobEnded),
            Over::Refused { kind, message } => return Next::End(End::Refused { kind, message }),
        }
        self.leave_round(view)
    }

    fn drain(&mut self, view: &View, actions: &mut Vec<Action>) -> Next {
        let can_stay = self.can_stay(view);
        let Some(watch) = &mut self.watch else { return Next::Wait };
        if watch.hang.is_some() {
            return Next::Wait;
        }
        if watch.asked.is_some() {
            return Next::End(End::Interrupted);
        }
        if watch.drain_by.is_some() {
            return Next::Wait;
        }
        let has_others = 1 < watch.group.nodes.len();
        if !has_others || !can_stay {
            return Next::End(End::Interrupted);
        }
        actions.push(Action::Leave);
        // The other half is for what they do after the signal.
        watch.drain_by = Some(view.now + self.limits.grace / 2);
        Next::Wait
    }

    /// Decides what the view and the time make due.
    fn look(&mut self, view: &View, actions: &mut Vec<Action>) -> Next {
        let Some(watch) = self.watch.as_mut().filter(|it| it.asked.is_none() && it.hang.is_none())
        else {
            return Next::Wait;
        };
        let runs = !self.running.is_empty();
        let have_all_left = self.running.is_subset(&view.left);
        if watch.drain_by.is_some() && runs && have_all_left {
            return Next::End(End::Interrupted);
        }
        let goes_on = watch.leave_by.is_none() && watch.drain_by.is_none();
        if goes_on && !self.running.is_disjoint(&view.left) {
            actions.push(Action::NoteLeft(watch.group.round));
            self.past.left += 1;
            watch.leave_by = Some(view.now + self.limits.reset_timeout);
        }
        match watch.leave_by {
            None if !runs => return Next::End(End::Succeeded),
            Some(_) if !runs => return Next::End(End::Restart),
            Some(_) if have_all_left => return Next::End(End::Stay),
            None | Some(_) => {}
        }
        if watch.drain_by.is_some_and(|by| by <= view.now) {
            actions.push(Action::NoteNoCommit);
            return Next::End(End::Interrupted);
        }
        if watch.leave_by.is_some_and(|by| by <= view.now) {
            watch.kill(self.running.difference(&view.left), actions);
            watch.leave_by = Some(view.now + self.limits.reset_timeout);
        }
        match self.limits.hang_timeout.limit(view) {
            Some(limit) if watch.hangs(view, limit) => {
                let what = match self.limits.hang_timeout {
                    HangTimeout::Progress => "no progress and no output",
                    HangTimeout::Off | HangTimeout::Silence(_) => "no output",
                };
                let reason = format!("the workers hang: {what} for {limit:?} (--hang-timeout)");
                watch.hang = Some(Failure { reason, last_lines: Vec::new() });
                Next::AskForStacks
            }
            Some(_) | None => Next::Wait,
        }
    }

    /// Counts a failure; returns whether a restart is left.
    fn count(&mut self, failure: Failure, actions: &mut Vec<Action>) -> bool {
        self.restarts += 1;
        let restarts = self.restarts;
        let is_left = restarts <= self.limits.restarts_max;
        actions.push(match is_left {
            true => Action::Retry { restarts, failure },
            false => Action::GiveUp { restarts, failure },
        });
        is_left
    }

    /// Gives the workers time to leave a round that is over, if they can go on in the next one.
    fn leave_round(&mut self, view: &View) -> Next {
        let can_stay = self.can_stay(view);
        match &mut self.watch {
            Some(watch) if can_stay => {
                watch.leave_by.get_or_insert(view.now + self.limits.reset_timeout);
                Next::Wait
            }
            Some(_) | None => Next::End(End::Restart),
        }
    }

    /// Returns whether the workers that run can go on in the next round in the same process.
    fn can_stay(&self, view: &View) -> bool {
        let has_succeeded = self.watch.as_ref().is_some_and(|watch| watch.has_succeeded);
        !has_succeeded && self.running.is_subset(&view.connected)
    }
}

impl Watch {
    fn new(group: Group) -> Self {
        Self {
            group,
            has_succeeded: false,
            leave_by: None,
            drain_by: None,
            killed: BTreeSet::new(),
            asked: None,
            hang: None,
        }
    }

    /// Kills workers that did not leave the round in time.
    fn kill<'a>(&mut self, late: impl Iterator<Item = &'a u32>, actions: &mut Vec<Action>) {
        for &local_rank in late {
            actions.push(Action::Kill { local_rank, rank: self.group.first_rank + local_rank });
            self.killed.insert(local_rank);
        }
    }

    /// Returns whether the workers of a round that goes on have printed and reported nothing for so long.
    fn hangs(&self, view: &View, limit: Duration) -> bool {
        let silence = view.last_output.map(|last| view.now.saturating_sub(last));
        self.leave_by.is_none() && silence.is_some_and(|silence| limit <= silence)
    }

    /// Returns the action that notes a failure of this round.
    fn failure(&self, reason: &str) -> Action {
        let round = self.group.round;
        Action::NoteFailure { round: Some(round), what: format!("round {round}: {reason}") }
    }
}
