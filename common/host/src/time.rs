//! Clocks, and waiting by them.

use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::future::BoxFuture;
use nix::time::{ClockId, clock_gettime};

use crate::simulated::present;

/// Time since the machine started, sleep included (`CLOCK_BOOTTIME`). A lease runs out while its
/// holder sleeps, so the holder's own deadline must as well.
pub fn boot_time() -> Duration {
    if let Some(host) = present() {
        return host.boot_time();
    }
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("Linux has a boot-time clock");
    Duration::from(time)
}

/// Milliseconds since 1970 by the machine's clock: for people's eyes; nothing is decided by it.
pub fn unix_ms() -> u64 {
    let since = match present() {
        Some(host) => host.unix_time(),
        None => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
    };
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The same as a calendar's moment, to be compared with those of an object store.
pub fn system_time() -> SystemTime {
    match present() {
        Some(host) => UNIX_EPOCH + host.unix_time(),
        None => SystemTime::now(),
    }
}

/// When this process first looked at its clock.
static START: LazyLock<tokio::time::Instant> = LazyLock::new(tokio::time::Instant::now);

/// A moment on the monotonic clock that sleeps are measured by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

impl Instant {
    /// This moment.
    pub fn now() -> Self {
        match present() {
            Some(host) => Self(host.boot_time()),
            None => Self(START.elapsed()),
        }
    }

    /// Time since then.
    pub fn elapsed(self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }

    /// Time until then.
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

/// Waits for a time. Returned by [`sleep`].
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

/// Waits for `time`.
pub fn sleep(time: Duration) -> Sleep {
    Sleep(match present() {
        None => Waiting::Tokio(Box::pin(tokio::time::sleep(time))),
        Some(host) => Waiting::Simulated(host.sleep_until(host.boot_time().saturating_add(time))),
    })
}

/// Waits until a moment.
pub fn sleep_until(at: Instant) -> Sleep {
    sleep(at.remaining())
}

/// The time was over before the work was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it took too long")]
pub struct TooLate;

/// Does `work`, at most for `time`.
///
/// # Errors
/// If the time is over first; `work` is dropped.
pub async fn timeout<T>(time: Duration, work: impl Future<Output = T>) -> Result<T, TooLate> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = sleep(time) => Err(TooLate),
    }
}

/// Ticks at least `period` apart, the first one at once. A tick that comes late delays those after
/// it.
pub fn interval(period: Duration) -> Interval {
    Interval { period, next: sleep(Duration::ZERO) }
}

/// Returned by [`interval`].
pub struct Interval {
    period: Duration,
    /// Kept from wait to wait, so that whoever waits for many things pays for one timer a tick.
    next: Sleep,
}

impl Interval {
    /// Waits for the next tick.
    pub async fn tick(&mut self) {
        (&mut self.next).await;
        self.reset();
    }

    /// The next tick comes a whole period from now.
    pub fn reset(&mut self) {
        self.next = sleep(self.period);
    }
}
