//! A job whose processes a test starts one by one, on a real etcd.

use std::collections::BTreeMap;
use std::process::{Command, Output};
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use steadfast_common::keys::Keys;
use steadfast_common::spec::JobSpec;
use steadfast_coord::{Entry, Etcd, EtcdOptions};
use tokio::runtime::Runtime;

use crate::{
    Answer, Certificates, Ended, EtcdServer, Job, Process, Scene, eventually, free_address, get,
    program,
};

/// Longest time that a process may take to leave.
const LEAVE_MAX: Duration = Duration::from_secs(60);

/// What opens the admin ports of a cluster with certificates.
pub const TOKEN: &str = "canary-token-0d5e6f1a";

const TOKEN_FILE: &str = "token";

/// The settings of a cluster by hand.
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
    /// Starts a real etcd for a job with that many slots.
    pub fn new(scene: &'a Scene, job: &Job, pservers: u32, lease_ttl: &str) -> Self {
        Self::on(scene, job, pservers, lease_ttl, None)
    }

    /// The same with certificates, also towards etcd.
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
        let spec = steadfast_common::job_file::parse(&job.text).expect("the job file is sound");
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

    /// Keeps what the job saves at this URL, which needs these variables.
    pub fn with_store(mut self, url: &str, environment: &[(&str, &str)]) -> Self {
        self.store = url.to_owned();
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        self.environment = environment.iter().map(owned).collect();
        self
    }

    /// Starts a master.
    pub fn master(&self, name: &str) -> Member {
        let more = ["--job-file", &self.job, "--store", &self.store, "--pservers", &self.pservers];
        self.member(name, "master", &more)
    }

    /// Starts a pserver.
    pub fn pserver(&self, name: &str) -> Member {
        self.member(name, "pserver", &[])
    }

    /// Starts a pserver with more settings.
    pub fn pserver_with(&self, name: &str, more: &[&str]) -> Member {
        self.member(name, "pserver", more)
    }

    /// Starts a trainer.
    pub fn trainer(&self, name: &str) -> Member {
        self.member(name, "trainer", &[])
    }

    /// One of our programs, with what it needs to reach the store.
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
        Member { admin, process: Process::start(self.scene.folder(), name, &mut command) }
    }

    /// Runs `steadfast` with these words, as an administrator.
    pub fn steadfast(&self, args: &[&str]) -> Output {
        self.tool(args).output().expect("the program starts")
    }

    /// `steadfast` with these words, as an administrator.
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

    /// Reads one key.
    pub fn get(&self, key: &str) -> Option<Entry> {
        self.runtime.block_on(self.client.get(key)).expect("etcd answers")
    }

    /// Reads one key as JSON.
    pub fn value(&self, key: &str) -> Option<Value> {
        self.get(key).map(|entry| entry.json().expect("values are JSON"))
    }

    /// The admin port of the master that acts, once one does.
    pub fn acting(&self) -> String {
        eventually("a master acts", || self.acting_now())
    }

    /// The admin port of the master that acts, if one does.
    pub fn acting_now(&self) -> Option<String> {
        Some(self.value(&self.keys.master_addr())?["admin"].as_str()?.to_owned())
    }

    /// Waits until the acting master tells such a status.
    #[track_caller]
    pub fn until(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        eventually(what, || {
            let status = self.status()?;
            holds(&status).then_some(status)
        })
    }

    /// What the acting master tells; with certificates, by the command line.
    fn status(&self) -> Option<Value> {
        let acting = self.acting_now()?;
        let text = match &self.certificates {
            None => get(&acting, "/status")?.body,
            Some(_) => String::from_utf8(self.steadfast(&["status", "--json"]).stdout).ok()?,
        };
        serde_json::from_str(&text).ok()
    }

    /// Waits until that many steps are done.
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
    /// Asks its admin port.
    pub fn ask(&self, path: &str) -> Option<Answer> {
        get(&self.admin, path)
    }

    /// Whether it says that it can do its work.
    pub fn is_ready(&self) -> bool {
        self.ask("/readyz").is_some_and(|it| it.code == 200)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Waits for its end.
    #[track_caller]
    pub fn end(&mut self) -> Ended {
        let ended = self.process.end(LEAVE_MAX);
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
        ended
    }
}
