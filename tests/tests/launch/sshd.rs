//! A real sshd on addresses of loopback, with keys of its own.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use steadfast_tests::{Process, Scene, eventually, free_address};

use crate::site::agent_program;

/// A running sshd. It ends with the test.
pub struct Sshd {
    _process: Process,
    /// The command line of a client.
    pub client: String,
}

impl Sshd {
    /// Starts sshd; prints the reason and returns `None` where it cannot be had.
    pub fn start(scene: &Scene, addresses: &[&str]) -> Option<Self> {
        let sshd = Path::new("/usr/sbin/sshd");
        let has_client = Command::new("ssh").arg("-V").stderr(Stdio::null()).status().is_ok();
        if !sshd.is_file() || !has_client {
            eprintln!("skipped: sshd or ssh is not installed (`scripts/setup --tests`)");
            return None;
        }
        // sshd refuses keys in directories that others can write.
        let keys = scene.path("ssh");
        fs::create_dir(&keys).unwrap();
        fs::set_permissions(&keys, fs::Permissions::from_mode(0o700)).unwrap();
        for name in ["host", "user"] {
            let mut command = Command::new("ssh-keygen");
            command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(keys.join(name));
            assert!(command.status().expect("ssh-keygen starts").success());
        }
        let port = free_address().port();
        let path = |name: &str| keys.join(name).display().to_string();
        let listen: Vec<String> =
            addresses.iter().map(|it| format!("ListenAddress {it}:{port}\n")).collect();
        let config = format!(
            "{}HostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\nStrictModes no\n\
             PasswordAuthentication no\nPermitRootLogin yes\n",
            listen.concat(),
            path("host"),
            path("user.pub"),
        );
        fs::write(keys.join("config"), config).unwrap();
        // sshd needs this directory, and only root can create it.
        if fs::create_dir_all("/run/sshd").is_err() && !Path::new("/run/sshd").is_dir() {
            eprintln!("skipped: /run/sshd does not exist, and cannot be created");
            return None;
        }
        let mut command = scene.command(sshd);
        command.args(["-D", "-e", "-f"]).arg(keys.join("config"));
        let mut process = Process::start(scene.directory(), "sshd", &mut command);
        let client = format!(
            "ssh -F none -p {port} -i {} -oIdentitiesOnly=yes -oBatchMode=yes \
             -oStrictHostKeyChecking=no -oUserKnownHostsFile={} -oLogLevel=ERROR",
            path("user"),
            path("known"),
        );
        let words: Vec<&str> = client.split(' ').filter(|word| !word.is_empty()).collect();
        let answers = eventually("sshd answers", || {
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).args([addresses[0], "true"]).stderr(Stdio::null());
            let is_up = command.stdin(Stdio::null()).status().expect("ssh starts").success();
            if is_up { Some(true) } else { (!process.is_running()).then_some(false) }
        });
        if !answers {
            eprintln!("skipped: sshd has ended: {}", process.stderr());
            return None;
        }
        Some(Self { _process: process, client })
    }

    /// Waits until no process of an agent is left: sshd gives them no mark of the test.
    pub fn leaves_no_agent(&self) {
        let program = agent_program();
        let program = fs::canonicalize(program).expect("it is built");
        eventually("no agent is left", || {
            let processes = fs::read_dir("/proc").expect("Linux has /proc").flatten();
            let is_agent = |path: &Path| {
                let runs = fs::read_link(path.join("exe")).is_ok_and(|exe| exe == program);
                let line = fs::read_to_string(path.join("cmdline")).unwrap_or_default();
                runs && line.contains("--launched-on\x00127.0.0.")
            };
            processes.into_iter().all(|it| !is_agent(&it.path())).then_some(())
        });
    }
}
