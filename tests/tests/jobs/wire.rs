//! The wire protocol: any gRPC client with the proto messages can call the servers.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use steadfast_common::ids::Slot;
use steadfast_common::records::{GenerationRecord, PserverRecord};
use steadfast_proto::v1::pserver_client::PserverClient;
use steadfast_proto::v1::push_header::Name;
use steadfast_proto::v1::{
    BlockData, LaneContribution, LaneShare, PullRequest, PushHeader, PushRequest, Target,
};
use steadfast_tests::{Cluster, Job, Member, Scene, Signal, eventually, free_address};
use tokio_stream::StreamExt;
use tonic::Code;
use tonic::transport::Channel;

/// Number of values of the model of [`Job::endless`]: 64 inputs, a layer of 32, 10 classes.
const VALUES: usize = 64 * 32 + 32 + 32 * 10 + 10;

/// Reads all messages of a pull; returns the version and the blocks.
async fn pull(client: &mut PserverClient<Channel>, target: Target) -> (u64, Vec<BlockData>) {
    // Without a wait, the current version is returned.
    let request = PullRequest { target: Some(target), version: 1, ..PullRequest::default() };
    let mut messages = client.pull(request).await.expect("the slot answers").into_inner();
    let (mut version, mut blocks) = (None, Vec::new());
    while let Some(message) = messages.message().await.expect("it answers to the end") {
        version = version.or(message
            .header
            .filter(|it| it.ready)
            .map(|it| it.position.unwrap_or_default().version));
        blocks.extend(message.blocks);
    }
    (version.expect("the slot has the version"), blocks)
}

/// Returns how many pushes a pserver has rejected with errors of this kind.
fn refused_pushes(pserver: &Member, kind: &str) -> u64 {
    let metrics = pserver.ask("/metrics").expect("the pserver is alive").body;
    let name = format!("steadfast_pserver_refused_pushes_total{{kind=\"{kind}\"}} ");
    let count = metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok());
    count.expect("every kind is exported from the start")
}

/// Both calls stay compatible with gRPC, although client and server do not use its codec.
#[test]
fn a_plain_grpc_client_pulls_and_pushes() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 1, "30s");
    let (_master, pserver) = (cluster.master("master"), cluster.pserver("pserver"));
    let _trainer = cluster.trainer("trainer");
    cluster.until_step(3);
    let entry = cluster.get(&cluster.keys.ps(Slot(0))).expect("the slot is held");
    let holder: PserverRecord = entry.json().expect("it is a record");
    let entry = cluster.get(&cluster.keys.generation()).expect("the job is in a generation");
    let generation: GenerationRecord = entry.json().expect("it is a record");
    let target =
        Target { generation: generation.generation.0, slot: 0, incarnation: generation.slots[0].0 };
    let before = (refused_pushes(&pserver, "invalid"), refused_pushes(&pserver, "stale"));
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    runtime.block_on(async {
        let connected = PserverClient::connect(format!("http://{}", holder.address)).await;
        let mut client = connected.expect("the pserver listens");
        let (version, blocks) = pull(&mut client, target).await;
        assert!(1 <= version);
        let bytes: usize = blocks.iter().map(|it| it.data.len()).sum();
        assert_eq!(bytes, VALUES * size_of::<f32>());

        // A push for a finished step is a duplicate, but is parsed: each block and the header are in
        // separate messages.
        let lane = LaneContribution {
            version: 0,
            lane: 0,
            shares: vec![LaneShare { records: 1, last: false, checksum: 1, weight: None }],
            reductions: 0,
        };
        let header = PushHeader {
            rows: 0,
            target: Some(target),
            records: 1,
            loss_sum: 0.5,
            weight: None,
            checksum: 1,
            name: Some(Name::Lanes(lane)),
        };
        let first = PushRequest { header: Some(header), blocks: Vec::new() };
        let rest = blocks.into_iter().map(|it| PushRequest { header: None, blocks: vec![it] });
        let messages: Vec<PushRequest> = [first].into_iter().chain(rest).collect();
        let pushed = client.push(tokio_stream::iter(messages.clone())).await;
        assert!(pushed.expect("the slot answers").into_inner().duplicate);

        let without_last = messages[..messages.len() - 1].to_vec();
        let refused = client.push(tokio_stream::iter(without_last)).await;
        assert_eq!(refused.expect_err("a block is missing").code(), Code::InvalidArgument);
        let without_header = messages[1..].to_vec();
        let refused = client.push(tokio_stream::iter(without_header)).await;
        assert_eq!(refused.expect_err("it is not named").code(), Code::InvalidArgument);
        let stranger = Target { incarnation: target.incarnation + 1, ..target };
        let request = PullRequest { target: Some(stranger), ..PullRequest::default() };
        let refused = client.pull(request).await.expect_err("another incarnation is addressed");
        assert_eq!(refused.code(), Code::FailedPrecondition);
        let mut messages = messages;
        messages[0].header.as_mut().expect("the first has it").target = Some(stranger);
        let refused = client.push(tokio_stream::iter(messages)).await;
        assert_eq!(refused.expect_err("the same").code(), Code::FailedPrecondition);
    });
    // The metrics count the rejected pushes.
    assert_eq!(refused_pushes(&pserver, "invalid"), before.0 + 2);
    assert_eq!(refused_pushes(&pserver, "stale"), before.1 + 1);
}

/// Returns the version that a pserver reports, while it is alive.
fn shown_version(pserver: &Member) -> Option<u64> {
    let status: serde_json::Value = serde_json::from_str(&pserver.ask("/status")?.body).ok()?;
    status["shard"]["version"].as_u64()
}

/// Pushes one block for the first lane, with other records than the trainer uses; the rest is never sent.
async fn begin_other_records(address: &str, target: Target, version: u64) {
    let connected = PserverClient::connect(format!("http://{address}")).await;
    let mut client = connected.expect("the pserver listens");
    let (_, blocks) = pull(&mut client, target).await;
    let shares = vec![LaneShare { records: 1, last: false, checksum: 12_345, weight: None }];
    let header = PushHeader {
        rows: 0,
        target: Some(target),
        records: 1,
        loss_sum: 0.5,
        weight: None,
        checksum: 12_345,
        name: Some(Name::Lanes(LaneContribution { version, lane: 0, shares, reductions: 0 })),
    };
    let begun = PushRequest { header: Some(header), blocks: blocks[..1].to_vec() };
    let messages = tokio_stream::iter([begun]).chain(tokio_stream::pending());
    let _ = tokio::time::timeout(Duration::from_millis(300), client.push(messages)).await;
}

/// I6: a pserver that has blocks of an aborted push, and then receives other records for the same lane,
/// exits. The job is rolled back and continues.
#[test]
fn a_step_that_cannot_be_completed_rolls_the_job_back() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 1, "30s");
    let (_master, mut pserver) = (cluster.master("master"), cluster.pserver("pserver"));
    let trainer = cluster.trainer("trainer");
    cluster.until_step(3);
    let entry = cluster.get(&cluster.keys.ps(Slot(0))).expect("the slot is held");
    let holder: PserverRecord = entry.json().expect("it is a record");
    let incarnation = holder.incarnation(entry.create_revision).0;
    let target = Target { generation: 1, slot: 0, incarnation };
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    let disturb = |_| {
        trainer.signal(Signal::SIGSTOP);
        let version = shown_version(&pserver).expect("the pserver is alive");
        runtime.block_on(begin_other_records(&holder.address, target, version));
        trainer.signal(Signal::SIGCONT);
        eventually("the pserver exits, or the job continues", || match shown_version(&pserver) {
            None => Some(true),
            Some(present) => (version + 1 < present).then_some(false),
        })
    };
    // A push that the trainer sent before it was stopped may have arrived first.
    assert!((0..20).any(disturb), "every attempt came after the trainer");
    let ended = pserver.end();
    assert!(ended.stderr.contains("was pushed before with other records"), "{}", ended.stderr);
    let _next = cluster.pserver("next");
    cluster.until("it trains in the next generation", |it| {
        it["generation"] == 2 && 0 < it["version"].as_u64().unwrap_or_default()
    });
}

/// A relay that counts how often the client cancels a call (RST_STREAM, RFC 9113 6.4).
#[derive(Clone, Default)]
struct Resets(Arc<AtomicUsize>);

impl Resets {
    /// Listens on a new address and forwards to `to`.
    fn relay(&self, to: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is available");
        let address = listener.local_addr().expect("it is bound");
        let resets = self.clone();
        let meet = move |caller: TcpStream| {
            let callee = TcpStream::connect(to)?;
            caller.set_nodelay(true)?;
            callee.set_nodelay(true)?;
            Ok((caller, callee))
        };
        thread::spawn(move || {
            for caller in listener.incoming() {
                let Ok((caller, callee)) = caller.and_then(meet) else { continue };
                let (mut back, mut to_caller) =
                    (callee.try_clone().unwrap(), caller.try_clone().unwrap());
                thread::spawn(move || io::copy(&mut back, &mut to_caller));
                let resets = resets.clone();
                thread::spawn(move || resets.pass_on(caller, callee));
            }
        });
        address
    }

    /// Forwards frame by frame.
    fn pass_on(&self, mut from: TcpStream, mut to: TcpStream) -> io::Result<()> {
        let (mut preface, mut head) = ([0; 24], [0; 9]);
        from.read_exact(&mut preface)?;
        to.write_all(&preface)?;
        loop {
            from.read_exact(&mut head)?;
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            from.read_exact(&mut payload)?;
            to.write_all(&[&head[..], &payload].concat())?;
            if head[3] == RST_STREAM {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

const RST_STREAM: u8 = 3;

/// F25: a trainer reads all replies to the end. Canceled calls whose replies arrive late count as
/// protocol errors in its HTTP/2 stack, which closes the connection after too many.
#[test]
fn a_trainer_cancels_no_call_during_its_steps() {
    let scene = Scene::new();
    let cluster = Cluster::new(&scene, &Job::endless(), 1, "30s");
    let _master = cluster.master("master");
    let (resets, listens) = (Resets::default(), free_address());
    let advertised = resets.relay(listens).to_string();
    let at = ["--listen", &listens.to_string(), "--advertise", &advertised];
    let _pserver = cluster.pserver_with("pserver", &at);
    let _trainer = cluster.trainer("trainer");
    cluster.until_step(2000);
    assert_eq!(resets.0.load(Ordering::Relaxed), 0);
}
