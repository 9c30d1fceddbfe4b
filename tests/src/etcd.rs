//! A real etcd, or the embedded one as a process, for one scene.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::{Process, Scene, program, within};

/// Ports that are chosen beforehand. Linux gives none of them to whoever asks for any, as connections
/// do, so nobody takes one between our choice and the process that is to listen there.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// How far apart processes of tests begin to choose.
const PORTS_OF_PROCESS: u32 = 211;

/// Another process may take a port between our finding it free and etcd's binding it.
const PORTS_TRIED: u32 = 5;
/// Longest time until an etcd that was started answers.
pub(crate) const START_MAX: Duration = Duration::from_secs(30);

/// An etcd that is killed when this is dropped.
#[derive(Debug)]
pub struct EtcdServer {
    process: Process,
    address: SocketAddr,
}

impl EtcdServer {
    /// Starts an empty real etcd, which is quick because it leaves it to the system when to write.
    pub fn real(scene: &Scene) -> Self {
        Self::start_real(scene, &["--unsafe-no-fsync"])
    }

    /// Starts an empty real etcd as people run it: what it answered is on the disk.
    pub fn durable(scene: &Scene) -> Self {
        Self::start_real(scene, &[])
    }

    fn start_real(scene: &Scene, more: &[&str]) -> Self {
        let path = find("etcd", "etcd-server");
        Self::start(scene, |address, data| {
            let peer = format!("http://{}", free_address());
            let client = format!("http://{address}");
            let mut command = scene.command(&path);
            command.arg("--data-dir").arg(data);
            command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
            command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
            command.arg(format!("--initial-cluster=default={peer}"));
            command.arg("--log-level=error").args(more);
            command
        })
    }

    /// Starts an empty embedded etcd.
    pub fn embedded(scene: &Scene) -> Self {
        Self::start(scene, |address, data| {
            let mut command = scene.command(&program("steadfast"));
            command.args(["etcd", "--listen", &address.to_string(), "--data-dir"]).arg(data);
            command
        })
    }

    fn start(scene: &Scene, command: impl Fn(SocketAddr, &Path) -> Command) -> Self {
        for attempt in 0..PORTS_TRIED {
            let address = free_address();
            let name = format!("etcd-{}-{attempt}", address.port());
            let mut command = command(address, &scene.path(&name));
            let mut process = Process::start(scene.folder(), &name, &mut command);
            let listens = within(START_MAX, "etcd listens", || {
                match (TcpStream::connect(address), process.is_running()) {
                    (_, false) => Some(false),
                    (Ok(_), true) => Some(true),
                    (Err(_), true) => None,
                }
            });
            if listens {
                return Self { process, address };
            }
        }
        panic!("etcd ended at its start {PORTS_TRIED} times");
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Stops or resumes it.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Asks it by `etcdctl`.
    pub fn ctl(&self, args: &[&str]) -> String {
        etcdctl(&self.url(), args)
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        self.process.pid()
    }
}

/// Asks an etcd by `etcdctl`, and returns what that printed.
pub fn etcdctl(url: &str, args: &[&str]) -> String {
    let mut command = Command::new(find("etcdctl", "etcd-client"));
    command.env("ETCDCTL_API", "3").args(["--endpoints", url]).args(args);
    let output = command.output().expect("etcdctl starts");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A command that writes all changes below a prefix since a revision, and goes on for ever.
pub fn watch_command(scene: &Scene, urls: &str, prefix: &str, first: i64) -> Command {
    let mut command = scene.command(&find("etcdctl", "etcd-client"));
    command.env("ETCDCTL_API", "3").args(["--endpoints", urls]);
    command.arg("watch").arg(format!("--rev={first}")).args(["--prefix", "-w", "json", prefix]);
    command
}

/// The path of an installed program, or a failure that says what to install.
pub(crate) fn find(name: &str, package: &str) -> PathBuf {
    let folders = std::env::var("PATH").unwrap_or_default();
    folders
        .split(':')
        .chain(["/usr/bin", "/usr/local/bin"])
        .map(|folder| Path::new(folder).join(name))
        .find(|path| path.is_file())
        .unwrap_or_else(|| panic!("{name} is not installed: install the package {package}"))
}

/// An address on loopback that nobody listens on right now.
pub fn free_address() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(PORTS_OF_PROCESS);
    let count = PORTS.len() as u32;
    let mut addresses = (0..count).map(|_| {
        let place = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % count;
        SocketAddr::from(([127, 0, 0, 1], PORTS.start + place as u16))
    });
    addresses.find(|it| TcpListener::bind(it).is_ok()).expect("loopback has free ports")
}
