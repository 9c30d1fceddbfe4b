//! Delays between retries.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use steadfast_host::random;

/// Returns an endless exponential backoff. The jitter keeps many clients from retrying at the same
/// moment.
pub fn backoff() -> impl Iterator<Item = Duration> + Send {
    ExponentialBuilder::default()
        .with_jitter()
        .with_jitter_seed(random::seed())
        .with_min_delay(Duration::from_millis(10))
        .with_max_delay(Duration::from_secs(1))
        .without_max_times()
        .build()
}
