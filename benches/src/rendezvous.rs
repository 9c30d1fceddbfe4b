//! Rendezvous of many nodes: agents without workers, each with its own lease and its own connection to a real
//! master on a real etcd.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::join_all;
use steadfast_common::ids::{NodeId, Phase, Round};
use steadfast_common::records::commits::{BegunState, COMMIT_TAG, Progress};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::rendezvous::{AgentRecord, PORTS_TAG, RoundRecord, Runner};
use steadfast_coord::Etcd;
use steadfast_elastic_client::{
    Change, Entered, Joined, NodeIdentity, NodeSession, RecordsWish, Terms,
};
use steadfast_net::TlsIdentity;
use steadfast_tests::{EtcdServer, Process, Scene, free_address};
use uuid::Uuid;

use crate::expense::{cpu_of, peak_of};
use crate::rig::{connect, listen_for_probes};
use crate::sample::Sample;

const JOB: &str = "nodes";

/// Long enough for keep-alives of this busy process.
const LEASE: Duration = Duration::from_secs(60);

/// Length of what an agent tells the others about its ports, as JSON.
const PORTS_BYTES: usize = 60;

/// A master, and the agents of its job.
struct Nodes {
    agents: Vec<NodeSession>,
    terms: Terms,
    master: Process,
    _etcd: EtcdServer,
    _scene: Scene,
}

impl Nodes {
    /// Starts etcd and a master; lets so many agents register, announce themselves and form the first round.
    /// Returns the master's CPU time for that, too.
    async fn start(count: u32) -> (Self, f64) {
        Self::of_job(count, "").await
    }

    /// The same, with more keys in the job file.
    async fn of_job(count: u32, more: &str) -> (Self, f64) {
        let scene = Scene::new();
        let etcd = EtcdServer::real(&scene);
        let file = format!(
            "name = \"{JOB}\"\nkind = \"elastic\"\n{more}[nodes]\nmin = {}\nmax = {count}\nlast_call = \"60s\"\n",
            count - 1
        );
        let file = scene.write("job.toml", file).display().to_string();
        let admin = free_address().to_string();
        let args = ["--job", JOB, "--job-file", &file, "--etcd-endpoints", &etcd.url()];
        let args = [&args[..], &["--admin-listen", &admin]].concat();
        let master = scene.start("master", "steadfast-master", &args);
        let client = connect(&etcd.url()).await;
        let terms = Terms { nodes_min: count - 1, nodes_max: count };
        // A call waits until the master acts.
        let mut nodes = Self { agents: Vec::new(), terms, master, _etcd: etcd, _scene: scene };
        let probed = listen_for_probes().await;
        nodes.agents.push(register(&client, 0, &probed).await);
        nodes.agents[0].announce().await.expect("the master answers");
        let before = nodes.cpu();
        let others = (1..count).map(|index| register(&client, index, &probed));
        nodes.agents.extend(join_all(others).await);
        join_all(nodes.agents.iter().map(|agent| async {
            agent.announce().await.expect("the master answers");
        }))
        .await;
        let rounds = join_all(nodes.agents.iter().map(|agent| enter(agent, Round(0), terms))).await;
        assert!(
            rounds.iter().all(|it| it.members.len() == count as usize),
            "they are in one round"
        );
        let cpu = nodes.cpu() - before;
        (nodes, cpu)
    }

    fn cpu(&self) -> f64 {
        cpu_of(self.master.pid().as_raw())
    }

    /// Returns a sample whose time is CPU time of the master.
    fn sample(&self, cpu: f64) -> Sample {
        let peak_bytes = peak_of(self.master.pid().as_raw());
        // Less than one tick of the kernel's clock is not measurable.
        Sample { amount: 1.0, seconds: cpu.max(0.01), peak_bytes, ..Sample::default() }
    }
}

/// Measures the master's CPU time from the first registration until all nodes are in a round, and know the ports of
/// each other.
pub async fn form(count: u32) -> Sample {
    let (nodes, cpu) = Nodes::start(count).await;
    nodes.sample(cpu)
}

/// Measures the master's CPU time from the loss of a node until all others are in the next round.
pub async fn form_again(count: u32) -> Sample {
    let (mut nodes, _) = Nodes::start(count).await;
    let lost = nodes.agents.pop().expect("there are several");
    let (terms, before) = (nodes.terms, nodes.cpu());
    let leave = async {
        lost.close().await;
    };
    let follow = nodes.agents.iter().map(|agent| async move {
        while let Ok(Change { nodes: 0, .. }) = agent.watch(Round(1), 0, None, LEASE).await {}
        enter(agent, Round(1), terms).await
    });
    let (rounds, ()) = tokio::join!(join_all(follow), leave);
    assert!(rounds.iter().all(|it| it.round == Round(2)), "they are in the second round");
    nodes.sample(nodes.cpu() - before)
}

/// Measures how many records are dealt to nodes in a second, until each has asked 64 times.
pub async fn deal() -> Sample {
    let (nodes, _) = Nodes::of_job(64, "records = 1000000000\norder = \"dynamic\"\n").await;
    let (round, begun) = (Round(1), Progress::State(BegunState::default()));
    join_all(nodes.agents.iter().map(|agent| async {
        let data = Bytes::from(begun.to_json());
        while let Entered::Waits(_) =
            agent.enter(round, COMMIT_TAG, Phase(0), data.clone()).await.expect("a master answers")
        {
        }
    }))
    .await;
    let (cpu, started) = (nodes.cpu(), Instant::now());
    let wish = RecordsWish { wanted: 256, least: 32, end: 0 };
    let dealt = join_all(nodes.agents.iter().map(|agent| async move {
        let mut total = 0;
        for _ in 0..64 {
            total = agent.deal(round, total, wish).await.expect("a master answers").total;
        }
        total
    }))
    .await;
    let amount = dealt.iter().sum::<u64>() as f64;
    let (seconds, cpu_seconds) = (started.elapsed().as_secs_f64(), nodes.cpu() - cpu);
    Sample { amount, seconds, cpu_seconds, ..Sample::default() }
}

async fn register(etcd: &Etcd, index: u32, probed: &str) -> NodeSession {
    // On this host, so that the master watches the port.
    let address = format!("127.0.0.1:{}", 1000 + index);
    let liveness = Some(probed.to_owned());
    let record = AgentRecord { liveness, ..AgentRecord::new(Runner::Agent, address, 8) };
    let identity =
        NodeIdentity { node: NodeId(Uuid::new_v4()), record, tls: TlsIdentity::default() };
    let registered = NodeSession::register(etcd, &Keys::of_job(JOB), LEASE, identity).await;
    registered.expect("etcd answers")
}

/// Joins a round and exchanges ports with its members, as an agent does.
async fn enter(agent: &NodeSession, after: Round, terms: Terms) -> RoundRecord {
    let record = loop {
        match agent.join(after, terms, Duration::MAX).await.expect("the master answers") {
            Joined::Round(record) => break record,
            Joined::Waits(_) => {}
            Joined::TooFew(reason) => panic!("{reason}"),
        }
    };
    let ports = Bytes::from(vec![b'0'; PORTS_BYTES]);
    loop {
        let entered = agent.enter(record.round, PORTS_TAG, Phase(0), ports.clone()).await;
        match entered.expect("the master answers") {
            Entered::Released(entries) => {
                assert_eq!(entries.len(), record.members.len());
                return record;
            }
            Entered::Waits(_) => {}
            Entered::Ended(reason) => panic!("{reason}"),
        }
    }
}
