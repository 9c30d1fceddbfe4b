//! A worker that the test plays: its process does nothing, and the test makes the calls of `steadfast.elastic`.

use std::time::Duration;

use steadfast_proto::WorkerToken;
use steadfast_proto::v1::suspect_reply::Verdict;
use steadfast_proto::v1::worker_client::WorkerClient;
use steadfast_proto::v1::{
    ChangesRequest, NextRoundRequest, SuspectRequest, WorkerAssignment, next_round_reply,
};
use steadfast_tests::{Process, within};
use tokio::runtime::Runtime;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};

use crate::job::LIMIT;

type Client = WorkerClient<InterceptedService<Channel, WorkerToken>>;

/// The calls of a worker.
pub struct Played {
    runtime: Runtime,
    client: Client,
    local_rank: u32,
}

/// Returns the address of an agent's service for its workers, and its token. A worker has to print `agent`, and
/// `STEADFAST_AGENT`.
pub fn hub(agent: &Process) -> (String, String) {
    within(LIMIT, "the worker runs", || {
        let text = agent.stdout();
        let line = text.lines().find_map(|line| line.split_once("agent "))?.1;
        let mut words = line.split(' ');
        let (address, _) = (words.next()?, words.next()?);
        Some((format!("http://{address}"), words.next()?.to_owned()))
    })
}

/// Returns the calls of a worker that shows a token.
fn client(address: String, token: &str) -> Client {
    let channel = Endpoint::from_shared(address).expect("it is an address").connect_lazy();
    WorkerClient::with_interceptor(channel, WorkerToken::new(token).expect("it is ASCII"))
}

/// Makes a call with another token than that of the agent; returns how it fails.
pub fn call_with(agent: &Process, token: &str) -> tonic::Status {
    let runtime = Runtime::new().expect("threads can be started");
    let entered = runtime.enter();
    let mut client = client(hub(agent).0, token);
    drop(entered);
    let request = NextRoundRequest { local_rank: 0, after: 1, wait_ms: 0 };
    runtime.block_on(client.next_round(request)).expect_err("it is refused")
}

impl Played {
    /// Connects to an agent as one of its workers, which is not restarted in the next round then.
    pub fn of(agent: &Process, local_rank: u32) -> Self {
        let (address, token) = hub(agent);
        let runtime = Runtime::new().expect("threads can be started");
        let entered = runtime.enter();
        let client = client(address, &token);
        drop(entered);
        let played = Self { runtime, client, local_rank };
        let mut client = played.client.clone();
        let request = ChangesRequest { local_rank, revision: i64::MAX, wait_ms: 0 };
        played.runtime.block_on(client.changes(request)).expect("the agent answers");
        played
    }

    /// Says that the worker is ready to leave a round.
    pub fn leave(&self, round: u64) {
        let mut client = self.client.clone();
        let request = NextRoundRequest { local_rank: self.local_rank, after: round, wait_ms: 0 };
        self.runtime.block_on(client.next_round(request)).expect("the agent answers");
    }

    /// Says the same, and waits for the next round.
    pub fn next_round(&self, after: u64) -> WorkerAssignment {
        let mut client = self.client.clone();
        let request = NextRoundRequest { local_rank: self.local_rank, after, wait_ms: 1000 };
        let next = async {
            loop {
                let reply = client.next_round(request).await.expect("the agent answers");
                match reply.into_inner().next {
                    Some(next_round_reply::Next::Assignment(it)) => return it,
                    Some(next_round_reply::Next::Wait(_)) | None => {}
                }
            }
        };
        let next = async { tokio::time::timeout(LIMIT, next).await };
        self.runtime.block_on(next).expect("a round is formed")
    }

    /// Asks whether a round is over; returns the answer within the time.
    pub fn verdict(&self, round: u64, within: Duration) -> Verdict {
        let mut client = self.client.clone();
        let wait_ms = within.as_millis() as u32;
        let request = SuspectRequest { local_rank: self.local_rank, round, wait_ms };
        self.runtime
            .block_on(client.suspect(request))
            .expect("the agent answers")
            .into_inner()
            .verdict()
    }
}
