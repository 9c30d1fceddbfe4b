//! Pauses between attempts.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use steadfast_host::chance;

/// Growing pauses with jitter, without end, so that a crowd does not come back all at once.
pub fn pauses() -> impl Iterator<Item = Duration> + Send {
    ExponentialBuilder::default()
        .with_jitter()
        .with_jitter_seed(chance::seed())
        .with_min_delay(Duration::from_millis(10))
        .with_max_delay(Duration::from_secs(1))
        .without_max_times()
        .build()
}
