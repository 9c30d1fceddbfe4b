//! The service that a program in any language can call. The tests have the names that the design of TensorFlow
//! Elastic gives them.

use std::time::{Duration, Instant};

use steadfast_proto::v1::elastic_client::ElasticClient;
use steadfast_proto::v1::{
    BarrierReply, BarrierRequest, GetClusterSpecReply, GetClusterSpecRequest,
    GetWaitingNodesRequest, ShutDownRequest, SynchronizeReply, SynchronizeRequest,
};
use steadfast_tests::{EtcdServer, Scene, Signal, free_address};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::job::{ElasticJob, LIMIT};

/// A program that calls the service, and is known by its address.
#[derive(Clone)]
struct Caller {
    client: ElasticClient<Channel>,
    address: String,
    nodes: (u32, u32),
}

impl Caller {
    async fn new(job: &ElasticJob<'_>, address: &str) -> Self {
        let client = ElasticClient::connect(format!("http://{}", job.master)).await.unwrap();
        let (min, max) = job.nodes.split_once(':').unwrap();
        let nodes = (min.parse().unwrap(), max.parse().unwrap());
        Self { client, address: address.to_owned(), nodes }
    }

    async fn cluster(&self) -> Result<GetClusterSpecReply, Status> {
        let (min_nodes, max_nodes) = self.nodes;
        let address = self.address.clone();
        let request = GetClusterSpecRequest { address, min_nodes, max_nodes, reset: false };
        let mut client = self.client.clone();
        let reply = tokio::time::timeout(LIMIT, client.get_cluster_spec(request));
        reply.await.expect("it is answered in time").map(tonic::Response::into_inner)
    }

    async fn waiting(&self) -> Result<i64, Status> {
        let request = GetWaitingNodesRequest { address: self.address.clone() };
        let reply = self.client.clone().get_waiting_nodes(request).await?;
        Ok(reply.into_inner().waiting_nodes)
    }

    async fn until_waiting(&self, expected: i64) {
        let deadline = Instant::now() + LIMIT;
        while self.waiting().await.unwrap() != expected {
            assert!(Instant::now() < deadline, "never {expected} nodes");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn barrier(&self, tag: &str, timeout_seconds: f64) -> BarrierReply {
        self.barrier_of(tag, None, timeout_seconds).await
    }

    async fn barrier_of(&self, tag: &str, phase: Option<u64>, timeout: f64) -> BarrierReply {
        let (address, tag) = (self.address.clone(), tag.to_owned());
        let request = BarrierRequest { address, tag, timeout_seconds: timeout, phase };
        self.client.clone().barrier(request).await.unwrap().into_inner()
    }

    async fn synchronize(&self, data: Vec<u8>, timeout_seconds: f64) -> SynchronizeReply {
        let address = self.address.clone();
        let (tag, data) = ("values".to_owned(), data.into());
        let request = SynchronizeRequest { address, tag, data, timeout_seconds, phase: None };
        self.client.clone().synchronize(request).await.unwrap().into_inner()
    }
}

fn workers(reply: &GetClusterSpecReply) -> Vec<String> {
    let spec: serde_json::Value = serde_json::from_str(&reply.cluster_spec).unwrap();
    let workers = spec["cluster"]["worker"].as_array().unwrap();
    workers.iter().map(|it| it.as_str().unwrap().to_owned()).collect()
}

/// Runs a test with a job of so many nodes.
fn with_job(nodes: &str, test: impl AsyncFnOnce(&ElasticJob<'_>)) {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, nodes, &["--last-call", "100ms"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(test(&job));
}

/// S003-36: the server starts with nothing but a port, and a caller that it does not know gets an error.
#[test]
fn bringup() {
    with_job("1:3", async |job| {
        let status = Caller::new(job, "a:1").await.waiting().await.unwrap_err();
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().contains("call GetClusterSpec"), "{}", status.message());
    });
}

/// S003-37, S003-1: one node gets its cluster, without the index of a task.
#[test]
fn single_connect() {
    with_job("1:1", async |job| {
        let caller = Caller::new(job, "a:1").await;
        let reply = caller.cluster().await.unwrap();
        assert_eq!(reply.cluster_spec, r#"{"cluster":{"worker":["a:1"]}}"#);
        assert_eq!((reply.round, reply.rank), (1, 0));
        // The answer was lost: the same call gets it again.
        assert_eq!(caller.cluster().await.unwrap(), reply);
        let mut other = caller.clone();
        other.nodes = (1, 2);
        let status = other.cluster().await.unwrap_err();
        assert_eq!(status.code(), Code::AlreadyExists, "{}", status.message());
        other.address = "no port".to_owned();
        assert_eq!(other.cluster().await.unwrap_err().code(), Code::InvalidArgument);
    });
}

/// The barriers of one kind of node are unknown to another, so a job has one kind.
#[test]
fn a_node_of_another_kind_is_refused() {
    with_job("1:3", async |job| {
        let _agent = job.agent("a");
        job.until_running(1);
        let status = Caller::new(job, "b:1").await.cluster().await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{}", status.message());
        assert!(status.message().contains("the others of the job by `steadfast run`"));
    });
}

/// S003-38, S003-2: several nodes get one cluster, as soon as the maximum is reached.
#[test]
fn multi_connect() {
    with_job("2:3", async |job| {
        let [a, b, c] = [
            Caller::new(job, "a:1").await,
            Caller::new(job, "b:1").await,
            Caller::new(job, "c:1").await,
        ];
        let (a, b, c) = tokio::join!(a.cluster(), b.cluster(), c.cluster());
        let (a, b, c) = (a.unwrap(), b.unwrap(), c.unwrap());
        let mut all = workers(&a);
        assert_eq!((workers(&b), workers(&c)), (all.clone(), all.clone()));
        assert_eq!(all[a.rank as usize], "a:1");
        all.sort();
        assert_eq!(all, ["a:1", "b:1", "c:1"]);
    });
}

/// S003-39, S003-3, S003-4: a node that comes later waits, and the others hear of it.
#[test]
fn waiting_workers() {
    with_job("1:3", async |job| {
        let a = Caller::new(job, "a:1").await;
        a.cluster().await.unwrap();
        assert_eq!(a.waiting().await.unwrap(), 0);
        let b = Caller::new(job, "b:1").await;
        let joining = tokio::spawn(async move { b.cluster().await });
        a.until_waiting(1).await;
        assert!(!joining.is_finished());
        a.cluster().await.unwrap();
        assert_eq!(workers(&joining.await.unwrap().unwrap()), ["a:1", "b:1"]);
    });
}

/// S003-40, S003-4: GetClusterSpec, GetWaitingNodes, GetClusterSpec. A node that is not heard of any more is
/// removed, which the others see as a negative number.
#[test]
fn reset_workers() {
    with_job("1:3", async |job| {
        let (a, b) = (Caller::new(job, "a:1").await, Caller::new(job, "b:1").await);
        let (first, second) = tokio::join!(a.cluster(), b.cluster());
        let (mut first, second) = (first.unwrap(), second.unwrap());
        if workers(&first).len() == 1 {
            // The last call ended before the other came.
            first = a.cluster().await.unwrap();
        }
        assert_eq!(first.round, second.round);
        a.until_waiting(-1).await;
        assert_eq!(workers(&a.cluster().await.unwrap()), ["a:1"]);
        assert_eq!(b.waiting().await.unwrap_err().code(), Code::NotFound);
    });
}

/// S003-4: a member that has called something in its round, and asks for a cluster again, has failed: it gets another
/// round, and the others hear of it.
#[test]
fn a_member_that_starts_again_gets_another_round() {
    with_job("2:2", async |job| {
        let (a, b) = (Caller::new(job, "a:1").await, Caller::new(job, "b:1").await);
        let (first, second) = tokio::join!(a.cluster(), b.cluster());
        assert_eq!((first.unwrap().round, second.unwrap().round), (1, 1));
        assert_eq!((a.waiting().await.unwrap(), b.waiting().await.unwrap()), (0, 0));
        let again = a.clone();
        let joining = tokio::spawn(async move { again.cluster().await });
        b.until_waiting(1).await;
        assert_eq!(b.cluster().await.unwrap().round, 2);
        assert_eq!(joining.await.unwrap().unwrap().round, 2);
    });
}

/// S003-41, S003-6: all nodes get the data of all.
#[test]
fn synchronize() {
    with_job("2:2", async |job| {
        let (a, b) = (Caller::new(job, "a:1").await, Caller::new(job, "b:1").await);
        let _ = tokio::join!(a.cluster(), b.cluster());
        for round in 0..3_u8 {
            let (one, other) =
                tokio::join!(a.synchronize(vec![round], 0.0), b.synchronize(vec![9, round], 0.0));
            assert!(one.success && other.success, "{} {}", one.error, other.error);
            assert_eq!(one.data, other.data);
            assert_eq!(
                (&one.data["a:1"][..], &one.data["b:1"][..]),
                (&[round][..], &[9, round][..])
            );
        }
        let mut client = a.client.clone();
        let large = client.synchronize(SynchronizeRequest {
            address: "a:1".to_owned(),
            tag: "values".to_owned(),
            data: vec![0; 512 * 1024 + 1].into(),
            timeout_seconds: 0.0,
            phase: None,
        });
        assert_eq!(large.await.unwrap_err().code(), Code::ResourceExhausted);
    });
}

/// S003-42, S003-6: what not all nodes enter in time fails, and names those that are missing.
#[test]
fn synchronize_fail() {
    with_job("2:2", async |job| {
        let (a, b) = (Caller::new(job, "a:1").await, Caller::new(job, "b:1").await);
        let _ = tokio::join!(a.cluster(), b.cluster());
        let reply = a.synchronize(vec![1], 0.2).await;
        assert!(!reply.success && reply.data.is_empty());
        assert!(
            reply.error.contains("timed out") && reply.error.contains("b:1"),
            "{}",
            reply.error
        );
    });
}

/// S003-43, S003-5: barriers of two tags do not mix.
#[test]
fn barrier() {
    with_job("2:2", async |job| {
        let (a, b) = (Caller::new(job, "a:1").await, Caller::new(job, "b:1").await);
        let _ = tokio::join!(a.cluster(), b.cluster());
        let (one, other) = tokio::join!(a.barrier("one", 0.3), b.barrier("other", 0.3));
        assert!(!one.success && !other.success);
        // The call that timed out has entered, so the phase says that this one repeats it.
        let (one, other) = tokio::join!(a.barrier_of("one", Some(0), 0.0), b.barrier("one", 0.0));
        assert!(one.success && other.success, "{} {}", one.error, other.error);
    });
}

/// S003-44, S003-5: a barrier that not all nodes enter times out; the death of a node ends it with its name.
#[test]
fn barrier_fail() {
    with_job("2:2", async |job| {
        let (a, b) = (Caller::new(job, "a:1").await, Caller::new(job, "b:1").await);
        let _ = tokio::join!(a.cluster(), b.cluster());
        let reply = a.barrier("exit", 0.2).await;
        assert!(!reply.success && reply.error.contains("b:1"), "{}", reply.error);
        // The other does not call any more, so its lease ends.
        let reply = a.barrier("exit", 0.0).await;
        assert!(!reply.success && reply.error.contains("lost b:1"), "{}", reply.error);
    });
}

/// S003-7: the answer to a shutdown has the times of the rounds; afterwards the server says so until it ends.
#[test]
fn a_job_that_was_shut_down_accepts_no_more_calls() {
    with_job("1:1", async |job| {
        let caller = Caller::new(job, "a:1").await;
        caller.cluster().await.unwrap();
        // Not a wait for a condition: the answer measures the time that passes here.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let request = ShutDownRequest { reason: "enough".to_owned(), success: false };
        let reply = caller.client.clone().shut_down(request).await.unwrap().into_inner();
        assert_eq!(reply.rounds, 1);
        let [times] = &reply.times[..] else { panic!("{:?}", reply.times) };
        assert_eq!(times.round, 1);
        let limit = LIMIT.as_secs_f64();
        assert!(0.0 <= times.rendezvous_seconds && times.rendezvous_seconds < limit, "{times:?}");
        assert!(0.3 <= times.running_seconds && times.running_seconds < limit, "{times:?}");
        let status = caller.waiting().await.unwrap_err();
        let is_gone = status.code() == Code::Unavailable;
        assert!(is_gone || status.message().contains("Server has shutdown"), "{status:?}");
    });
}

/// I12, S003-8: a new master answers for barriers whose data are together larger than an answer of etcd.
#[test]
fn a_new_master_reads_all_that_barriers_hold() {
    const TAGS: u32 = 10;
    let scene = Scene::new();
    let etcd = EtcdServer::embedded(&scene);
    let file = "name = \"job\"\nkind = \"elastic\"\n[nodes]\nmin = 1\nmax = 1\n";
    let file = scene.write("job.toml", file).display().to_string();
    let url = etcd.url();
    let begin = |name: &str| {
        let address = free_address().to_string();
        let args = ["--job", "job", "--job-file", &file, "--etcd-endpoints", &url];
        let args = [&args[..], &["--listen", &address]].concat();
        (scene.start(name, "steadfast-master", &args), format!("http://{address}"))
    };
    let synchronize = async |client: &mut ElasticClient<Channel>, number: u32| {
        let (address, tag) = ("a:1".to_owned(), format!("tag-{number}"));
        let (data, phase) = (vec![number as u8; 512 * 1024].into(), Some(0));
        let request = SynchronizeRequest { address, tag, data, timeout_seconds: 30.0, phase };
        let reply = client.synchronize(request).await.unwrap().into_inner();
        assert!(reply.success, "{}", reply.error);
        assert_eq!(reply.data["a:1"], vec![number as u8; 512 * 1024]);
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (mut first, address) = begin("first");
    runtime.block_on(async {
        let mut client = acting(&address).await;
        for number in 0..TAGS {
            synchronize(&mut client, number).await;
        }
    });
    first.signal(Signal::SIGKILL);
    first.end(LIMIT);
    let (_second, address) = begin("second");
    runtime.block_on(async {
        let mut client = acting(&address).await;
        synchronize(&mut client, TAGS - 1).await;
    });
}

/// Waits until the master at an address acts, and `a:1` is a node of a round.
async fn acting(address: &str) -> ElasticClient<Channel> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Ok(mut client) = ElasticClient::connect(address.to_owned()).await {
            let caller = "a:1".to_owned();
            let request =
                GetClusterSpecRequest { address: caller, min_nodes: 1, max_nodes: 1, reset: false };
            if client.get_cluster_spec(request).await.is_ok() {
                return client;
            }
        }
        assert!(Instant::now() < deadline, "no master acts at {address}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
