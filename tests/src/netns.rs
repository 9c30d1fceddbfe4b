//! A separate network namespace for one process, connected by a link that a test can break silently.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Set where [`enter_router`] has replaced this process.
const ROUTER: &str = "STEADFAST_ROUTER";

/// Prefix of the network names; the rest is the process id of the owner and a number.
const PREFIX: &str = "steadfast-";

static NETWORKS: AtomicU32 = AtomicU32::new(0);

/// A network with one link. It is removed on drop, also after a panic.
#[derive(Debug)]
pub struct Network {
    name: String,
    /// The outer end of the link.
    link: String,
    /// The addresses of the networks of this process.
    all: String,
    /// Addresses of the outer and the inner end of the link.
    pub outside: String,
    pub inside: String,
}

impl Network {
    /// Creates a network.
    ///
    /// # Errors
    /// The reason why this process cannot create one.
    pub fn make() -> Result<Self, String> {
        remove_orphans();
        let number = NETWORKS.fetch_add(1, Ordering::Relaxed);
        let owner = std::process::id();
        // Networks of different processes get different addresses, as far as the range allows.
        let subnet = format!("10.{}.{}", 64 + owner / 256 % 64, owner % 256);
        let base = number % 64 * 4;
        let made = Self {
            name: format!("{PREFIX}{owner}-{number}"),
            link: format!("sf{owner}x{number}"),
            all: format!("{subnet}.0/24"),
            outside: format!("{subnet}.{}", base + 1),
            inside: format!("{subnet}.{}", base + 2),
        };
        made.set_up()?;
        Ok(made)
    }

    fn set_up(&self) -> Result<(), String> {
        let (name, link) = (&self.name, &self.link);
        let peer = format!("{link}p");
        let (outside, inside) = (format!("{}/30", self.outside), format!("{}/30", self.inside));
        ip(&["netns", "add", name])?;
        ip(&["link", "add", link, "type", "veth", "peer", "name", &peer, "netns", name])?;
        ip(&["addr", "add", &outside, "dev", link])?;
        ip(&["link", "set", link, "up"])?;
        ip(&["-n", name, "addr", "add", &inside, "dev", &peer])?;
        ip(&["-n", name, "link", "set", &peer, "up"])?;
        ip(&["-n", name, "link", "set", "lo", "up"])?;
        ip(&["-n", name, "route", "add", "default", "via", &self.outside])?;
        // Check now whether packets can be dropped.
        self.filter("-A", "65535").and_then(|()| self.filter("-D", "65535"))
    }

    /// Wraps a command to run in this network. The process id does not change.
    pub fn wrap(&self, command: &Command) -> Command {
        let mut wrapped = Command::new("ip");
        wrapped.args(["netns", "exec", &self.name]).arg(command.get_program());
        wrapped.args(command.get_args());
        if let Some(directory) = command.get_current_dir() {
            wrapped.current_dir(directory);
        }
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => wrapped.env(name, value),
                None => wrapped.env_remove(name),
            };
        }
        wrapped
    }

    /// Drops all packets from and to a port of the outer end.
    pub fn drop_port(&self, port: u16) {
        self.filter("-A", &port.to_string()).expect("it could be done before");
    }

    /// Stops dropping packets from and to a port.
    pub fn pass_port(&self, port: u16) {
        self.filter("-D", &port.to_string()).expect("packets of that port were dropped");
    }

    /// Drops all packets from other networks of this process.
    pub fn deafen(&self) {
        self.peers("-I", "INPUT", "-s").expect("it could be done before");
    }

    pub fn hear(&self) {
        self.peers("-D", "INPUT", "-s").expect("packets were dropped");
    }

    /// Drops all packets to other networks of this process.
    pub fn mute(&self) {
        self.peers("-I", "OUTPUT", "-d").expect("it could be done before");
    }

    pub fn speak(&self) {
        self.peers("-D", "OUTPUT", "-d").expect("packets were dropped");
    }

    /// Changes the rules that drop packets of other networks, and accept those of the outer end.
    fn peers(&self, change: &str, chain: &str, of: &str) -> Result<(), String> {
        let inside = ["netns", "exec", &self.name, "iptables", "-w", change, chain, of];
        ip(&[&inside[..], &[&self.all, "-j", "DROP"]].concat())?;
        ip(&[&inside[..], &[&self.outside, "-j", "ACCEPT"]].concat())
    }

    pub fn link_down(&self) {
        ip(&["link", "set", &self.link, "down"]).expect("the link exists");
    }

    pub fn link_up(&self) {
        ip(&["link", "set", &self.link, "up"]).expect("the link exists");
    }

    fn filter(&self, change: &str, port: &str) -> Result<(), String> {
        let inside = ["netns", "exec", &self.name, "iptables", "-w", change];
        let out = ["OUTPUT", "-p", "tcp", "--dport", port, "-j", "DROP"];
        let back = ["INPUT", "-p", "tcp", "--sport", port, "-j", "DROP"];
        ip(&[&inside[..], &out].concat())?;
        ip(&[&inside[..], &back].concat())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The other end of the link goes with it.
        let _ = ip(&["link", "del", &self.link]);
        let _ = ip(&["netns", "del", &self.name]);
    }
}

/// Replaces this process by itself in a network namespace of its own, which passes packets between the networks that it
/// makes. Nothing of it is visible from outside.
///
/// # Errors
/// The reason why this process cannot have one.
pub fn enter_router() -> Result<(), String> {
    if std::env::var_os(ROUTER).is_none() {
        let program = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new("unshare");
        command.arg("--net").arg(program).args(std::env::args_os().skip(1)).env(ROUTER, "1");
        return Err(format!("cannot start `unshare`: {}", command.exec()));
    }
    ip(&["link", "set", "lo", "up"])?;
    let forward = Path::new("/proc/sys/net/ipv4/ip_forward");
    fs::write(forward, "1").map_err(|error| format!("cannot write {}: {error}", forward.display()))
}

fn ip(args: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(args).output();
    let output = output.map_err(|error| format!("cannot start `ip`: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(format!("`ip {}` failed: {}", args.join(" "), stderr.trim()))
}

/// Removes networks whose owner was killed.
fn remove_orphans() {
    let Ok(output) = Command::new("ip").args(["netns", "list"]).output() else { return };
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let name = line.split(' ').next().unwrap_or_default();
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        let Some(owner) = owner else { continue };
        if !Path::new("/proc").join(owner).exists() {
            let _ = ip(&["netns", "del", name]);
        }
    }
}
