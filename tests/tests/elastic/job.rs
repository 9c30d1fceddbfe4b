//! An elastic job: its rendezvous, and the agents of its nodes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use steadfast_tests::{Ended, Process, Scene, free_address, get, within};

/// Enough for a machine that is busy with something else.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Prints what the worker was told, and runs until it is stopped.
const WORKER: &str = r#"
echo "start $STEADFAST_ROUND $RANK $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $MASTER_ADDR:$MASTER_PORT"
exec sleep 1000
"#;

/// A job whose rendezvous is served by one process.
pub struct ElasticJob<'a> {
    pub scene: &'a Scene,
    pub nodes: String,
    pub etcd: SocketAddr,
    pub master: SocketAddr,
    admin: SocketAddr,
    server: Process,
}

/// A worker's start, as it printed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    pub round: u64,
    pub rank: u32,
    pub world_size: u32,
    pub restarts: u32,
    pub master: String,
}

impl<'a> ElasticJob<'a> {
    /// Starts the rendezvous of a job of so many nodes (`1:3`).
    pub fn start(scene: &'a Scene, nodes: &str, more: &[&str]) -> Self {
        let (etcd, master, admin) = (free_address(), free_address(), free_address());
        let [listen, master_listen, admin_listen] = [etcd, master, admin].map(|it| it.to_string());
        let mut args = vec!["rendezvous", "--rdzv-id", "job", "--nnodes", nodes];
        args.extend(["--listen", &listen, "--master-listen", &master_listen]);
        args.extend(["--admin-listen", &admin_listen]);
        args.extend(more);
        let server = scene.start("rendezvous", "steadfast", &args);
        let job = Self { scene, nodes: nodes.to_owned(), etcd, master, admin, server };
        job.until("the master acts", |status| !status["epoch"].is_null() || status["job"] == "job");
        job
    }

    /// Waits until the rendezvous has ended.
    pub fn end(&mut self) -> Ended {
        self.server.end(LIMIT)
    }

    /// Returns the flags of an agent.
    pub fn flags(&self) -> Vec<String> {
        let etcd = self.etcd.to_string();
        ["run", "--rdzv-endpoint", &etcd, "--rdzv-id", "job", "--nnodes", &self.nodes]
            .map(str::to_owned)
            .to_vec()
    }

    /// Starts an agent whose worker runs until it is stopped.
    pub fn agent(&self, name: &str) -> Process {
        self.agent_of(name, &[], &["sh", "-c", WORKER])
    }

    /// Starts an agent with more flags and a command.
    pub fn agent_of(&self, name: &str, more: &[&str], command: &[&str]) -> Process {
        let flags = self.flags();
        let args = flags.iter().map(String::as_str).chain(more.iter().copied());
        let args: Vec<&str> = args.chain(["--"]).chain(command.iter().copied()).collect();
        self.scene.start(name, "steadfast", &args)
    }

    /// Waits until the status says something, and returns it.
    #[track_caller]
    pub fn until(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        within(LIMIT, what, || {
            let reply = get(&self.admin.to_string(), "/status")?;
            let status = serde_json::from_str(&reply.body).ok()?;
            holds(&status).then_some(status)
        })
    }

    /// Waits until a round of so many workers runs.
    #[track_caller]
    pub fn until_running(&self, world_size: u32) -> Value {
        self.until(&format!("a round of {world_size} workers runs"), |status| {
            status["state"] == "running" && status["world_size"] == world_size
        })
    }
}

/// Returns the starts that the workers of an agent printed.
pub fn starts(agent: &Process) -> Vec<Start> {
    let text = agent.stdout();
    let lines = text.lines().filter_map(|line| line.split_once("start ").map(|it| it.1));
    lines
        .map(|line| {
            let words: Vec<&str> = line.split(' ').collect();
            let number = |index: usize| words[index].parse::<u64>().expect("it is a number");
            Start {
                round: number(0),
                rank: number(1) as u32,
                world_size: number(2) as u32,
                restarts: number(3) as u32,
                master: words[4].to_owned(),
            }
        })
        .collect()
}

/// Waits until workers of all agents run in one round together; returns their starts by name.
#[track_caller]
pub fn together(agents: &[(&str, &Process)]) -> BTreeMap<String, Start> {
    within(LIMIT, "the workers run in one round together", || {
        let last =
            agents.iter().map(|(name, agent)| Some(((*name).to_owned(), starts(agent).pop()?)));
        let last: BTreeMap<String, Start> = last.collect::<Option<_>>()?;
        let first = last.values().next()?;
        let is_one = last.values().all(|it| {
            (it.round, &it.master) == (first.round, &first.master)
                && it.world_size as usize == agents.len()
        });
        is_one.then(|| last.clone())
    })
}

/// Returns the path of a program that prints nothing and ignores SIGTERM.
pub fn stubborn(scene: &Scene) -> PathBuf {
    scene.write("stubborn.sh", "trap '' TERM\necho ready\nwhile :; do sleep 0.1; done\n")
}
