//! A real cluster, and in the trainer's place something that sends gradients as fast as it can.

use std::sync::Arc;
use std::time::Duration;

use steadfast_client::{Cluster, Master, Pservers};
use steadfast_common::ids::TrainerId;
use steadfast_common::keys::Keys;
use steadfast_common::layout::{Layout, ParamSpec};
use steadfast_common::records::TrainerRecord;
use steadfast_coord::{Etcd, EtcdOptions, Session};
use steadfast_proto::v1::begin_init_reply::Answer;
use steadfast_proto::v1::{BeginInitRequest, FinishInitRequest};
use steadfast_tests::{EtcdServer, Job, Process, Scene, free_address};
use uuid::Uuid;

const LEASE: &str = "30s";

/// Processes of one job, and our own connections to them.
pub struct Rig {
    pub pservers: Pservers,
    processes: Vec<Process>,
    _session: Session,
    _etcd: EtcdServer,
    _scene: Scene,
}

impl Rig {
    /// Starts a job whose model has `values` parameters on that many slots, all of them zero.
    pub async fn start(job: &Job, slots: u32, values: usize) -> Self {
        let scene = Scene::new();
        let etcd = EtcdServer::embedded(&scene);
        let processes = start(&scene, &etcd, job, slots);
        let options = EtcdOptions { endpoints: vec![etcd.url()], ..EtcdOptions::default() };
        let client = Etcd::connect(&options).await.expect("etcd answers");
        let keys = Keys::of_job(&job.name);
        let session = Session::open(&client, Duration::from_secs(30)).await.expect("a lease");
        let id = TrainerId(Uuid::new_v4());
        let record = TrainerRecord { admin: free_address().to_string(), numerics: String::new() };
        let record = serde_json::to_vec(&record).expect("records are plain data");
        let created = client.create(&keys.trainer(id), &record, session.lease()).await;
        created.expect("etcd answers").expect("it is a new key");
        let cluster = Arc::new(Cluster::join(&client, keys).await.expect("etcd answers"));
        let layout = Arc::new(Layout::new(vec![ParamSpec::new("w", &[values])]));
        let pservers = initialise(cluster, id, layout, &session).await;
        Self { pservers, processes, _session: session, _etcd: etcd, _scene: scene }
    }

    /// The processes whose work counts.
    pub fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|it| it.pid().as_raw()).collect()
    }
}

fn start(scene: &Scene, etcd: &EtcdServer, job: &Job, slots: u32) -> Vec<Process> {
    let (file, store) = (job.write(scene), scene.path("store"));
    let (file, store, slots_text) =
        (file.display().to_string(), store.display().to_string(), slots.to_string());
    let url = etcd.url();
    let member = |name: &str, program: &str, more: &[&str]| {
        let admin = free_address().to_string();
        let common = ["--job", &job.name, "--etcd-endpoints", &url, "--lease-ttl", LEASE];
        let args = [&common[..], &["--admin-listen", &admin], more].concat();
        scene.start(name, program, &args)
    };
    let master = ["--job-file", &file, "--store", &store, "--pservers", &slots_text];
    let mut processes = vec![member("master", "steadfast-master", &master)];
    processes.extend(
        (0..slots).map(|slot| member(&format!("pserver-{slot}"), "steadfast-pserver", &[])),
    );
    processes
}

async fn initialise(
    cluster: Arc<Cluster>,
    id: TrainerId,
    layout: Arc<Layout>,
    session: &Session,
) -> Pservers {
    let master = Master::new(cluster.clone(), id);
    let crew = cluster.crew().await.expect("the job begins");
    let caller = master.caller(crew.record.generation);
    let values = Arc::new(vec![0.0; layout.len()]);
    let pservers = Pservers::new(cluster, &crew, layout, session.deadline()).expect("addresses");
    let begun = BeginInitRequest { caller: caller.clone() };
    let reply = master.begin_init(begun).await.expect("the master answers");
    assert_eq!(reply.answer(), Answer::Initialize, "nobody else is there");
    pservers.init(reply.attempt, values).await.expect("pservers take values");
    let finished = FinishInitRequest { caller, attempt: reply.attempt };
    master.finish_init(finished).await.expect("the master answers");
    pservers
}
