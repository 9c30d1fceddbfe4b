//! CPU time and memory of processes, as reported by the kernel.

use std::fs;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::unistd::Pid;
use steadfast_tests::memory_of;

/// `/proc/<pid>/stat` reports time in hundredths of a second on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;

/// Returns the CPU seconds that this process has used.
pub fn own_cpu() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("a process may ask about itself");
    (usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1e6
}

/// Returns the CPU seconds that another process has used; zero if it has ended.
pub fn cpu_of(pid: i32) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in parentheses, may contain any character.
    let after_name = text.rsplit(')').next().unwrap_or_default();
    let mut fields = after_name.split_whitespace().skip(11).filter_map(|it| it.parse::<f64>().ok());
    (fields.next().unwrap_or(0.0) + fields.next().unwrap_or(0.0)) / TICKS_PER_SECOND
}

/// Returns the peak memory of a process; zero if it has ended.
pub fn peak_of(pid: i32) -> u64 {
    memory_of(Pid::from_raw(pid), "VmHWM").unwrap_or(0)
}

/// Returns the present memory of a process; zero if it has ended.
pub fn resident_of(pid: i32) -> u64 {
    memory_of(Pid::from_raw(pid), "VmRSS").unwrap_or(0)
}
