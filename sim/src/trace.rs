//! The trace: the logs of all processes merged in the order of the events.

use std::cell::RefCell;
use std::fmt;
use std::time::Duration;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::prelude::*;

thread_local! {
    /// Time and process of the current turn.
    static PRESENT: RefCell<(Duration, String)> = const { RefCell::new((Duration::ZERO, String::new())) };
}

/// Sets the process of the current turn.
pub fn turn(now: Duration, who: &str) {
    PRESENT.with_borrow_mut(|(at, name)| {
        *at = now;
        name.clear();
        name.push_str(who);
    });
}

/// Returns whether the process of the current turn has this name prefix.
pub fn is_turn_of(name: &str) -> bool {
    PRESENT.with_borrow(|(_, who)| who.starts_with(name))
}

struct Present;

impl FormatTime for Present {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        PRESENT.with_borrow(|(now, who)| write!(writer, "{:>11.6} {who:<13}", now.as_secs_f64()))
    }
}

/// Prints the trace on stdout from now on. Only for a process that runs one seed.
pub fn print_to_stdout(filter: &Targets) {
    let lines = tracing_subscriber::fmt::layer()
        .with_timer(Present)
        .with_ansi(false)
        .with_writer(std::io::stdout)
        .with_filter(filter.clone());
    tracing_subscriber::registry().with(lines).init();
}
