//! Tests of the host interface on a real machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use steadfast_host::net::{Port, Probe, probe};
use steadfast_host::task::{TaskSet, spawn};
use steadfast_host::time::{Instant, TooLate, interval, timeout};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

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
    assert_eq!(timeout(SOON, work).await, Err(TooLate));
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

/// A probe distinguishes a closed port from a silent peer, and detects when the connection closes.
#[tokio::test]
async fn a_knock_is_answered_while_somebody_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let Probe::Open(closed) = probe(&address).await else { panic!("refused") };
    let (stream, _) = listener.accept().await.unwrap();
    let mut closed = std::pin::pin!(closed);
    assert_eq!(timeout(SOON, &mut closed).await, Err(TooLate));
    drop(stream);
    timeout(Duration::from_secs(10), closed).await.expect("the peer has closed");
    drop(listener);
    assert!(matches!(probe(&address).await, Probe::Refused));
}

/// A served port closes when it is stopped.
#[tokio::test]
async fn a_port_is_served_until_it_is_told_to_stop() {
    let port = Port::bind("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = port.local_addr().unwrap().to_string();
    let stop = CancellationToken::new();
    let serving = port.serve(Routes::default(), |_| &[], stop.clone());
    stop.cancel();
    serving.await.unwrap().unwrap();
    assert!(matches!(probe(&address).await, Probe::Refused));
}
