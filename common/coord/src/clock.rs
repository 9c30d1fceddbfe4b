//! The clock of the cores.

use steadfast_common::ids::Millis;
use steadfast_host::time::boot_time;

/// Returns the time since the machine started, including sleep, in the unit of the cores.
pub fn now() -> Millis {
    Millis(u64::try_from(boot_time().as_millis()).unwrap_or(u64::MAX))
}
