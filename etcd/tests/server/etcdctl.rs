//! etcdctl works with the embedded etcd.

use crate::support::embedded::Embedded;
use crate::support::real::binary;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Command, Stdio};

/// The endpoint has no scheme, like etcdctl's default: with a scheme, version 3.4 sends the whole URL as the
/// authority of its status request, which the HTTP/2 library here refuses.
fn etcdctl(address: SocketAddr, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary("etcdctl", "etcd-client"));
    command.env("ETCDCTL_API", "3").arg(format!("--endpoints={address}")).args(arguments);
    command
}

/// Runs etcdctl and returns its output.
async fn run(address: SocketAddr, arguments: &'static [&'static str]) -> String {
    let run = move || etcdctl(address, arguments).output().unwrap();
    let output = tokio::task::spawn_blocking(run).await.unwrap();
    let (out, err) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "etcdctl {arguments:?}: {out}{err}");
    // It prints the health of an endpoint to stderr.
    out + &err
}

/// Reads, writes and leases with etcdctl.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_reads_writes_and_leases() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let at = server.address;
    assert_eq!(run(at, &["put", "/jobs/a", "1"]).await, "OK\n");
    assert_eq!(run(at, &["put", "/jobs/b", "2"]).await, "OK\n");
    assert_eq!(run(at, &["get", "--prefix", "/jobs/"]).await, "/jobs/a\n1\n/jobs/b\n2\n");
    assert_eq!(run(at, &["del", "/jobs/b"]).await, "1\n");
    assert!(run(at, &["lease", "grant", "30"]).await.contains("granted with TTL(30s)"));
    assert!(run(at, &["lease", "list"]).await.contains("found 1 leases"));
    assert_eq!(run(at, &["compaction", "3"]).await, "compacted revision 3\n");
    assert!(run(at, &["endpoint", "health"]).await.contains("is healthy"));
    let status = run(at, &["endpoint", "status"]).await;
    assert!(status.contains("3.4.23-steadfast") && status.contains("true"), "{status}");
    assert!(run(at, &["member", "list"]).await.contains("steadfast"));
    assert_eq!(run(at, &["alarm", "list"]).await, "");
}

/// Watches with etcdctl.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcdctl_watches() {
    let dir = tempfile::tempdir().unwrap();
    let server = Embedded::start(dir.path()).await;
    let at = server.address;
    run(at, &["put", "k", "1"]).await;
    run(at, &["put", "k", "2"]).await;
    let watch = move || {
        let mut child =
            etcdctl(at, &["watch", "k", "--rev=2"]).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let lines: Vec<String> = lines.take(6).map(Result::unwrap).collect();
        child.kill().unwrap();
        child.wait().unwrap();
        lines
    };
    let lines = tokio::task::spawn_blocking(watch).await.unwrap();
    assert_eq!(lines, ["PUT", "k", "1", "PUT", "k", "2"]);
}
