//! Clocks and timers.

use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::future::BoxFuture;
use nix::time::{ClockId, clock_gettime};

use crate::simulated::present;

/// Returns the time since the machine started, sleep included (`CLOCK_BOOTTIME`). A lease expires even while its
/// holder's machine sleeps, so the holder's own deadline must pass as well.
pub fn boot_time() -> Duration {
    if let Some(host) = present() {
        return host.boot_time();
    }
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("Linux has a boot-time clock");
    Duration::from(time)
}

/// Returns the milliseconds since 1970 by the machine's clock. It is for display only; no decision depends on it.
pub fn unix_ms() -> u64 {
    let since = match present() {
        Some(host) => host.unix_time(),
        None => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
    };
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the machine's wall-clock time, to compare with timestamps of an object store.
pub fn system_time() -> SystemTime {
    match present() {
        Some(host) => UNIX_EPOCH + host.unix_time(),
        None => SystemTime::now(),
    }
}

/// Time at which this process first read its clock.
static START: LazyLock<tokio::time::Instant> = LazyLock::new(tokio::time::Instant::now);

/// A time of the monotonic clock that [`sleep`] uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

impl Instant {
    pub fn now() -> Self {
        match present() {
            Some(host) => Self(host.boot_time()),
            None => Self(START.elapsed()),
        }
    }

    /// Returns the time since this instant; zero if it is in the future.
    pub fn elapsed(self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }

    /// Returns the time from `earlier` to this instant; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns the time until this instant; zero if it has passed.
    pub fn remaining(self) -> Duration {
        self.0.saturating_sub(Self::now().0)
    }
}

impl std::ops::Add<Duration> for Instant {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time))
    }
}

/// A timer. Returned by [`sleep`].
pub struct Sleep(Waiting);

enum Waiting {
    Tokio(Pin<Box<tokio::time::Sleep>>),
    Simulated(BoxFuture<'static, ()>),
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        match &mut self.0 {
            Waiting::Tokio(sleep) => sleep.as_mut().poll(context),
            Waiting::Simulated(sleep) => sleep.as_mut().poll(context),
        }
    }
}

/// Returns a timer that completes after `time`, counted from this call.
pub fn sleep(time: Duration) -> Sleep {
    Sleep(match present() {
        None => Waiting::Tokio(Box::pin(tokio::time::sleep(time))),
        Some(host) => Waiting::Simulated(host.sleep_until(host.boot_time().saturating_add(time))),
    })
}

/// Returns a timer that completes at `at`, or at once if that has passed.
pub fn sleep_until(at: Instant) -> Sleep {
    sleep(at.remaining())
}

/// The timeout passed before the work completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("timed out")]
pub struct TimedOut;

/// Runs `work` with a timeout.
///
/// # Errors
/// If `time` passes first; `work` is dropped.
pub async fn timeout<T>(time: Duration, work: impl Future<Output = T>) -> Result<T, TimedOut> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = sleep(time) => Err(TimedOut),
    }
}

/// Returns a timer that ticks at once and then at least `period` apart. A late tick delays the ticks
/// after it.
pub fn interval(period: Duration) -> Interval {
    Interval { period, next: sleep(Duration::ZERO) }
}

/// A periodic timer. Returned by [`interval`].
pub struct Interval {
    period: Duration,
    /// Kept across calls of [`Interval::tick`], so that a `select!` loop creates one timer a tick.
    next: Sleep,
}

impl Interval {
    pub async fn tick(&mut self) {
        (&mut self.next).await;
        self.reset();
    }

    /// Schedules the next tick a whole period from now.
    pub fn reset(&mut self) {
        self.next = sleep(self.period);
    }
}
