//! The task queues of an asynchronous job, reconstructed from their keys.
//!
//! A task's queue follows from its key and the head: the key names the queue; without a key the task
//! is done if it was dispatched, and todo otherwise. The rules therefore constrain changes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::ids::{Attempt, Pass, TaskId};
use steadfast_common::job::schedule::{stream_order, task_order};
use steadfast_common::job::spec::Mode;
use steadfast_common::records::stream::StreamPassRecord;
use steadfast_common::records::{GenerationRecord, QueueRecord, QueueSnapshot, TaskRecord};

use super::keyspace::Keyspace;
use super::records::read;
use super::{Change, HistoryReport, Job, Revision, Rule};

/// The queues as of the last revision.
pub(super) struct Queues<'a> {
    job: Job<'a>,
    head: Option<QueueRecord>,
    /// Tasks that have keys, by round. Keys of the round after the head's may already exist.
    rounds: BTreeMap<u64, BTreeMap<TaskId, TaskRecord>>,
    /// The order of the head's pass.
    order: Arc<PassOrder>,
    /// Number of tasks of each pass of a stream.
    passes: BTreeMap<Pass, u32>,
}

#[derive(Default)]
struct PassOrder {
    tasks: Vec<TaskId>,
    place: BTreeMap<TaskId, u32>,
}

/// The changes of one revision.
#[derive(Default)]
struct RevisionChanges {
    head: Option<QueueRecord>,
    tasks: BTreeMap<(u64, TaskId), Option<TaskRecord>>,
    generation: Option<GenerationRecord>,
}

impl<'a> Queues<'a> {
    pub fn new(job: &Job<'a>, start: &[Change]) -> Self {
        let mut queues = Self {
            job: *job,
            head: None,
            rounds: BTreeMap::new(),
            order: Arc::default(),
            passes: BTreeMap::new(),
        };
        queues.learn(start);
        let mut unseen = HistoryReport::default();
        let news = queues.news(0, start, &mut unseen);
        queues.take(news);
        queues
    }

    /// Checks one revision and applies it.
    pub fn check(
        &mut self,
        revision: &Revision,
        keyspace: &Keyspace<'_>,
        report: &mut HistoryReport,
    ) {
        if self.job.spec.mode == Mode::Sync {
            return;
        }
        let at = revision.revision;
        self.learn(&revision.changes);
        let news = self.news(at, &revision.changes, report);
        if news.head.is_none() && news.tasks.is_empty() {
            return;
        }
        self.check_attempts(at, &news, report);
        let before = self.head.unwrap_or_default();
        let after = news.head.unwrap_or(before);
        self.check_round(at, &news, before.round, report);
        if after.round == before.round {
            let is_forward = after.pass == before.pass
                && before.cursor <= after.cursor
                && after.cursor as usize <= self.order_of(after.pass).tasks.len();
            if !is_forward {
                let text = format!("the head of the queues changed from {before:?} to {after:?}");
                report.breaks(at, Rule::Queues, text);
            }
            let order = self.order_of(after.pass);
            self.check_dispatched(at, &news, &order, before.cursor..after.cursor, report);
            self.take(news);
        } else {
            let ends_pass = after.pass.0 == before.pass.0 + 1 && news.generation.is_none();
            let to = news.generation.as_ref().map(|record| {
                let checkpoint =
                    record.checkpoint.as_deref().and_then(|id| keyspace.checkpoint(id));
                checkpoint.and_then(|it| it.queue.clone()).unwrap_or_default()
            });
            if ends_pass {
                self.check_pass_end(at, &news, before, report);
            } else if to.is_none() {
                let text = format!("pass {} follows pass {}", after.pass.0, before.pass.0);
                report.breaks(at, Rule::PassEnd, text);
            }
            self.take(news);
            let dispatched_before =
                to.unwrap_or(QueueSnapshot { pass: after.pass, ..QueueSnapshot::default() });
            self.check_new_round(at, &dispatched_before, report);
        }
    }

    /// Records the number of tasks of each pass of a stream that `changes` adds.
    fn learn(&mut self, changes: &[Change]) {
        for change in changes {
            let Some(pass) = self.job.keys.stream_pass_of(&change.key) else { continue };
            let record = change.value.as_deref();
            let record = record.and_then(|it| serde_json::from_str::<StreamPassRecord>(it).ok());
            self.passes.extend(record.map(|it| (pass, it.tasks)));
        }
    }

    fn news(&self, at: i64, changes: &[Change], report: &mut HistoryReport) -> RevisionChanges {
        let keys = self.job.keys;
        let mut news = RevisionChanges::default();
        for change in changes {
            if change.key == keys.queue() {
                if change.value.is_none() {
                    report.breaks(at, Rule::Queues, "the head of the queues was deleted");
                }
                news.head = read(at, change, report);
            } else if change.key == keys.generation() {
                news.generation = read(at, change, report);
            } else if let Some((round, task)) = self.task_of(&change.key) {
                let record = match &change.value {
                    Some(_) => match read(at, change, report) {
                        Some(record) => Some(record),
                        None => continue,
                    },
                    None => None,
                };
                news.tasks.insert((round, task), record);
            }
        }
        news
    }

    fn task_of(&self, key: &str) -> Option<(u64, TaskId)> {
        let rest = key.strip_prefix(&self.job.keys.tasks_prefix())?;
        let (round, _) = rest.split_once('/')?;
        let round = round.parse().ok()?;
        Some((round, self.job.keys.task_of(round, key)?))
    }

    fn order_of(&self, pass: Pass) -> Arc<PassOrder> {
        if self.head.is_some_and(|head| head.pass == pass) && !self.order.tasks.is_empty() {
            return self.order.clone();
        }
        let seed = self.job.spec.seed;
        let tasks = match self.job.spec.dataset.follow {
            false => task_order(self.job.manifest, seed, pass),
            true => stream_order(self.passes.get(&pass).copied().unwrap_or(0), seed, pass),
        };
        let place = tasks.iter().enumerate().map(|(at, task)| (*task, at as u32)).collect();
        Arc::new(PassOrder { tasks, place })
    }

    fn record(&self, round: u64, task: TaskId) -> Option<&TaskRecord> {
        self.rounds.get(&round)?.get(&task)
    }

    /// Checks that attempt numbers increase, and that no attempt that is over becomes pending again.
    fn check_attempts(&self, at: i64, news: &RevisionChanges, report: &mut HistoryReport) {
        let next = self.head.map_or(Attempt(0), |head| head.next_attempt);
        let after = news.head.map_or(next, |head| head.next_attempt);
        if after < next {
            let text = format!("the next attempt number went back from {next} to {after}");
            report.breaks(at, Rule::Attempts, text);
        }
        let mut seen = BTreeSet::new();
        for ((round, task), record) in &news.tasks {
            let Some(TaskRecord::Pending { attempt, .. }) = record else { continue };
            let is_same = self.record(*round, *task).is_some_and(
                |it| matches!(it, TaskRecord::Pending { attempt: known, .. } if known == attempt),
            );
            if is_same {
                continue;
            }
            report.attempts += 1;
            if *attempt < next || after <= *attempt || !seen.insert(*attempt) {
                let text =
                    format!("task {task} is pending with attempt {attempt}, which is not new");
                report.breaks(at, Rule::Attempts, text);
            }
        }
    }

    /// Checks that a key of the present round is deleted only when its task is done, that is, after it was pending.
    fn check_round(&self, at: i64, news: &RevisionChanges, round: u64, report: &mut HistoryReport) {
        for ((of, task), record) in &news.tasks {
            if *of != round || record.is_some() {
                continue;
            }
            match self.record(round, *task) {
                Some(TaskRecord::Pending { .. }) => {}
                Some(TaskRecord::Todo { .. } | TaskRecord::Discarded { .. }) | None => {
                    let text = format!("task {task} is done, but was not pending");
                    report.breaks(at, Rule::Queues, text);
                }
            }
        }
    }

    /// Checks that a task gets its first key when it is dispatched, and only then, and that a given-up task is not
    /// queued again.
    fn check_dispatched(
        &self,
        at: i64,
        news: &RevisionChanges,
        order: &PassOrder,
        dispatched: std::ops::Range<u32>,
        report: &mut HistoryReport,
    ) {
        let round = news.head.or(self.head).map_or(0, |head| head.round);
        for ((of, task), record) in &news.tasks {
            if *of != round || record.is_none() {
                continue;
            }
            let is_known = self.record(round, *task).is_some();
            let is_new = order.place.get(task).is_some_and(|place| dispatched.contains(place));
            if !is_known && !is_new {
                let text = format!("task {task} got a key, but was done or not dispatched");
                report.breaks(at, Rule::Queues, text);
            }
            let was_given_up =
                matches!(self.record(round, *task), Some(TaskRecord::Discarded { .. }));
            if was_given_up && !matches!(record, Some(TaskRecord::Discarded { .. })) {
                let text = format!("task {task} was given up, but is queued again");
                report.breaks(at, Rule::Queues, text);
            }
        }
        for task in order.tasks.iter().skip(dispatched.start as usize).take(dispatched.len()) {
            if !matches!(news.tasks.get(&(round, *task)), Some(Some(_))) {
                let text =
                    format!("task {task} was skipped: it counts as done, but was not dispatched");
                report.breaks(at, Rule::Queues, text);
            }
        }
    }

    /// Checks that no task of a round is todo or pending when its pass ends.
    fn check_pass_end(
        &self,
        at: i64,
        news: &RevisionChanges,
        before: QueueRecord,
        report: &mut HistoryReport,
    ) {
        let order = self.order_of(before.pass);
        let mut left = self.rounds.get(&before.round).cloned().unwrap_or_default();
        for ((round, task), record) in &news.tasks {
            if *round == before.round {
                match record {
                    Some(record) => left.insert(*task, record.clone()),
                    None => left.remove(task),
                };
            }
        }
        let is_left = |record: &&TaskRecord| !matches!(record, TaskRecord::Discarded { .. });
        let waiting = left.values().filter(is_left).count();
        let unseen = order.tasks.len().saturating_sub(before.cursor as usize);
        if 0 < waiting + unseen {
            let text = format!(
                "pass {} ended with {} tasks neither done nor given up",
                before.pass.0,
                waiting + unseen
            );
            report.breaks(at, Rule::PassEnd, text);
        }
    }

    /// Checks that in a new round only those tasks are done that the checkpoint's queues mark as done, and only
    /// dispatched tasks have keys.
    fn check_new_round(&self, at: i64, from: &QueueSnapshot, report: &mut HistoryReport) {
        let Some(head) = self.head else { return };
        let none = BTreeMap::new();
        let keyed = self.rounds.get(&head.round).unwrap_or(&none);
        for (place, task) in (0..head.cursor).zip(&self.order.tasks) {
            let was_done = from.pass == head.pass
                && place < from.cursor
                && !from.open.contains_key(task)
                && !from.discarded.contains_key(task);
            if !keyed.contains_key(task) && !was_done {
                let text =
                    format!("task {task} counts as done in a round that did not dispatch it");
                report.breaks(at, Rule::Queues, text);
            }
        }
        let is_dispatched =
            |task: &&TaskId| self.order.place.get(task).is_some_and(|it| *it < head.cursor);
        if let Some(task) = keyed.keys().find(|task| !is_dispatched(task)) {
            let text = format!("task {task} has a key, but was not dispatched");
            report.breaks(at, Rule::Queues, text);
        }
    }

    fn take(&mut self, news: RevisionChanges) {
        for ((round, task), record) in news.tasks {
            let tasks = self.rounds.entry(round).or_default();
            match record {
                Some(record) => tasks.insert(task, record),
                None => tasks.remove(&task),
            };
        }
        if let Some(head) = news.head {
            self.order = self.order_of(head.pass);
            self.head = Some(head);
            // Earlier rounds are no longer needed.
            self.rounds = self.rounds.split_off(&head.round);
        }
    }
}
