//! A job on a real etcd whose processes are started one by one by a test.

use std::collections::BTreeMap;
use std::process::{Command, Output};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use steadfast_common::job::spec::JobSpec;
use steadfast_common::records::keys::Keys;
use steadfast_coord::{Entry, Etcd, EtcdOptions};
use tokio::runtime::Runtime;

use crate::{
    Certificates, Ended, EtcdServer, HttpReply, Job, Process, Scene, eventually, free_address, get,
    program,
};

/// Longest time that a process may take to exit.
const LEAVE_MAX: Duration = Duration::from_secs(60);

/// Bearer token for the admin ports of a cluster with certificates.
pub const TOKEN: &str = "canary-token-0d5e6f1a";

const TOKEN_FILE: &str = "token";

/// A job on a real etcd, and the settings of its processes.
#[derive(Debug)]
pub struct Cluster<'a> {
    scene: &'a Scene,
    pub keys: Keys,
    pub spec: JobSpec,
    pub etcd: EtcdServer,
    job: String,
    lease_ttl: String,
    pservers: String,
    store: String,
    environment: Vec<(String, String)>,
    certificates: Option<Certificates>,
    client: Etcd,
    runtime: Runtime,
}

/// One process of a cluster.
#[derive(Debug)]
pub struct Member {
    pub admin: String,
    pub process: Process,
}

impl<'a> Cluster<'a> {
    /// Starts a real etcd for a job with `pservers` slots.
    pub fn new(scene: &'a Scene, job: &Job, pservers: u32, lease_ttl: &str) -> Self {
        Self::on(scene, job, pservers, lease_ttl, None)
    }

    /// Starts etcd as [`Cluster::new`] does, with TLS between all processes and etcd.
    pub fn secured(
        scene: &'a Scene,
        job: &Job,
        pservers: u32,
        lease_ttl: &str,
        certificates: &Certificates,
    ) -> Self {
        Self::on(scene, job, pservers, lease_ttl, Some(certificates))
    }

    fn on(
        scene: &'a Scene,
        job: &Job,
        pservers: u32,
        lease_ttl: &str,
        certificates: Option<&Certificates>,
    ) -> Self {
        let etcd = match certificates {
            Some(certificates) => EtcdServer::secured(scene, certificates),
            None => EtcdServer::real(scene),
        };
        let spec =
            steadfast_common::job::job_file::parse(&job.text).expect("the job file is sound");
        let runtime = Runtime::new().expect("threads can be started");
        scene.write(TOKEN_FILE, TOKEN);
        let file = |name| Some(certificates?.of("admin").join(name));
        let options = EtcdOptions {
            endpoints: vec![etcd.url()],
            ca_file: file("ca.crt"),
            cert_file: file("tls.crt"),
            key_file: file("tls.key"),
            ..EtcdOptions::default()
        };
        let client =
            eventually("etcd has a leader", || runtime.block_on(Etcd::connect(&options)).ok());
        Self {
            scene,
            keys: Keys::of_job(&spec.name),
            spec,
            etcd,
            job: job.write(scene).display().to_string(),
            lease_ttl: lease_ttl.to_owned(),
            pservers: pservers.to_string(),
            store: scene.path("store").display().to_string(),
            environment: Vec::new(),
            certificates: certificates.cloned(),
            client,
            runtime,
        }
    }

    /// Sets the store URL of the job, and the environment variables that the store needs.
    pub fn with_store(mut self, url: &str, environment: &[(&str, &str)]) -> Self {
        self.store = url.to_owned();
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        self.environment = environment.iter().map(owned).collect();
        self
    }

    pub fn master(&self, name: &str) -> Member {
        let more = ["--job-file", &self.job, "--store", &self.store, "--pservers", &self.pservers];
        self.member(name, "master", &more)
    }

    pub fn pserver(&self, name: &str) -> Member {
        self.member(name, "pserver", &[])
    }

    /// Starts a pserver with more settings.
    pub fn pserver_with(&self, name: &str, more: &[&str]) -> Member {
        self.member(name, "pserver", more)
    }

    pub fn trainer(&self, name: &str) -> Member {
        self.member(name, "trainer", &[])
    }

    /// Returns a command for one of the programs, with the environment of the store.
    pub fn command(&self, program_name: &str) -> Command {
        let mut command = self.scene.command(&program(program_name));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    fn member(&self, name: &str, role: &str, more: &[&str]) -> Member {
        let admin = free_address().to_string();
        let url = self.etcd.url();
        let common = ["--job", &self.spec.name, "--etcd-endpoints", &url];
        let ports = ["--admin-listen", &admin, "--lease-ttl", &self.lease_ttl];
        let mut command = self.command(&format!("steadfast-{role}"));
        if let Some(certificates) = &self.certificates {
            command.arg("--tls").arg(certificates.of(role));
            command.arg("--admin-token-file").arg(self.scene.path(TOKEN_FILE));
        }
        command.args(common).args(ports).args(more);
        Member { admin, process: Process::start(self.scene.directory(), name, &mut command) }
    }

    /// Runs `steadfast` with these arguments, as an administrator.
    pub fn steadfast(&self, args: &[&str]) -> Output {
        self.tool(args).output().expect("the program starts")
    }

    /// Returns a command for `steadfast` with these arguments, as an administrator.
    pub fn tool(&self, args: &[&str]) -> Command {
        let mut command = self.command("steadfast");
        command.args(args).args(["--job", &self.spec.name, "--etcd-endpoints", &self.etcd.url()]);
        if let Some(certificates) = &self.certificates {
            command.arg("--tls").arg(certificates.of("admin"));
        }
        command
    }

    /// Reads all keys that begin with `prefix`.
    pub fn list(&self, prefix: &str) -> BTreeMap<String, Entry> {
        self.runtime.block_on(self.client.list(prefix)).expect("etcd answers").entries
    }

    pub fn get(&self, key: &str) -> Option<Entry> {
        self.runtime.block_on(self.client.get(key)).expect("etcd answers")
    }

    /// Reads one key as JSON.
    pub fn value(&self, key: &str) -> Option<Value> {
        self.get(key).map(|entry| entry.json().expect("values are JSON"))
    }

    /// Waits for an acting master; returns its admin address.
    pub fn acting(&self) -> String {
        eventually("a master acts", || self.acting_now())
    }

    /// Returns the admin address of the acting master, if any.
    pub fn acting_now(&self) -> Option<String> {
        Some(self.value(&self.keys.master_addr())?["admin"].as_str()?.to_owned())
    }

    /// Waits until the status of the acting master meets a condition.
    #[track_caller]
    pub fn until(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || {
            let status = self.status()?;
            holds(&status).then_some(status)
        })
    }

    /// Returns the status of the acting master; with certificates, through the command line.
    fn status(&self) -> Option<Value> {
        let acting = self.acting_now()?;
        let text = match &self.certificates {
            None => get(&acting, "/status")?.body,
            Some(_) => String::from_utf8(self.steadfast(&["status", "--json"]).stdout).ok()?,
        };
        serde_json::from_str(&text).ok()
    }

    /// Waits until `step` steps are done.
    #[track_caller]
    pub fn until_step(&self, step: u64) {
        self.until(&format!("step {step} is done"), |it| it["version"].as_u64() >= Some(step));
    }

    /// Waits for the result.
    #[track_caller]
    pub fn result(&self) -> Value {
        eventually("the job has a result", || self.value(&self.keys.result()))
    }
}

impl Member {
    /// Sends a GET request to the admin port.
    pub fn ask(&self, path: &str) -> Option<HttpReply> {
        get(&self.admin, path)
    }

    /// Returns whether the process reports that it is ready.
    pub fn is_ready(&self) -> bool {
        self.ask("/readyz").is_some_and(|it| it.code == 200)
    }

    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Waits until the process exits, for at most a minute, and checks that it did not panic.
    #[track_caller]
    pub fn end(&mut self) -> Ended {
        let ended = self.process.end(LEAVE_MAX);
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
        ended
    }
}
