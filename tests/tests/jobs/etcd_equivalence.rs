//! Guarantees of the coordination crate, on a real etcd and on the embedded one.

use std::time::{Duration, Instant};

use steadfast_coord::{
    CoordError, Etcd, EtcdOptions, Leadership, Mirror, OPS_MAX, Op, Range, Session,
};
use steadfast_tests::{EtcdServer, Proxy, Scene, Signal, eventually, within};
use tokio::runtime::Runtime;

const LOCK: &str = "/jobs/it/master/lock";

/// Lease TTL longer than any test, so no lease expires.
const LONG: Duration = Duration::from_secs(60);

/// Runs a check on both kinds of etcd. The check may block, because background tasks have their own
/// threads.
fn on_both(check: impl AsyncFn(&EtcdServer)) {
    let scene = Scene::new();
    let runtime = Runtime::new().expect("threads can be started");
    for (kind, start) in
        [("real", EtcdServer::real as fn(&Scene) -> EtcdServer), ("embedded", EtcdServer::embedded)]
    {
        eprintln!("on a {kind} etcd:");
        let server = start(&scene);
        runtime.block_on(check(&server));
    }
}

async fn connect(url: &str) -> Etcd {
    let options = EtcdOptions { endpoints: vec![url.to_owned()], ..EtcdOptions::default() };
    // etcd listens shortly before it has a leader and answers.
    for _ in 0..100 {
        if let Ok(etcd) = Etcd::connect(&options).await {
            return etcd;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("etcd at {url} does not answer");
}

async fn acquire(etcd: &Etcd, session: &Session, holder: &str) -> Leadership {
    let acquired = Leadership::acquire(etcd, session, LOCK, holder.as_bytes()).await;
    acquired.expect("etcd answers").expect("the lock is free")
}

/// Returns a client that holds the lock.
async fn leading(url: &str) -> (Etcd, Session, Leadership) {
    let etcd = connect(url).await;
    let session = Session::open(&etcd, LONG).await.unwrap();
    let leadership = acquire(&etcd, &session, "a").await;
    (etcd, session, leadership)
}

fn put(key: &str, value: &str) -> Op {
    Op::put(key, &value)
}

async fn value(etcd: &Etcd, key: &str) -> Option<String> {
    etcd.get_json(key).await.expect("etcd answers")
}

/// S004-41
#[test]
fn a_key_is_created_once_and_a_retry_finds_its_own() {
    on_both(async |server| {
        let etcd = connect(&server.url()).await;
        let one = Session::open(&etcd, LONG).await.unwrap();
        let two = Session::open(&etcd, LONG).await.unwrap();
        let first = etcd.create("/ps/0", b"a", one.lease()).await.unwrap().unwrap();
        let retried = etcd.create("/ps/0", b"a", one.lease()).await.unwrap();
        assert_eq!(retried, Ok(first), "the same lease and value are the same call");
        let found = etcd.create("/ps/0", b"a", two.lease()).await.unwrap().unwrap_err();
        assert_eq!((found.create_revision, found.lease), (first, one.lease()));
        one.close(&etcd).await;
        let second = etcd.create("/ps/0", b"a", two.lease()).await.unwrap().unwrap();
        assert!(first < second, "an incarnation is never used twice");
    });
}

/// S004-26
#[test]
fn a_listing_of_several_pages_shows_one_revision() {
    on_both(async |server| {
        let (etcd, _session, mut leadership) = leading(&server.url()).await;
        let keys: Vec<String> = (0..1270).map(|it| format!("/jobs/it/tasks/{it:08}")).collect();
        for some in keys.chunks(OPS_MAX) {
            let ops: Vec<Op> = some.iter().map(|key| put(key, key)).collect();
            leadership.commit(&etcd, &ops).await.unwrap();
        }
        etcd.put("/jobs/it/tasks0", b"after the last").await.unwrap();
        let view = etcd.list("/jobs/it/tasks/").await.unwrap();
        let listed: Vec<&String> = view.entries.keys().collect();
        assert_eq!(listed, keys.iter().collect::<Vec<_>>());
        let (revision, _) = etcd.get_at("/none").await.unwrap();
        assert_eq!(view.revision, revision);
        assert!(etcd.list("/jobs/other/").await.unwrap().entries.is_empty());
    });
}

/// S000-20: also if some values are much larger than most, and a page of them than what the client accepts.
#[test]
fn a_listing_of_values_of_any_size_has_all_of_them() {
    on_both(async |server| {
        let etcd = connect(&server.url()).await;
        let sizes = [1_400_000, 0, 10, 1_400_000, 1_400_000, 5, 1_400_000];
        for (at, size) in sizes.iter().enumerate() {
            etcd.put(&format!("/large/{at}"), &vec![b'x'; *size]).await.unwrap();
        }
        for view in [etcd.list("/large/").await.unwrap(), etcd.list_large("/large/").await.unwrap()]
        {
            let found: Vec<usize> = view.entries.values().map(|it| it.value.len()).collect();
            assert_eq!(found, sizes);
        }
    });
}

/// S004-20, S004-23
#[test]
fn a_former_holder_of_the_lock_changes_nothing() {
    on_both(async |server| {
        let etcd = connect(&server.url()).await;
        let session = Session::open(&etcd, LONG).await.unwrap();
        let mut former = acquire(&etcd, &session, "former").await;
        former.commit(&etcd, &[put("/jobs/it/x", "1")]).await.unwrap();

        // The holder loses the lock without notice while its own deadline is ahead: only the fence
        // protects the data.
        let operator = Session::open(&etcd, LONG).await.unwrap();
        let acquired = Leadership::acquire(&etcd, &operator, "/operator", b"").await;
        let mut by_hand = acquired.unwrap().expect("the lock is free");
        by_hand.commit(&etcd, &[Op::delete(LOCK)]).await.unwrap();
        assert!(former.is_live());
        let refused = former.commit(&etcd, &[put("/jobs/it/x", "2")]).await;
        assert!(matches!(refused, Err(CoordError::Fenced { .. })), "{refused:?}");

        let other = Session::open(&etcd, LONG).await.unwrap();
        let mut acting = acquire(&etcd, &other, "acting").await;
        assert!(former.epoch() < acting.epoch());
        // Both have committed once, so the commit counts do not differ.
        acting.commit(&etcd, &[put("/jobs/it/y", "1")]).await.unwrap();
        let refused = former.commit(&etcd, &[put("/jobs/it/x", "3")]).await;
        assert!(matches!(refused, Err(CoordError::Fenced { .. })), "{refused:?}");
        assert_eq!(value(&etcd, "/jobs/it/x").await.as_deref(), Some("1"));
        let lock = etcd.get(LOCK).await.unwrap().expect("it is held");
        assert_eq!(lock.value, b"acting", "the former holder did not put the lock either");

        acting.commit(&etcd, &[put("/jobs/it/x", "4")]).await.unwrap();
        assert_eq!(value(&etcd, "/jobs/it/x").await.as_deref(), Some("4"));
    });
}

/// S004-26
#[test]
fn the_largest_commit_is_accepted_and_a_larger_one_is_rejected_before_it_is_sent() {
    on_both(async |server| {
        let (etcd, _session, mut leadership) = leading(&server.url()).await;
        let ops: Vec<Op> = (0..=OPS_MAX).map(|it| put(&format!("/t/{it}"), "1")).collect();
        leadership.commit(&etcd, &ops[..OPS_MAX]).await.unwrap();
        let refused = leadership.commit(&etcd, &ops).await;
        assert!(matches!(refused, Err(CoordError::TooManyOperations { .. })), "{refused:?}");
    });
}

/// S004-7, S004-27
#[test]
fn a_commit_whose_reply_was_lost_is_applied_once() {
    on_both(async |server| {
        let direct = connect(&server.url()).await;
        let proxy = Proxy::start(&server.url()).await;
        let (etcd, _session, mut leadership) = leading(&proxy.url()).await;
        leadership.commit(&etcd, &[put("/before", "1")]).await.unwrap();

        proxy.hold_replies();
        let lose_the_reply = async {
            while value(&direct, "/x").await.is_none() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            proxy.cut();
            tokio::time::sleep(Duration::from_millis(300)).await;
            proxy.open();
        };
        let ops = [put("/x", "1")];
        let commit = leadership.commit(&etcd, &ops);
        let (outcome, ()) = tokio::join!(commit, lose_the_reply);
        let entry = direct.get("/x").await.unwrap().expect("it was put");
        assert_eq!(outcome.unwrap(), entry.mod_revision);
        assert_eq!(entry.version, 1, "it was put once");

        leadership.commit(&etcd, &[put("/x", "2")]).await.unwrap();
        let lock = direct.get(LOCK).await.unwrap().expect("it is held");
        assert_eq!(lock.version, 4, "taken, and three commits");
    });
}

/// S004-7, S004-23
#[test]
fn a_lock_overwritten_by_a_user_no_longer_belongs_to_its_holder() {
    on_both(async |server| {
        let (etcd, _session, mut leadership) = leading(&server.url()).await;
        etcd.put(LOCK, b"a").await.unwrap();
        // The version is the same as after a commit with a lost reply.
        let refused = leadership.commit(&etcd, &[put("/x", "1")]).await;
        assert!(matches!(refused, Err(CoordError::Fenced { .. })), "{refused:?}");
        assert_eq!(value(&etcd, "/x").await, None);
    });
}

/// S004-31, S004-38
#[test]
fn a_mirror_that_missed_compacted_history_catches_up() {
    on_both(async |server| {
        let direct = connect(&server.url()).await;
        direct.put("/m/stays", b"1").await.unwrap();
        let expired = Session::open(&direct, LONG).await.unwrap();
        direct.create("/m/goes", b"1", expired.lease()).await.unwrap().unwrap();
        let proxy = Proxy::start(&server.url()).await;
        let etcd = connect(&proxy.url()).await;
        let mirror = Mirror::start(&etcd, Range::Prefix("/m/".to_owned())).await.unwrap();
        let shown = || {
            let view = mirror.view();
            let pairs = view
                .entries
                .iter()
                .map(|(key, entry)| format!("{key}={}", String::from_utf8_lossy(&entry.value)));
            pairs.collect::<Vec<_>>().join(" ")
        };
        assert_eq!(shown(), "/m/goes=1 /m/stays=1");
        direct.put("/m/stays", b"2").await.unwrap();
        eventually("the mirror follows", || (shown() == "/m/goes=1 /m/stays=2").then_some(()));

        proxy.cut();
        expired.close(&direct).await;
        for value in 3..=9 {
            direct.put("/m/stays", value.to_string().as_bytes()).await.unwrap();
        }
        direct.put("/m/new", b"1").await.unwrap();
        let (revision, _) = direct.get_at("/m/new").await.unwrap();
        direct.compact(revision).await.unwrap();
        assert_eq!(shown(), "/m/goes=1 /m/stays=2", "the mirror was cut off");
        proxy.open();
        eventually("the mirror is back", || (shown() == "/m/new=1 /m/stays=9").then_some(()));

        direct.put("/m/new", b"2").await.unwrap();
        eventually("it follows again", || (shown() == "/m/new=2 /m/stays=9").then_some(()));
    });
}

/// S004-31
#[test]
fn a_mirror_of_one_key_shows_that_key_alone() {
    on_both(async |server| {
        let etcd = connect(&server.url()).await;
        let mirror = Mirror::start(&etcd, Range::Key("/m".to_owned())).await.unwrap();
        etcd.put("/m/below", b"1").await.unwrap();
        etcd.put("/m", b"1").await.unwrap();
        eventually("the key is shown", || (!mirror.view().entries.is_empty()).then_some(()));
        assert_eq!(mirror.view().single::<u32>().unwrap(), Some(1));
    });
}

/// S004-43
#[test]
fn a_holder_considers_its_lease_expired_before_etcd_deletes_its_keys() {
    on_both(async |server| {
        let etcd = connect(&server.url()).await;
        let ttl = Duration::from_secs(3);
        let session = Session::open(&etcd, ttl).await.unwrap();
        let mut leadership = acquire(&etcd, &session, "a").await;
        // The lease is renewed beyond its first deadline.
        let opened = Instant::now();
        within(LONG, "the first deadline is over", || {
            assert!(session.is_live(), "it was not renewed");
            (ttl + Duration::from_millis(500) < opened.elapsed()).then_some(())
        });

        server.signal(Signal::SIGSTOP);
        // No keep-alive is answered from now on, so etcd keeps the lease at least until then.
        let stopped = Instant::now();
        within(ttl, "the holder judged its lease to be over", || {
            (!session.is_live()).then_some(())
        });
        assert!(!leadership.is_live());
        assert!(stopped.elapsed() < ttl, "{:?}", stopped.elapsed());
        let refused = leadership.commit(&etcd, &[put("/x", "late")]).await;
        assert!(matches!(refused, Err(CoordError::LeaseLost)), "{refused:?}");
        tokio::time::timeout(ttl, session.lost()).await.expect("the loss is reported");
        server.signal(Signal::SIGCONT);
        assert_eq!(value(&etcd, "/x").await, None);
    });
}

/// S004-22, S004-43
#[test]
fn the_keys_of_a_holder_are_deleted_with_its_lease_and_at_once_on_revocation() {
    on_both(async |server| {
        let etcd = connect(&server.url()).await;
        let ttl = Duration::from_secs(2);
        let silent = Session::open(&etcd, ttl).await.unwrap();
        let polite = Session::open(&etcd, LONG).await.unwrap();
        etcd.create("/s/silent", b"1", silent.lease()).await.unwrap().unwrap();
        etcd.create("/s/polite", b"1", polite.lease()).await.unwrap().unwrap();
        let mirror = Mirror::start(&etcd, Range::Prefix("/s/".to_owned())).await.unwrap();

        polite.close(&etcd).await;
        assert!(etcd.get("/s/polite").await.unwrap().is_none());

        // The session stops renewing without revoking the lease.
        drop(silent);
        eventually("its key vanished", || mirror.view().entries.is_empty().then_some(()));
    });
}

/// S004-43
#[test]
fn a_holder_learns_that_its_lease_was_revoked() {
    on_both(async |server| {
        let etcd = connect(&server.url()).await;
        let ttl = Duration::from_secs(4);
        let session = Session::open(&etcd, ttl).await.unwrap();
        etcd.revoke(session.lease()).await.unwrap();
        tokio::time::timeout(ttl, session.lost()).await.expect("the next keep-alive detects it");
        assert!(!session.is_live());
    });
}
