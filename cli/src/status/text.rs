//! Formats the status of a job as text.

use std::collections::BTreeMap;
use std::fmt::Write;

use steadfast_common::given_up::Discarded;
use steadfast_common::records::{EvaluationRecord, JobOutcome, ResultRecord};
use steadfast_common::spec::Mode;
use steadfast_common::status::{
    JobPhase, JobStatus, Recovery, SlotStatus, SlotTables, StreamStatus, TrainerStatus,
};
use steadfast_common::stream::LeftOut;

use super::stored_status::StoredStatus;
use crate::format::{bytes, figure, passes, plural, rate, span};

/// Maximum number of discarded tasks and of trainers that are listed.
pub(super) const LISTED_MAX: usize = 20;

/// Maximum number of recoveries that are shown, latest first.
const RECOVERIES_SHOWN: usize = 3;

/// Formats the status received from a master.
pub fn live(status: &JobStatus) -> String {
    let mut page = Page::new(&status.job, state(status.state), mode(Some(status.mode)));
    for reason in &status.waiting {
        page.row("waiting", reason);
    }
    let pass = status.pass.0.saturating_add(1);
    page.row(
        "pass",
        match status.passes {
            Some(passes) => format!("{} of {passes}", pass.min(passes)),
            None => pass.to_string(),
        },
    );
    page.row(
        "step",
        match status.steps {
            Some(steps) => format!("{} of {steps}", status.version),
            None => status.version.to_string(),
        },
    );
    let queues = &status.queues;
    page.row(
        "tasks",
        format!(
            "{} todo, {} pending, {} done, {} discarded",
            queues.todo, queues.pending, queues.done, queues.discarded
        ),
    );
    page.row(
        "examples",
        match status.examples_total {
            Some(total) => format!(
                "{} of {total}, {} a second",
                status.examples,
                rate(status.examples_per_second)
            ),
            None => format!("{}, {} a second", status.examples, rate(status.examples_per_second)),
        },
    );
    if let Some(seconds) = status.seconds_left {
        page.row("left", span(seconds));
    }
    if let Some(stream) = &status.stream {
        page.stream(stream);
    }
    if let Some(loss) = status.loss {
        page.row("loss", figure(loss));
    }
    page.evaluation(status.evaluation.as_ref());
    page.row("generation", status.generation.to_string());
    page.row("checkpoint", status.checkpoint.as_deref().unwrap_or("none"));
    if let Some(error) = &status.checkpoint_error {
        page.row("error", format!("no new checkpoint: {error}"));
    }
    page.warnings(&status.warnings);
    for recovery in status.recoveries.iter().rev().take(RECOVERIES_SHOWN) {
        let Recovery { cause, seconds, .. } = recovery;
        page.row("recovered", format!("{cause}; next step {seconds:.2} s later"));
    }
    page.row("master", format!("{} (epoch {})", status.master.address, status.master.epoch));
    page.slots(&status.slots, Some(status.ps_desired));
    page.tables(&status.tables);
    page.trainers(&status.trainers);
    page.discarded(&status.discarded);
    if let Some(result) = &status.result {
        page.result(result);
    }
    page.text
}

/// Formats the status read from etcd when no master answers.
pub fn stored(status: &StoredStatus) -> String {
    let state = match (&status.result, &status.waits_for) {
        (Some(result), _) => outcome(result),
        (None, Some(_)) => "waiting",
        (None, None) => "no master answers",
    };
    let mut page = Page::new(&status.job, state, mode(status.mode));
    if let Some(result) = &status.result {
        page.result(result);
        page.row("checkpoint", status.checkpoint.as_deref().unwrap_or("none"));
        page.discarded(&result.discarded);
        page.left_out(&result.left_out);
        page.warnings(&status.warnings);
        return page.text;
    }
    page.row("why", &status.error);
    if status.waits_for.is_none() {
        page.row("below", "the state in etcd; the job continues once a master is acting");
    }
    if let Some(generation) = status.generation {
        page.row("generation", generation.to_string());
    }
    page.row("checkpoint", status.checkpoint.as_deref().unwrap_or("none"));
    page.evaluation(status.evaluation.as_ref());
    page.warnings(&status.warnings);
    page.slots(&status.slots, status.ps_desired);
    page.row("trainers", plural(status.trainers.len(), "live trainer"));
    for trainer in status.trainers.iter().take(LISTED_MAX) {
        page.row("", format!("{}, admin port {}", trainer.id, trainer.admin));
    }
    page.text
}

fn state(state: JobPhase) -> &'static str {
    match state {
        JobPhase::Waiting => "waiting",
        JobPhase::Starting => "starting",
        JobPhase::Training => "training",
        JobPhase::Evaluating => "evaluating",
        JobPhase::Saving => "saving",
        JobPhase::Finished => "finished",
        JobPhase::Failed => "failed",
    }
}

fn outcome(result: &ResultRecord) -> &'static str {
    match result.state {
        JobOutcome::Finished => "finished",
        JobOutcome::Failed => "failed",
    }
}

fn mode(mode: Option<Mode>) -> &'static str {
    match mode {
        Some(Mode::Sync) => " (synchronous)",
        Some(Mode::Async) => " (asynchronous)",
        None => "",
    }
}

/// Builds a text of two columns.
pub(super) struct Page {
    pub text: String,
}

impl Page {
    pub fn new(job: &str, state: &str, kind: &str) -> Self {
        Self { text: format!("job {job}: {state}{kind}\n") }
    }

    pub fn row(&mut self, name: &str, value: impl AsRef<str>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "  {name:<11} {}", value.as_ref());
    }

    fn stream(&mut self, stream: &StreamStatus) {
        let StreamStatus { files, waiting_files, waiting_records, oldest_seconds, .. } = stream;
        let drained = if stream.is_draining { "; being drained" } else { "" };
        let read = plural(*files as usize, "file");
        self.row(
            "stream",
            format!(
                "{read} read; {waiting_records} records and {waiting_files} more files wait, the oldest for \
                 {}{drained}",
                span(*oldest_seconds)
            ),
        );
        let (files, listed) = (stream.left_out_files, stream.left_out.clone());
        self.left_out(&LeftOut { files, listed });
        if let Some(error) = &stream.error {
            self.row("error", format!("the stream is not read: {error}"));
        }
    }

    fn evaluation(&mut self, evaluation: Option<&EvaluationRecord>) {
        if let Some(it) = evaluation {
            self.row(
                &it.metric_name,
                format!(
                    "{} (loss {}) on {} held-out records after {}",
                    figure(it.metric),
                    figure(it.loss),
                    it.records,
                    match it.pass.0 {
                        1 => "1 pass".to_owned(),
                        passes => format!("{passes} passes"),
                    }
                ),
            );
        }
    }

    fn slots(&mut self, slots: &[SlotStatus], desired: Option<u32>) {
        let held = slots.iter().filter(|slot| slot.address.is_some()).count();
        self.row(
            "pservers",
            match desired {
                Some(desired) => format!("{held} of {}", plural(desired as usize, "slot")),
                None => plural(held, "slot"),
            },
        );
        for slot in slots {
            let holder = match (&slot.address, slot.incarnation) {
                (Some(address), Some(incarnation)) => {
                    format!("{address} (incarnation {incarnation})")
                }
                (Some(address), None) => address.clone(),
                (None, _) => "free".to_owned(),
            };
            self.row("", format!("slot {}: {holder}", slot.slot));
        }
    }

    fn tables(&mut self, slots: &[SlotTables]) {
        let mut rows: BTreeMap<&str, u64> = BTreeMap::new();
        for (name, count) in slots.iter().flat_map(|it| &it.rows) {
            *rows.entry(name).or_default() += count;
        }
        if rows.is_empty() {
            return;
        }
        let counts: Vec<String> = rows
            .iter()
            .map(|(name, count)| format!("{name} {}", plural(*count as usize, "row")))
            .collect();
        self.row("tables", counts.join(", "));
        for it in slots {
            self.row(
                "",
                format!(
                    "slot {}: {}, {:.0} % in memory ({}), {} on disk; {} accesses a second, {:.1} % in memory",
                    it.slot,
                    plural(it.rows.values().sum::<u64>() as usize, "row"),
                    100.0 * it.share_in_memory(),
                    bytes(it.memory_bytes),
                    bytes(it.disk_bytes),
                    rate(it.accesses_per_second),
                    100.0 * it.hit_rate(),
                ),
            );
        }
    }

    fn trainers(&mut self, trainers: &[TrainerStatus]) {
        self.row("trainers", trainers.len().to_string());
        for trainer in trainers.iter().take(LISTED_MAX) {
            let work = match trainer.lanes.as_slice() {
                [] => plural(trainer.tasks as usize, "task"),
                lanes => {
                    let lanes: Vec<String> = lanes.iter().map(ToString::to_string).collect();
                    format!("lanes {}", lanes.join(" "))
                }
            };
            self.row("", format!("{}: {work}, admin port {}", trainer.id, trainer.admin));
        }
        self.more(trainers.len());
    }

    fn discarded(&mut self, discarded: &Discarded) {
        for task in discarded.listed.iter().take(LISTED_MAX) {
            let text = format!("task {} {}: {}", task.task, passes(task), task.reason);
            self.row("discarded", text);
        }
        self.more(discarded.tasks as usize);
    }

    fn left_out(&mut self, left_out: &LeftOut) {
        for (file, reason) in left_out.listed.iter().take(LISTED_MAX) {
            self.row("left out", format!("{file}: {reason}"));
        }
        self.more(left_out.files as usize);
    }

    fn warnings(&mut self, warnings: &[String]) {
        for warning in warnings {
            self.row("warning", warning);
        }
    }

    pub fn more(&mut self, count: usize) {
        if LISTED_MAX < count {
            self.row("", format!("and {} more", count - LISTED_MAX));
        }
    }

    fn result(&mut self, result: &ResultRecord) {
        if let Some(reason) = &result.reason {
            self.row("reason", reason);
        }
        self.row(
            "result",
            format!(
                "{}, {}, {}",
                plural(result.passes as usize, "pass").replace("passs", "passes"),
                plural(usize::try_from(result.steps).unwrap_or(usize::MAX), "step"),
                plural(usize::try_from(result.examples).unwrap_or(usize::MAX), "example")
            ),
        );
        if let Some(loss) = result.loss {
            self.row("loss", figure(loss));
        }
        if let Some(metric) = result.metric {
            self.row(result.metric_name.as_deref().unwrap_or("metric"), figure(metric));
        }
        if let Some(sha256) = &result.parameters_sha256 {
            self.row("sha-256", sha256);
        }
        if let Some(model) = &result.model {
            self.row("model", model);
        }
    }
}

#[cfg(test)]
mod tests {
    use steadfast_common::given_up::{DiscardedTask, GivenUpRecord};
    use steadfast_common::ids::{Pass, TaskId};

    use super::*;
    use crate::status::sample;

    #[test]
    fn a_running_job_shows_queues_members_and_the_wait_chain() {
        let text = live(&sample::training());
        let expected = "\
job digits: training (synchronous)
  waiting     slot 1 has no pserver
  pass        3 of 20
  step        180
  tasks       76 todo, 2 pending, 12 done, 0 discarded
  examples    3000 of 28740, 5.2k a second
  left        12s
  loss        0.1235
  accuracy    0.9710 (loss 0.1000) on 359 held-out records after 1 pass
  generation  1
  checkpoint  c-1
  master      127.0.0.1:4000 (epoch 9)
  pservers    1 of 2 slots
              slot 0: 127.0.0.1:4100 (incarnation 12)
              slot 1: free
  trainers    2
              00000000-0000-0000-0000-000000000001: lanes 0 1, admin port 127.0.0.1:4201
              00000000-0000-0000-0000-000000000002: 1 task, admin port 127.0.0.1:4202
";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_truncated_list_shows_how_much_is_missing() {
        let record = GivenUpRecord::default().and(Pass(0), "bad record");
        let discarded = |task| DiscardedTask {
            task: TaskId(task),
            held_out: false,
            passes: record.passes.clone(),
            times: 1,
            reason: record.reason.clone(),
            records: Vec::new(),
        };
        let listed = (0..25).map(discarded).collect();
        let discarded = Discarded { tasks: 25, times: 25, listed, list: None };
        let status = JobStatus { discarded, ..sample::training() };
        assert!(
            live(&status).ends_with("task 19 in pass 1: bad record\n              and 5 more\n")
        );
    }

    fn without_master(result: Option<ResultRecord>) -> StoredStatus {
        StoredStatus {
            warnings: Vec::new(),
            job: "digits".to_owned(),
            mode: Some(Mode::Sync),
            master: None,
            error: "the job has no acting master".to_owned(),
            waits_for: None,
            generation: None,
            ps_desired: Some(2),
            slots: sample::training().slots[..1].to_vec(),
            trainers: Vec::new(),
            checkpoint: None,
            evaluation: None,
            result,
        }
    }

    #[test]
    fn without_a_master_status_shows_the_contents_of_etcd_and_a_notice() {
        let text = stored(&without_master(None));
        assert!(text.starts_with("job digits: no master answers (synchronous)\n"), "{text}");
        assert!(text.contains("why         the job has no acting master\n"), "{text}");
        assert!(text.contains("pservers    1 of 2 slots\n"), "{text}");
        assert!(text.contains("trainers    0 live trainers\n"), "{text}");

        let error = "the master waits for the first file".to_owned();
        let waits_for = Some("the first file".to_owned());
        let text = stored(&StoredStatus { error, waits_for, ..without_master(None) });
        assert!(text.starts_with("job digits: waiting (synchronous)\n"), "{text}");
        assert!(text.contains("why         the master waits for the first file\n"), "{text}");
    }

    #[test]
    fn a_job_that_has_ended_shows_its_result() {
        let result = ResultRecord {
            state: JobOutcome::Failed,
            reason: Some("all tasks were discarded".to_owned()),
            passes: 0,
            steps: 1,
            examples: 16,
            loss: None,
            metric: None,
            metric_name: None,
            parameters_sha256: None,
            model: None,
            checkpoint: None,
            discarded: Discarded::default(),
            left_out: LeftOut::default(),
            ended_unix_ms: None,
        };
        let text = stored(&without_master(Some(result)));
        let expected = "job digits: failed (synchronous)\n  reason      all tasks were discarded\n  \
                        result      0 passes, 1 step, 16 examples\n  checkpoint  none\n";
        assert_eq!(text, expected);
    }
}
