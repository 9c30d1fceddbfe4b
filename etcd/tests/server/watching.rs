//! The guarantees of a watch.

use crate::support::embedded::{Embedded, config};
use etcd_client::{CompactionOptions, EventType, WatchOptions, WatchResponse, WatchStream};
use std::time::Duration;
use tokio::time::timeout;

async fn next(watch: &mut WatchStream) -> WatchResponse {
    let message = timeout(Duration::from_secs(10), watch.message()).await;
    message.expect("a response in time").unwrap().expect("an open stream")
}

/// A client that read at revision r and watches from r+1 sees each later change once and in order, while
/// others write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_from_the_revision_after_a_read_misses_nothing() {
    const PUTS: i64 = 300;
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let address = server.address;
    let writer = tokio::spawn(async move {
        let mut client = crate::support::client(address).await;
        for n in 0..PUTS {
            client.put("k", n.to_string(), None).await.unwrap();
        }
    });
    let mut client = crate::support::client(address).await;
    for _ in 0..5 {
        let read = client.get("k", None).await.unwrap();
        let seen = read.kvs().first().map_or(0, |kv| kv.version());
        let from = read.header().unwrap().revision() + 1;
        let options = WatchOptions::new().with_start_revision(from);
        let mut watch = client.watch("k", Some(options)).await.unwrap();
        let mut versions = Vec::new();
        while seen + i64::try_from(versions.len()).unwrap() < PUTS {
            let response = next(&mut watch).await;
            versions.extend(response.events().iter().map(|event| event.kv().unwrap().version()));
        }
        assert_eq!(versions, (seen + 1..=PUTS).collect::<Vec<_>>());
    }
    writer.await.unwrap();
}

/// A watcher that requests compacted revisions is cancelled with the compacted revision.
#[tokio::test]
async fn a_watch_from_before_the_compaction_is_cancelled_with_its_revision() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    for n in 0..5 {
        client.put("k", n.to_string(), None).await.unwrap();
    }
    client.compact(4, Some(CompactionOptions::new())).await.unwrap();
    let options = WatchOptions::new().with_start_revision(3);
    let mut watch = client.watch("k", Some(options)).await.unwrap();
    assert!(next(&mut watch).await.created());
    let cancelled = next(&mut watch).await;
    assert!(cancelled.canceled());
    assert_eq!(cancelled.compact_revision(), 4);
}

/// A compaction right after a write does not cancel watchers that have not received the write yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_keeps_up_survives_eager_compaction() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    let mut watch = client.watch("k", None).await.unwrap();
    assert!(next(&mut watch).await.created());
    for n in 0..200 {
        let put = client.put("k", n.to_string(), None).await.unwrap();
        client.compact(put.header().unwrap().revision(), None).await.unwrap();
    }
    let mut received = 0;
    while received < 200 {
        let response = next(&mut watch).await;
        assert!(!response.canceled(), "after {received}");
        received += response.events().len();
    }
}

/// A client that does not read uses no memory: it is cancelled once its position is compacted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_does_not_read_is_cancelled_instead_of_buffered() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.retention.revisions = 20;
    let server = Embedded::start_with(config).await;
    let mut client = crate::support::client(server.address).await;
    let mut watch = client.watch("k", None).await.unwrap();
    // Far more than the connection buffers, and than survives a compaction.
    let large = vec![b'x'; 1 << 20];
    for _ in 0..60 {
        client.put("k", large.clone(), None).await.unwrap();
    }
    let mut received = 0;
    loop {
        let response = next(&mut watch).await;
        if response.canceled() {
            assert!(response.compact_revision() > 2);
            break;
        }
        received += response.events().len();
    }
    assert!(received < 60, "{received} of 60 events received");
}

/// Watches of one stream receive only their own events, and are cancelled one by one.
#[tokio::test]
async fn watches_share_a_stream() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    let mut watch = client.watch("a", None).await.unwrap();
    let first = next(&mut watch).await.watch_id();
    watch.watch("b", None).await.unwrap();
    let second = next(&mut watch).await.watch_id();
    assert_ne!(first, second);
    client.put("b", "1", None).await.unwrap();
    assert_eq!(next(&mut watch).await.watch_id(), second);
    watch.cancel(second).await.unwrap();
    assert!(next(&mut watch).await.canceled());
    client.put("b", "2", None).await.unwrap();
    client.put("a", "3", None).await.unwrap();
    let response = next(&mut watch).await;
    assert_eq!((response.watch_id(), response.events().len()), (first, 1));
}

/// A progress request is answered after all earlier events have been sent.
#[tokio::test]
async fn progress_is_reported_on_request_and_periodically() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.watch_progress_interval = Duration::from_millis(50);
    let server = Embedded::start_with(config).await;
    let mut client = crate::support::client(server.address).await;
    let options = WatchOptions::new().with_progress_notify();
    let mut watch = client.watch("k", Some(options)).await.unwrap();
    assert!(next(&mut watch).await.created());
    let put = client.put("other", "1", None).await.unwrap().header().unwrap().revision();
    let idle = next(&mut watch).await;
    assert!(idle.events().is_empty() && idle.watch_id() == 0);
    client.put("k", "1", None).await.unwrap();
    watch.request_progress().await.unwrap();
    let mut received = 0;
    loop {
        let response = next(&mut watch).await;
        received += response.events().len();
        if response.watch_id() == -1 {
            assert_eq!(response.header().unwrap().revision(), put + 1);
            break;
        }
    }
    assert_eq!(received, 1, "the event comes before the progress");
}

/// A deletion is an event of its own type, without a value.
#[tokio::test]
async fn a_deletion_is_reported_with_its_revision() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    client.put("k", "1", None).await.unwrap();
    let options = WatchOptions::new().with_prev_key();
    let mut watch = client.watch("k", Some(options)).await.unwrap();
    assert!(next(&mut watch).await.created());
    let deleted = client.delete("k", None).await.unwrap().header().unwrap().revision();
    let response = next(&mut watch).await;
    let event = &response.events()[0];
    assert_eq!(event.event_type(), EventType::Delete);
    assert_eq!(event.kv().unwrap().mod_revision(), deleted);
    assert_eq!(event.prev_kv().unwrap().value_str().unwrap(), "1");
}
