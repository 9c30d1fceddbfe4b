//! Time that does not jump and does not stop while the machine sleeps.

use std::time::Duration;

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
