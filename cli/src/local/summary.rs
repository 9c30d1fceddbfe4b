//! The summary of a run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use serde::{Deserialize, Serialize};
use steadfast_common::job::spec::{JobSpec, Mode};
use steadfast_common::records::given_up::{Discarded, DiscardedTask};
use steadfast_common::records::stream::LeftOut;
use steadfast_common::records::{Best, JobOutcome, RecordRange, ResultRecord, nans_if_null};
use steadfast_common::status::{JobStatus, TimeBreakdown};
use steadfast_process::{Failure, try_print};

use super::outages::Outage;
use crate::output::Output;
use steadfast_common::status::format::{figure, passes, plural, span};

/// Maximum number of discarded tasks that are listed.
const LISTED_MAX: usize = 10;

/// Exit code of a job that finished, but without some tasks or files.
const EXIT_WITHOUT_SOME: u8 = 10;

/// Summary of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub job: String,
    pub state: State,
    pub mode: Mode,
    pub passes: u32,
    pub steps: u64,
    pub examples: u64,
    pub loss: Option<f64>,
    pub metric: Option<f64>,
    pub metric_name: Option<String>,
    /// The further metrics, by name.
    #[serde(
        default,
        deserialize_with = "nans_if_null",
        skip_serializing_if = "BTreeMap::is_empty"
    )]
    pub further_metrics: BTreeMap<String, f64>,
    pub parameters_sha256: Option<String>,
    /// Path or URL of the model file.
    pub model: Option<String>,
    pub wall_seconds: f64,
    /// The checkpoint from which a later run resumes, or which holds the final parameters.
    #[serde(default)]
    pub checkpoint: Option<String>,
    /// Why the last checkpoint failed, and the number of failures since the last success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint_error: Option<String>,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub checkpoint_failures: u32,
    /// Warnings about the dataset.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Tasks that were given up.
    pub discarded: Discarded,
    /// Files of a stream that could not be read.
    #[serde(default, skip_serializing_if = "LeftOut::is_empty")]
    pub left_out: LeftOut,
    /// Processes that ended unexpectedly during this run, and the time that training stopped for each.
    #[serde(default)]
    pub outages: Vec<Outage>,
    /// What trainers spent their time on, as last seen by this run.
    #[serde(default)]
    pub time_breakdown: TimeBreakdown,
    /// Why the job failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The best evaluation, if the course of the job depended on evaluations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
}

/// Final state of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Finished,
    Failed,
    /// Interrupted by the user; resumable.
    Drained,
}

impl Summary {
    /// Creates the summary of a job that has ended.
    pub fn of_result(spec: &JobSpec, result: ResultRecord, wall_seconds: f64) -> Self {
        Self {
            job: spec.name.clone(),
            state: match result.state {
                JobOutcome::Finished => State::Finished,
                JobOutcome::Failed => State::Failed,
            },
            mode: spec.mode,
            passes: result.passes,
            steps: result.steps,
            examples: result.examples,
            loss: result.loss,
            metric: result.metric,
            metric_name: result.metric_name,
            further_metrics: result.further_metrics,
            parameters_sha256: result.parameters_sha256,
            model: result.model.map(|model| local_path(&model)),
            wall_seconds,
            checkpoint: result.checkpoint,
            checkpoint_error: None,
            checkpoint_failures: 0,
            warnings: Vec::new(),
            discarded: result.discarded,
            left_out: result.left_out,
            outages: Vec::new(),
            time_breakdown: TimeBreakdown::default(),
            reason: result.reason,
            best: result.best,
        }
    }

    /// Creates the summary of a job that was interrupted, from its last status.
    pub fn of_drained(spec: &JobSpec, seen: Option<&JobStatus>, wall_seconds: f64) -> Self {
        let evaluation = seen.and_then(|status| status.evaluation.as_ref());
        Self {
            job: spec.name.clone(),
            state: State::Drained,
            mode: spec.mode,
            passes: seen.map_or(0, |status| status.pass.0),
            steps: seen.map_or(0, |status| status.version.0),
            examples: seen.map_or(0, |status| status.examples),
            loss: seen.and_then(|status| status.loss),
            metric: evaluation.map(|it| it.metric),
            metric_name: evaluation.map(|it| it.metric_name.clone()),
            further_metrics: evaluation.map(|it| it.further_metrics.clone()).unwrap_or_default(),
            parameters_sha256: None,
            model: None,
            wall_seconds,
            checkpoint: seen.and_then(|status| status.checkpoint.clone()),
            checkpoint_error: None,
            checkpoint_failures: 0,
            warnings: Vec::new(),
            discarded: seen.map(|status| status.discarded.clone()).unwrap_or_default(),
            left_out: LeftOut::default(),
            outages: Vec::new(),
            time_breakdown: TimeBreakdown::default(),
            reason: None,
            best: evaluation.and_then(|it| Some(it.course.as_ref()?.best.clone())),
        }
    }

    /// Adds the fields that only the master's status has.
    #[must_use]
    pub fn with_status(mut self, seen: Option<&JobStatus>) -> Self {
        let Some(seen) = seen else { return self };
        self.time_breakdown = seen.time_breakdown;
        self.warnings.clone_from(&seen.warnings);
        self.checkpoint_error.clone_from(&seen.checkpoint_error);
        self.checkpoint_failures = seen.checkpoint_failures;
        self
    }

    pub fn exit_code(&self) -> ExitCode {
        match self.state {
            State::Finished if self.discarded.is_empty() && self.left_out.is_empty() => {
                ExitCode::SUCCESS
            }
            State::Finished => ExitCode::from(EXIT_WITHOUT_SOME),
            State::Failed => ExitCode::FAILURE,
            // 128 + SIGINT, as shells report an interrupted command.
            State::Drained => ExitCode::from(130),
        }
    }

    /// Prints the summary to stdout.
    ///
    /// # Errors
    /// If stdout cannot be written, unless its reader is gone.
    pub fn print(&self, output: Output) -> Result<(), Failure> {
        match output {
            Output::Text => try_print(self.text()),
            Output::Json => try_print(format_args!("{}\n", self.json())),
        }
    }

    /// Formats the summary as one line of JSON, fields in the order of the struct.
    fn json(&self) -> String {
        serde_json::to_string(self).expect("a summary is plain data")
    }

    fn text(&self) -> String {
        let state = match (self.state, &self.reason) {
            (State::Finished, _) => "finished".to_owned(),
            (State::Failed, Some(reason)) => format!("failed: {reason}"),
            (State::Failed, None) => "failed".to_owned(),
            (State::Drained, _) => "interrupted; resumable".to_owned(),
        };
        let mut rows = vec![
            ("passes", self.passes.to_string()),
            ("steps", self.steps.to_string()),
            ("examples", self.examples.to_string()),
        ];
        if let Some(loss) = self.loss {
            rows.push(("loss", figure(loss)));
        }
        if let Some(metric) = self.metric {
            rows.push((self.metric_name.as_deref().unwrap_or("metric"), figure(metric)));
        }
        rows.extend(self.further_metrics.iter().map(|(name, it)| (&name[..], figure(*it))));
        rows.extend(self.best.as_ref().map(|best| ("best", best.describe())));
        if let Some(sha256) = &self.parameters_sha256 {
            rows.push(("sha-256", sha256.clone()));
        }
        if let Some(model) = &self.model {
            rows.push(("model", model.clone()));
        }
        rows.push(("time", span(self.wall_seconds)));
        rows.extend(self.error().map(|it| ("error", it)));
        rows.extend(self.warnings.iter().map(|it| ("warning", it.clone())));
        rows.extend(shares(&self.time_breakdown).map(|it| ("trainers", it)));
        rows.extend(discarded(&self.discarded).map(|it| ("discarded", it)));
        rows.extend(left_out_lines(&self.left_out).map(|it| ("left out", it)));
        for outage in &self.outages {
            let lasted = match outage.seconds {
                Some(seconds) => format!("next step {seconds:.2} s later"),
                None => "training did not stop".to_owned(),
            };
            rows.push(("outage", format!("{}; {lasted}", outage.cause)));
        }
        let mut text = format!("job {}: {state}\n", self.job);
        for (name, value) in rows {
            text.push_str(&format!("  {name:<10} {value}\n"));
        }
        text
    }

    /// Describes the failed checkpoints if the last checkpoint failed.
    fn error(&self) -> Option<String> {
        let error = self.checkpoint_error.as_ref()?;
        Some(match (&self.checkpoint, self.checkpoint_failures) {
            (None, failures) => {
                format!("no checkpoint could be taken in {failures} attempts: {error}")
            }
            (Some(id), failures) => {
                format!("no checkpoint after {id}; {failures} attempts failed: {error}")
            }
        })
    }

    /// Saves the summary for a later run of the same command.
    pub fn save(&self, path: &Path) {
        // Errors are ignored: etcd has all of it except what only this run measured.
        let _ = fs::write(path, format!("{}\n", self.json()));
    }

    /// Reads the saved summary, if it is that of a job that ended with parameters of this hash.
    pub fn saved(path: &Path, parameters_sha256: Option<&str>) -> Option<Self> {
        let saved: Self = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        (saved.parameters_sha256.as_deref() == parameters_sha256).then_some(saved)
    }
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// Formats the shares of trainers' time; `None` if no time was recorded.
fn shares(time_breakdown: &TimeBreakdown) -> Option<String> {
    let TimeBreakdown { data, compute, push, wait, pull, .. } = *time_breakdown;
    let parts = [
        ("computed", compute),
        ("pushed", push),
        ("waited", wait),
        ("pulled", pull),
        ("read data", data),
    ];
    let share = |(what, seconds): (&str, f64)| {
        format!("{what} {:.0} %", 100.0 * seconds / time_breakdown.total())
    };
    (0.0 < time_breakdown.total()).then(|| parts.map(share).join(", "))
}

/// Formats one line for each of the first discarded tasks, and one for the rest.
fn discarded(of: &Discarded) -> impl Iterator<Item = String> {
    let more = of.tasks.saturating_sub(LISTED_MAX as u64);
    let list = of.list.as_deref().map_or_else(
        || "`steadfast status` lists them".to_owned(),
        |list| format!("all of them are in {}", local_path(list)),
    );
    let more = (0 < more).then(|| format!("and {more} more tasks; {list}"));
    of.listed.iter().take(LISTED_MAX).map(one_discarded).chain(more)
}

/// Formats one line for each of the first files that were left out, and one for the rest.
fn left_out_lines(of: &LeftOut) -> impl Iterator<Item = String> {
    let listed = of.listed.iter().take(LISTED_MAX);
    let more = of.files.saturating_sub(listed.len() as u64);
    let more = (0 < more).then(|| format!("and {}", plural(more as usize, "more file")));
    listed.map(|(url, reason)| format!("{}: {reason}", local_path(url))).chain(more)
}

fn one_discarded(of: &DiscardedTask) -> String {
    let named: Vec<String> = of.records.iter().map(range).collect();
    let place = if named.is_empty() { String::new() } else { format!(" ({})", named.join(", ")) };
    format!("task {}{place} {}: {}", of.task, passes(of), of.reason)
}

/// Formats a range of records of one file, counted from 1.
fn range(of: &RecordRange) -> String {
    let (first, last) = (of.first + 1, of.first + u64::from(of.records));
    let file = local_path(&of.file);
    match first == last {
        true => format!("{file}, record {first}"),
        false => format!("{file}, records {first} to {last}"),
    }
}

/// Returns the path of a `file` URL, and any other URL unchanged.
fn local_path(url: &str) -> String {
    let Some(path) = url.strip_prefix("file://") else { return url.to_owned() };
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let [first, more @ ..] = rest {
        let code = match (first, more) {
            (b'%', [high, low, ..]) => hex(*high).zip(hex(*low)).map(|(high, low)| high * 16 + low),
            _ => None,
        };
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &more[2..] } else { more };
    }
    String::from_utf8(bytes).unwrap_or_else(|_| path.to_owned())
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use steadfast_common::ids::{Pass, TaskId};
    use steadfast_common::records::given_up::GivenUpRecord;

    use super::*;
    use crate::status::sample;

    fn result() -> ResultRecord {
        ResultRecord {
            state: JobOutcome::Finished,
            reason: None,
            passes: 20,
            steps: 1_800,
            examples: 28_740,
            loss: Some(0.0123),
            metric: Some(0.9778),
            metric_name: Some("accuracy".to_owned()),
            further_metrics: BTreeMap::new(),
            parameters_sha256: Some("ab12".to_owned()),
            model: Some("file:///data/my%20jobs/model.safetensors".to_owned()),
            checkpoint: None,
            discarded: Discarded::default(),
            left_out: LeftOut::default(),
            ended_unix_ms: None,
            best: None,
        }
    }

    /// Returns `tasks` tasks that were given up in the second and the third pass.
    fn discarded(tasks: u32) -> Discarded {
        let file = "file:///data/a.csv".to_owned();
        let records = vec![RecordRange { file, first: 70, records: 10 }];
        let record = GivenUpRecord::default().and(Pass(1), "bad record").and(Pass(2), "bad record");
        let listed = (0..tasks).map(|task| DiscardedTask {
            task: TaskId(7 + task),
            held_out: false,
            passes: record.passes.clone(),
            times: record.times,
            reason: record.reason.clone(),
            records: records.clone(),
        });
        Discarded {
            tasks: u64::from(tasks),
            times: 2 * u64::from(tasks),
            listed: listed.collect(),
            list: Some("file:///data/discarded.jsonl".to_owned()),
        }
    }

    fn left_out(files: u64) -> LeftOut {
        let listed = vec![("file:///data/bad%20one.csv".to_owned(), "no column `y`".to_owned())];
        LeftOut { files, listed }
    }

    #[test]
    fn the_time_breakdown_is_shown_once_it_has_values() {
        let mut summary = Summary::of_result(&sample::spec(), result(), 1.0);
        assert!(!summary.text().contains("trainers"));
        let time_breakdown =
            TimeBreakdown { data: 0.5, compute: 8.5, push: 0.3, ..TimeBreakdown::default() };
        summary.time_breakdown = TimeBreakdown { wait: 0.5, pull: 0.2, ..time_breakdown };
        let line = "computed 85 %, pushed 3 %, waited 5 %, pulled 2 %, read data 5 %";
        assert!(summary.text().contains(line), "{}", summary.text());
    }

    #[test]
    fn the_exit_code_distinguishes_finished_finished_with_losses_and_failed() {
        let code = |result| Summary::of_result(&sample::spec(), result, 1.0).exit_code();
        assert_eq!(code(result()), ExitCode::SUCCESS);
        assert_eq!(code(ResultRecord { discarded: discarded(1), ..result() }), ExitCode::from(10));
        assert_eq!(code(ResultRecord { left_out: left_out(1), ..result() }), ExitCode::from(10));
        assert_eq!(code(ResultRecord { state: JobOutcome::Failed, ..result() }), ExitCode::FAILURE);
    }

    #[test]
    fn the_text_shows_every_figure_once() {
        let result = ResultRecord { discarded: discarded(1), ..result() };
        let text = Summary::of_result(&sample::spec(), result, 65.2).text();
        let expected = "job digits: finished\n  passes     20\n  steps      1800\n  \
                        examples   28740\n  loss       0.0123\n  accuracy   0.9778\n  \
                        sha-256    ab12\n  model      /data/my jobs/model.safetensors\n  \
                        time       1m 06s\n  discarded  task 7 (/data/a.csv, records 71 to 80) in passes \
                        2 to 3: bad record\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn files_that_were_left_out_are_listed() {
        let result = ResultRecord { left_out: left_out(3), ..result() };
        let text = Summary::of_result(&sample::spec(), result, 65.2).text();
        let expected =
            "  left out   /data/bad one.csv: no column `y`\n  left out   and 2 more files\n";
        assert!(text.ends_with(expected), "{text}");
    }

    #[test]
    fn many_given_up_tasks_are_summarized_with_the_file_that_lists_them() {
        let result = ResultRecord { discarded: discarded(25), ..result() };
        let text = Summary::of_result(&sample::spec(), result, 65.2).text();
        let last = "  discarded  and 15 more tasks; all of them are in /data/discarded.jsonl\n";
        assert!(text.ends_with(last), "{text}");
        assert_eq!(text.matches("discarded  task ").count(), 10);
    }

    #[test]
    fn the_json_output_has_exactly_the_documented_fields() {
        let summary = Summary::of_result(&sample::spec(), result(), 12.5);
        let json = serde_json::json!(summary);
        let names: Vec<&str> = json.as_object().unwrap().keys().map(String::as_str).collect();
        let mut documented = [
            "job",
            "state",
            "mode",
            "passes",
            "steps",
            "examples",
            "loss",
            "metric",
            "metric_name",
            "parameters_sha256",
            "model",
            "wall_seconds",
            "checkpoint",
            "warnings",
            "discarded",
            "outages",
            "time_breakdown",
        ];
        documented.sort_unstable();
        let mut names = names;
        names.sort_unstable();
        assert_eq!(names, documented);
        assert_eq!(json["state"], "finished");
        assert_eq!(json["mode"], "sync");
    }

    /// F33
    #[test]
    fn a_run_without_any_checkpoint_reports_it_at_its_end() {
        let seen = JobStatus {
            checkpoint: None,
            checkpoint_error: Some("slot 0: no space".to_owned()),
            checkpoint_failures: 3,
            warnings: vec!["4 tasks are few".to_owned()],
            ..sample::training()
        };
        let text =
            Summary::of_drained(&sample::spec(), Some(&seen), 1.0).with_status(Some(&seen)).text();
        let line = "  error      no checkpoint could be taken in 3 attempts: slot 0: no space\n";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("  warning    4 tasks are few\n"), "{text}");
    }

    #[test]
    fn the_time_of_a_finished_job_is_shown_again_only_for_the_same_parameters() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("summary.json");
        Summary::of_result(&sample::spec(), result(), 12.5).save(&path);
        let seconds = |sha256| Summary::saved(&path, Some(sha256)).map(|it| it.wall_seconds);
        assert_eq!((seconds("ab12"), seconds("cd34")), (Some(12.5), None));
    }
}
