//! Tests of the host interface on a real machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use steadfast_host::task::{TaskSet, spawn};
use steadfast_host::time::{Instant, TimedOut, interval, timeout};

const SOON: Duration = Duration::from_millis(20);
const NEVER: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn work_that_takes_too_long_is_dropped() {
    struct Flag(Arc<AtomicBool>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let dropped = Arc::new(AtomicBool::new(false));
    let flag = Flag(dropped.clone());
    let work = async move {
        std::future::pending::<()>().await;
        drop(flag);
    };
    assert_eq!(timeout(SOON, work).await, Err(TimedOut));
    assert!(dropped.load(Ordering::SeqCst));
    assert_eq!(timeout(NEVER, async { 1 }).await, Ok(1));
}

#[tokio::test]
async fn a_tick_that_comes_late_delays_those_after_it() {
    let mut ticks = interval(SOON);
    ticks.tick().await;
    let due = Instant::now() + 3 * SOON;
    // Block the thread for several periods.
    while Instant::now() < due {
        std::hint::spin_loop();
    }
    ticks.tick().await;
    let late = Instant::now();
    ticks.tick().await;
    assert!(SOON <= late.elapsed(), "{:?}", late.elapsed());
}

#[tokio::test]
async fn tasks_of_a_set_end_with_it_and_others_go_on() {
    let (tx, mut rx) = tokio::sync::mpsc::unbounded_channel();
    let say = |what: &'static str| {
        let tx = tx.clone();
        async move {
            let _ = tx.send(what);
        }
    };
    let mut set = TaskSet::default();
    set.spawn(say("of the set"));
    drop(set);
    drop(spawn(say("by itself")));
    drop(tx);
    assert_eq!(rx.recv().await, Some("by itself"));
    assert_eq!(rx.recv().await, None);
}

#[tokio::test]
async fn a_task_that_panics_is_broken_and_harms_nobody() {
    let mut set = TaskSet::default();
    set.spawn(async { panic!("on purpose") });
    let broken = set.join_next().await.unwrap().unwrap_err();
    assert!(broken.to_string().contains("panic"), "{broken}");
    assert!(set.is_empty());
}
