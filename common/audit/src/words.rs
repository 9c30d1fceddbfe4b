//! Helpers for text output, in which passes are numbered from 1.

use std::fmt::Display;

use steadfast_common::ids::Pass;

/// Formats a number with its noun: `1 record`, `2 records`.
pub(crate) fn plural(count: u64, noun: &str) -> String {
    match count {
        1 => format!("1 {noun}"),
        _ => format!("{count} {noun}s"),
    }
}

/// Formats a pass as `pass N`, counted from 1.
pub(crate) fn pass(pass: Pass) -> String {
    format!("pass {}", u64::from(pass.0) + 1)
}

/// Formats the first eight items of a list, and the number of the others.
pub(crate) fn some<T: Display>(items: &[T]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = items.iter().take(SHOWN).map(ToString::to_string).collect();
    match items.len().checked_sub(SHOWN) {
        None | Some(0) => shown.join(", "),
        Some(more) => format!("{} and {more} more", shown.join(", ")),
    }
}
