//! Time that does not jump and does not stop while the machine sleeps.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};
use steadfast_common::ids::Millis;

/// Time since the machine started, sleep included (`CLOCK_BOOTTIME`). A lease runs out while its
/// holder sleeps, so the holder's own deadline must as well.
pub fn boot_time() -> Duration {
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("Linux has a boot-time clock");
    Duration::from(time)
}

/// [`boot_time`] in the unit that cores are given.
pub fn now() -> Millis {
    Millis(u64::try_from(boot_time().as_millis()).unwrap_or(u64::MAX))
}

/// Milliseconds since 1970 by the machine's clock: for people's eyes; nothing is decided by it.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
