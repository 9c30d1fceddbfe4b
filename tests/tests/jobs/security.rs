//! TLS, authentication and authorization.

use std::fs;
use std::time::Duration;

use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair};
use reqwest::Method;
use steadfast_common::ids::Slot;
use steadfast_common::records::{MasterRecord, PserverRecord};
use steadfast_proto::v1::master_client::MasterClient;
use steadfast_proto::v1::pserver_client::PserverClient;
use steadfast_proto::v1::{
    NextTaskRequest, RestoreCheckpointRequest, SnapshotRequest, StatusRequest,
};
use steadfast_tests::{
    Certificates, Cluster, Job, Member, Run, Scene, Signal, TOKEN, eventually, send_garbage, within,
};
use time::{Duration as Span, OffsetDateTime};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status};

/// Longest time until a process that cannot begin has ended.
const SOON: Duration = Duration::from_secs(20);

/// I7, F51: the result has the same bits as a plaintext run, also when a pserver dies and all
/// certificates are replaced; running processes load the new ones without a restart.
#[test]
fn a_job_with_certificates_gives_the_same_bits_while_they_are_replaced() {
    let scene = Scene::new();
    let job = Job::long().with("passes = 300", "passes = 600");
    let expected = Run::to_end(&scene, &job, "local", &["--pservers", "2"]);
    let certificates = Certificates::make(&scene, "certs");
    let cluster = Cluster::secured(&scene, &job, 2, "2s", &certificates);
    let mut members = vec![cluster.master("master")];
    members.extend(["pserver-0", "pserver-1", "spare"].iter().map(|it| cluster.pserver(it)));
    members.extend(["trainer-0", "trainer-1"].iter().map(|it| cluster.trainer(it)));
    cluster.until_step(100);
    let ends = |member: &Member| -> i64 {
        let shown = admin(&member.admin, "/metrics", None, Some(TOKEN)).1;
        let name = "steadfast_certificate_not_after_seconds ";
        let line = shown.lines().find_map(|it| it.strip_prefix(name));
        line.unwrap_or_else(|| panic!("{shown}")).parse().expect("it is a time")
    };
    let before = ends(&members[0]);
    // Expiry times have a resolution of one second; wait until a new certificate differs.
    within(Duration::from_secs(10), "a new one would end later", || {
        let end = OffsetDateTime::now_utc() + Span::days(365);
        (before < end.unix_timestamp()).then_some(())
    });
    certificates.renew();
    let holder =
        members.iter_mut().skip(1).take(3).find(|it| is_ready(it)).expect("one holds a slot");
    holder.signal(Signal::SIGKILL);
    holder.end();
    members.push(cluster.trainer("trainer-2"));
    cluster.until("training continues with another pserver and trainer", |it| {
        let count = |what: &str| it[what].as_array().map_or(0, Vec::len);
        count("trainers") == 3 && 0 < count("recoveries")
    });
    assert!(before < ends(&members[0]), "the master has its new certificate");

    let result = cluster.result();
    assert_eq!(result["parameters_sha256"], expected["parameters_sha256"], "{result}");
    for member in &mut members {
        let ended = member.process.end(Duration::from_secs(60));
        assert!(!ended.stderr.contains(TOKEN) && !ended.stderr.contains("PRIVATE KEY"));
    }
}

/// F50: with only the etcd permissions that `steadfast etcd-users` grants, a job runs to its end,
/// including all takeovers; the certificate of a trainer does not allow changes to the queues.
#[test]
fn each_role_needs_no_more_of_etcd_than_it_is_granted() {
    let scene = Scene::new();
    let certificates = Certificates::make(&scene, "certs");
    let cluster = Cluster::secured(&scene, &Job::long(), 1, "2s", &certificates);
    let made = cluster.steadfast(&["etcd-users"]);
    assert!(made.status.success(), "{made:?}");
    let again = cluster.steadfast(&["etcd-users"]);
    assert!(again.status.success(), "{again:?}");
    let mut members = vec![cluster.master("master"), cluster.master("standby")];
    members.extend(["pserver", "spare"].iter().map(|it| cluster.pserver(it)));
    members.push(cluster.trainer("trainer"));
    cluster.until_step(50);
    for index in [0, 2, 4] {
        members[index].signal(Signal::SIGKILL);
        members[index].end();
    }
    members.push(cluster.trainer("another"));
    assert_eq!(cluster.result()["state"], "finished");
    let put = |role: &str, key: &str| cluster.etcd.ctl_as(role, &["put", key, "x"]).is_ok();
    assert!(!put("trainer", &cluster.keys.queue()) && !put("pserver", &cluster.keys.job()));
    assert!(!put("master", "/jobs/other/job") && put("admin", "/jobs/other/job"));
}

/// F50: an etcd that another program uses as well is not closed to it unawares, and a job without users is told which
/// command makes them.
#[test]
fn etcd_users_does_not_lock_others_out_of_a_shared_etcd() {
    let scene = Scene::new();
    let certificates = Certificates::make(&scene, "certs");
    let cluster = Cluster::secured(&scene, &Job::small(), 1, "2s", &certificates);
    let put = |role: &str| cluster.etcd.ctl_as(role, &["put", "/registry/pods/a", "x"]);
    put("trainer").expect("etcd has no users yet");
    let made = cluster.steadfast(&["etcd-users"]);
    let stderr = String::from_utf8_lossy(&made.stderr);
    assert_eq!(made.status.code(), Some(8), "{stderr}");
    assert!(stderr.contains("`/registry/pods/a`") && stderr.contains("--shared-etcd"), "{stderr}");
    put("trainer").expect("nothing has changed");
    // Once it has users, they are made for further jobs as well.
    for arguments in [&["etcd-users", "--shared-etcd"][..], &["etcd-users"]] {
        let made = cluster.steadfast(arguments);
        assert!(made.status.success(), "{made:?}");
    }
    put("trainer").expect_err("etcd has users");
    let (url, tls) = (cluster.etcd.url(), certificates.of("trainer").display().to_string());
    let settings = ["--job", "other", "--etcd-endpoints", &url, "--tls", &tls];
    let ended = scene.start("trainer", "steadfast-trainer", &settings).end(SOON);
    assert!(ended.stderr.contains("`steadfast etcd-users --job NAME`"), "{}", ended.stderr);
    assert_eq!(ended.code, Some(8), "{}", ended.stderr);
}

/// F46, F50: clients without a valid certificate of the job cannot send requests; each role may call only
/// its own methods; rejected calls have no effect.
#[test]
fn a_connection_without_the_right_certificate_is_rejected() {
    let scene = Scene::new();
    let certificates = Certificates::make(&scene, "certs");
    let others = Certificates::make(&scene, "others");
    let cluster = Cluster::secured(&scene, &Job::endless(), 1, "5s", &certificates);
    let members =
        [cluster.master("master"), cluster.pserver("pserver"), cluster.trainer("trainer")];
    cluster.until_step(3);
    let generation = cluster.value(&cluster.keys.generation());
    let master: MasterRecord =
        cluster.get(&cluster.keys.master_addr()).unwrap().json().expect("it is a record");
    let pserver: PserverRecord =
        cluster.get(&cluster.keys.ps(Slot(0))).unwrap().json().expect("it is a record");
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    runtime.block_on(async {
        let ask = |tls: Option<ClientTlsConfig>| status(&master.address, tls);
        let strange = identity(&others, "admin");
        for (who, identity) in [
            ("a client without a certificate", None),
            ("an administrator of another job", Some(strange)),
            ("an administrator with an expired certificate", Some(expired(&certificates))),
        ] {
            let refused = ask(Some(trust(&certificates, "master", identity))).await;
            assert!(refused.is_err_and(|it| it.code() != Code::PermissionDenied), "{who}");
        }
        assert!(ask(None).await.is_err(), "in the clear");
        let known = |role| trust(&certificates, "master", Some(identity(&certificates, role)));
        ask(Some(known("admin"))).await.expect("an administrator may ask");
        assert_eq!(ask(Some(known("trainer"))).await.unwrap_err().code(), Code::PermissionDenied);
        let elsewhere = trust(&certificates, "pserver", Some(identity(&certificates, "admin")));
        assert!(ask(Some(elsewhere)).await.is_err(), "a master is accepted as a pserver");

        let mut trainer = MasterClient::new(connect(&master.address, Some(known("trainer"))));
        let request = RestoreCheckpointRequest { checkpoint: "any".to_owned(), force: true };
        let refused = trainer.restore_checkpoint(request).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
        assert!(refused.message().contains("not permitted for trainer"), "{}", refused.message());
        let mut person = MasterClient::new(connect(&master.address, Some(known("admin"))));
        let refused = person.next_task(NextTaskRequest::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
        let tls = trust(&certificates, "pserver", Some(identity(&certificates, "trainer")));
        let mut trainer = PserverClient::new(connect(&pserver.address, Some(tls)));
        let refused = trainer.snapshot(SnapshotRequest::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
    });
    for address in [&master.address, &pserver.address, &members[2].admin] {
        send_garbage(address);
    }
    let shown = admin(&members[0].admin, "/metrics", None, Some(TOKEN)).1;
    let count = |name: &str| -> u64 {
        let line = shown.lines().find_map(|it| it.strip_prefix(name));
        line.unwrap_or_else(|| panic!("{shown}")).trim().parse().expect("it is a number")
    };
    assert!(3 <= count("steadfast_refused_connections_total "), "{shown}");
    assert!(3 <= count("steadfast_refused_calls_total "), "{shown}");
    let now = cluster.until("training continues", |it| it["version"].as_u64().is_some());
    let version = now["version"].as_u64().expect("it trains");
    cluster.until_step(version + 3);
    assert_eq!(
        cluster.value(&cluster.keys.generation()),
        generation,
        "a rejected call had an effect"
    );
}

/// F50: an admin port reports liveness and readiness to all clients, everything else to administrators
/// and to clients with the token; it accepts commands only from administrators.
#[test]
fn an_admin_port_with_certificates_opens_by_certificate_or_token() {
    let scene = Scene::new();
    let certificates = Certificates::make(&scene, "certs");
    let cluster = Cluster::secured(&scene, &Job::endless(), 1, "5s", &certificates);
    let mut master = cluster.master("master");
    within(Duration::from_secs(20), "it acts", || is_ready(&master).then_some(()));
    let ask = |method, path: &str, role: Option<&str>, token: Option<&str>| {
        let identity = role.map(|role| (&certificates, role));
        request(method, &master.admin, path, identity, token).0
    };
    let code =
        |path: &str, role: Option<&str>, token: Option<&str>| ask(Method::GET, path, role, token);
    for path in ["/", "/metrics", "/status"] {
        assert_eq!(code(path, None, None), 401, "{path}");
        assert_eq!(code(path, Some("trainer"), None), 401, "{path}");
        assert_eq!(code(path, None, Some("canary-token-0d5e6f1b")), 401, "{path}");
        assert_eq!(code(path, None, Some(TOKEN)), 200, "{path}");
        assert_eq!(code(path, Some("admin"), None), 200, "{path}");
    }
    assert_eq!(code("/healthz", None, None), 200);
    let probe = |role: &str| {
        let mut command = cluster.command("steadfast");
        command.args(["probe", &master.admin, "--ready", "--tls"]).arg(certificates.of(role));
        command.output().expect("the program starts")
    };
    let probed = probe("master");
    assert!(probed.status.success() && probed.stdout == b"ready\n", "{probed:?}");
    let drain = |role: Option<&str>, token| ask(Method::POST, "/drain", role, token);
    for refused in [drain(None, None), drain(Some("master"), None), drain(None, Some(TOKEN))] {
        assert_eq!(refused, 401);
    }
    assert!(is_ready(&master));
    assert_eq!(drain(Some("admin"), None), 202);
    assert_eq!(master.end().code, Some(0));
}

/// F50: a client cannot reconnect after its certificate has expired, not even with a resumed TLS session.
#[test]
fn an_expired_certificate_ends_established_access() {
    let scene = Scene::new();
    let certificates = Certificates::make(&scene, "certs");
    let cluster = Cluster::secured(&scene, &Job::endless(), 1, "5s", &certificates);
    let master = cluster.master("master");
    within(Duration::from_secs(20), "it acts", || is_ready(&master).then_some(()));
    let until = OffsetDateTime::now_utc() + Span::seconds(4);
    let (certificate, key) = administrator(&certificates, until - Span::hours(1), until);
    let identity = reqwest::Identity::from_pem(format!("{key}{certificate}").as_bytes()).unwrap();
    let client = reqwest::Client::builder().tls_danger_accept_invalid_certs(true).no_proxy();
    // Each request opens a new connection; TLS sessions are kept.
    let client = client.identity(identity).pool_max_idle_per_host(0).build().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ask = || {
        let response = client.get(format!("https://{}/status", master.admin)).send();
        runtime.block_on(response).map_or(0, |it| it.status().as_u16())
    };
    assert_eq!((ask(), ask()), (200, 200));
    within(Duration::from_secs(10), "it is over", || {
        (until + Span::seconds(1) < OffsetDateTime::now_utc()).then_some(())
    });
    assert_eq!(ask(), 0);
}

/// F50: plaintext on a public address requires an explicit flag, and is reported.
#[test]
fn an_open_port_without_certificates_requires_a_flag() {
    let scene = Scene::new();
    let open = ["--job", "digits", "--admin-listen", "0.0.0.0:0"];
    let refused = scene.start("refused", "steadfast-pserver", &open).end(Duration::from_secs(20));
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("--insecure-allow-plaintext"), "{}", refused.stderr);
    let open = ["etcd", "--listen", "0.0.0.0:0", "--data-dir", "data"];
    let refused = scene.start("etcd", "steadfast", &open).end(Duration::from_secs(20));
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("--insecure-allow-plaintext"), "{}", refused.stderr);

    let cluster = Cluster::new(&scene, &Job::endless(), 1, "5s");
    let admin = steadfast_tests::free_address();
    let mut command = cluster.command("steadfast-pserver");
    command.args(["--insecure-allow-plaintext", "--job", "endless", "--etcd-endpoints"]);
    command.args([&cluster.etcd.url(), "--admin-listen", &format!("0.0.0.0:{}", admin.port())]);
    command.args(["--advertise", "127.0.0.1"]);
    let process = steadfast_tests::Process::start(scene.directory(), "open", &mut command);
    let shown = eventually("it answers", || steadfast_tests::get(&admin.to_string(), "/metrics"));
    assert!(shown.body.contains("steadfast_insecure_plaintext 1"), "{}", shown.body);
    let page = steadfast_tests::get(&admin.to_string(), "/").expect("it answers");
    assert!(page.body.contains("INSECURE"), "{}", page.body);
    eventually("it is logged", || process.stderr().contains("INSECURE").then_some(()));
}

/// An invalid certificate directory is reported at startup, with the reason.
#[test]
fn invalid_certificates_are_named() {
    let scene = Scene::new();
    let certificates = Certificates::make(&scene, "certs");
    let start = |directory: &str| {
        let args = ["--job", "digits", "--tls", directory];
        scene.start("pserver", "steadfast-pserver", &args).end(Duration::from_secs(20))
    };
    let directory = |role| certificates.of(role).display().to_string();
    let refused = start(&directory("trainer"));
    assert!(
        refused.stderr.contains("is a certificate of trainer; this is a pserver"),
        "{refused:?}"
    );
    let refused = start("nowhere");
    assert!(refused.stderr.contains("nowhere/ca.crt"), "{refused:?}");
    fs::copy(
        certificates.of("trainer").join("tls.key"),
        certificates.of("pserver").join("tls.key"),
    )
    .unwrap();
    let refused = start(&directory("pserver"));
    assert!(refused.stderr.contains("tls.key"), "{refused:?}");
    assert_eq!(refused.code, Some(2));
    fs::write(certificates.of("pserver").join("tls.crt"), "nothing\n").unwrap();
    let refused = start(&directory("pserver"));
    assert!(refused.stderr.contains("tls.crt: no certificate found"), "{refused:?}");
}

fn is_ready(member: &Member) -> bool {
    admin(&member.admin, "/readyz", None, None).0 == 200
}

/// Returns the HTTP status of a request to an admin port; 0 without a response.
fn admin(
    address: &str,
    path: &str,
    identity: Option<(&Certificates, &str)>,
    token: Option<&str>,
) -> (u16, String) {
    request(Method::GET, address, path, identity, token)
}

fn request(
    method: Method,
    address: &str,
    path: &str,
    identity: Option<(&Certificates, &str)>,
    token: Option<&str>,
) -> (u16, String) {
    // Fails if another test has already installed a provider, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // The identity of the server does not matter here.
    let mut client = reqwest::Client::builder().tls_danger_accept_invalid_certs(true).no_proxy();
    if let Some((certificates, role)) = identity {
        let read = |name| fs::read(certificates.of(role).join(name)).expect("it exists");
        let pem = [read("tls.key"), read("tls.crt")].concat();
        client = client.identity(reqwest::Identity::from_pem(&pem).expect("it is one"));
    }
    let client = client.timeout(Duration::from_secs(10)).build().expect("it is a client");
    let mut request = client.request(method, format!("https://{address}{path}"));
    if let Some(token) = token {
        request = request.bearer_auth(token);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        match request.send().await {
            Err(_) => (0, String::new()),
            Ok(answer) => (answer.status().as_u16(), answer.text().await.unwrap_or_default()),
        }
    })
}

fn identity(certificates: &Certificates, role: &str) -> Identity {
    let read = |name| fs::read(certificates.of(role).join(name)).expect("it exists");
    Identity::from_pem(read("tls.crt"), read("tls.key"))
}

/// F50: an open connection is closed when its certificate expires.
#[test]
fn a_connection_ends_with_its_certificate() {
    let scene = Scene::new();
    let certificates = Certificates::make(&scene, "certs");
    let cluster = Cluster::secured(&scene, &Job::endless(), 1, "5s", &certificates);
    let _members =
        [cluster.master("master"), cluster.pserver("pserver"), cluster.trainer("trainer")];
    cluster.until_step(3);
    let master: MasterRecord =
        cluster.get(&cluster.keys.master_addr()).unwrap().json().expect("it is a record");
    let now = OffsetDateTime::now_utc();
    let end = now + Span::seconds(4);
    let short = administrator(&certificates, now - Span::days(1), end);
    let identity = Identity::from_pem(short.0, short.1);
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    runtime.block_on(async {
        let channel =
            connect(&master.address, Some(trust(&certificates, "master", Some(identity))));
        let mut client = MasterClient::new(channel);
        client.status(StatusRequest {}).await.expect("the certificate has not ended yet");
        // Constant traffic does not keep the connection open.
        let last_answer = async {
            let mut last = OffsetDateTime::now_utc();
            while client.status(StatusRequest {}).await.is_ok() {
                last = OffsetDateTime::now_utc();
            }
            last
        };
        let last = tokio::time::timeout(Duration::from_secs(30), last_answer).await;
        let last = last.expect("requests are rejected after the certificate has expired");
        assert!(last < end + Span::seconds(2), "{last} is long after {end}");
    });
}

/// Returns an administrator identity that expired yesterday.
fn expired(certificates: &Certificates) -> Identity {
    let now = OffsetDateTime::now_utc();
    let (certificate, key) = administrator(certificates, now - Span::days(9), now - Span::days(1));
    Identity::from_pem(certificate, key)
}

/// Creates the certificate and the key of an administrator.
fn administrator(
    certificates: &Certificates,
    from: OffsetDateTime,
    until: OffsetDateTime,
) -> (String, String) {
    let read = |name| fs::read_to_string(certificates.of("ca").join(name)).expect("it exists");
    let key = KeyPair::from_pem(&read("tls.key")).unwrap();
    let issuer = Issuer::from_ca_cert_pem(&read("tls.crt"), key).unwrap();
    let names = vec!["admin.steadfast".to_owned(), "steadfast".to_owned()];
    let mut params = CertificateParams::new(names).unwrap();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    (params.not_before, params.not_after) = (from, until);
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    (certificate.pem(), key.serialize_pem())
}

fn trust(certificates: &Certificates, role: &str, identity: Option<Identity>) -> ClientTlsConfig {
    let ca = fs::read(certificates.of("ca").join("ca.crt")).expect("it exists");
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca));
    let tls = tls.domain_name(format!("{role}.steadfast"));
    match identity {
        None => tls,
        Some(identity) => tls.identity(identity),
    }
}

fn connect(address: &str, tls: Option<ClientTlsConfig>) -> Channel {
    let endpoint = match tls {
        None => Endpoint::from_shared(format!("http://{address}")).unwrap(),
        Some(tls) => {
            let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap();
            endpoint.tls_config(tls).expect("it can be read")
        }
    };
    endpoint.timeout(Duration::from_secs(10)).connect_lazy()
}

async fn status(address: &str, tls: Option<ClientTlsConfig>) -> Result<(), Status> {
    let mut client = MasterClient::new(connect(address, tls));
    client.status(StatusRequest {}).await.map(|_| ())
}
