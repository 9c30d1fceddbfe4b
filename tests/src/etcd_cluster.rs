//! A real etcd of one or several members, each of which can be killed, stopped and restarted.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::etcd::{START_MAX, find, free_address};
use crate::{Process, Scene, within};

/// Another process may take a free port before etcd binds it.
const CLUSTERS_TRIED: u32 = 5;

/// Size of the values that fill the database, close to the request limit of etcd.
const FILLER_BYTES: usize = 1 << 20;
const FILLER_PREFIX: &str = "/filler/";

/// Backend quota of etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quota {
    Default,
    Bytes(u64),
}

/// The members of an etcd. They are killed on drop.
#[derive(Debug)]
pub struct EtcdCluster<'a> {
    scene: &'a Scene,
    members: Vec<EtcdMember>,
    quota: Quota,
}

/// One member: its data and its ports stay the same over restarts.
#[derive(Debug)]
struct EtcdMember {
    name: String,
    client: SocketAddr,
    peer: SocketAddr,
    /// Number of starts so far.
    starts: u32,
    process: Option<Process>,
}

impl<'a> EtcdCluster<'a> {
    /// Starts an empty etcd with `members` members, and waits until it answers.
    pub fn start(scene: &'a Scene, members: usize, quota: Quota) -> Self {
        for attempt in 0..CLUSTERS_TRIED {
            let members = (0..members).map(|index| EtcdMember {
                name: format!("etcd-{attempt}-{index}"),
                client: free_address(),
                peer: free_address(),
                starts: 0,
                process: None,
            });
            let mut cluster = Self { scene, members: members.collect(), quota };
            cluster.start_missing();
            let answers =
                within(START_MAX, "etcd answers", || match (cluster.all_run(), cluster.leader()) {
                    (false, _) => Some(false),
                    (true, Some(_)) => Some(true),
                    (true, None) => None,
                });
            if answers {
                return cluster;
            }
        }
        panic!("etcd did not start in {CLUSTERS_TRIED} attempts");
    }

    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Returns whether there are no members; always false.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Returns the URL of each member.
    pub fn urls(&self) -> Vec<String> {
        self.members.iter().map(|it| format!("http://{}", it.client)).collect()
    }

    /// Starts all members that are not running, with their data and ports.
    pub fn start_missing(&mut self) {
        for index in 0..self.members.len() {
            let is_running = self.members[index].process.as_mut().is_some_and(Process::is_running);
            if !is_running {
                let mut command = self.command(index);
                let member = &mut self.members[index];
                member.starts += 1;
                let log = format!("{}.{}", member.name, member.starts);
                member.process = Some(Process::start(self.scene.directory(), &log, &mut command));
            }
        }
    }

    fn command(&self, index: usize) -> Command {
        let member = &self.members[index];
        let all: Vec<String> =
            self.members.iter().map(|it| format!("{}=http://{}", it.name, it.peer)).collect();
        let client = format!("http://{}", member.client);
        let peer = format!("http://{}", member.peer);
        let mut command = self.scene.command(&find("etcd", "etcd-server"));
        command.args(["--name", &member.name, "--initial-cluster", &all.join(",")]);
        command.arg("--data-dir").arg(self.scene.path(&format!("{}-data", member.name)));
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        // The page cache survives a killed process, so fsync is not needed.
        command.args(["--unsafe-no-fsync", "--log-level=error"]);
        if let Quota::Bytes(bytes) = self.quota {
            command.arg(format!("--quota-backend-bytes={bytes}"));
        }
        command
    }

    fn all_run(&mut self) -> bool {
        self.members.iter_mut().all(|it| it.process.as_mut().is_some_and(Process::is_running))
    }

    /// Kills a member with SIGKILL.
    pub fn kill(&mut self, index: usize) {
        self.members[index].process = None;
    }

    /// Kills all members with SIGKILL.
    pub fn kill_all(&mut self) {
        self.members.iter_mut().for_each(|it| it.process = None);
    }

    /// Stops or resumes a member, if it is running.
    pub fn signal(&mut self, index: usize, signal: Signal) {
        if let Some(process) = &mut self.members[index].process {
            process.signal_if_running(signal);
        }
    }

    /// Stops or resumes all running members.
    pub fn signal_all(&mut self, signal: Signal) {
        (0..self.len()).for_each(|index| self.signal(index, signal));
    }

    /// Returns the member that reports itself as leader, if any.
    pub fn leader(&self) -> Option<usize> {
        self.statuses().iter().position(|status| match status {
            Some(status) => !status["leader"].is_null() && status["leader"] == *id(status),
            None => false,
        })
    }

    /// Transfers leadership to the next member that answers; returns it.
    pub fn move_leader(&self) -> Option<usize> {
        let (from, statuses) = (self.leader()?, self.statuses());
        let to = (1..self.len())
            .map(|step| (from + step) % self.len())
            .find(|index| statuses[*index].is_some())?;
        let target = format!("{:x}", id(statuses[to].as_ref()?).as_u64()?);
        self.try_ctl(&[self.urls()[from].clone()], &["move-leader", &target])?;
        Some(to)
    }

    /// Returns the status of each member; `None` for members that do not answer.
    fn statuses(&self) -> Vec<Option<Value>> {
        let status = |url: String| {
            let text = self.try_ctl(&[url], &["endpoint", "status", "-w", "json"])?;
            let mut answer: Value = serde_json::from_str(&text).ok()?;
            Some(answer[0]["Status"].take())
        };
        self.urls().into_iter().map(status).collect()
    }

    /// Returns the current revision, if a member answers.
    pub fn revision(&self) -> Option<i64> {
        let statuses = self.statuses();
        let revisions = statuses.iter().flatten().map(|it| it["header"]["revision"].as_i64());
        revisions.max().flatten()
    }

    /// Returns the size of the database in use, by the member with the largest, if one answers.
    pub fn bytes_in_use(&self) -> Option<u64> {
        let statuses = self.statuses();
        statuses.iter().flatten().filter_map(|it| it["dbSizeInUse"].as_u64()).max()
    }

    /// Returns the number of keys below a prefix, if a member answers.
    pub fn keys(&self, prefix: &str) -> Option<usize> {
        let text = self.try_ctl(&self.urls(), &["get", "--prefix", "--keys-only", prefix])?;
        Some(text.lines().filter(|line| !line.is_empty()).count())
    }

    /// Returns the value of a key, if it is not empty and a member answers.
    pub fn value(&self, key: &str) -> Option<String> {
        let text = self.try_ctl(&self.urls(), &["get", "--print-value-only", key])?;
        (!text.is_empty()).then_some(text)
    }

    /// Returns the seconds that a lease lives without another keep-alive, if a member answers.
    pub fn lease_left(&self, lease: i64) -> Option<u64> {
        let text = self.try_ctl(&self.urls(), &["lease", "timetolive", &format!("{lease:x}")])?;
        let left = text.split_once("remaining(")?.1.split_once('s')?.0;
        left.parse().ok()
    }

    /// Puts a value; returns whether it succeeded.
    pub fn put(&self, key: &str, value: &str) -> bool {
        self.try_ctl(&self.urls(), &["put", key, value]).is_some()
    }

    /// Compacts the history before a revision; returns whether it succeeded.
    pub fn compact(&self, revision: i64) -> bool {
        self.try_ctl(&self.urls(), &["compact", &revision.to_string()]).is_some()
    }

    /// Puts `mark`, and then values until there is no space left; returns whether the quota was reached.
    pub fn fill(&self, mark: &str) -> bool {
        if self.try_ctl(&self.urls(), &["put", mark, ""]).is_none() {
            return false;
        }
        let path = self.scene.write("filler", vec![b'x'; FILLER_BYTES]);
        let (bytes, urls) = (
            match self.quota {
                Quota::Default => panic!("an etcd without a small quota is too large to fill"),
                Quota::Bytes(bytes) => bytes,
            },
            self.urls(),
        );
        for number in 0..=bytes / FILLER_BYTES as u64 {
            let mut command = ctl_command(&urls, &["put", &format!("{FILLER_PREFIX}{number}")]);
            command.stdin(fs::File::open(&path).expect("it was just written"));
            let output = command.output().expect("etcdctl starts");
            if !output.status.success() {
                return String::from_utf8_lossy(&output.stderr).contains("space exceeded");
            }
        }
        self.is_full()
    }

    /// Returns whether etcd has raised the NOSPACE alarm.
    pub fn is_full(&self) -> bool {
        self.try_ctl(&self.urls(), &["alarm", "list"]).is_some_and(|it| it.contains("NOSPACE"))
    }

    /// Deletes the filler values, then `mark`. Can be retried.
    pub fn empty(&self, mark: &str) -> bool {
        let delete = |args: &[&str]| self.try_ctl(&self.urls(), &[&["del"], args].concat());
        delete(&["--prefix", FILLER_PREFIX]).and_then(|_| delete(&[mark])).is_some()
    }

    /// Compacts the history before a revision, defragments, and disarms the alarm. Can be retried.
    pub fn reclaim(&self, revision: i64) -> bool {
        let ctl = |args: &[&str]| self.try_ctl(&self.urls(), args);
        // Fails if the history is already compacted; the steps below may still be needed.
        self.compact(revision);
        ctl(&["defrag"]).and_then(|_| ctl(&["alarm", "disarm"])).is_some() && !self.is_full()
    }

    /// Runs `etcdctl`; returns `None` on an error or a timeout.
    fn try_ctl(&self, urls: &[String], args: &[&str]) -> Option<String> {
        let output = ctl_command(urls, args).output().expect("etcdctl starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        output.status.success().then_some(text)
    }
}

fn id(status: &Value) -> &Value {
    &status["header"]["member_id"]
}

fn ctl_command(urls: &[String], args: &[&str]) -> Command {
    let mut command = Command::new(find("etcdctl", "etcd-client"));
    command.env("ETCDCTL_API", "3").args(["--endpoints", &urls.join(",")]);
    command.args(["--dial-timeout=500ms", "--command-timeout=1s"]).args(args);
    command
}
