//! Renders a document as text of two columns, and its tables below their labels.

use std::fmt::Write;

use super::document::{Body, Document, Table};

/// Maximum number of rows of a table that are shown.
const ROWS_MAX: usize = 20;

/// Width of the labels.
const LABEL: usize = 11;

/// Renders a document at the wall-clock time `now_unix_ms`. Curves and events are left out.
pub fn text(document: &Document, now_unix_ms: u64) -> String {
    let Document { job, state, kind, .. } = document;
    let kind = if kind.is_empty() { String::new() } else { format!(" ({kind})") };
    let mut text = format!("job {job}: {state}{kind}\n");
    let mut reasons: Vec<&str> = Vec::new();
    for wait in &document.waits {
        // A wait for several processes is one line.
        if !reasons.contains(&wait.why.as_str()) {
            reasons.push(&wait.why);
        }
    }
    reasons.into_iter().for_each(|reason| line(&mut text, "waiting", reason));
    for section in &document.sections {
        match &section.body {
            Body::Rows(rows) => {
                rows.iter().for_each(|row| line(&mut text, &row.label, &row.words(now_unix_ms)));
            }
            Body::Table(table) => add_table(&mut text, table, now_unix_ms),
            Body::Curves(..) | Body::Events(_) => {}
        }
    }
    text
}

fn line(text: &mut String, label: &str, value: &str) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{}", format!("  {label:<LABEL$} {value}").trim_end());
}

fn add_table(text: &mut String, table: &Table, now_unix_ms: u64) {
    line(text, table.summary.label, &table.summary.text);
    let head: Vec<String> = table.columns.iter().map(|&column| column.to_owned()).collect();
    let rows = table.rows.iter().take(ROWS_MAX);
    let rows = rows.map(|row| row.iter().map(|cell| cell.value.text(now_unix_ms)).collect());
    let lines: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    if 1 < lines.len() {
        aligned(&lines).iter().for_each(|it| line(text, "", it));
    }
    table.more(ROWS_MAX).iter().for_each(|more| line(text, "", more));
}

/// Pads the cells of lines, so that columns begin at the same place.
fn aligned(lines: &[Vec<String>]) -> Vec<String> {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let pad = |line: &Vec<String>| {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ")
    };
    lines.iter().map(pad).collect()
}
