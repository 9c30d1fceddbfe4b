//! Hosts that a fake remote shell plays, and a program that waits for its end.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;
use steadfast_tests::{Process, Scene, Signal, etcdctl, eventually, free_address, program};

/// Runs a command line as if on another host. A file `down-HOST` makes a host unreachable.
const REMOTE_SHELL: &str = r#"
echo "$1" >> calls
[ ! -e "down-$1" ] || { echo "rsh: host $1 is down" >&2; exit 255; }
export TEST_HOST="$1"
exec sh -c "$2"
"#;

/// Notes its rank and waits.
const JOB: &str = r#"
trap 'echo >> terminated; exit 143' TERM
echo "rank $RANK runs"
echo "$WORLD_SIZE $RANK ${TEST_HOST:-${SSH_CONNECTION:-here}}" >> started
until [ -e finish ]; do sleep 0.1; done
"#;

/// The environment of a test.
pub struct Site {
    pub scene: Scene,
    starts: AtomicU32,
}

/// etcd and the master of a job that outlive launchers.
pub struct Rendezvous {
    pub process: Process,
    pub endpoint: String,
}

impl Site {
    pub fn new() -> Self {
        let site = Self { scene: Scene::new(), starts: AtomicU32::new(0) };
        site.script("rsh", REMOTE_SHELL);
        site.script("job.sh", JOB);
        site.script("hosts.sh", "cat hosts.txt");
        site
    }

    /// Writes a shell script.
    pub fn script(&self, name: &str, text: &str) -> PathBuf {
        // A rename: the script may be in use.
        let draft = self.scene.write("draft", format!("#!/bin/sh\n{text}\n"));
        fs::set_permissions(&draft, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(draft, self.scene.path(name)).unwrap();
        self.scene.path(name)
    }

    /// Sets what the discovery script prints.
    pub fn hosts(&self, text: &str) {
        let draft = self.scene.write("draft", text);
        fs::rename(draft, self.scene.path("hosts.txt")).unwrap();
    }

    /// Starts a launcher with the fake remote shell.
    pub fn launch(&self, args: &[&str]) -> Process {
        self.launch_words(args, &["./job.sh"])
    }

    /// As [`Site::launch`], with the discovery script.
    pub fn launch_script(&self, args: &[&str]) -> Process {
        self.launch(&[args, &["--host-discovery-script", "./hosts.sh"]].concat())
    }

    /// As [`Site::launch`], with a command.
    pub fn launch_words(&self, args: &[&str], command: &[&str]) -> Process {
        let mut more = vec!["--rdzv-id", "job"];
        if !args.contains(&"--remote-shell") {
            more.extend(["--remote-shell", "./rsh"]);
        }
        if !args.contains(&"--rdzv-endpoint") {
            more.extend(["--insecure-allow-plaintext", "--listen", "127.0.0.1:0"]);
        }
        self.start_words("launch", &[&more, args].concat(), command)
    }

    /// Starts a launcher.
    pub fn start(&self, name: &str, args: &[&str]) -> Process {
        self.start_words(name, args, &["./job.sh"])
    }

    fn start_words(&self, name: &str, args: &[&str], command: &[&str]) -> Process {
        let common = ["launch", "--lease-ttl", "2s", "--last-call", "1s"];
        let words = [&common[..], args, &["--"], command].concat();
        let number = self.starts.fetch_add(1, Ordering::Relaxed);
        self.scene.start(&format!("{name}-{number}"), "steadfast", &words)
    }

    /// Serves the rendezvous of the job.
    pub fn rendezvous(&self) -> Rendezvous {
        let address: SocketAddr = free_address();
        let endpoint = address.to_string();
        let args = ["rendezvous", "--rdzv-id", "job", "--last-call", "1s", "--listen", &endpoint];
        let args = [&args[..], &["--nnodes", "1:2048"]].concat();
        let process = self.scene.start("rendezvous", "steadfast", &args);
        eventually("etcd listens", || std::net::TcpStream::connect(address).ok());
        Rendezvous { process, endpoint }
    }

    /// Waits until a round with this number of workers has begun; returns the host of each rank.
    pub fn world(&self, size: usize) -> Vec<String> {
        eventually(&format!("a round of {size} workers"), || {
            let text = self.read("started");
            let lines: Vec<&str> = text.lines().collect();
            let last = &lines[lines.len().checked_sub(size)?..];
            let mut hosts = vec![None; size];
            for line in last {
                let mut words = line.split(' ');
                let world: usize = words.next()?.parse().ok()?;
                let rank: usize = words.next()?.parse().ok()?;
                let host = words.next()?.to_owned();
                *hosts.get_mut(rank).filter(|_| world == size)? = Some(host);
            }
            hosts.into_iter().collect()
        })
    }

    /// Returns how many workers were started so far.
    pub fn started(&self) -> usize {
        self.read("started").lines().count()
    }

    /// Returns how many workers have handled SIGTERM.
    pub fn terminated(&self) -> usize {
        self.read("terminated").lines().count()
    }

    /// Forgets the workers that were started and told to end so far.
    pub fn forget(&self) {
        for file in ["started", "terminated"] {
            // It may not exist.
            let _ = fs::remove_file(self.scene.path(file));
        }
    }

    /// Lets all workers succeed.
    pub fn finish(&self) {
        self.scene.write("finish", "");
    }

    /// Returns how often the remote shell was called for a host.
    pub fn calls(&self, host: &str) -> usize {
        self.read("calls").lines().filter(|line| *line == host).count()
    }

    /// Kills the agent of a host.
    pub fn kill_agent(&self, host: &str) {
        let wanted = format!("--launched-on\0{host}\0");
        let agents = self.scene.all_of("run");
        let found = agents.iter().find(|agent| {
            let line = fs::read_to_string(format!("/proc/{}/cmdline", agent.pid));
            line.is_ok_and(|line| line.contains(&wanted))
        });
        self.scene.signal(found.expect("the host has an agent"), Signal::SIGKILL);
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.scene.path(name)).unwrap_or_default()
    }
}

impl Rendezvous {
    /// Returns the record of a host.
    pub fn host(&self, host: &str) -> Value {
        self.get(&format!("/jobs/job/launch/hosts/{host}"))
    }

    /// Returns the record of the job.
    pub fn state(&self) -> Value {
        self.get("/jobs/job/launch/state")
    }

    fn get(&self, key: &str) -> Value {
        let url = format!("http://{}", self.endpoint);
        let text = etcdctl(&url, &["get", "--print-value-only", key]);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{key}: {error}: {text}"))
    }
}

/// Returns the path of the program that hosts run.
pub fn agent_program() -> PathBuf {
    program("steadfast")
}
