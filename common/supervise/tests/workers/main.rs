//! Tests with real worker processes. The test program is also the guard and the supervising process of the tests.

#![allow(clippy::unwrap_used)]

mod ending;
mod left_behind;
mod output;
mod starting;
mod support;

use steadfast_supervise::run_guard_if_requested;

/// Not a test: the guard process of the tests.
#[test]
fn guard_process() {
    run_guard_if_requested();
}

/// Not a test: the supervising process of those tests that kill it or read its output.
#[test]
fn supervisor_process() {
    support::scenario::run_if_requested();
}
