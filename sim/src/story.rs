//! Who says what, when: the log of all processes in one, in the order in which it happened.

use std::cell::RefCell;
use std::fmt;
use std::time::Duration;

use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;

thread_local! {
    /// Whose turn it is, and when.
    static PRESENT: RefCell<(Duration, String)> = const { RefCell::new((Duration::ZERO, String::new())) };
}

/// Says whose turn it is.
pub fn turn(now: Duration, who: &str) {
    if tracing::dispatcher::has_been_set() {
        PRESENT.with_borrow_mut(|(at, name)| {
            *at = now;
            name.clear();
            name.push_str(who);
        });
    }
}

struct Present;

impl FormatTime for Present {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        PRESENT.with_borrow(|(now, who)| write!(writer, "{:>11.6} {who:<13}", now.as_secs_f64()))
    }
}

/// Tells everything on stdout from now on. Only for a process that runs one seed.
pub fn tell(filter: &str) {
    tracing_subscriber::fmt()
        .with_timer(Present)
        .with_ansi(false)
        .with_writer(std::io::stdout)
        .with_env_filter(tracing_subscriber::EnvFilter::new(filter))
        .init();
}
