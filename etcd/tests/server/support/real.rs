//! A real etcd, started for one test and killed at its end.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use super::client;

const START_MAX: Duration = Duration::from_secs(30);

pub struct RealEtcd {
    pub address: SocketAddr,
    process: Child,
    _data_dir: TempDir,
}

impl RealEtcd {
    /// Starts an empty etcd and waits until it answers. Another process may take a free port first: then it
    /// starts with other ports.
    pub async fn start() -> Self {
        for _ in 0..5 {
            let mut etcd = Self::spawn();
            if etcd.answers().await {
                return etcd;
            }
        }
        panic!("etcd exited during startup, each of five times");
    }

    fn spawn() -> Self {
        let data_dir = tempfile::tempdir().unwrap();
        let (address, peer) = (free_address(), free_address());
        let (client_url, peer_url) = (format!("http://{address}"), format!("http://{peer}"));
        let process = Command::new(binary("etcd", "etcd-server"))
            .arg("--data-dir")
            .arg(data_dir.path())
            .args(["--listen-client-urls", &client_url, "--advertise-client-urls", &client_url])
            .args(["--listen-peer-urls", &peer_url, "--initial-advertise-peer-urls", &peer_url])
            .arg(format!("--initial-cluster=default={peer_url}"))
            .args(["--unsafe-no-fsync", "--log-level=error"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        RealEtcd { address, process, _data_dir: data_dir }
    }

    /// Waits for an answer; returns false if the process has ended.
    async fn answers(&mut self) -> bool {
        let deadline = Instant::now() + START_MAX;
        while client(self.address).await.status().await.is_err() {
            if self.process.try_wait().unwrap().is_some() {
                return false;
            }
            assert!(Instant::now() < deadline, "etcd does not answer at {}", self.address);
            sleep(Duration::from_millis(20)).await;
        }
        true
    }
}

impl Drop for RealEtcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the path of a program, or panics with the package to install.
pub fn binary(name: &str, package: &str) -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    for dir in path.split(':').chain(["/usr/bin", "/usr/local/bin"]) {
        let candidate = Path::new(dir).join(name);
        if candidate.is_file() {
            return candidate.to_str().unwrap().into();
        }
    }
    panic!("this test needs a real {name}: install the package {package}");
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}
