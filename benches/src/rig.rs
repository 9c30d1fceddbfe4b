//! A real cluster, and in the trainer's place something that sends gradients as fast as it can.

use std::sync::Arc;
use std::time::Duration;

use steadfast_client::{Cluster, Crew, Master, Pservers};
use steadfast_common::compression::Codec;
use steadfast_common::ids::TrainerId;
use steadfast_common::job_file::parse;
use steadfast_common::keys::Keys;
use steadfast_common::layout::{Layout, ParamSpec};
use steadfast_common::records::TrainerRecord;
use steadfast_coord::{Etcd, EtcdOptions, Session};
use steadfast_proto::v1::begin_init_reply::Answer;
use steadfast_proto::v1::{BeginInitRequest, FinishInitRequest};
use steadfast_tests::{
    Ended, EtcdServer, Job, Process, Proxy, Scene, Signal, free_address, within,
};
use tokio::net::TcpListener;
use uuid::Uuid;

const LEASE: &str = "30s";

/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// How we reach pservers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    Tcp,
    /// Over a link of [`SLOW_BYTES`] a second.
    SlowTcp,
    Unix,
}

impl Via {
    /// How many gradients of the benches' size make a sample.
    pub fn rounds(self) -> usize {
        match self {
            Self::Tcp | Self::Unix => 24,
            Self::SlowTcp => 3,
        }
    }
}

/// What a slow link lets through in a second, to each pserver.
const SLOW_BYTES: u32 = 32 << 20;

/// A slow link to `address`.
pub async fn slow_link(address: &str) -> Proxy {
    let link = Proxy::start(address).await;
    link.slow(SLOW_BYTES);
    link
}

/// Processes of one job, and our own connections to them.
pub struct Rig {
    pub pservers: Pservers,
    pub cluster: Arc<Cluster>,
    via: Via,
    /// Slow links that we reach pservers over.
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
    /// Starts a job whose model has `values` parameters on that many slots, all of them zero.
    pub async fn start(
        scene: Scene,
        etcd: EtcdServer,
        job: &Job,
        slots: u32,
        values: usize,
        via: Via,
    ) -> Self {
        let commands = Commands::new(&scene, &etcd, job, slots);
        let processes = commands.start_all(&scene, slots);
        let client = connect(&etcd.url()).await;
        let keys = Keys::of_job(&job.name);
        let session = Session::open(&client, Duration::from_secs(30)).await.expect("a lease");
        let cluster = Arc::new(Cluster::join(&client, keys.clone()).await.expect("etcd answers"));
        let id = TrainerId(Uuid::new_v4());
        register(&client, &keys, &session, id).await;
        let layout = Arc::new(Layout::new(vec![ParamSpec::new("w", &[values])]));
        let codec = parse(&job.text).expect("it is a job file").gradients.codec();
        let mut links = Vec::new();
        let crew = crew(&cluster, via, &mut links).await;
        let pservers =
            initialise(cluster.clone(), id, &crew, layout.clone(), &session, codec).await;
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

    /// Announces one more trainer.
    pub async fn register(&self, id: TrainerId) {
        register(&self.client, &self.keys, &self.session, id).await;
    }

    /// One more pserver than there are slots.
    pub fn start_spare(&mut self) {
        let spare = self.commands.start(&self.scene, "spare", "steadfast-pserver", &[]);
        self.processes.push(spare);
    }

    /// As another trainer sees the pservers: over connections of its own.
    pub async fn other_pservers(&self) -> Pservers {
        assert!(self.links.is_empty(), "a slow link has one trainer");
        let crew = crew(&self.cluster, self.via, &mut Vec::new()).await;
        let layout = self.layout.clone();
        let deadline = self.session.deadline();
        Pservers::new(self.cluster.clone(), &crew, layout, self.codec, deadline).expect("addresses")
    }

    /// Starts a second master; returns its process.
    pub fn start_standby(&mut self) -> i32 {
        let process = self.commands.start_master(&self.scene, "standby");
        within(PATIENCE, "it stands by", || process.stderr().contains("stands by").then_some(()));
        let pid = process.pid().as_raw();
        self.processes.push(process);
        pid
    }

    /// Takes a checkpoint, and waits for it.
    pub fn take_checkpoint(&self) {
        let ended = self.ask_for_checkpoint();
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }

    /// The same, of a job that may not go on.
    pub fn ask_for_checkpoint(&self) -> Ended {
        let args: Vec<&str> = self.commands.cluster.iter().map(String::as_str).collect();
        let args = [&["checkpoint", "now"], &args[..]].concat();
        self.scene.start("checkpoint", "steadfast", &args).end(PATIENCE)
    }

    /// Ends all pservers without a word.
    pub fn kill_pservers(&mut self) {
        for mut pserver in self.processes.drain(1..) {
            pserver.signal(Signal::SIGKILL);
            pserver.end(PATIENCE);
        }
    }

    /// Starts others in their place; waits until these have the values of the last checkpoint.
    pub fn replace_pservers(&mut self, slots: usize) {
        for slot in 0..slots {
            let name = format!("other-pserver-{slot}");
            self.processes.push(self.commands.start(&self.scene, &name, "steadfast-pserver", &[]));
        }
        for pserver in &self.processes[1..] {
            let has_restored = || pserver.stderr().contains("shard restored").then_some(());
            within(PATIENCE, "it restores its shard", has_restored);
        }
    }

    /// What the pservers have, in whatever generation they are by now.
    pub async fn pull(&mut self, values: &mut [f32]) {
        while self.pservers.pull(values).await.is_err() {
            self.cluster.generation_after(self.pservers.generation()).await;
            self.pservers = self.other_pservers().await;
        }
    }

    /// Ends the first master without a word.
    pub fn kill_master(&self) {
        self.processes[0].signal(Signal::SIGKILL);
    }

    /// The processes whose work counts.
    pub fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|it| it.pid().as_raw()).collect()
    }
}

/// A connection to the etcd at `url`.
pub async fn connect(url: &str) -> Etcd {
    let options = EtcdOptions { endpoints: vec![url.to_owned()], ..EtcdOptions::default() };
    Etcd::connect(&options).await.expect("etcd answers")
}

/// An address of ours that whoever doubts that we live can connect to.
async fn be_seen() -> String {
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
    let record = TrainerRecord { admin: be_seen().await, numerics: String::new() };
    let record = serde_json::to_vec(&record).expect("records are plain data");
    let created = client.create(&keys.trainer(id), &record, session.lease()).await;
    created.expect("etcd answers").expect("it is a new key");
}

/// How the processes of a job are started.
struct Commands {
    /// Where the job is.
    cluster: Vec<String>,
    common: Vec<String>,
    master: Vec<String>,
}

impl Commands {
    fn new(scene: &Scene, etcd: &EtcdServer, job: &Job, slots: u32) -> Self {
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
        let admin = ["--admin-listen".to_owned(), free_address().to_string()];
        let args: Vec<&str> =
            self.common.iter().chain(&admin).chain(more).map(String::as_str).collect();
        scene.start(name, program, &args)
    }
}

/// The pservers, as they are reached that way; over new `links` if it is a slow one.
async fn crew(cluster: &Cluster, via: Via, links: &mut Vec<Proxy>) -> Crew {
    let mut crew = cluster.crew().await.expect("the job begins");
    for holder in &mut crew.holders {
        assert!(holder.unix.is_some(), "we share a machine");
        if via != Via::Unix {
            holder.unix = None;
        }
        if via == Via::SlowTcp {
            let link = slow_link(&holder.address).await;
            holder.address = link.address().to_string();
            links.push(link);
        }
    }
    crew
}

async fn initialise(
    cluster: Arc<Cluster>,
    id: TrainerId,
    crew: &Crew,
    layout: Arc<Layout>,
    session: &Session,
    codec: Codec,
) -> Pservers {
    let master = Master::new(cluster.clone(), id);
    let caller = master.caller(crew.record.generation);
    let values = Arc::new(vec![0.0; layout.len()]);
    let pservers =
        Pservers::new(cluster, crew, layout, codec, session.deadline()).expect("addresses");
    let begun = BeginInitRequest { caller: caller.clone() };
    let reply = master.begin_init(begun).await.expect("the master answers");
    assert_eq!(reply.answer(), Answer::Initialize, "nobody else is there");
    pservers.init(reply.attempt, values).await.expect("pservers take values");
    let finished = FinishInitRequest { caller, attempt: reply.attempt };
    master.finish_init(finished).await.expect("the master answers");
    pservers
}
