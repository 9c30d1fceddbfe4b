//! Acknowledged writes survive the end of the server, in whatever way it ends.

use crate::support::embedded::{Embedded, config};
use etcd_client::{GetOptions, WatchOptions};
use std::fs;
use steadfast_etcd::{Error, Retention, Server};

/// An acknowledged write survives a server that is aborted.
#[tokio::test]
async fn acknowledged_writes_survive_an_abrupt_stop() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    let lease = client.lease_grant(30, None).await.unwrap().id();
    let mut revision = 0;
    for n in 0..50 {
        let put = client.put(format!("k/{n}"), format!("v{n}"), None).await.unwrap();
        revision = put.header().unwrap().revision();
    }
    server.tear_down().await;

    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    let all = client.get("k/", Some(GetOptions::new().with_prefix())).await.unwrap();
    assert_eq!(all.header().unwrap().revision(), revision);
    assert_eq!(all.count(), 50);
    assert_eq!(all.kvs()[7].value_str().unwrap(), "v15", "in order of keys");
    let status = client.lease_time_to_live(lease, None).await.unwrap();
    assert!(status.ttl() >= 28, "a lease has its full TTL again: {status:?}");
}

/// History is durable as well: a watcher resumes at its revision.
#[tokio::test]
async fn a_watch_resumes_by_revision_across_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    client.put("k", "1", None).await.unwrap();
    let second = client.put("k", "2", None).await.unwrap().header().unwrap().revision();
    client.delete("k", None).await.unwrap();
    server.stop().await;

    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    let options = WatchOptions::new().with_start_revision(second).with_prev_key();
    let mut watch = client.watch("k", Some(options)).await.unwrap();
    assert!(watch.message().await.unwrap().unwrap().created());
    let response = watch.message().await.unwrap().unwrap();
    let previous = response.events().iter().map(|e| e.prev_kv().unwrap().value_str().unwrap());
    assert_eq!(previous.collect::<Vec<_>>(), ["1", "2"]);
}

/// Many concurrent writers, frequent snapshots and compactions: all current keys survive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_writers_snapshots_and_compactions_lose_nothing() {
    const WRITERS: usize = 16;
    const PUTS: usize = 100;
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    config.log_bytes_max = 8 << 10;
    config.retention = Retention { revisions: 200, ..Retention::default() };
    let server = Embedded::start_with(config).await;
    let writers = (0..WRITERS).map(|writer| {
        let address = server.address;
        tokio::spawn(async move {
            let mut client = crate::support::client(address).await;
            for n in 0..PUTS {
                client.put(format!("{writer}/{n}"), "x".repeat(100), None).await.unwrap();
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
    server.tear_down().await;
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "lock, snapshot, log: {names:?}");
    assert!(names.iter().any(|name| name.to_str().unwrap().starts_with("snapshot-")));

    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    let options = GetOptions::new().with_all_keys().with_count_only();
    let all = client.get("", Some(options)).await.unwrap();
    assert_eq!(all.count(), i64::try_from(WRITERS * PUTS).unwrap());
    assert_eq!(all.header().unwrap().revision(), 1 + all.count());
    let old = client.get("0/0", Some(GetOptions::new().with_revision(2))).await.unwrap_err();
    assert!(old.to_string().contains("has been compacted"), "{old}");
}

/// Two servers on one directory would overwrite each other's log.
#[tokio::test]
async fn a_second_server_on_the_same_directory_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let error = Server::bind(config(dir.path())).await.err().unwrap();
    assert!(matches!(error, Error::InUse { .. }), "{error}");
    assert!(error.to_string().contains("is in use by another server"), "{error}");
    server.stop().await;
    Embedded::start(dir.path()).await.stop().await;
}

/// A shutdown does not wait for streams that never end.
#[tokio::test]
async fn a_stop_ends_open_watches() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    let mut watch = client.watch("k", None).await.unwrap();
    assert!(watch.message().await.unwrap().unwrap().created());
    server.stop().await;
    let error = watch.message().await.unwrap_err();
    assert!(error.to_string().contains("server stopped"), "{error}");
}
