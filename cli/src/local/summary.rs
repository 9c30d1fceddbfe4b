//! What is said about a job at its end.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use serde::{Deserialize, Serialize};
use steadfast_common::records::{DiscardedTask, JobOutcome, RecordRange, ResultRecord};
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_common::status::{JobStatus, Spent};

use super::deaths::Outage;
use crate::format::{figure, span};
use crate::output::Output;

/// Exit code of a job that finished without some of its data.
const EXIT_WITH_DISCARDED: u8 = 10;

/// How a run ended.
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
    pub parameters_sha256: Option<String>,
    /// Path or URL of the model file.
    pub model: Option<String>,
    pub wall_seconds: f64,
    pub discarded: Vec<DiscardedTask>,
    /// Processes that died during this run, and how long training stood still for each.
    #[serde(default)]
    pub outages: Vec<Outage>,
    /// What trainers spent their time on, as far as this run saw.
    #[serde(default)]
    pub spent: Spent,
    /// Why the job failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Ways in which a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Finished,
    Failed,
    /// Put away by the user; it can be resumed.
    Drained,
}

impl Summary {
    /// Sums up a job that has ended.
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
            parameters_sha256: result.parameters_sha256,
            model: result.model.map(|model| local_path(&model)),
            wall_seconds,
            discarded: result.discarded,
            outages: Vec::new(),
            spent: Spent::default(),
            reason: result.reason,
        }
    }

    /// Sums up a job that was put away, as it was last seen.
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
            parameters_sha256: None,
            model: None,
            wall_seconds,
            discarded: seen.map(|status| status.discarded.clone()).unwrap_or_default(),
            outages: Vec::new(),
            spent: seen.map(|status| status.spent).unwrap_or_default(),
            reason: None,
        }
    }

    /// What the command ends with.
    pub fn exit_code(&self) -> ExitCode {
        match self.state {
            State::Finished if self.discarded.is_empty() => ExitCode::SUCCESS,
            State::Finished => ExitCode::from(EXIT_WITH_DISCARDED),
            State::Failed => ExitCode::FAILURE,
            // What a shell reports of a command that was interrupted.
            State::Drained => ExitCode::from(130),
        }
    }

    /// Writes it to stdout.
    pub fn print(&self, output: Output) {
        match output {
            Output::Text => print!("{}", self.text()),
            Output::Json => println!("{}", self.json()),
        }
    }

    /// One line, its members in the order above.
    fn json(&self) -> String {
        serde_json::to_string(self).expect("a summary is plain data")
    }

    fn text(&self) -> String {
        let state = match (self.state, &self.reason) {
            (State::Finished, _) => "finished".to_owned(),
            (State::Failed, Some(reason)) => format!("failed: {reason}"),
            (State::Failed, None) => "failed".to_owned(),
            (State::Drained, _) => "put away".to_owned(),
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
        if let Some(sha256) = &self.parameters_sha256 {
            rows.push(("sha-256", sha256.clone()));
        }
        if let Some(model) = &self.model {
            rows.push(("model", model.clone()));
        }
        rows.push(("time", span(self.wall_seconds)));
        rows.extend(split(&self.spent).map(|it| ("trainers", it)));
        for task in &self.discarded {
            let named: Vec<String> = task.records.iter().map(range).collect();
            let place =
                if named.is_empty() { String::new() } else { format!(" ({})", named.join(", ")) };
            let (number, pass, reason) = (task.task, task.pass.0 + 1, &task.reason);
            rows.push(("discarded", format!("task {number}{place} in pass {pass}: {reason}")));
        }
        for outage in &self.outages {
            let lasted = match outage.seconds {
                Some(seconds) => format!("the next step came after {seconds:.2} s"),
                None => "training was not held up".to_owned(),
            };
            rows.push(("outage", format!("{}; {lasted}", outage.cause)));
        }
        let mut text = format!("job {}: {state}\n", self.job);
        for (name, value) in rows {
            text.push_str(&format!("  {name:<10} {value}\n"));
        }
        text
    }

    /// Keeps it for a later run of the same command.
    pub fn save(&self, path: &Path) {
        // It can be told again from etcd, all but the time that it took.
        let _ = fs::write(path, format!("{}\n", self.json()));
    }

    /// What was kept of a job that ended with these parameters.
    pub fn saved(path: &Path, parameters_sha256: Option<&str>) -> Option<Self> {
        let saved: Self = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        (saved.parameters_sha256.as_deref() == parameters_sha256).then_some(saved)
    }
}

/// The shares of trainers' time; nothing if there was none.
fn split(spent: &Spent) -> Option<String> {
    let Spent { data, compute, push, wait, pull, .. } = *spent;
    let parts = [
        ("computed", compute),
        ("pushed", push),
        ("waited", wait),
        ("pulled", pull),
        ("read data", data),
    ];
    let share =
        |(what, seconds): (&str, f64)| format!("{what} {:.0} %", 100.0 * seconds / spent.total());
    (0.0 < spent.total()).then(|| parts.map(share).join(", "))
}

/// Records of one file, counted from 1 as a person does.
fn range(of: &RecordRange) -> String {
    let (first, last) = (of.first + 1, of.first + u64::from(of.records));
    format!("{}, records {first} to {last}", local_path(&of.file))
}

/// The path that a `file` URL means; other URLs stay as they are.
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
            parameters_sha256: Some("ab12".to_owned()),
            model: Some("file:///data/my%20jobs/model.safetensors".to_owned()),
            checkpoint: None,
            discarded: Vec::new(),
        }
    }

    fn discarded() -> DiscardedTask {
        let file = "file:///data/a.csv".to_owned();
        let records = vec![RecordRange { file, first: 70, records: 10 }];
        DiscardedTask { pass: Pass(1), task: TaskId(7), reason: "bad record".to_owned(), records }
    }

    #[test]
    fn the_shares_of_trainers_time_are_told_once_there_are_any() {
        let mut summary = Summary::of_result(&sample::spec(), result(), 1.0);
        assert!(!summary.text().contains("trainers"));
        let spent = Spent { data: 0.5, compute: 8.5, push: 0.3, ..Spent::default() };
        summary.spent = Spent { wait: 0.5, pull: 0.2, ..spent };
        let line = "computed 85 %, pushed 3 %, waited 5 %, pulled 2 %, read data 5 %";
        assert!(summary.text().contains(line), "{}", summary.text());
    }

    #[test]
    fn the_exit_code_tells_finished_from_finished_with_losses_from_failed() {
        let code = |result| Summary::of_result(&sample::spec(), result, 1.0).exit_code();
        assert_eq!(code(result()), ExitCode::SUCCESS);
        assert_eq!(
            code(ResultRecord { discarded: vec![discarded()], ..result() }),
            ExitCode::from(10)
        );
        assert_eq!(code(ResultRecord { state: JobOutcome::Failed, ..result() }), ExitCode::FAILURE);
    }

    #[test]
    fn the_text_shows_every_figure_once() {
        let result = ResultRecord { discarded: vec![discarded()], ..result() };
        let text = Summary::of_result(&sample::spec(), result, 65.2).text();
        let expected = "job digits: finished\n  passes     20\n  steps      1800\n  \
                        examples   28740\n  loss       0.0123\n  accuracy   0.9778\n  \
                        sha-256    ab12\n  model      /data/my jobs/model.safetensors\n  \
                        time       1m 06s\n  discarded  task 7 (/data/a.csv, records 71 to 80) in pass 2: \
                        bad record\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn the_json_form_has_exactly_the_documented_members() {
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
            "discarded",
            "outages",
            "spent",
        ];
        documented.sort_unstable();
        let mut names = names;
        names.sort_unstable();
        assert_eq!(names, documented);
        assert_eq!(json["state"], "finished");
        assert_eq!(json["mode"], "sync");
    }

    #[test]
    fn the_time_of_a_finished_job_is_told_again_for_the_same_parameters_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.json");
        Summary::of_result(&sample::spec(), result(), 12.5).save(&path);
        let seconds = |sha256| Summary::saved(&path, Some(sha256)).map(|it| it.wall_seconds);
        assert_eq!((seconds("ab12"), seconds("cd34")), (Some(12.5), None));
    }
}
