//! The client of etcd: members that are dead or hang, and credentials that change.

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rcgen::KeyPair;
use steadfast_common::error::ErrorKind;
use steadfast_coord::{Etcd, EtcdOptions, Mirror, Op, Range, Session};
use steadfast_tests::{
    Certificates, EtcdCluster, EtcdServer, Job, PASSWORD, Proxy, Quota, Run, Scene, eventually, get,
};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

/// Lifetime of a token that no call renews.
const TOKEN_TTL: Duration = Duration::from_secs(1);

/// Lifetime of a lease that is not renewed: more than an election of etcd takes.
const LEASE_TTL: Duration = Duration::from_secs(9);

/// The address of no process: port 1 needs a privilege that servers do not use.
const DEAD: &str = "http://127.0.0.1:1";

fn options(urls: &[String]) -> EtcdOptions {
    EtcdOptions { endpoints: urls.to_vec(), ..EtcdOptions::default() }
}

/// Returns options for the user `root`, whose password file has `password`.
fn with_password(scene: &Scene, server: &EtcdServer, password: &str) -> EtcdOptions {
    let file = scene.write("password", format!("{password}\n"));
    let user = Some("root".to_owned());
    EtcdOptions { user, password_file: Some(file), ..options(&[server.url()]) }
}

/// Makes one call of each kind, all of which must succeed.
async fn use_all(etcd: &Etcd, value: &str) {
    etcd.get("/key").await.expect("a read");
    etcd.put("/key", value.as_bytes()).await.expect("a put");
    etcd.put_if(&Op::put("/other", &value), &[]).await.expect("a transaction");
    let lease = etcd.grant_unattended(Duration::from_secs(60)).await.expect("a lease");
    etcd.renew_once(lease).await.expect("a keep-alive");
    etcd.revoke(lease).await.expect("a revocation");
}

/// F50: a process outlives its token, also one that makes no call for longer than the token lives.
#[test]
fn a_client_logs_in_again_when_its_token_has_expired() {
    let scene = Scene::new();
    let server = EtcdServer::with_password(&scene, &["--auth-token-ttl", "1"]);
    let options = with_password(&scene, &server, PASSWORD);
    Runtime::new().expect("threads can be started").block_on(async {
        let etcd = Etcd::connect(&options).await.expect("etcd accepts the password");
        let mirror = Mirror::start(&etcd, Range::Key("/key".to_owned())).await.expect("a list");
        for value in ["one", "two"] {
            // The condition is that no call has been made for this time.
            tokio::time::sleep(2 * TOKEN_TTL).await;
            use_all(&etcd, value).await;
            let mut views = mirror.subscribe();
            let shows = |entry: &steadfast_coord::Entry| entry.value == value.as_bytes();
            let seen = views.wait_for(|view| view.entries.values().any(shows));
            let seen = tokio::time::timeout(Duration::from_secs(10), seen).await;
            assert!(seen.is_ok(), "the mirror shows what was put after the token's end");
        }
    });
}

/// F50: etcd spends much time on each password, so calls that find the token stale at once share one login.
#[test]
fn calls_with_one_stale_token_log_in_once() {
    let scene = Scene::new();
    let server = EtcdServer::with_password(&scene, &["--auth-token-ttl", "1"]);
    let options = with_password(&scene, &server, PASSWORD);
    let address = server.url().replace("http://", "");
    let logins = || -> f64 {
        let metrics = get(&address, "/metrics").expect("etcd has metrics").body;
        let is_login = |line: &&str| {
            line.starts_with("grpc_server_handled_total") && line.contains("\"Authenticate\"")
        };
        let counts = metrics.lines().filter(is_login).filter_map(|it| it.rsplit_once(' '));
        counts.map(|(_, count)| count.parse::<f64>().expect("a number")).sum()
    };
    Runtime::new().expect("threads can be started").block_on(async {
        let etcd = Etcd::connect(&options).await.expect("etcd accepts the password");
        let before = logins();
        // The condition is that no call has been made for this time.
        tokio::time::sleep(2 * TOKEN_TTL).await;
        let mut calls = JoinSet::new();
        for _ in 0..50 {
            let etcd = etcd.clone();
            calls.spawn(async move { etcd.get("/key").await.map(drop) });
        }
        let ended = calls.join_all().await;
        assert!(ended.iter().all(Result::is_ok), "each call is repeated: {ended:?}");
        assert_eq!(logins() - before, 1.0);
    });
}

/// F50: with JSON web tokens each change of users makes all tokens stale.
#[test]
fn a_client_logs_in_again_when_the_users_of_etcd_change() {
    let scene = Scene::new();
    let key = KeyPair::generate().expect("the system has random numbers");
    let private = scene.write("jwt.key", key.serialize_pem());
    let public = scene.write("jwt.pub", key.public_key_pem());
    let (private, public) = (private.display(), public.display());
    let token = format!("jwt,pub-key={public},priv-key={private},sign-method=ES256,ttl=10m");
    let server = EtcdServer::with_password(&scene, &["--auth-token", &token]);
    let options = with_password(&scene, &server, PASSWORD);
    Runtime::new().expect("threads can be started").block_on(async {
        let etcd = Etcd::connect(&options).await.expect("etcd accepts the password");
        use_all(&etcd, "before").await;
        server.ctl(&["user", "add", "another:secret"]);
        use_all(&etcd, "after").await;
    });
}

/// F50: a password is changed in etcd and in the file, while the process runs; a wrong one is final at a start.
#[test]
fn a_client_takes_a_changed_password_from_its_file() {
    let scene = Scene::new();
    let mut server = EtcdServer::with_password(&scene, &[]);
    let runtime = Runtime::new().expect("threads can be started");
    let wrong = with_password(&scene, &server, "wrong");
    let refused = runtime.block_on(Etcd::connect(&wrong)).expect_err("the password is wrong");
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
    assert!(refused.to_string().contains("etcd refuses the user `root`"), "{refused}");

    let options = with_password(&scene, &server, PASSWORD);
    let etcd = runtime.block_on(Etcd::connect(&options)).expect("etcd accepts the password");
    server.change_password("second-secret");
    let between = runtime.block_on(etcd.put("/key", b"")).expect_err("the file has the old one");
    assert!(between.is_transient(), "the process repeats the call: {between}");
    with_password(&scene, &server, "second-secret");
    runtime.block_on(use_all(&etcd, "with the new one"));
}

/// F50: a job of some seconds under tokens of one second ends with its model.
#[test]
fn a_job_outlives_the_tokens_of_its_processes() {
    let scene = Scene::new();
    let server = EtcdServer::with_password(&scene, &["--auth-token-ttl", "1"]);
    let file = scene.write("password", PASSWORD).display().to_string();
    let url = server.url();
    let user = ["--etcd", &url, "--etcd-user", "root", "--etcd-password-file", &file];
    let job = Job::long()
        .with("passes = 300", "passes = 3000")
        .with("every_steps = 200", "every = \"3s\"");
    let summary = Run::to_end(&scene, &job, "data", &user);
    assert!(scene.path("data/store/model.safetensors").exists(), "{summary}");
}

/// F15: with a dead member in the list, no start and no command fails; if all are dead, each is named with its
/// reason.
#[test]
fn a_dead_member_of_etcd_fails_no_call() {
    let scene = Scene::new();
    let server = EtcdServer::real(&scene);
    let runtime = Runtime::new().expect("threads can be started");
    let urls = [DEAD.to_owned(), server.url(), "http://127.0.0.1:2".to_owned()];
    eventually("etcd has a leader", || runtime.block_on(Etcd::connect(&options(&urls))).ok());
    for _ in 0..20 {
        let etcd = runtime.block_on(Etcd::connect(&options(&urls)));
        runtime.block_on(use_all(&etcd.expect("a live member is in the list"), "value"));
    }
    let dead = [DEAD.to_owned(), "http://127.0.0.1:2".to_owned()];
    let error = runtime.block_on(Etcd::connect(&options(&dead))).unwrap_err().to_string();
    for url in dead {
        assert!(error.contains(&format!("{url}: connection refused")), "{error}");
    }
}

/// F15: a member that hangs, and then one that dies, cost a client of three members no failed read.
#[test]
fn a_client_moves_to_another_member_of_etcd() {
    let scene = Scene::new();
    let mut cluster = EtcdCluster::start(&scene, 3, Quota::Default);
    let runtime = Runtime::new().expect("threads can be started");
    let etcd = runtime.block_on(Etcd::connect(&options(&cluster.urls()))).expect("all are live");
    for index in 0..cluster.len() {
        cluster.signal(index, Signal::SIGSTOP);
        for _ in 0..3 {
            // The caller tries again, as each driver does: without a leader, members refuse calls until one is elected.
            let put = || runtime.block_on(etcd.put("/key", b"value")).ok();
            eventually("one of the two live members has served the call", put);
        }
        cluster.signal(index, Signal::SIGCONT);
        eventually("the member has caught up", || cluster.leader());
    }
    cluster.kill(0);
    runtime.block_on(etcd.get("/key")).expect("two members are live");
}

/// F15: a lease outlives each member's silence for longer than the lease lives without a keep-alive.
#[test]
fn a_lease_is_kept_while_a_member_of_etcd_hangs() {
    let scene = Scene::new();
    let mut cluster = EtcdCluster::start(&scene, 3, Quota::Default);
    let runtime = Runtime::new().expect("threads can be started");
    let etcd = runtime.block_on(Etcd::connect(&options(&cluster.urls()))).expect("all are live");
    let session = runtime.block_on(Session::open(&etcd, LEASE_TTL)).expect("all are live");
    for index in 0..cluster.len() {
        cluster.signal(index, Signal::SIGSTOP);
        let stopped = Instant::now();
        eventually("the member is silent for longer than a lease lives", || {
            assert!(session.is_live(), "the lease is lost while member {index} hangs");
            (LEASE_TTL < stopped.elapsed()).then_some(())
        });
        cluster.signal(index, Signal::SIGCONT);
        eventually("the member has caught up", || cluster.leader());
        // Otherwise two elections, after two stops, could follow one keep-alive.
        eventually("the lease was renewed since", || {
            let left = cluster.lease_left(session.lease())?;
            (LEASE_TTL.as_secs() < left + 2).then_some(())
        });
    }
}

/// F51: a connection presents the certificate that the files have when it is opened; files that cannot be read
/// do not end the process.
#[test]
fn a_new_connection_to_etcd_presents_the_certificate_of_its_files() {
    let scene = Scene::new();
    let (ours, others) = (Certificates::make(&scene, "ours"), Certificates::make(&scene, "others"));
    let server = EtcdServer::secured(&scene, &ours);
    let runtime = Runtime::new().expect("threads can be started");
    let proxy = runtime.block_on(Proxy::start(&server.url().replace("https://", "http://")));
    let copy = |from: &Certificates| {
        for name in ["tls.crt", "tls.key"] {
            fs::copy(from.file("admin", name), scene.path(name)).expect("it can be copied");
        }
    };
    copy(&ours);
    let file = |name| Some(scene.path(name));
    let options = EtcdOptions {
        ca_file: Some(ours.file("admin", "ca.crt").into()),
        cert_file: file("tls.crt"),
        key_file: file("tls.key"),
        ..options(&[proxy.url().replace("http://", "https://")])
    };
    let connect = || runtime.block_on(Etcd::connect(&options)).ok();
    let etcd = eventually("etcd has a leader", connect);
    let put = || runtime.block_on(etcd.put("/key", b"value"));
    let reconnect = || {
        proxy.cut();
        eventually("the connection has ended", || put().err());
        proxy.open();
    };

    copy(&others);
    put().expect("the connection is open");
    reconnect();
    eventually("the new certificate is refused", || put().err());
    copy(&ours);
    eventually("the right certificate is presented", || put().ok());
    fs::remove_file(scene.path("tls.crt")).expect("it exists");
    reconnect();
    eventually("the last certificate serves while there is none", || put().ok());
}
