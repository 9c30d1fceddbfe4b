//! A real etcd, started for one test and killed at its end.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

const START_MAX: Duration = Duration::from_secs(30);

pub struct RealEtcd {
    pub address: SocketAddr,
    process: Child,
    _data_dir: TempDir,
}

impl RealEtcd {
    /// Starts an empty etcd and waits until it listens.
    pub async fn start() -> Self {
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
        let mut etcd = RealEtcd { address, process, _data_dir: data_dir };
        etcd.wait_until_it_listens().await;
        etcd
    }

    async fn wait_until_it_listens(&mut self) {
        let deadline = Instant::now() + START_MAX;
        while TcpStream::connect(self.address).await.is_err() {
            if let Some(status) = self.process.try_wait().unwrap() {
                panic!("etcd exited during startup: {status}");
            }
            assert!(Instant::now() < deadline, "etcd does not listen on {}", self.address);
            sleep(Duration::from_millis(20)).await;
        }
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
