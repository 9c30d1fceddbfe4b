//! Workers that stay in their process while the ranks change. The test plays what `steadfast.elastic` does in them.

use std::time::Duration;

use steadfast_proto::v1::worker_client::WorkerClient;
use steadfast_proto::v1::{ChangesRequest, NextRoundRequest, next_round_reply};
use steadfast_tests::{Process, Scene, Signal, within};

use crate::job::{ElasticJob, LIMIT};

/// Prints where its agent is, and then one line after the other.
const WORKER: &str = "echo agent $STEADFAST_AGENT; while :; do echo tick; sleep 0.05; done";

/// Returns the address of an agent's service for its worker.
fn hub(agent: &Process) -> String {
    within(LIMIT, "the worker runs", || {
        let text = agent.stdout();
        let line = text.lines().find_map(|line| line.split_once("agent "))?.1;
        Some(format!("http://{}", line.split(' ').next()?))
    })
}

/// S003-25, S003-52: a worker joins the next round without a restart of its process. What it prints has its rank in
/// that round before it.
#[test]
fn the_output_of_a_worker_that_stays_has_its_current_rank() {
    let scene = Scene::new();
    let job = ElasticJob::start(&scene, "1:2", &["--last-call", "500ms"]);
    let agents = ["a", "b"].map(|name| job.agent_of(name, &[], &["sh", "-c", WORKER]));
    job.until_running(2);
    let hubs = agents.each_ref().map(hub);
    let is_first = |agent: &Process| agent.stdout().contains("[rank 0] tick");
    within(LIMIT, "both print", || {
        agents.iter().all(|agent| agent.stdout().contains("tick")).then_some(())
    });
    let (mut first, stays, hub) = match agents {
        [a, b] if is_first(&a) => (a, b, &hubs[1]),
        [a, b] => (b, a, &hubs[0]),
    };
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    let rank = runtime.block_on(async {
        let mut worker = WorkerClient::connect(hub.clone()).await.expect("the agent listens");
        let request = ChangesRequest { local_rank: 0, revision: i64::MAX, wait_ms: 0 };
        worker.changes(request).await.expect("the agent answers");
        first.signal(Signal::SIGKILL);
        let request = NextRoundRequest { local_rank: 0, after: 1, wait_ms: 1000 };
        let next = async {
            loop {
                let reply = worker.next_round(request).await.expect("the agent answers");
                match reply.into_inner().next {
                    Some(next_round_reply::Next::Assignment(it)) => return it.rank,
                    Some(next_round_reply::Next::Wait(_)) | None => {}
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(60), next).await.expect("a round is formed")
    });
    first.end(LIMIT);
    assert_eq!(rank, 0);
    within(LIMIT, "its lines have the new rank", || is_first(&stays).then_some(()));
    let text = stays.stdout();
    assert_eq!(text.matches("agent ").count(), 1, "the worker was not restarted: {text}");
    assert!(text.starts_with("[rank 1] agent "), "{text}");
}
