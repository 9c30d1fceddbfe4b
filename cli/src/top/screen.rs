//! Draws the document of a job's status on the terminal.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Axis, Block, Cell as Place, Chart, Dataset, GraphType, LineGauge, Paragraph, Row as Places,
    Table as Grid, Wrap,
};
use steadfast_common::status::format::{plain, span};
use steadfast_common::status::{
    Body, Cell, Curve, Document, Level, Row, Table, TimelineEvent, Value,
};
use steadfast_host::time::unix_ms;
use steadfast_process::Failure;

/// Maximum number of reasons for waiting that are shown; the rest is counted.
const REASONS_SHOWN: usize = 4;

/// Height of a curve, including its border.
const CURVE_ROWS: u16 = 9;

/// Height of the list of events, including its border.
const EVENTS_ROWS: u16 = 8;

/// Terminals with fewer rows show no curves.
const ROWS_FOR_CURVES: u16 = 36;

/// Maximum number of rows of the job that are shown, in two columns.
const FACTS_MAX: usize = 12;

/// Width of the labels of the job's rows.
const LABEL: usize = 10;

/// Width of a bar that shows parts of a whole.
const BAR: u16 = 20;

/// Maximum width of a column.
const COLUMN_MAX: u16 = 40;

/// The colors of the parts of a bar.
const PARTS: [Color; 5] = [Color::Green, Color::Blue, Color::DarkGray, Color::Cyan, Color::Yellow];

/// The last known status of a job.
#[derive(Debug)]
pub struct ScreenState {
    name: String,
    status: Option<Document>,
    /// Why the last request failed, if it did.
    error: Option<String>,
    /// Number of rows of the longest table scrolled off above.
    above: usize,
}

impl ScreenState {
    /// Creates the state of the job `name` before the first status.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), status: None, error: None, above: 0 }
    }

    /// Takes the result of a request. An error keeps the last status.
    pub fn note(&mut self, answer: Result<Document, Failure>) {
        match answer {
            Ok(status) => (self.status, self.error) = (Some(status), None),
            Err(failure) => self.error = Some(failure.message),
        }
        self.scroll(0);
    }

    /// Scrolls the longest table down by this number of rows, or up if it is negative.
    pub fn scroll(&mut self, rows: isize) {
        let longest = self.status.as_ref().and_then(|it| longest(&tables(it)));
        let last = longest.map_or(0, |table| table.rows.len().saturating_sub(1));
        self.above = self.above.saturating_add_signed(rows).min(last);
    }
}

pub fn draw(frame: &mut Frame<'_>, view: &ScreenState) {
    match &view.status {
        Some(document) => draw_document(frame, view, document, unix_ms()),
        None => {
            let why = view.error.as_deref().unwrap_or("connecting …");
            let text = Paragraph::new(format!("job {}: {why}", plain(&view.name)));
            frame.render_widget(text.wrap(Wrap { trim: true }), frame.area());
        }
    }
}

fn draw_document(frame: &mut Frame<'_>, view: &ScreenState, document: &Document, now_unix_ms: u64) {
    let reasons = reasons(view.error.as_ref(), document);
    let (mut facts, mut events, mut curves) = (&[][..], &[][..], &[][..]);
    for section in &document.sections {
        match &section.body {
            Body::Rows(rows) => facts = &rows[..rows.len().min(FACTS_MAX)],
            Body::Curves(drawn, _) => curves = drawn,
            Body::Events(listed) => events = listed,
            Body::Table(_) => {}
        }
    }
    let has_curves = !curves.is_empty() && ROWS_FOR_CURVES <= frame.area().height;
    let [head, why, drawn, members, below] = Layout::vertical([
        Constraint::Length(3 + facts.len().div_ceil(2) as u16),
        Constraint::Length(reasons_rows(&reasons)),
        Constraint::Length(if has_curves { CURVE_ROWS } else { 0 }),
        Constraint::Min(4),
        Constraint::Length(EVENTS_ROWS),
    ])
    .areas(frame.area());
    draw_head(frame, head, document, facts, now_unix_ms);
    draw_reasons(frame, why, &reasons);
    if has_curves {
        draw_curves(frame, drawn, curves);
    }
    draw_tables(frame, members, &tables(document), view.above, now_unix_ms);
    draw_events(frame, below, events, now_unix_ms);
}

/// Returns why the job waits, or why its status is out of date.
fn reasons(error: Option<&String>, document: &Document) -> Vec<String> {
    let no_answer = error.map(|it| format!("no current status: {it}"));
    let mut reasons: Vec<String> = no_answer.into_iter().collect();
    for wait in &document.waits {
        let why = plain(&wait.why);
        if !reasons.contains(&why) {
            reasons.push(why);
        }
    }
    let rows = document.sections.iter().filter_map(|section| match &section.body {
        Body::Rows(rows) => Some(rows),
        Body::Table(_) | Body::Curves(..) | Body::Events(_) => None,
    });
    let errors = rows.flatten().filter(|row| row.level == Level::Bad && row.label == "error");
    reasons.extend(errors.map(|row| plain(&row.value.text(0))));
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

fn draw_head(
    frame: &mut Frame<'_>,
    area: Rect,
    document: &Document,
    facts: &[Row],
    now_unix_ms: u64,
) {
    let kind = match document.kind {
        "" => String::new(),
        kind => format!(", {kind}"),
    };
    let title = Line::from(vec![
        Span::from(plain(&document.job)).bold(),
        ": ".into(),
        Span::styled(plain(&document.state), style(document.level)),
        kind.into(),
    ]);
    let block =
        Block::bordered().title(title).title_bottom(Line::from(" q quits ").right_aligned());
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [gauge, text] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(inner);
    if let Some(done) = document.done.filter(|done| (0.0..=1.0).contains(done)) {
        let filled = Style::new().fg(Color::Green);
        frame.render_widget(LineGauge::default().filled_style(filled).ratio(done), gauge);
    }
    let sides: [Rect; 2] = Layout::horizontal([Constraint::Fill(1); 2]).areas(text);
    let line = |row: &Row| {
        let words = plain(&row.words(now_unix_ms));
        Line::styled(format!("{:<LABEL$} {words}", plain(&row.label)), style(row.level))
    };
    for (side, rows) in sides.into_iter().zip(facts.chunks(facts.len().div_ceil(2).max(1))) {
        frame.render_widget(Paragraph::new(rows.iter().map(line).collect::<Vec<_>>()), side);
    }
}

fn style(level: Level) -> Style {
    match level {
        Level::Normal => Style::new(),
        Level::Good => Style::new().fg(Color::Green),
        Level::Warning => Style::new().fg(Color::Yellow),
        Level::Bad => Style::new().fg(Color::Red),
    }
}

fn draw_curves(frame: &mut Frame<'_>, area: Rect, curves: &[Curve]) {
    let places = Layout::horizontal(curves.iter().map(|_| Constraint::Fill(1))).split(area);
    for (place, curve) in places.iter().zip(curves) {
        draw_curve(frame, *place, curve);
    }
}

fn draw_curve(frame: &mut Frame<'_>, area: Rect, curve: &Curve) {
    let block = Block::bordered().title(curve.label.as_str());
    let (Some(first), Some(last)) = (curve.points.first(), curve.points.last()) else {
        return frame.render_widget(Paragraph::new("nothing yet").block(block), area);
    };
    let values = curve.points.iter().map(|it| it.1);
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(f64::NEG_INFINITY, f64::max);
    let label = |value: f64| curve.scale.value(value).text(0);
    // One label is enough for a flat curve.
    let labels = if low < high { vec![label(low), label(high)] } else { vec![label(high)] };
    let room = ((high - low) * 0.05).max(high.abs() * 1e-6).max(1e-9);
    let line = Dataset::default().marker(Marker::Braille).graph_type(GraphType::Line);
    let chart = Chart::new(vec![line.data(&curve.points).cyan()])
        .block(block)
        .x_axis(
            Axis::default()
                .bounds([first.0, last.0.max(first.0 + 1.0)])
                .labels([span(first.0), span(last.0)]),
        )
        .y_axis(Axis::default().bounds([low - room, high + room]).labels(labels));
    frame.render_widget(chart, area);
}

fn tables(document: &Document) -> Vec<&Table> {
    let tables = document.sections.iter().filter_map(|section| match &section.body {
        Body::Table(table) => Some(table),
        Body::Rows(_) | Body::Curves(..) | Body::Events(_) => None,
    });
    tables.collect()
}

fn longest<'a>(tables: &[&'a Table]) -> Option<&'a Table> {
    tables.iter().copied().max_by_key(|table| (table.rows.len(), table.columns.len()))
}

/// Draws tables beside each other, each with a width for what is in it.
fn draw_tables(
    frame: &mut Frame<'_>,
    area: Rect,
    tables: &[&Table],
    above: usize,
    now_unix_ms: u64,
) {
    let widths: Vec<Vec<u16>> = tables.iter().map(|it| widths(it, now_unix_ms)).collect();
    let constraints = widths.iter().map(|it| Constraint::Fill(it.iter().map(|it| it + 1).sum()));
    let places = Layout::horizontal(constraints).split(area);
    for ((table, widths), place) in tables.iter().zip(widths).zip(places.iter()) {
        let is_longest = longest(tables).is_some_and(|it| std::ptr::eq(it, *table));
        let above = if is_longest { above } else { 0 };
        draw_table(frame, *place, table, (widths, above), now_unix_ms);
    }
}

fn widths(table: &Table, now_unix_ms: u64) -> Vec<u16> {
    let column = |(at, head): (usize, &&str)| {
        let cells = table.rows.iter().filter_map(|row| row.get(at));
        let width = |cell: &Cell| match &cell.value {
            Value::Shares(_) => BAR,
            other => other.short(now_unix_ms).chars().count() as u16,
        };
        cells.map(width).chain([head.chars().count() as u16]).max().unwrap_or(0).min(COLUMN_MAX)
    };
    table.columns.iter().enumerate().map(column).collect()
}

fn draw_table(
    frame: &mut Frame<'_>,
    area: Rect,
    table: &Table,
    (widths, above): (Vec<u16>, usize),
    now_unix_ms: u64,
) {
    let cell = |cell: &Cell| match &cell.value {
        Value::Shares(parts) => Place::from(bar(parts)),
        other => Place::from(plain(&other.short(now_unix_ms))).style(style(cell.level)),
    };
    let rows = table.rows.iter().skip(above);
    let rows = rows.map(|row| Places::new(row.iter().map(cell)));
    let title = match above {
        0 => format!("{}: {}", table.summary.label, table.summary.text),
        above => format!("{}: {} ({above} above)", table.summary.label, table.summary.text),
    };
    let head = Places::new(table.columns.iter().copied()).bold();
    let grid = Grid::new(rows, widths.into_iter().map(Constraint::Length)).header(head);
    frame.render_widget(grid.block(Block::bordered().title(plain(&title))), area);
}

/// Draws parts of a whole as a bar.
fn bar(parts: &[(&'static str, f64)]) -> Line<'static> {
    let whole: f64 = parts.iter().map(|(_, amount)| amount).sum();
    let spans = parts.iter().zip(PARTS).filter(|_| 0.0 < whole).map(|((_, amount), color)| {
        let width = (amount / whole * f64::from(BAR)).round() as usize;
        Span::styled("█".repeat(width), Style::new().fg(color))
    });
    Line::from(spans.collect::<Vec<_>>())
}

fn draw_events(frame: &mut Frame<'_>, area: Rect, events: &[TimelineEvent], now_unix_ms: u64) {
    let latest = events.iter().rev();
    let lines: Vec<Line<'_>> = latest
        .take(usize::from(EVENTS_ROWS))
        .map(|it| {
            let ago = span(now_unix_ms.saturating_sub(it.unix_ms) as f64 / 1000.0);
            Line::from(format!("{ago:>7} ago  {}", plain(&it.what)))
        })
        .collect();
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("events")), area);
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use steadfast_common::status::{JobStatus, Point, TimelineKind};

    use super::*;
    use crate::status::sample;

    fn shown(view: &ScreenState, columns: u16, rows: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
        terminal.draw(|frame| draw(frame, view)).unwrap();
        terminal.backend().to_string()
    }

    fn status() -> JobStatus {
        let mut status = sample::training();
        status.points = (0..20)
            .map(|at| Point {
                unix_ms: at * 500,
                version: status.version,
                examples: at * 100,
                loss: Some(1.0 / (at + 1) as f64),
                metric: None,
                further_metrics: Default::default(),
            })
            .collect();
        let what = "slot 1 lost its \x1b[31mpserver".to_owned();
        let kind = TimelineKind::Failure;
        status.events.push(TimelineEvent { unix_ms: unix_ms() - 4500, what, kind });
        status
    }

    fn seen() -> ScreenState {
        let mut view = ScreenState::new("digits");
        view.note(Ok(status().document()));
        view
    }

    #[test]
    fn a_job_fits_on_one_screen() {
        let text = shown(&seen(), 120, 45);
        for wanted in [
            "digits: training",
            "synchronous",
            "pass       3 of 20",
            "step       180",
            "slot 1 has no pserver",
            "accuracy   0.9710",
            "examples/s",
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
        assert!(text.contains("no current status: no acting master") && text.contains("3 of 20"));
    }

    #[test]
    fn an_elastic_job_fits_on_one_screen() {
        let mut view = ScreenState::new("ddp");
        view.note(Ok(sample::elastic().document()));
        let text = shown(&view, 120, 40);
        for wanted in [
            "ddp: gathering",
            "round      3, 4 workers",
            "10.0.0.1:4001 waits for 10.0.0.2:4002",
            "running",
            "1 of 3",
            "blacklist: 1 host",
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
    fn the_selection_stops_at_the_last_trainer() {
        let mut view = seen();
        view.scroll(-5);
        assert_eq!(view.above, 0);
        view.scroll(100);
        assert_eq!(view.above, 1);
        assert!(shown(&view, 120, 45).contains("1 task"));
    }
}
