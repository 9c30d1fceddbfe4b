//! Timeline and curves of a job during one term, for the status.

use std::collections::{BTreeSet, VecDeque};

use steadfast_common::ids::{Slot, TaskId, TrainerId};
use steadfast_common::status::{JobStatus, Point, TimelineEvent, TimelineKind};

/// Maximum number of events that are kept.
const EVENTS_MAX: usize = 200;

/// Maximum length of an event's description in characters.
const CHARS_MAX: usize = 300;

/// Maximum number of points of a curve. Beyond it every second point is dropped and the interval doubles.
const POINTS_MAX: usize = 512;

/// Initial time between points.
const STEP_MS: u64 = 500;

/// Events and curves of one term.
#[derive(Debug)]
pub(crate) struct Timeline {
    events: VecDeque<TimelineEvent>,
    points: Vec<Point>,
    step_ms: u64,
    last: Option<Observed>,
}

/// State with which the next snapshot is compared.
#[derive(Debug)]
struct Observed {
    trainers: BTreeSet<TrainerId>,
    slots: Vec<(Slot, Option<String>)>,
    followers: Vec<(Slot, Option<String>)>,
    generation: u64,
    checkpoint: Option<String>,
    recoveries: u64,
    discarded: BTreeSet<TaskId>,
    discarded_tasks: u64,
    is_over: bool,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { events: VecDeque::new(), points: Vec::new(), step_ms: STEP_MS, last: None }
    }
}

impl Timeline {
    /// Adds the changes that `status` shows at the wall-clock time `unix_ms`.
    pub fn note(&mut self, status: &JobStatus, unix_ms: u64) {
        let observed = Observed::of(status);
        match self.last.take() {
            None => {
                let what = format!("this master acts, epoch {}", status.master.epoch);
                self.add(unix_ms, TimelineKind::Other, what);
            }
            Some(last) => last
                .compare(&observed, status)
                .into_iter()
                .for_each(|(kind, what)| self.add(unix_ms, kind, what)),
        }
        self.last = Some(observed);
        self.add_point(status, unix_ms);
    }

    /// Returns the events, oldest first.
    pub fn events(&self) -> Vec<TimelineEvent> {
        self.events.iter().cloned().collect()
    }

    /// Returns the points of the curves, oldest first.
    pub fn points(&self) -> Vec<Point> {
        self.points.clone()
    }

    fn add(&mut self, unix_ms: u64, kind: TimelineKind, mut what: String) {
        // Addresses and reasons come from other processes and may be long.
        if let Some((end, _)) = what.char_indices().nth(CHARS_MAX) {
            what.truncate(end);
        }
        self.events.push_back(TimelineEvent { unix_ms, what, kind });
        if EVENTS_MAX < self.events.len() {
            self.events.pop_front();
        }
    }

    fn add_point(&mut self, status: &JobStatus, unix_ms: u64) {
        // A clock that was set back does not delay the next point.
        let is_due = self
            .points
            .last()
            .is_none_or(|last| unix_ms < last.unix_ms || last.unix_ms + self.step_ms <= unix_ms);
        if !is_due {
            return;
        }
        let evaluation = status.evaluation.as_ref();
        let further = evaluation.into_iter().flat_map(|it| it.further_metrics.clone());
        self.points.push(Point {
            unix_ms,
            version: status.version,
            examples: status.examples,
            loss: status.loss.filter(|loss| loss.is_finite()),
            metric: status.evaluation.as_ref().map(|it| it.metric).filter(|it| it.is_finite()),
            further_metrics: further.filter(|(_, it)| it.is_finite()).collect(),
        });
        if POINTS_MAX < self.points.len() {
            let mut index = 0;
            self.points.retain(|_| {
                index += 1;
                index % 2 == 1
            });
            self.step_ms *= 2;
        }
    }
}

impl Observed {
    fn of(status: &JobStatus) -> Self {
        Self {
            trainers: status.trainers.iter().map(|it| it.id).collect(),
            slots: status.slots.iter().map(|it| (it.slot, it.address.clone())).collect(),
            followers: status.slots.iter().map(|it| (it.slot, it.follower.clone())).collect(),
            generation: status.generation.0,
            checkpoint: status.checkpoint.clone(),
            recoveries: status.recoveries_count,
            discarded: status.discarded.listed.iter().map(|it| it.task).collect(),
            discarded_tasks: status.discarded.tasks,
            is_over: status.result.is_some(),
        }
    }

    /// Returns the differences in words, with their kinds.
    fn compare(self, now: &Self, status: &JobStatus) -> Vec<(TimelineKind, String)> {
        let mut changes = Vec::new();
        let left = self.trainers.difference(&now.trainers);
        changes.extend(left.map(|id| (TimelineKind::Failure, format!("trainer {id} left"))));
        let joined = now.trainers.difference(&self.trainers);
        changes.extend(joined.map(|id| (TimelineKind::Other, format!("trainer {id} joined"))));
        for (slot, address) in &now.slots {
            let before = self.slots.iter().find(|it| it.0 == *slot).and_then(|it| it.1.as_ref());
            if before == address.as_ref() {
                continue;
            }
            // A spare may take the slot between two statuses: report both the loss and the takeover.
            let lost = |it| (TimelineKind::Failure, format!("slot {slot} lost its pserver {it}"));
            changes.extend(before.map(lost));
            let taken =
                |it| (TimelineKind::Other, format!("slot {slot} was taken by pserver {it}"));
            changes.extend(address.iter().map(taken));
        }
        for (slot, follower) in &now.followers {
            let before = self.followers.iter().find(|it| it.0 == *slot);
            let before = before.and_then(|it| it.1.as_ref());
            if before == follower.as_ref() {
                continue;
            }
            let lost = |it| (TimelineKind::Other, format!("{it} no longer follows slot {slot}"));
            changes.extend(before.map(lost));
            let follows = |it| (TimelineKind::Other, format!("{it} follows slot {slot}"));
            changes.extend(follower.iter().map(follows));
        }
        if self.generation != now.generation {
            let what = format!("generation {} began", now.generation);
            changes.push((TimelineKind::Generation, what));
        }
        let latest = now.checkpoint.as_ref().filter(|id| self.checkpoint.as_ref() != Some(id));
        let latest = latest.map(|id| format!("checkpoint {id} is the latest"));
        changes.extend(latest.map(|what| (TimelineKind::Checkpoint, what)));
        changes.extend(self.others(now, status).into_iter().map(|it| (TimelineKind::Other, it)));
        changes
    }

    /// Returns the differences that are marked beside no curve.
    fn others(self, now: &Self, status: &JobStatus) -> Vec<String> {
        let mut changes = Vec::new();
        let new = now.recoveries.saturating_sub(self.recoveries) as usize;
        for it in status.recoveries.iter().skip(status.recoveries.len().saturating_sub(new)) {
            changes.push(format!("{}; recovered after {:.2} s", it.cause, it.seconds));
        }
        // Reported once per task, not once per pass.
        let mut new = now.discarded_tasks.saturating_sub(self.discarded_tasks);
        for task in status.discarded.listed.iter().filter(|it| !self.discarded.contains(&it.task)) {
            changes.push(format!("task {} was given up: {}", task.task, task.reason));
            new = new.saturating_sub(1);
        }
        if 0 < new {
            changes.push(format!("{new} more tasks were given up"));
        }
        if let Some(result) = status.result.as_ref().filter(|_| !self.is_over) {
            let reason = result.reason.as_deref().map_or_else(String::new, |it| format!(": {it}"));
            changes.push(format!("the job is over{reason}"));
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use steadfast_common::ids::Incarnation;
    use steadfast_common::status::SlotStatus;

    use super::*;

    fn with_slot(address: Option<&str>) -> JobStatus {
        let address = address.map(str::to_owned);
        let (incarnation, follower) = (Some(Incarnation(3)), None);
        let slot = SlotStatus { slot: Slot(0), address, incarnation, follower };
        JobStatus { slots: vec![slot], ..JobStatus::default() }
    }

    fn descriptions(timeline: &Timeline) -> Vec<String> {
        timeline.events().into_iter().map(|it| it.what).collect()
    }

    #[test]
    fn a_loss_and_a_takeover_are_each_reported_once() {
        let mut timeline = Timeline::default();
        let holders = [Some("a:1"), Some("a:1"), None, Some("b:1"), Some("c:1")];
        for (at, address) in (0..).zip(holders) {
            timeline.note(&with_slot(address), at);
        }
        let expected = [
            "this master acts, epoch 0",
            "slot 0 lost its pserver a:1",
            "slot 0 was taken by pserver b:1",
            "slot 0 lost its pserver b:1",
            "slot 0 was taken by pserver c:1",
        ];
        assert_eq!(descriptions(&timeline), expected);
    }

    #[test]
    fn curves_continue_when_the_clock_is_set_back() {
        let mut timeline = Timeline::default();
        for unix_ms in [10_000_000, 10_001_000, 1_000, 1_100, 2_000] {
            timeline.note(&JobStatus::default(), unix_ms);
        }
        let drawn: Vec<u64> = timeline.points().iter().map(|it| it.unix_ms).collect();
        assert_eq!(drawn, [10_000_000, 10_001_000, 1_000, 2_000]);
    }

    #[test]
    fn a_long_job_keeps_a_bounded_curve_of_all_its_time() {
        let mut timeline = Timeline::default();
        for second in 0..100_000 {
            let checkpoint = Some(format!("c-{}", second / 100));
            let snapshot = JobStatus { checkpoint, ..JobStatus::default() };
            timeline.note(&snapshot, second * 1000);
        }
        let points = timeline.points();
        assert!(POINTS_MAX / 2 <= points.len() && points.len() <= POINTS_MAX, "{}", points.len());
        assert_eq!(points[0].unix_ms, 0);
        assert!(99_000_000 - 512_000 < points.last().unwrap().unix_ms);
        assert_eq!(timeline.events().len(), EVENTS_MAX);
    }
}
