//! A real cluster, with a load generator in place of the trainer.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use steadfast_common::ids::TrainerId;
use steadfast_common::job::job_file::parse;
use steadfast_common::records::discarded_records::LeftOutRecords;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{PROTOCOL, TrainerRecord};
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::layout::{Layout, ParamSpec};
use steadfast_coord::{Etcd, EtcdOptions, Session};
use steadfast_net::TlsIdentity;
use steadfast_net::tls::Credentials;
use steadfast_tests::{
    Certificates, Ended, EtcdServer, Job, Process, Proxy, Scene, Signal, free_address, within,
};
use steadfast_training_client::{
    ClientError, Cluster, GenerationClient, Master, PserverSet, Pservers,
};
use tokio::net::TcpListener;
use uuid::Uuid;

const LEASE: &str = "30s";

/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The transport to pservers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    Tcp,
    /// A link of [`SLOW_BYTES`] per second.
    SlowTcp,
    /// TCP with mutual TLS.
    Tls,
    /// Shared memory; of plain sockets, a Unix socket.
    Local,
}

impl Via {
    /// Returns the number of transfers per sample.
    pub fn rounds(self) -> usize {
        match self {
            Self::Tcp | Self::Tls | Self::Local => 24,
            Self::SlowTcp => 3,
        }
    }
}

/// Bandwidth of a slow link to each pserver, in bytes per second.
const SLOW_BYTES: u32 = 32 << 20;

/// Starts a slow link to `address`.
pub async fn slow_link(address: &str) -> Proxy {
    let link = Proxy::start(address).await;
    link.slow(SLOW_BYTES);
    link
}

/// The processes of one job, and the client connections to them.
pub struct Rig {
    pub pservers: Pservers,
    pub cluster: Arc<Cluster>,
    via: Via,
    /// Slow links to pservers.
    links: Vec<Proxy>,
    codec: Codec,
    layout: Arc<Layout>,
    client: Etcd,
    keys: Keys,
    commands: Commands,
    processes: Vec<Process>,
    session: Session,
    _etcd: EtcdServer,
    scene: Scene,
}

impl Rig {
    /// Starts a job with `slots` slots and a model with these parameters, all zero.
    pub async fn start(
        scene: Scene,
        etcd: EtcdServer,
        job: &Job,
        slots: u32,
        parameters: Vec<ParamSpec>,
        via: Via,
    ) -> Self {
        let certificates = (via == Via::Tls).then(|| Certificates::make(&scene, "certs"));
        let tls = certificates.as_ref().map_or_else(TlsIdentity::default, |certificates| {
            let credentials = Credentials::open(&certificates.of("trainer"));
            credentials.expect("they were just made").into()
        });
        let commands = Commands::new(&scene, &etcd, job, slots, certificates);
        let processes = commands.start_all(&scene, slots);
        let client = connect(&etcd.url()).await;
        let keys = Keys::of_job(&job.name);
        let session = Session::open(&client, Duration::from_secs(30)).await.expect("a lease");
        let cluster =
            Arc::new(Cluster::join(&client, keys.clone(), tls).await.expect("etcd answers"));
        let id = TrainerId(Uuid::new_v4());
        register(&client, &keys, &session, id).await;
        let layout = Arc::new(Layout::new(parameters));
        let codec = parse(&job.text).expect("it is a job file").gradients.codec();
        let mut links = Vec::new();
        let pserver_set = pserver_set(&cluster, via, &mut links).await;
        let pservers =
            initialize(cluster.clone(), id, &pserver_set, layout.clone(), &session, codec).await;
        Self {
            via,
            links,
            codec,
            layout,
            pservers,
            cluster,
            client,
            keys,
            commands,
            processes,
            session,
            _etcd: etcd,
            scene,
        }
    }

    /// Registers another trainer.
    async fn register(&self, id: TrainerId) {
        register(&self.client, &self.keys, &self.session, id).await;
    }

    /// Returns the generation, as another trainer takes part in it.
    pub async fn generation_of(&self, id: TrainerId) -> GenerationClient {
        self.register(id).await;
        GenerationClient::new(
            Master::new(self.cluster.clone(), id),
            self.pservers.clone(),
            LeftOutRecords::default(),
        )
    }

    /// Starts a spare pserver.
    pub fn start_spare(&mut self) {
        let spare = self.commands.start(&self.scene, "spare", "steadfast-pserver", &[]);
        self.processes.push(spare);
    }

    /// Starts spares and waits until each follows a slot.
    pub fn follow_slots(&mut self, slots: usize) {
        let start = |slot| {
            let name = format!("follower-{slot}");
            self.commands.start(&self.scene, &name, "steadfast-pserver", &[])
        };
        let spares: Vec<Process> = (0..slots).map(start).collect();
        for spare in &spares {
            let follows = || spare.stderr().contains("follows the slot").then_some(());
            within(TIMEOUT, "it follows a slot", follows);
        }
        self.processes.extend(spares);
    }

    /// Returns the pservers for another trainer, with connections of its own.
    pub async fn other_pservers(&self) -> Pservers {
        assert!(self.links.is_empty(), "a slow link has one trainer");
        let pserver_set = pserver_set(&self.cluster, self.via, &mut Vec::new()).await;
        let layout = self.layout.clone();
        let deadline = self.session.deadline();
        Pservers::new(self.cluster.clone(), &pserver_set, layout, self.codec, deadline)
            .expect("addresses")
    }

    /// Starts a second master; returns its process.
    pub fn start_standby(&mut self) -> i32 {
        let process = self.commands.start_master(&self.scene, "standby");
        within(TIMEOUT, "it is a standby", || process.stderr().contains("standby").then_some(()));
        let pid = process.pid().as_raw();
        self.processes.push(process);
        pid
    }

    /// Takes a checkpoint and waits for it.
    pub fn take_checkpoint(&self) {
        let ended = self.ask_for_checkpoint();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }

    /// Takes a checkpoint of a job that may have stopped training, which may fail.
    pub fn ask_for_checkpoint(&self) -> Ended {
        let args: Vec<&str> = self.commands.cluster.iter().map(String::as_str).collect();
        let args = [&["checkpoint", "now"], &args[..]].concat();
        self.scene.start("checkpoint", "steadfast", &args).end(TIMEOUT)
    }

    /// Sets the number of slots.
    pub fn scale(&self, slots: usize) {
        let slots = slots.to_string();
        let args: Vec<&str> = self.commands.cluster.iter().map(String::as_str).collect();
        let args = [&["scale", "--slots", &slots], &args[..]].concat();
        let ended = self.scene.start("scale", "steadfast", &args).end(TIMEOUT);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }

    /// Kills the first pserver, which holds a slot.
    pub fn kill_pserver(&mut self) {
        let mut pserver = self.processes.remove(1);
        pserver.signal(Signal::SIGKILL);
        pserver.end(TIMEOUT);
    }

    /// Kills all pservers.
    pub fn kill_pservers(&mut self) {
        for mut pserver in self.processes.drain(1..) {
            pserver.signal(Signal::SIGKILL);
            pserver.end(TIMEOUT);
        }
    }

    /// Starts pservers and waits until all have the values of a checkpoint, or those of the slots before.
    pub fn replace_pservers(&mut self, slots: usize) {
        for slot in 0..slots {
            let name = format!("other-pserver-{slot}");
            self.processes.push(self.commands.start(&self.scene, &name, "steadfast-pserver", &[]));
        }
        for pserver in &self.processes[1..] {
            let has_restored = || pserver.stderr().contains("shard restored").then_some(());
            within(TIMEOUT, "it restores its shard", has_restored);
        }
    }

    /// Pulls the parameters, in whatever generation the pservers are.
    pub async fn pull(&mut self, values: &mut [f32]) {
        while self.pservers.pull(values).await.is_err() {
            self.cluster.generation_after(self.pservers.generation()).await;
            self.pservers = self.other_pservers().await;
        }
    }

    /// Kills the first master.
    pub fn kill_master(&self) {
        self.processes[0].signal(Signal::SIGKILL);
    }

    /// Returns the processes whose resources are measured.
    pub fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|it| it.pid().as_raw()).collect()
    }
}

/// Connects to the etcd at `url`.
pub async fn connect(url: &str) -> Etcd {
    let options = EtcdOptions { endpoints: vec![url.to_owned()], ..EtcdOptions::default() };
    Etcd::connect(&options).await.expect("etcd answers")
}

/// Listens for the failure detector, as the admin port of a trainer does; returns the address.
pub async fn listen_for_probes() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback is there");
    let address = listener.local_addr().expect("it is bound").to_string();
    tokio::spawn(async move {
        let mut visitors = Vec::new();
        while let Ok((visitor, _)) = listener.accept().await {
            visitors.push(visitor);
        }
    });
    address
}

async fn register(client: &Etcd, keys: &Keys, session: &Session, id: TrainerId) {
    let (admin, numerics) = (listen_for_probes().await, String::new());
    let record = TrainerRecord { admin, numerics, protocol: PROTOCOL };
    let record = serde_json::to_vec(&record).expect("records are plain data");
    let created = client.create(&keys.trainer(id), &record, session.lease()).await;
    created.expect("etcd answers").expect("it is a new key");
}

/// The command lines of a job's processes.
struct Commands {
    /// The job and its etcd.
    cluster: Vec<String>,
    common: Vec<String>,
    master: Vec<String>,
    certificates: Option<Certificates>,
}

impl Commands {
    fn new(
        scene: &Scene,
        etcd: &EtcdServer,
        job: &Job,
        slots: u32,
        certificates: Option<Certificates>,
    ) -> Self {
        let (file, store) = (job.write(scene), scene.path("store"));
        let (file, store) = (file.display().to_string(), store.display().to_string());
        let slots = slots.to_string();
        let owned = |args: &[&str]| args.iter().map(|&it| it.to_owned()).collect();
        let url = etcd.url();
        let cluster = ["--job", &job.name, "--etcd-endpoints", &url];
        Self {
            cluster: owned(&cluster),
            common: owned(&[&cluster[..], &["--lease-ttl", LEASE]].concat()),
            master: owned(&["--job-file", &file, "--store", &store, "--pservers", &slots]),
            certificates,
        }
    }

    fn start_all(&self, scene: &Scene, slots: u32) -> Vec<Process> {
        let pserver =
            |slot| self.start(scene, &format!("pserver-{slot}"), "steadfast-pserver", &[]);
        [self.start_master(scene, "master")].into_iter().chain((0..slots).map(pserver)).collect()
    }

    fn start_master(&self, scene: &Scene, name: &str) -> Process {
        self.start(scene, name, "steadfast-master", &self.master)
    }

    fn start(&self, scene: &Scene, name: &str, program: &str, more: &[String]) -> Process {
        let mut own = vec!["--admin-listen".to_owned(), free_address().to_string()];
        if let Some(certificates) = &self.certificates {
            let role = program.trim_start_matches("steadfast-");
            own.extend(["--tls".to_owned(), certificates.of(role).display().to_string()]);
        }
        let args: Vec<&str> =
            self.common.iter().chain(&own).chain(more).map(String::as_str).collect();
        scene.start(name, program, &args)
    }
}

/// Returns the pserver set as reached over a transport; adds slow links to `links`.
async fn pserver_set(cluster: &Cluster, via: Via, links: &mut Vec<Proxy>) -> PserverSet {
    let mut pserver_set = cluster.pserver_set().await.expect("the job begins");
    for holder in &mut pserver_set.holders {
        assert!(holder.unix.is_some(), "the pserver is on another machine");
        if via != Via::Local {
            holder.unix = None;
        }
        if via == Via::SlowTcp {
            let link = slow_link(&holder.address).await;
            holder.address = link.address().to_string();
            links.push(link);
        }
    }
    pserver_set
}

async fn initialize(
    cluster: Arc<Cluster>,
    id: TrainerId,
    pserver_set: &PserverSet,
    layout: Arc<Layout>,
    session: &Session,
    codec: Codec,
) -> Pservers {
    let master = Master::new(cluster.clone(), id);
    let values = || ready(Ok::<_, ClientError>(vec![0.0; layout.len()].into()));
    let deadline = session.deadline();
    let pservers = Pservers::new(cluster, pserver_set, layout.clone(), codec, deadline);
    let generation =
        GenerationClient::new(master, pservers.expect("addresses"), LeftOutRecords::default());
    generation.initialize(values).await.expect("the job begins");
    generation.pservers().clone()
}
