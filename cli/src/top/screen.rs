//! Draws a job on the terminal.

mod elastic;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Axis, Block, Cell, Chart, Dataset, GraphType, LineGauge, Paragraph, Row, Table, Wrap,
};
use steadfast_common::elastic_status::ElasticStatus;
use steadfast_common::ids::Lane;
use steadfast_common::spec::Mode;
use steadfast_common::status::{
    Curve, Curves, JobPhase, JobStatus, SlotStatus, TimelineEvent, TrainerStatus,
};
use steadfast_host::time::unix_ms;
use steadfast_process::Failure;

use crate::format::{figure, plain, plural, rate, span};

/// Maximum number of reasons for waiting that are shown; the rest is counted.
const REASONS_SHOWN: usize = 4;

/// Height of a curve, including its border.
const CURVE_ROWS: u16 = 9;

/// Height of the list of events, including its border.
const EVENTS_ROWS: u16 = 8;

/// Terminals with fewer rows show no curves.
const ROWS_FOR_CURVES: u16 = 36;

/// The status of a job of either kind.
#[derive(Debug)]
pub enum Shown {
    Training(Box<JobStatus>),
    Elastic(Box<ElasticStatus>),
}

/// The last known status of a job.
#[derive(Debug)]
pub struct ScreenState {
    name: String,
    status: Option<Shown>,
    /// Why the last request failed, if it did.
    error: Option<String>,
    /// Number of trainers, or nodes, scrolled off above.
    above: usize,
}

impl ScreenState {
    /// Creates the state of the job `name` before the first status.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), status: None, error: None, above: 0 }
    }

    /// Takes the result of a request. An error keeps the last status.
    pub fn note(&mut self, answer: Result<Shown, Failure>) {
        match answer {
            Ok(status) => (self.status, self.error) = (Some(status), None),
            Err(failure) => self.error = Some(failure.message),
        }
        self.scroll(0);
    }

    /// Scrolls the list of trainers or nodes down by this number of rows, or up if it is negative.
    pub fn scroll(&mut self, rows: isize) {
        let listed = match &self.status {
            Some(Shown::Training(status)) => status.trainers.len(),
            Some(Shown::Elastic(status)) => status.nodes.len(),
            None => 0,
        };
        let last = listed.saturating_sub(1);
        self.above = self.above.saturating_add_signed(rows).min(last);
    }
}

pub fn draw(frame: &mut Frame<'_>, view: &ScreenState) {
    match &view.status {
        Some(Shown::Training(status)) => draw_training(frame, view, status),
        Some(Shown::Elastic(status)) => {
            let error = view.error.as_ref().or(status.error.as_ref());
            let reasons = reasons(error, &status.waiting);
            elastic::draw(frame, status, &reasons, view.above, unix_ms());
        }
        None => {
            let why = view.error.as_deref().unwrap_or("connecting …");
            let text = Paragraph::new(format!("job {}: {why}", plain(&view.name)));
            frame.render_widget(text.wrap(Wrap { trim: true }), frame.area());
        }
    }
}

fn draw_training(frame: &mut Frame<'_>, view: &ScreenState, status: &JobStatus) {
    let checkpoint = status.checkpoint_error.as_ref();
    let checkpoint = checkpoint.map(|error| format!("no new checkpoint: {error}"));
    let waiting: Vec<String> = status.waiting.iter().cloned().chain(checkpoint).collect();
    let reasons = reasons(view.error.as_ref(), &waiting);
    let curves = if frame.area().height < ROWS_FOR_CURVES { 0 } else { CURVE_ROWS };
    let [head, why, drawn, members, events] = Layout::vertical([
        Constraint::Length(7),
        Constraint::Length(reasons_rows(&reasons)),
        Constraint::Length(curves),
        Constraint::Min(4),
        Constraint::Length(EVENTS_ROWS),
    ])
    .areas(frame.area());
    draw_head(frame, head, status);
    draw_reasons(frame, why, &reasons);
    if curves != 0 {
        draw_curves(frame, drawn, &Curves::through(&status.points));
    }
    let [trainers, slots] =
        Layout::horizontal([Constraint::Fill(2), Constraint::Fill(1)]).areas(members);
    draw_trainers(frame, trainers, &status.trainers, view.above);
    draw_slots(frame, slots, &status.slots);
    let now = status.points.iter().map(|it| it.unix_ms).max().unwrap_or(0);
    draw_events(frame, events, &status.events, now);
}

/// Returns why the job waits, or why its status is out of date.
fn reasons(error: Option<&String>, waiting: &[String]) -> Vec<String> {
    let no_answer = error.map(|it| format!("no current status: {it}"));
    let all = no_answer.into_iter().chain(waiting.iter().cloned());
    let mut reasons: Vec<String> = all.map(|it| plain(&it)).collect();
    if REASONS_SHOWN < reasons.len() {
        let more = reasons.len() - REASONS_SHOWN;
        reasons.truncate(REASONS_SHOWN);
        reasons.push(format!("and {more} more"));
    }
    reasons
}

fn reasons_rows(reasons: &[String]) -> u16 {
    if reasons.is_empty() { 0 } else { reasons.len() as u16 + 2 }
}

fn draw_reasons(frame: &mut Frame<'_>, area: Rect, reasons: &[String]) {
    if !reasons.is_empty() {
        let lines: Vec<Line<'_>> = reasons.iter().map(|it| Line::from(it.as_str()).red()).collect();
        frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("waiting")), area);
    }
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, status: &JobStatus) {
    let state = match status.state {
        JobPhase::Waiting => "waiting".red(),
        JobPhase::Starting => "starting".yellow(),
        JobPhase::Training => "training".green(),
        JobPhase::Evaluating => "evaluating".green(),
        JobPhase::Saving => "saving".green(),
        JobPhase::Finished => "finished".green(),
        JobPhase::Failed => "failed".red(),
    };
    let mode = match status.mode {
        Mode::Sync => "synchronous",
        Mode::Async => "asynchronous",
    };
    let title = Line::from(vec![
        Span::from(plain(&status.job)).bold(),
        ": ".into(),
        state,
        format!(", {mode}").into(),
    ]);
    let block =
        Block::bordered().title(title).title_bottom(Line::from(" q quits ").right_aligned());
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [gauge, facts] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(inner);
    let done = match (status.examples_total, status.steps) {
        (Some(total), _) => status.examples as f64 / total as f64,
        (None, Some(steps)) => status.version.0 as f64 / steps as f64,
        (None, None) => 0.0,
    };
    let done = if done.is_finite() { done.clamp(0.0, 1.0) } else { 0.0 };
    let filled = Style::new().fg(Color::Green);
    frame.render_widget(LineGauge::default().filled_style(filled).ratio(done), gauge);
    frame.render_widget(Paragraph::new(facts_of(status)), facts);
}

fn facts_of(status: &JobStatus) -> Vec<Line<'static>> {
    let of = |now: u64, all: Option<u64>| match all {
        Some(all) => format!("{now} of {all}"),
        None => now.to_string(),
    };
    let pass = u64::from(status.pass.0) + 1;
    let passes = status.passes.map(u64::from);
    let left = status.seconds_left.map_or_else(String::new, |it| format!(", {} left", span(it)));
    let progress = format!(
        "pass {}, step {}, {} records, {} a second{left}",
        of(passes.map_or(pass, |all| pass.min(all)), passes),
        of(status.version.0, status.steps),
        of(status.examples, status.examples_total),
        rate(status.examples_per_second),
    );
    let loss = status.loss.map_or_else(|| "–".to_owned(), figure);
    let metric = status.evaluation.as_ref().map_or_else(String::new, |it| {
        format!(", {} {} on {} held-out records", it.metric_name, figure(it.metric), it.records)
    });
    let queues = status.queues;
    let tasks = format!(
        "tasks: {} todo, {} pending, {} done, {} discarded",
        queues.todo, queues.pending, queues.done, queues.discarded
    );
    let whole = format!(
        "generation {}, master {} (epoch {}), checkpoint {}",
        status.generation,
        status.master.address,
        status.master.epoch,
        status.checkpoint.as_deref().unwrap_or("none"),
    );
    [progress, format!("loss {loss}{metric}"), tasks, whole]
        .into_iter()
        .map(|it| Line::from(plain(&it)))
        .collect()
}

fn draw_curves(frame: &mut Frame<'_>, area: Rect, curves: &Curves) {
    let places: [Rect; 3] = Layout::horizontal([Constraint::Fill(1); 3]).areas(area);
    let [loss, metric, speed] = places;
    draw_curve(frame, loss, "loss", &curves.loss, figure);
    draw_curve(frame, metric, "held-out metric", &curves.metric, figure);
    draw_curve(frame, speed, "records/s", &curves.examples_per_second, rate);
}

fn draw_curve(
    frame: &mut Frame<'_>,
    area: Rect,
    title: &'static str,
    curve: &Curve,
    label: fn(f64) -> String,
) {
    let block = Block::bordered().title(title);
    let (Some(first), Some(last)) = (curve.first(), curve.last()) else {
        return frame.render_widget(Paragraph::new("nothing yet").block(block), area);
    };
    let values = curve.iter().map(|it| it.1);
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(f64::NEG_INFINITY, f64::max);
    let room = ((high - low) * 0.05).max(high.abs() * 1e-6).max(1e-9);
    let line = Dataset::default().marker(Marker::Braille).graph_type(GraphType::Line).data(curve);
    let chart = Chart::new(vec![line.cyan()])
        .block(block)
        .x_axis(
            Axis::default()
                .bounds([first.0, last.0.max(first.0 + 1.0)])
                .labels([span(first.0), span(last.0)]),
        )
        .y_axis(
            Axis::default().bounds([low - room, high + room]).labels([label(low), label(high)]),
        );
    frame.render_widget(chart, area);
}

fn draw_trainers(frame: &mut Frame<'_>, area: Rect, trainers: &[TrainerStatus], above: usize) {
    let head = ["trainer", "works on", "comp", "push", "wait", "pull", "read", "MB/s"];
    let rows = trainers.iter().skip(above).map(|it| {
        let work = match it.lanes.as_slice() {
            [] => plural(it.tasks as usize, "task"),
            lanes => format!("lanes {}", ranges(lanes)),
        };
        let time_breakdown = it.time_breakdown;
        let share = |part: f64| match time_breakdown.total() {
            total if 0.0 < total => format!("{:.0} %", part / total * 100.0),
            _ => "–".to_owned(),
        };
        let id = it.id.to_string();
        let shares = [
            time_breakdown.compute,
            time_breakdown.push,
            time_breakdown.wait,
            time_breakdown.pull,
            time_breakdown.data,
        ]
        .map(share);
        let moved = format!("{:.1}", time_breakdown.bytes_per_second() / 1e6);
        let cells = [id.chars().take(8).collect(), work].into_iter().chain(shares).chain([moved]);
        Row::new(cells.map(Cell::from))
    });
    let shares = [Constraint::Length(5); 6];
    let widths = [Constraint::Length(8), Constraint::Min(12)].into_iter().chain(shares);
    let title = match above {
        0 => plural(trainers.len(), "trainer"),
        above => format!("{} ({above} above)", plural(trainers.len(), "trainer")),
    };
    let table = Table::new(rows, widths).header(Row::new(head).bold());
    frame.render_widget(table.block(Block::bordered().title(title)), area);
}

/// Formats lanes as ranges, since most are adjacent: `0-3 6`.
fn ranges(lanes: &[Lane]) -> String {
    let ranges = lanes.chunk_by(|left, right| left.0 + 1 == right.0).map(|chunk| match chunk {
        [first, .., last] => format!("{first}-{last}"),
        lone => lone.iter().map(ToString::to_string).collect(),
    });
    ranges.collect::<Vec<String>>().join(" ")
}

fn draw_slots(frame: &mut Frame<'_>, area: Rect, slots: &[SlotStatus]) {
    let rows = slots.iter().map(|it| {
        let holder = match &it.address {
            Some(address) => Cell::from(plain(address)),
            None => Cell::from("free").red(),
        };
        let since = it.incarnation.map_or_else(String::new, |it| it.to_string());
        Row::new([Cell::from(it.slot.to_string()), holder, Cell::from(since)])
    });
    let widths = [Constraint::Length(4), Constraint::Min(15), Constraint::Length(11)];
    let head = Row::new(["slot", "pserver", "incarnation"]).bold();
    let block = Block::bordered().title(plural(slots.len(), "slot"));
    frame.render_widget(Table::new(rows, widths).header(head).block(block), area);
}

fn draw_events(frame: &mut Frame<'_>, area: Rect, events: &[TimelineEvent], now: u64) {
    let latest = events.iter().rev();
    let lines: Vec<Line<'_>> = latest
        .take(usize::from(EVENTS_ROWS))
        .map(|it| {
            let ago = span(now.saturating_sub(it.unix_ms) as f64 / 1000.0);
            Line::from(format!("{ago:>7} ago  {}", plain(&it.what)))
        })
        .collect();
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("events")), area);
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use steadfast_common::status::Point;

    use super::*;
    use crate::status::sample;

    fn shown(view: &ScreenState, columns: u16, rows: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
        terminal.draw(|frame| draw(frame, view)).unwrap();
        terminal.backend().to_string()
    }

    fn seen() -> ScreenState {
        let mut status = sample::training();
        status.points = (0..20)
            .map(|at| Point {
                unix_ms: at * 500,
                version: status.version,
                examples: at * 100,
                loss: Some(1.0 / (at + 1) as f64),
                metric: None,
            })
            .collect();
        let what = "slot 1 lost its \x1b[31mpserver".to_owned();
        status.events.push(TimelineEvent { unix_ms: 4500, what });
        let mut view = ScreenState::new("digits");
        view.note(Ok(Shown::Training(Box::new(status))));
        view
    }

    #[test]
    fn a_job_fits_on_one_screen() {
        let text = shown(&seen(), 120, 45);
        for wanted in [
            "digits: training",
            "synchronous",
            "pass 3 of 20, step 180",
            "slot 1 has no pserver",
            "accuracy 0.9710",
            "records/s",
            "lanes 0-1",
            "free",
            "5s ago  slot 1 lost its [31mpserver",
            "q quits",
        ] {
            assert!(text.contains(wanted), "{wanted} in\n{text}");
        }
    }

    /// A terminal of any size can be drawn without a panic.
    #[test]
    fn any_size_is_drawn() {
        let view = seen();
        for (columns, rows) in [(1, 1), (20, 5), (80, 24), (400, 100)] {
            shown(&view, columns, rows);
        }
        shown(&ScreenState::new("digits"), 80, 24);
    }

    #[test]
    fn the_last_status_stays_visible_while_no_master_answers() {
        let mut view = seen();
        view.note(Err(Failure::unavailable("no acting master")));
        let text = shown(&view, 120, 45);
        assert!(
            text.contains("no current status: no acting master") && text.contains("pass 3 of 20")
        );
    }

    #[test]
    fn an_elastic_job_fits_on_one_screen() {
        let mut view = ScreenState::new("ddp");
        view.note(Ok(Shown::Elastic(Box::new(sample::elastic()))));
        let text = shown(&view, 120, 40);
        for wanted in [
            "ddp: gathering",
            "round 3, 4 workers",
            "10.0.0.1:4001 waits for 10.0.0.2:4002",
            "running",
            "1 of 3",
            "2 failures",
            "round 3 formed",
        ] {
            assert!(text.contains(wanted), "{wanted} in\n{text}");
        }
        for (columns, rows) in [(1, 1), (20, 5), (80, 24), (400, 100)] {
            shown(&view, columns, rows);
        }
        view.scroll(100);
        assert_eq!(view.above, 2);
    }

    #[test]
    fn neighboring_lanes_are_one_range() {
        let lanes = |of: &[u32]| ranges(&of.iter().copied().map(Lane).collect::<Vec<_>>());
        assert_eq!(lanes(&[0, 1, 2, 5, 7, 8]), "0-2 5 7-8");
        assert_eq!(lanes(&[]), "");
    }

    #[test]
    fn the_selection_stops_at_the_last_trainer() {
        let mut view = seen();
        view.scroll(-5);
        assert_eq!(view.above, 0);
        view.scroll(100);
        assert_eq!(view.above, 1);
        assert!(shown(&view, 120, 45).contains("1 task"));
    }
}
