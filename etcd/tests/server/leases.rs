//! Expiry of leases in real time.

use crate::support::embedded::Embedded;
use etcd_client::{EventType, PutOptions};
use std::time::Duration;
use tokio::time::{Instant, timeout};

const TTL: Duration = Duration::from_secs(2);

/// A lease without keep-alives expires on time, and its keys are deleted.
#[tokio::test]
async fn an_expired_lease_deletes_its_keys_and_notifies_watchers() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    let mut watch = client.watch("k", None).await.unwrap();
    let granted = client.lease_grant(1, None).await.unwrap();
    assert_eq!(granted.ttl(), 2, "shorter TTLs are raised, as in real etcd");
    let since = Instant::now();
    let options = PutOptions::new().with_lease(granted.id());
    client.put("k", "v", Some(options)).await.unwrap();
    loop {
        let response = timeout(TTL * 3, watch.message()).await.unwrap().unwrap().unwrap();
        if response.events().iter().any(|event| event.event_type() == EventType::Delete) {
            break;
        }
    }
    let lasted = since.elapsed();
    assert!(lasted > TTL - Duration::from_millis(50) && lasted < TTL * 2, "{lasted:?}");
    assert_eq!(client.get("k", None).await.unwrap().count(), 0);
    let status = client.lease_time_to_live(granted.id(), None).await.unwrap();
    assert_eq!(status.ttl(), -1);
}

/// Keep-alives extend a lease; a revoked lease cannot be renewed.
#[tokio::test]
async fn a_lease_that_is_kept_alive_does_not_expire() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let mut client = crate::support::client(server.address).await;
    let lease = client.lease_grant(2, None).await.unwrap().id();
    client.put("k", "v", Some(PutOptions::new().with_lease(lease))).await.unwrap();
    let (mut keeper, mut replies) = client.lease_keep_alive(lease).await.unwrap();
    let since = Instant::now();
    while since.elapsed() < TTL * 2 {
        tokio::time::sleep(TTL / 4).await;
        keeper.keep_alive().await.unwrap();
        assert_eq!(replies.message().await.unwrap().unwrap().ttl(), 2);
    }
    assert_eq!(client.get("k", None).await.unwrap().count(), 1);
    client.lease_revoke(lease).await.unwrap();
    assert_eq!(client.get("k", None).await.unwrap().count(), 0);
    keeper.keep_alive().await.unwrap();
    assert_eq!(replies.message().await.unwrap().unwrap().ttl(), 0);
}

/// The server does not reuse lease ids after a restart: a late client must not find the lease of another
/// client under its id.
#[tokio::test]
async fn lease_ids_are_not_reused() {
    let dir = tempfile::tempdir().unwrap();
    let mut ids = Vec::new();
    for _ in 0..3 {
        let server = Embedded::start(dir.path()).await;
        let mut client = crate::support::client(server.address).await;
        for _ in 0..5 {
            let lease = client.lease_grant(10, None).await.unwrap().id();
            assert!(lease > 0 && !ids.contains(&lease));
            ids.push(lease);
            client.lease_revoke(lease).await.unwrap();
        }
        server.stop().await;
    }
}
