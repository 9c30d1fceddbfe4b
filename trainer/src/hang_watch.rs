//! Ends a process whose model does not return from a gradient.
//!
//! A trainer that hangs keeps its lease, so no other one would compute its lanes. One that ends is lost, and what it
//! computed is looked at as after any other loss.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use steadfast_host::task::TaskSet;
use steadfast_host::time::{Instant, sleep};

/// Divides each limit into so many looks, whose pauses have a least and a greatest length.
const LOOKS: u32 = 20;
const LOOK_MIN: Duration = Duration::from_millis(10);
const LOOK_MAX: Duration = Duration::from_secs(10);

/// Tells when the gradient that is computed was begun. The mutex guards only this field.
type Begun = Mutex<Option<Instant>>;

thread_local! {
    /// Tells when the gradient that this thread computes was begun.
    static PRESENT: RefCell<Option<Arc<Begun>>> = const { RefCell::new(None) };
}

/// Watches the gradients of one trainer, which computes one at a time, until it is dropped.
#[derive(Debug)]
pub(crate) struct HangWatch {
    begun: Arc<Begun>,
    _watching: TaskSet<()>,
}

impl HangWatch {
    /// Calls `hung` once when a gradient takes longer than `limit`.
    pub fn start(limit: Duration, hung: impl FnOnce() + Send + 'static) -> Self {
        let begun = Arc::<Begun>::default();
        let seen = begun.clone();
        let mut watching = TaskSet::default();
        watching.spawn(async move {
            while lock(&seen).is_none_or(|begun| begun.elapsed() <= limit) {
                sleep((limit / LOOKS).clamp(LOOK_MIN, LOOK_MAX)).await;
            }
            hung();
        });
        Self { begun, _watching: watching }
    }

    /// Watches a gradient that this thread computes.
    pub fn computes<T>(&self, work: impl FnOnce() -> T) -> T {
        let _watched = Watched::begin(self.begun.clone());
        work()
    }
}

/// Begins anew to count the time of the gradient that this thread computes, if there is one: until now a loop was busy
/// with other things.
pub(crate) fn restart() {
    PRESENT.with_borrow(|present| {
        if let Some(begun) = present {
            *lock(begun) = Some(Instant::now());
        }
    });
}

/// A gradient that a thread computes.
struct Watched;

impl Watched {
    fn begin(begun: Arc<Begun>) -> Self {
        *lock(&begun) = Some(Instant::now());
        PRESENT.set(Some(begun));
        Self
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(begun) = PRESENT.take() {
            *lock(&begun) = None;
        }
    }
}

fn lock(begun: &Begun) -> std::sync::MutexGuard<'_, Option<Instant>> {
    begun.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(300);

    /// F9: only a single gradient that takes too long counts, not many in a row.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn one_gradient_that_takes_too_long_is_noticed() {
        let (tx, mut noticed) = oneshot::channel();
        let watch = HangWatch::start(LIMIT, || {
            let _ = tx.send(());
        });
        let compute = |time| {
            let work = || watch.computes(|| std::thread::sleep(time));
            steadfast_host::task::in_place(work);
        };
        (0..20).for_each(|_| compute(LIMIT / 10));
        assert!(noticed.try_recv().is_err());
        tokio::time::sleep(2 * LIMIT).await;
        assert!(noticed.try_recv().is_err());
        compute(2 * LIMIT);
        timeout(LIMIT, noticed).await.expect("in time").expect("once");
    }

    /// F9: the time in which a loop does something else is not that of a gradient.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn time_before_a_loop_takes_the_work_does_not_count() {
        let (tx, mut noticed) = oneshot::channel();
        let watch = HangWatch::start(LIMIT, || {
            let _ = tx.send(());
        });
        let (requests, queue) = crate::own_loop::Requests::channel();
        let answers = std::thread::spawn(move || {
            for _ in 0..3 {
                std::thread::sleep(LIMIT * 6 / 10);
                let reply: crate::own_loop::Reply<()> = queue.recv().expect("it asks");
                std::thread::sleep(LIMIT * 6 / 10);
                reply.send(Ok(()));
            }
        });
        steadfast_host::task::in_place(|| {
            (0..3).for_each(|_| watch.computes(|| requests.call(|reply| reply)).expect("answered"));
        });
        answers.join().expect("it does not panic");
        assert!(noticed.try_recv().is_err());
    }
}
