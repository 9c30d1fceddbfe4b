//! Draws the processes of a job, and who waits for whom.

use maud::{Markup, html};
use steadfast_common::status::{Body, Cell, Document, JOB, Level, Table, Value};

use crate::status::page::{bar, class};

/// Maximum number of processes of one kind that are drawn.
const DRAWN_MAX: usize = 12;

const WIDTH: usize = 190;
const HEIGHT: usize = 46;
const GAP_X: usize = 70;
const GAP_Y: usize = 10;

/// A box of the picture.
struct Place {
    process: String,
    title: String,
    text: String,
    level: Level,
    column: usize,
    row: usize,
    /// How the process spends its time, if it is known.
    shares: Option<Vec<(&'static str, f64)>>,
}

/// Draws the master, and the processes of each table beside it. Returns `None` if there are none.
pub(super) fn picture(document: &Document, now_unix_ms: u64) -> Option<Markup> {
    let tables: Vec<&Table> = document
        .sections
        .iter()
        .filter_map(|section| match &section.body {
            Body::Table(table) if !table.processes.is_empty() => Some(table),
            Body::Rows(_) | Body::Table(_) | Body::Curves(..) | Body::Events(_) => None,
        })
        .collect();
    if tables.is_empty() {
        return None;
    }
    let mut places = vec![Place {
        process: "master".to_owned(),
        title: "master".to_owned(),
        text: document.state.clone(),
        level: document.level,
        column: 0,
        row: 0,
        shares: None,
    }];
    for (column, table) in tables.iter().enumerate() {
        let awaited = |process: &str| document.waits.iter().any(|it| it.on == process);
        let rows = table.processes.iter().zip(&table.rows).take(DRAWN_MAX).enumerate();
        places.extend(rows.map(|(row, (process, cells))| Place {
            level: if awaited(process) { Level::Bad } else { level(cells) },
            ..place(process, table.columns[0], cells, (column + 1, row), now_unix_ms)
        }));
    }
    let rows = 1 + places.iter().map(|it| it.row).max().unwrap_or(0);
    let width = (tables.len() + 1) * (WIDTH + GAP_X) - GAP_X;
    let more = tables
        .iter()
        .enumerate()
        .filter_map(|(column, table)| table.more(DRAWN_MAX).map(|more| (column + 1, more)));
    let height = rows * (HEIGHT + GAP_Y) + 14;
    let label = format!("The processes of the job {}, and who waits for whom", document.job);
    Some(html! {
        svg.picture viewBox={ "0 0 " (width) " " (height) } role="img" aria-label=(label) {
            @for it in places.iter().filter(|it| it.column != 0) { (line(&places[0], it, "link")) }
            @for wait in &document.waits {
                @if let (Some(who), Some(on)) = (find(&places, &wait.who), find(&places, &wait.on)) {
                    (line(who, on, "wait"))
                }
            }
            @for it in &places { (drawn(it)) }
            @for (column, more) in more {
                text.small x=(column * (WIDTH + GAP_X)) y=(height - 4) { (more) }
            }
        }
    })
}

fn place(
    process: &str,
    column: &str,
    cells: &[Cell],
    (x, y): (usize, usize),
    now_unix_ms: u64,
) -> Place {
    let short =
        |at: usize| cells.get(at).map_or_else(String::new, |it| it.value.short(now_unix_ms));
    let shares = cells.iter().find_map(|cell| match &cell.value {
        Value::Shares(parts) => Some(parts.clone()),
        _ => None,
    });
    Place {
        process: process.to_owned(),
        title: format!("{column} {}", short(0)),
        text: short(1),
        level: Level::Normal,
        column: x,
        row: y,
        shares,
    }
}

fn level(cells: &[Cell]) -> Level {
    match cells.iter().any(|cell| cell.level == Level::Bad) {
        true => Level::Bad,
        false => Level::Good,
    }
}

/// Returns the box of a process; the master stands for the job.
fn find<'a>(places: &'a [Place], process: &str) -> Option<&'a Place> {
    if process == JOB {
        return places.first();
    }
    places.iter().find(|it| it.process == process)
}

fn corner(place: &Place) -> (usize, usize) {
    (place.column * (WIDTH + GAP_X), place.row * (HEIGHT + GAP_Y) + 2)
}

/// Draws a line between two boxes; between boxes of one column, along their left sides.
fn line(from: &Place, to: &Place, class: &str) -> Markup {
    let ((x, y), (to_x, to_y)) = (corner(from), corner(to));
    let (middle, to_middle) = (y + HEIGHT / 2, to_y + HEIGHT / 2);
    let path = match from.column < to.column {
        true => format!(
            "M {} {middle} C {} {middle} {} {to_middle} {to_x} {to_middle}",
            x + WIDTH,
            x + WIDTH + GAP_X / 2,
            to_x.saturating_sub(GAP_X / 2)
        ),
        false => format!(
            "M {x} {middle} C {} {middle} {} {to_middle} {} {to_middle}",
            x.saturating_sub(GAP_X / 2),
            (to_x + WIDTH + GAP_X / 2).min(x.saturating_sub(GAP_X / 2)),
            if from.column == to.column { to_x } else { to_x + WIDTH }
        ),
    };
    html! { path class=(class) d=(path) {} }
}

fn drawn(place: &Place) -> Markup {
    let (x, y) = corner(place);
    html! {
        g class={ "process " (class(place.level)) } {
            title { (place.process) }
            rect x=(x) y=(y) width=(WIDTH) height=(HEIGHT) rx="6" {}
            text x=(x + 10) y=(y + 18) { (place.title) }
            text.small x=(x + 10) y=(y + 33) { (place.text) }
            @if let Some(shares) = &place.shares {
                (bar(shares, (x + 10, y + HEIGHT - 9), (WIDTH - 20, 5)))
            }
        }
    }
}
