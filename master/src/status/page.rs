//! The web page of a master: renders the document of its status.

use maud::{Markup, PreEscaped, html};
use steadfast_common::status::format::span;
use steadfast_common::status::{
    Body, Cell, Curve, Document, Level, Mark, MarkKind, Row, Section as Part, Table, TimelineEvent,
    Value, chains,
};
use steadfast_process::Section;

use crate::status::curve::curve;
use crate::status::picture::picture;

/// Maximum number of rows of a table.
const ROWS_MAX: usize = 100;

/// Maximum number of events on the page; the status lists more.
const EVENTS_SHOWN: usize = 40;

/// Maximum number of events that are marked in curves, and listed beside them: the latest.
const MARKS_SHOWN: usize = 12;

/// Tables with more columns take the whole width of the page.
const COLUMNS_NARROW: usize = 4;

/// Renders the sections of a page at the wall-clock time `now_unix_ms`.
pub(crate) fn sections(document: &Document, now_unix_ms: u64) -> Vec<Section> {
    let mut sections = Vec::new();
    let drawn = picture(document, now_unix_ms);
    sections.extend(drawn.map(|body| Section { id: "picture", title: "Processes", body }));
    for part in &document.sections {
        let body = match part.id {
            // The page of a process begins with its job.
            "job" => job(document, part, now_unix_ms),
            _ => body(part, now_unix_ms),
        };
        sections.push(Section { id: part.id, title: part.title, body });
    }
    sections
}

fn job(document: &Document, part: &Part, now_unix_ms: u64) -> Markup {
    html! {
        p.state {
            strong class=(class(document.level)) { (document.state) }
            @if !document.kind.is_empty() { ", " (document.kind) }
        }
        @if let Some(done) = document.done {
            progress max="1" value=(done) aria-label="Share of the job that is done" {}
        }
        @if !document.waits.is_empty() {
            ul.waits { @for it in chains(&document.waits) { li.bad { (it.what) } } }
        }
        (body(part, now_unix_ms))
    }
}

fn body(part: &Part, now_unix_ms: u64) -> Markup {
    match &part.body {
        Body::Rows(rows) => html! {
            table { tbody { @for it in rows { (row(it, now_unix_ms)) } } }
        },
        Body::Table(it) => table(it, now_unix_ms),
        Body::Curves(curves, marks) => drawn(curves, marks),
        Body::Events(it) => events(it, now_unix_ms),
    }
}

fn row(row: &Row, now_unix_ms: u64) -> Markup {
    html! {
        tr {
            th scope="row" { (row.label) }
            td class=(class(row.level)) {
                (row.words(now_unix_ms))
                @if let Value::Counts(parts) = &row.value {
                    @let amounts: Vec<_> = parts.iter().map(|(label, it)| (*label, *it as f64)).collect();
                    (bar_of(&amounts))
                }
            }
        }
    }
}

fn table(table: &Table, now_unix_ms: u64) -> Markup {
    let is_wide = COLUMNS_NARROW < table.columns.len();
    html! {
        div.wide[is_wide] {
            p { (table.summary.text) }
            @if !table.rows.is_empty() {
                table {
                    thead { tr { @for it in &table.columns { th scope="col" { (it) } } } }
                    tbody {
                        @for cells in table.rows.iter().take(ROWS_MAX) {
                            tr { @for it in cells { (cell(it, now_unix_ms)) } }
                        }
                    }
                }
            }
            @if let Some(more) = table.more(ROWS_MAX) { p { (more) } }
            @if let Some(labels) = labels(table) { (legend(&labels)) }
        }
    }
}

fn cell(cell: &Cell, now_unix_ms: u64) -> Markup {
    let text = cell.value.text(now_unix_ms);
    match &cell.value {
        Value::Shares(parts) => html! { td.bar title=(text) { (bar_of(parts)) } },
        Value::Id(_) => {
            html! { td { code title=(text) { (cell.value.short(now_unix_ms)) } } }
        }
        Value::None | Value::Text(_) | Value::Counts(_) => {
            html! { td class=(class(cell.level)) { (text) } }
        }
        Value::Count(_)
        | Value::Of(..)
        | Value::Figure(_)
        | Value::Rate(_)
        | Value::Seconds(_)
        | Value::Since(_)
        | Value::Until(_)
        | Value::Bytes(_)
        | Value::BytesPerSecond(_)
        | Value::Share(_) => html! { td.number class=(class(cell.level)) { (text) } },
    }
}

/// Returns the names of the parts that bars of a table have.
fn labels(table: &Table) -> Option<Vec<&'static str>> {
    table.rows.first()?.iter().find_map(|cell| match &cell.value {
        Value::Shares(parts) => Some(parts.iter().map(|(label, _)| *label).collect()),
        _ => None,
    })
}

fn legend(labels: &[&str]) -> Markup {
    html! {
        p.legend {
            @for (index, label) in labels.iter().enumerate() {
                svg.key viewBox="0 0 10 10" aria-hidden="true" {
                    rect class={ "part" (index) } width="10" height="10" {}
                }
                (label) " "
            }
        }
    }
}

/// Draws parts of a whole as one bar.
fn bar_of(parts: &[(&'static str, f64)]) -> Markup {
    html! {
        svg.bar viewBox="0 0 200 12" preserveAspectRatio="none" aria-hidden="true" {
            (bar(parts, (0, 0), (200, 12)))
        }
    }
}

/// Draws parts of a whole as one bar, within a drawing.
pub(super) fn bar(
    parts: &[(&'static str, f64)],
    (x, y): (usize, usize),
    (width, height): (usize, usize),
) -> Markup {
    let whole: f64 = parts.iter().map(|(_, amount)| amount).sum();
    let mut before = 0.0;
    let mut rects = Vec::new();
    for (index, (_, amount)) in parts.iter().enumerate().filter(|_| 0.0 < whole) {
        let share = amount / whole * width as f64;
        rects.push((index, x as f64 + before, share));
        before += share;
    }
    html! {
        rect.part x=(x) y=(y) width=(width) height=(height) {}
        @for (index, left, share) in rects {
            // Whole pixels: a bar does not change on every refresh.
            rect class={ "part" (index) } x=(left.round()) y=(y) width=(share.round()) height=(height) {}
        }
    }
}

fn drawn(curves: &[Curve], marks: &[Mark]) -> Markup {
    let shown = &marks[marks.len().saturating_sub(MARKS_SHOWN)..];
    html! {
        div.wide {
            div.curves { @for it in curves { (figure(it, shown)) } }
            @if !shown.is_empty() {
                ul.marks {
                    @for it in shown.iter().rev() {
                        li {
                            span class=(mark(it.kind)) { (span(it.seconds)) }
                            " " (it.what)
                        }
                    }
                }
            }
        }
    }
}

fn figure(it: &Curve, marks: &[Mark]) -> Markup {
    let last = it.points.last().map(|point| it.scale.value(point.1).text(0));
    let last = last.as_deref().unwrap_or("no data yet");
    html! {
        figure role="img" aria-label={ (it.label) ": " (last) } {
            figcaption { (it.label) ": " (last) }
            @if 1 < it.points.len() { (PreEscaped(curve(it, marks))) }
        }
    }
}

fn mark(kind: MarkKind) -> &'static str {
    match kind {
        MarkKind::Checkpoint => "checkpoint",
        MarkKind::Generation => "generation",
        MarkKind::Failure => "failure",
    }
}

fn events(events: &[TimelineEvent], now_unix_ms: u64) -> Markup {
    html! {
        table {
            thead { tr { th scope="col" { "ago" } th scope="col" { "what" } } }
            tbody { @for it in events.iter().rev().take(EVENTS_SHOWN) { tr {
                // Older events are rounded to minutes: most rows do not change on every refresh.
                td.number { (ago(now_unix_ms.saturating_sub(it.unix_ms))) }
                td { (it.what) }
            } } }
        }
    }
}

fn ago(ms: u64) -> String {
    match ms / 1000 {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

/// Returns the class of a level, for the style sheet.
pub(super) fn class(level: Level) -> &'static str {
    match level {
        Level::Normal => "",
        Level::Good => "good",
        Level::Warning => "warn",
        Level::Bad => "bad",
    }
}
