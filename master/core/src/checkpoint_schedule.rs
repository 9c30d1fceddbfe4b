//! When checkpoints are taken, and at which version.
//!
//! A checkpoint is taken by time, by steps, on request, and of the final parameters. One by steps waits in
//! the background until training reaches its version. The others take a version close to the present one,
//! in a few attempts, and come before it.

use steadfast_common::ids::{Generation, Millis, Version};

/// Pause while the pserver set is incomplete or changing.
const IDLE_MS: u64 = 200;

/// Longest pause after failed checkpoints.
const PAUSE_MAX_MS: u64 = 30_000;

/// Maximum number of multiples of `every_steps` by which an attempt is ahead of a fast job.
const AHEAD_MAX: u64 = 64;

/// Maximum attempts at a checkpoint that is requested or due by time.
const ATTEMPTS_MAX: u32 = 8;

/// Timeout for all slots to reach a version that training has reached.
const REACHED_MAX_MS: u64 = 60_000;

/// Timeout for training to reach a version slightly ahead; training may end before it.
const AHEAD_FOR_MAX_MS: u64 = 5_000;

/// Timeout for training to reach the next multiple of `every_steps`. The loss of a slot is reported
/// long before.
const STEPS_TAKE_MAX_MS: u64 = 24 * 3_600_000;

/// A version of one generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub generation: Generation,
    pub version: Version,
}

/// A checkpoint that a caller waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// A checkpoint of the present version.
    Now,
    /// A checkpoint of the final parameters, which the generation has at this version.
    Final(Progress),
}

/// Whether a request starts a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceptance {
    Accepted,
    /// The final checkpoint of this generation was attempted before; its outcome is the answer.
    Repeated,
}

/// Why a checkpoint is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    Request,
    Final,
    Time,
    Steps,
}

/// One attempt at a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub trigger: Trigger,
    pub generation: Generation,
    /// The version of a synchronous job's checkpoint.
    pub version: Version,
    /// How long the slots may take to reach the version.
    pub reach_max_ms: u64,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Committed,
    /// A slot had passed the version and was at `present`.
    Past {
        present: Version,
    },
    /// A slot did not reach the version in time.
    NotReached,
    /// The job is in another generation.
    OtherGeneration,
    /// The pserver set is incomplete, or the master no longer acts.
    NoPserverSet,
    /// A task was given up meanwhile.
    QueuesMoved,
    Failed,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Take(Attempt),
    /// Wait for a request, at most until this time.
    Wait(Option<Millis>),
    /// Wait until this time, before the next attempt for the request in service.
    Pause(Millis),
}

/// Whether the request in service is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    Over,
    Continues,
}

/// Intervals at which checkpoints are taken, in milliseconds and in steps; `None` if they are not taken like this.
pub type Intervals = (Option<u64>, Option<u64>);

/// The schedule of checkpoints in one term.
#[derive(Clone, Debug)]
pub struct CheckpointSchedule {
    every_ms: Option<u64>,
    every_steps: Option<u64>,
    /// When the next checkpoint by time is due.
    due: Option<Millis>,
    by_steps: BySteps,
    /// The attempts for a request or for a checkpoint that is due by time.
    series: Option<Series>,
    /// The generation whose final checkpoint was attempted.
    final_of: Option<Generation>,
    failures_in_a_row: u32,
}

/// Progress of the checkpoints by steps.
#[derive(Clone, Copy, Debug)]
struct BySteps {
    generation: Generation,
    /// A version that training has reached. The reported position may be older.
    reached: Version,
    /// Consecutive multiples that were missed. The next attempt is 2^`missed` multiples ahead.
    missed: u32,
    not_before: Millis,
}

/// Attempts at one checkpoint.
#[derive(Clone, Copy, Debug)]
struct Series {
    trigger: Trigger,
    /// A version that training has reached; unknown before the first attempt and after a new generation.
    reached: Option<Progress>,
    /// By how many versions the next attempt is ahead.
    margin: u64,
    attempts: u32,
    not_before: Millis,
}

impl CheckpointSchedule {
    /// Returns the schedule of a term that begins now, with its intervals in milliseconds and in steps.
    pub fn new((every_ms, every_steps): Intervals, now: Millis) -> Self {
        Self {
            every_ms,
            every_steps,
            due: every_ms.map(|every| after(now, every)),
            by_steps: BySteps::of(Generation(0)),
            series: None,
            final_of: None,
            failures_in_a_row: 0,
        }
    }

    /// Changes the intervals. A request in service stays.
    pub fn change(&mut self, (every_ms, every_steps): Intervals, now: Millis) {
        (self.every_ms, self.every_steps) = (every_ms, every_steps);
        self.due = every_ms.map(|every| after(now, every));
    }

    /// Accepts a request. The caller calls this only while no other request is in service.
    pub fn request(&mut self, request: Request) -> Acceptance {
        self.series = Some(match request {
            Request::Now => Series::new(Trigger::Request, None, 0),
            Request::Final(of) if self.final_of == Some(of.generation) => {
                return Acceptance::Repeated;
            }
            Request::Final(of) => {
                self.final_of = Some(of.generation);
                Series::new(Trigger::Final, Some(of), 0)
            }
        });
        Acceptance::Accepted
    }

    /// Decides what to do next. `present` is the latest known progress, which may lag.
    pub fn next(&mut self, now: Millis, present: Progress) -> Next {
        let is_due = self.is_due(now);
        match &mut self.series {
            Some(series) if now < series.not_before => Next::Pause(series.not_before),
            Some(series) => Next::Take(series.attempt(present)),
            // A request that waits comes before a checkpoint that is due.
            None if is_due => Next::Wait(self.due),
            None => self.next_by_steps(now, present),
        }
    }

    /// Begins a checkpoint that is due by time. The caller calls this after a wait in which no request arrived.
    pub fn wake(&mut self, now: Millis) {
        if self.is_due(now) {
            // No caller waits, so this one can be of the next version, which no slot has passed.
            self.series = Some(Series::new(Trigger::Time, None, 1));
        }
    }

    fn is_due(&self, now: Millis) -> bool {
        self.due.is_some_and(|due| due <= now)
    }

    fn next_by_steps(&mut self, now: Millis, present: Progress) -> Next {
        let Some(steps) = self.every_steps else { return Next::Wait(self.due) };
        let state = &mut self.by_steps;
        if now < state.not_before {
            return Next::Wait(Some(
                self.due.map_or(state.not_before, |it| it.min(state.not_before)),
            ));
        }
        if state.generation != present.generation {
            *state = BySteps::of(present.generation);
        }
        state.reached = state.reached.max(present.version);
        let ahead = 1_u64.checked_shl(state.missed).unwrap_or(AHEAD_MAX).min(AHEAD_MAX);
        Next::Take(Attempt {
            trigger: Trigger::Steps,
            generation: present.generation,
            version: Version((state.reached.0 / steps + ahead) * steps),
            reach_max_ms: STEPS_TAKE_MAX_MS,
        })
    }

    /// Returns when an attempt by steps is interrupted, because a checkpoint by time is due.
    pub fn due(&self) -> Option<Millis> {
        self.due
    }

    /// Returns whether an attempt that a request (or a due checkpoint, without one) interrupts runs to its
    /// end: training has reached its version. If it were dropped, the shards that it saved would become
    /// orphans.
    pub fn finishes(attempt: &Attempt, request: Option<Request>, present: Progress) -> bool {
        let reached = match request {
            // A delayed request may name a generation that advanced further than the present one has.
            Some(Request::Final(of)) if of.generation == present.generation => of.version,
            Some(Request::Final(_) | Request::Now) | None => present.version,
        };
        attempt.version <= reached
    }

    /// Records the outcome of an attempt. `pause_ms` is the pause after a first failure, with jitter.
    pub fn ended(
        &mut self,
        attempt: &Attempt,
        outcome: Outcome,
        now: Millis,
        present: Progress,
        pause_ms: u64,
    ) -> Service {
        if outcome == Outcome::Committed {
            self.failures_in_a_row = 0;
        } else if attempt.is_failed_by(outcome) {
            self.failures_in_a_row += 1;
        }
        let pause_ms =
            pause_ms.saturating_mul(u64::from(self.failures_in_a_row.max(1))).min(PAUSE_MAX_MS);
        if attempt.trigger == Trigger::Steps {
            self.by_steps.ended(attempt, outcome, now, pause_ms);
            return Service::Continues;
        }
        let series = self.series.take();
        self.series = series.and_then(|it| it.after(attempt, outcome, now, present));
        if self.series.is_some() {
            return Service::Continues;
        }
        if attempt.trigger == Trigger::Time {
            let next = if outcome == Outcome::Committed { self.every_ms } else { Some(pause_ms) };
            self.due = next.map(|next| after(now, next));
        }
        Service::Over
    }

    /// Returns the number of failed checkpoints since the last committed one.
    pub fn failures_in_a_row(&self) -> u32 {
        self.failures_in_a_row
    }
}

impl Attempt {
    /// Returns whether the outcome is reported as a failed checkpoint. Others are part of normal operation:
    /// another attempt follows, or the next pserver set gets its own checkpoints.
    fn is_failed_by(&self, outcome: Outcome) -> bool {
        let is_series = matches!(self.trigger, Trigger::Request | Trigger::Time);
        match outcome {
            Outcome::Committed => false,
            Outcome::Failed => true,
            Outcome::NoPserverSet => self.trigger != Trigger::Steps,
            Outcome::NotReached if is_series => self.reach_max_ms == REACHED_MAX_MS,
            Outcome::QueuesMoved => !is_series,
            Outcome::Past { .. } | Outcome::NotReached | Outcome::OtherGeneration => {
                self.trigger == Trigger::Final
            }
        }
    }
}

impl BySteps {
    fn of(generation: Generation) -> Self {
        Self { generation, reached: Version(0), missed: 0, not_before: Millis(0) }
    }

    fn ended(&mut self, attempt: &Attempt, outcome: Outcome, now: Millis, pause_ms: u64) {
        match outcome {
            Outcome::Committed => (self.reached, self.missed) = (attempt.version, 0),
            // The reported position always lags slightly.
            Outcome::Past { present } => (self.reached, self.missed) = (present, self.missed + 1),
            Outcome::NotReached => {}
            Outcome::OtherGeneration | Outcome::NoPserverSet => {
                self.not_before = after(now, IDLE_MS);
            }
            Outcome::QueuesMoved | Outcome::Failed => self.not_before = after(now, pause_ms),
        }
    }
}

impl Series {
    fn new(trigger: Trigger, reached: Option<Progress>, margin: u64) -> Self {
        Self { trigger, reached, margin, attempts: 0, not_before: Millis(0) }
    }

    fn attempt(&mut self, present: Progress) -> Attempt {
        let reached = *self.reached.get_or_insert(present);
        Attempt {
            trigger: self.trigger,
            generation: reached.generation,
            version: Version(reached.version.0 + self.margin),
            reach_max_ms: if self.margin == 0 { REACHED_MAX_MS } else { AHEAD_FOR_MAX_MS },
        }
    }

    /// Returns the series if another attempt follows.
    fn after(
        mut self,
        attempt: &Attempt,
        outcome: Outcome,
        now: Millis,
        present: Progress,
    ) -> Option<Self> {
        self.attempts += 1;
        if self.trigger == Trigger::Final || self.attempts == ATTEMPTS_MAX {
            return None;
        }
        let reached = |version| Some(Progress { generation: attempt.generation, version });
        match outcome {
            Outcome::Committed | Outcome::NoPserverSet | Outcome::Failed => return None,
            Outcome::QueuesMoved => {}
            // The known version is of the previous generation; the present one may never reach it.
            Outcome::OtherGeneration => {
                (self.reached, self.margin) = (None, 0);
                self.not_before = after(now, IDLE_MS);
            }
            // The slot is already working on the next version, and so are the others.
            Outcome::Past { present } if present == attempt.version => {
                (self.reached, self.margin) = (reached(Version(present.0 + 1)), 0);
            }
            Outcome::Past { present } => {
                self.reached = reached(present);
                // Training may have ended at this version.
                self.margin = if self.attempts == 1 { 0 } else { (self.margin * 4).max(2) };
            }
            Outcome::NotReached if self.margin == 0 => return None,
            // Training does not reach the version soon, or never: take what the slots have now.
            Outcome::NotReached => {
                let known = Version(attempt.version.0 - self.margin);
                let is_same = present.generation == attempt.generation;
                let version = if is_same { known.max(present.version) } else { present.version };
                (self.reached, self.margin) = (Some(Progress { version, ..present }), 0);
            }
        }
        Some(self)
    }
}

fn after(now: Millis, ms: u64) -> Millis {
    Millis(now.0.saturating_add(ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Millis = Millis(1_000);

    fn at(version: u64) -> Progress {
        Progress { generation: Generation(1), version: Version(version) }
    }

    fn past(version: u64) -> Outcome {
        Outcome::Past { present: Version(version) }
    }

    fn attempt(schedule: &mut CheckpointSchedule, now: Millis, present: Progress) -> Attempt {
        match schedule.next(now, present) {
            Next::Take(attempt) => attempt,
            other => panic!("no attempt: {other:?}"),
        }
    }

    /// Makes attempts with the given outcomes at version 10; returns their versions and the last answer.
    fn serve(schedule: &mut CheckpointSchedule, outcomes: &[Outcome]) -> (Vec<u64>, Service) {
        let (mut versions, mut service) = (Vec::new(), Service::Continues);
        for outcome in outcomes {
            assert_eq!(service, Service::Continues);
            let attempt = attempt(schedule, NOW, at(10));
            versions.push(attempt.version.0);
            service = schedule.ended(&attempt, *outcome, NOW, at(12), 1_000);
        }
        (versions, service)
    }

    #[test]
    fn checkpoints_by_steps_take_the_next_multiple_and_lead_a_fast_job_further_each_time() {
        let mut schedule = CheckpointSchedule::new((None, Some(5)), NOW);
        let (versions, _) = serve(&mut schedule, &[past(16), past(31), Outcome::Committed]);
        assert_eq!(versions, [15, 25, 50]);
        assert_eq!(attempt(&mut schedule, NOW, at(10)).version, Version(55));
        for _ in 0..100 {
            serve(&mut schedule, &[past(50)]);
        }
        assert_eq!(attempt(&mut schedule, NOW, at(10)).version, Version((10 + AHEAD_MAX) * 5));
        let other = Progress { generation: Generation(2), version: Version(3) };
        assert_eq!(attempt(&mut schedule, NOW, other).version, Version(5));
    }

    #[test]
    fn failures_pause_longer_each_time_and_requests_do_not_wait_for_that() {
        let mut schedule = CheckpointSchedule::new((None, Some(5)), NOW);
        let mut now = NOW;
        for failures in 1..40 {
            let failed = attempt(&mut schedule, now, at(10));
            schedule.ended(&failed, Outcome::Failed, now, at(10), 1_000);
            assert_eq!(schedule.failures_in_a_row(), failures);
            let until = Millis(now.0 + (u64::from(failures) * 1_000).min(PAUSE_MAX_MS));
            assert_eq!(schedule.next(now, at(10)), Next::Wait(Some(until)));
            now = until;
        }
        schedule.ended(
            &attempt(&mut schedule.clone(), now, at(10)),
            Outcome::Failed,
            now,
            at(10),
            9,
        );
        assert_eq!(schedule.request(Request::Now), Acceptance::Accepted);
        assert_eq!(serve(&mut schedule, &[Outcome::Committed]), (vec![10], Service::Over));
        assert_eq!(schedule.failures_in_a_row(), 0);
    }

    #[test]
    fn an_interrupted_attempt_runs_to_its_end_once_training_has_reached_its_version() {
        let mut schedule = CheckpointSchedule::new((None, Some(5)), NOW);
        let attempt = attempt(&mut schedule, NOW, at(10));
        let finishes =
            |request, version| CheckpointSchedule::finishes(&attempt, request, at(version));
        assert!(!finishes(None, 14) && finishes(None, 15));
        assert!(!finishes(Some(Request::Now), 14) && finishes(Some(Request::Now), 15));
        assert!(finishes(Some(Request::Final(at(15))), 14));
        let of_another = Progress { generation: Generation(0), version: Version(15) };
        assert!(!finishes(Some(Request::Final(of_another)), 14));
    }

    #[test]
    fn a_request_follows_a_fast_job_for_some_attempts_and_is_answered() {
        let mut schedule = CheckpointSchedule::new((None, None), NOW);
        schedule.request(Request::Now);
        let outcomes = [past(10), past(15), past(30), Outcome::QueuesMoved, Outcome::Committed];
        let (versions, service) = serve(&mut schedule, &outcomes);
        assert_eq!((versions, service), (vec![10, 11, 17, 38, 38], Service::Over));
        schedule.request(Request::Now);
        let (versions, service) = serve(&mut schedule, &[past(40); ATTEMPTS_MAX as usize]);
        assert_eq!((versions.len(), service), (ATTEMPTS_MAX as usize, Service::Over));
        assert_eq!(
            (schedule.failures_in_a_row(), schedule.next(NOW, at(10))),
            (0, Next::Wait(None))
        );
    }

    #[test]
    fn a_request_continues_in_the_next_generation_after_a_pause() {
        let mut schedule = CheckpointSchedule::new((None, None), NOW);
        schedule.request(Request::Now);
        assert_eq!(serve(&mut schedule, &[Outcome::OtherGeneration]).1, Service::Continues);
        let until = Millis(NOW.0 + IDLE_MS);
        assert_eq!(schedule.next(NOW, at(10)), Next::Pause(until));
        let present = Progress { generation: Generation(2), version: Version(3) };
        let next = attempt(&mut schedule, until, present);
        assert_eq!((next.generation, next.version), (Generation(2), Version(3)));
    }

    #[test]
    fn one_that_is_due_takes_the_next_version_or_else_the_present_one() {
        let mut schedule = CheckpointSchedule::new((Some(500), None), Millis(500));
        assert_eq!(schedule.next(Millis(999), at(10)), Next::Wait(Some(NOW)));
        assert_eq!(schedule.next(NOW, at(10)), Next::Wait(Some(NOW)));
        schedule.wake(NOW);
        let outcomes = [Outcome::NotReached, Outcome::Committed];
        assert_eq!(serve(&mut schedule, &outcomes), (vec![11, 12], Service::Over));
        assert_eq!(schedule.next(NOW, at(12)), Next::Wait(Some(Millis(1_500))));
        let mut now = Millis(1_500);
        schedule.wake(now);
        let failed = attempt(&mut schedule, now, at(12));
        schedule.ended(&failed, Outcome::Failed, now, at(12), 900);
        now.0 += 900;
        assert_eq!(schedule.due(), Some(now));
    }

    /// I12: if a checkpoint takes longer than `every`, the next one is always due.
    #[test]
    fn a_request_comes_before_a_checkpoint_that_is_due() {
        let mut schedule = CheckpointSchedule::new((Some(500), Some(5)), Millis(0));
        assert_eq!(schedule.next(NOW, at(10)), Next::Wait(Some(Millis(500))));
        schedule.request(Request::Now);
        assert_eq!(attempt(&mut schedule, NOW, at(10)).trigger, Trigger::Request);
    }

    #[test]
    fn the_final_checkpoint_is_attempted_once_in_each_generation() {
        let mut schedule = CheckpointSchedule::new((None, None), NOW);
        assert_eq!(schedule.request(Request::Final(at(20))), Acceptance::Accepted);
        assert_eq!(serve(&mut schedule, &[past(21)]), (vec![20], Service::Over));
        assert_eq!(schedule.failures_in_a_row(), 1);
        assert_eq!(schedule.request(Request::Final(at(20))), Acceptance::Repeated);
        let next = Progress { generation: Generation(2), version: Version(20) };
        assert_eq!(schedule.request(Request::Final(next)), Acceptance::Accepted);
    }
}
