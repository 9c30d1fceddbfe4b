//! An etcd process for one scene: a real etcd or the embedded one.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::{Certificates, Process, Scene, program, within};

/// Ports chosen before a process listens on them. They are outside of the ephemeral range of Linux, so no
/// outgoing connection takes one in between.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// Distance between the first ports of two test processes.
const PORTS_OF_PROCESS: u32 = 211;

/// Another process may take a free port before etcd binds it.
const PORTS_TRIED: u32 = 5;
/// Longest time until a started etcd answers.
pub(crate) const START_MAX: Duration = Duration::from_secs(30);

/// An etcd process that is killed on drop.
#[derive(Debug)]
pub struct EtcdServer {
    process: Process,
    address: SocketAddr,
    certificates: Option<Certificates>,
    /// The password of `root`, if authentication is enabled.
    password: Option<String>,
}

/// The first password of the user `root` of [`EtcdServer::with_password`].
pub const PASSWORD: &str = "first-secret";

impl EtcdServer {
    /// Starts an empty real etcd without fsync, which is fast.
    pub fn real(scene: &Scene) -> Self {
        Self::start_real(scene, None, &["--unsafe-no-fsync"])
    }

    /// Starts an empty real etcd as [`EtcdServer::real`] does, with mutual TLS.
    pub fn secured(scene: &Scene, certificates: &Certificates) -> Self {
        let file = |name| certificates.file("etcd", name);
        let (ca, certificate, key) = (file("ca.crt"), file("tls.crt"), file("tls.key"));
        let files = ["--trusted-ca-file", &ca, "--cert-file", &certificate, "--key-file", &key];
        let more = [&["--unsafe-no-fsync", "--client-cert-auth"], &files[..]].concat();
        Self::start_real(scene, Some(certificates.clone()), &more)
    }

    /// Starts an empty real etcd with fsync, as in production.
    pub fn durable(scene: &Scene) -> Self {
        Self::start_real(scene, None, &[])
    }

    /// Starts an empty real etcd as [`EtcdServer::real`] does, with authentication, the user `root` with [`PASSWORD`],
    /// and more flags.
    pub fn with_password(scene: &Scene, more: &[&str]) -> Self {
        let more = [&["--unsafe-no-fsync"], more].concat();
        let mut server = Self::start_real(scene, None, &more);
        let user = format!("root:{PASSWORD}");
        within(START_MAX, "etcd has a leader", || server.ctl_as("", &["user", "add", &user]).ok());
        server.ctl(&["user", "grant-role", "root", "root"]);
        server.ctl(&["auth", "enable"]);
        server.password = Some(PASSWORD.to_owned());
        server
    }

    /// Changes the password of `root`.
    pub fn change_password(&mut self, password: &str) {
        let mut command = self.ctl_command("admin");
        command.args(["user", "passwd", "root", "--interactive=false"]);
        let changed = answer_to(&mut command, password);
        changed.unwrap_or_else(|output| panic!("the password is not changed: {output}"));
        self.password = Some(password.to_owned());
    }

    fn start_real(scene: &Scene, certificates: Option<Certificates>, more: &[&str]) -> Self {
        let path = find("etcd", "etcd-server");
        let scheme = scheme(certificates.as_ref());
        Self::start(scene, certificates, |address, data| {
            let peer = format!("http://{}", free_address());
            let client = format!("{scheme}://{address}");
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
        Self::start(scene, None, |address, data| {
            let mut command = scene.command(&program("steadfast"));
            command.args(["etcd", "--listen", &address.to_string(), "--data-dir"]).arg(data);
            command
        })
    }

    fn start(
        scene: &Scene,
        certificates: Option<Certificates>,
        command: impl Fn(SocketAddr, &Path) -> Command,
    ) -> Self {
        for attempt in 0..PORTS_TRIED {
            let address = free_address();
            let name = format!("etcd-{}-{attempt}", address.port());
            let mut command = command(address, &scene.path(&name));
            let mut process = Process::start(scene.directory(), &name, &mut command);
            let listens = within(START_MAX, "etcd listens", || {
                match (TcpStream::connect(address), process.is_running()) {
                    (_, false) => Some(false),
                    (Ok(_), true) => Some(true),
                    (Err(_), true) => None,
                }
            });
            if listens {
                return Self { process, address, certificates, password: None };
            }
        }
        panic!("etcd ended at its start {PORTS_TRIED} times");
    }

    pub fn url(&self) -> String {
        format!("{}://{}", scheme(self.certificates.as_ref()), self.address)
    }

    /// Stops or resumes the process.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Runs `etcdctl`; returns its stdout.
    pub fn ctl(&self, args: &[&str]) -> String {
        self.ctl_as("admin", args).unwrap_or_else(|output| panic!("{args:?}: {output}"))
    }

    /// Runs `etcdctl` with the certificate of a role.
    ///
    /// # Errors
    /// The stderr of `etcdctl`, if it failed.
    pub fn ctl_as(&self, role: &str, args: &[&str]) -> Result<String, String> {
        answer(self.ctl_command(role).args(args))
    }

    fn ctl_command(&self, role: &str) -> Command {
        let mut command = etcdctl_command(&self.url());
        if let Some(certificates) = &self.certificates {
            command.env("ETCDCTL_CACERT", certificates.file(role, "ca.crt"));
            command.env("ETCDCTL_CERT", certificates.file(role, "tls.crt"));
            command.env("ETCDCTL_KEY", certificates.file(role, "tls.key"));
        }
        if let Some(password) = &self.password {
            command.env("ETCDCTL_USER", format!("root:{password}"));
        }
        command
    }

    pub fn pid(&self) -> Pid {
        self.process.pid()
    }
}

/// Runs `etcdctl` on an etcd; returns its stdout.
pub fn etcdctl(url: &str, args: &[&str]) -> String {
    answer(etcdctl_command(url).args(args)).unwrap_or_else(|output| panic!("{args:?}: {output}"))
}

fn etcdctl_command(url: &str) -> Command {
    let mut command = Command::new(find("etcdctl", "etcd-client"));
    command.env("ETCDCTL_API", "3").args(["--endpoints", url]);
    command
}

fn answer(command: &mut Command) -> Result<String, String> {
    answer_to(command, "")
}

/// Runs a command with `input` as its stdin.
fn answer_to(command: &mut Command, input: &str) -> Result<String, String> {
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = pipes.spawn().expect("etcdctl starts");
    let mut stdin = child.stdin.take().expect("it is a pipe");
    stdin.write_all(input.as_bytes()).expect("etcdctl reads its input");
    drop(stdin);
    let output = child.wait_with_output().expect("etcdctl ends");
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn scheme(certificates: Option<&Certificates>) -> &'static str {
    if certificates.is_some() { "https" } else { "http" }
}

/// Returns a command that prints all changes below a prefix since a revision and does not end.
pub fn watch_command(scene: &Scene, urls: &str, prefix: &str, first: i64) -> Command {
    let mut command = scene.command(&find("etcdctl", "etcd-client"));
    command.env("ETCDCTL_API", "3").args(["--endpoints", urls]);
    command.arg("watch").arg(format!("--rev={first}")).args(["--prefix", "-w", "json", prefix]);
    command
}

/// Returns the path of an installed program; panics with the package to install if it is missing.
pub(crate) fn find(name: &str, package: &str) -> PathBuf {
    let directories = std::env::var("PATH").unwrap_or_default();
    directories
        .split(':')
        .chain(["/usr/bin", "/usr/local/bin"])
        .map(|directory| Path::new(directory).join(name))
        .find(|path| path.is_file())
        .unwrap_or_else(|| panic!("{name} is not installed: install the package {package}"))
}

/// Returns a loopback address with a port that is currently free.
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
