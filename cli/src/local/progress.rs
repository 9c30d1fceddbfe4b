//! Shows the progress of a job on stderr: a progress bar on a terminal, otherwise periodic lines.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use steadfast_common::status::{JobPhase, JobStatus};

use super::observer::Observation;
use crate::output::notice;
use steadfast_common::status::format::{figure, plural, rate, span};

/// Interval between lines while the status changes.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// Time without an answer of the master after which it is reported.
const SILENCE_SHOWN: Duration = Duration::from_secs(2);

const BAR: &str = "{bar:24} {percent:>3}%  {msg}";

/// Where progress is shown.
#[derive(Debug)]
pub struct Progress {
    display: Display,
    waits_for: &'static str,
    /// When the master last answered.
    heard: Instant,
}

#[derive(Debug)]
enum Display {
    Bar(ProgressBar),
    Lines(Lines),
}

/// Whether stderr is a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stderr {
    Terminal,
    Other,
}

impl Progress {
    /// Creates the display, without output yet.
    /// `waits_for` is what the first status waits for.
    pub fn new(stderr: Stderr, waits_for: &'static str) -> Self {
        let display = match stderr {
            Stderr::Terminal => {
                let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
                let style = ProgressStyle::with_template(BAR).expect("the template is a constant");
                Display::Bar(bar.with_style(style.progress_chars("━╸─")))
            }
            Stderr::Other => Display::Lines(Lines::default()),
        };
        Self { display, waits_for, heard: Instant::now() }
    }

    /// Shows the latest status.
    pub fn update(&mut self, seen: &Observation) {
        let now = Instant::now();
        if seen.error.is_none() {
            self.heard = now;
        }
        let silent = SILENCE_SHOWN <= now - self.heard;
        let text = match (&seen.status, silent) {
            (None, _) => format!("waiting for {}", self.waits_for),
            (Some(status), false) => describe(status),
            (Some(status), true) => format!("{} · no master answers", describe(status)),
        };
        match &mut self.display {
            Display::Bar(bar) => {
                let (position, length) = seen.status.as_ref().map_or((0, 1), position);
                bar.set_length(length);
                bar.set_position(position);
                bar.set_message(text);
            }
            Display::Lines(lines) => {
                let stage = seen.status.as_ref().map(|status| (status.state, status.pass.0));
                if lines.is_due(stage, &text, now) {
                    notice(text);
                }
            }
        }
    }

    /// Prints a message on stderr, above the progress bar if there is one.
    pub fn note(&self, text: &str) {
        let print = || notice(format_args!("steadfast: {text}"));
        match &self.display {
            Display::Bar(bar) => bar.suspend(print),
            Display::Lines(_) => print(),
        }
    }

    /// Removes the progress bar.
    pub fn clear(&self) {
        match &self.display {
            Display::Bar(bar) => bar.finish_and_clear(),
            Display::Lines(_) => {}
        }
    }
}

/// State and pass, once known.
type Stage = Option<(JobPhase, u32)>;

/// Decides when a line is printed.
#[derive(Debug, Default)]
struct Lines {
    last: Option<(Stage, String, Instant)>,
}

impl Lines {
    fn is_due(&mut self, stage: Stage, text: &str, now: Instant) -> bool {
        let due = self.last.as_ref().is_none_or(|(last_stage, last_text, when)| {
            *last_stage != stage || (last_text != text && LINE_EVERY <= now - *when)
        });
        if due {
            self.last = Some((stage, text.to_owned(), now));
        }
        due
    }
}

/// Returns progress and total: in records if their number is known, else in tasks of the pass.
fn position(status: &JobStatus) -> (u64, u64) {
    let queues = &status.queues;
    let tasks = u64::from(queues.todo + queues.pending + queues.done + queues.discarded);
    match status.examples_total {
        Some(total) if total != 0 => (status.examples.min(total), total),
        _ => (u64::from(queues.done + queues.discarded), tasks.max(1)),
    }
}

/// Formats the status as one line.
fn describe(status: &JobStatus) -> String {
    let mut parts = Vec::new();
    match status.state {
        JobPhase::Waiting if !status.waiting.is_empty() => {
            return format!("waiting: {}", status.waiting.join("; "));
        }
        JobPhase::Waiting => return "waiting".to_owned(),
        JobPhase::Starting => parts.push("starting".to_owned()),
        JobPhase::Evaluating => parts.push("evaluating".to_owned()),
        JobPhase::Saving => parts.push("saving the model".to_owned()),
        JobPhase::Finished => parts.push("finished".to_owned()),
        JobPhase::Failed => parts.push("failed".to_owned()),
        JobPhase::Training => {}
    }
    let pass = status.pass.0.saturating_add(1);
    match (status.passes, status.steps) {
        (Some(passes), _) => parts.push(format!("pass {}/{passes}", pass.min(passes))),
        (None, Some(steps)) => parts.push(format!("step {}/{steps}", status.version)),
        (None, None) if status.stream.is_some() => parts.push(format!("pass {pass}")),
        // A job of closures has no passes.
        (None, None) => {}
    }
    let queues = &status.queues;
    let tasks = queues.todo + queues.pending + queues.done + queues.discarded;
    if 0 < tasks || status.stream.is_some() {
        parts.push(format!("tasks {}/{tasks}", queues.done));
    }
    if 0 < queues.discarded {
        parts.push(format!("{} discarded", queues.discarded));
    }
    parts.push(format!("{} examples/s", rate(status.examples_per_second)));
    if let Some(loss) = status.loss {
        parts.push(format!("loss {}", figure(loss)));
    }
    if let Some(evaluation) = &status.evaluation {
        parts.push(format!("{} {}", evaluation.metric_name, figure(evaluation.metric)));
        let further = evaluation.further_metrics.iter();
        parts.extend(further.map(|(name, it)| format!("{name} {}", figure(*it))));
    }
    parts.push(plural(status.trainers.len(), "trainer"));
    let held = status.slots.iter().filter(|slot| slot.address.is_some()).count();
    parts.push(format!("{held}/{} pservers", status.ps_desired));
    if let (JobPhase::Training, Some(left)) = (status.state, status.seconds_left) {
        parts.push(format!("{} left", span(left)));
    }
    if let Some(error) = &status.checkpoint_error {
        let failures = plural(status.checkpoint_failures as usize, "attempt");
        parts.push(format!("no checkpoint, {failures} failed: {error}"));
    }
    // A training job can also wait, for example for a pserver to take a free slot.
    parts.extend(status.waiting.iter().map(|reason| format!("waiting: {reason}")));
    parts.join(" · ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::sample;

    #[test]
    fn a_line_shows_pass_tasks_speed_loss_members_and_time_left() {
        let line = describe(&sample::training());
        assert_eq!(
            line,
            "pass 3/20 · tasks 12/90 · 5.2k examples/s · loss 0.1235 · accuracy 0.9710 · \
             2 trainers · 1/2 pservers · 12s left · waiting: slot 1 has no pserver"
        );
    }

    #[test]
    fn a_waiting_job_shows_what_it_waits_for() {
        let status = JobStatus { state: JobPhase::Waiting, ..sample::training() };
        assert_eq!(describe(&status), "waiting: slot 1 has no pserver");
    }

    #[test]
    fn a_line_is_printed_at_each_new_pass_and_otherwise_every_two_seconds_on_a_change() {
        let mut lines = Lines::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let pass = |number| Some((JobPhase::Training, number));
        assert!(lines.is_due(pass(0), "a", at(0)));
        assert!(!lines.is_due(pass(0), "b", at(1_999)));
        assert!(lines.is_due(pass(0), "b", at(2_000)));
        assert!(!lines.is_due(pass(0), "b", at(9_000)));
        assert!(lines.is_due(pass(1), "b", at(9_001)));
    }

    #[test]
    fn the_position_is_in_records_if_their_number_is_known() {
        let mut status = sample::training();
        assert_eq!(position(&status), (3_000, 28_740));
        status.examples_total = None;
        assert_eq!(position(&status), (12, 90));
    }
}
