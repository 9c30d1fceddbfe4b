//! The reference for served dispatches: a process that answers the same calls over the same HTTP/2 and
//! commits the same number of keys and bytes per call, with as many concurrent calls, but without any logic.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use futures::future::BoxFuture;
use steadfast_common::role::Role;
use steadfast_coord::{Leadership, OPS_MAX, Op, Session};
use steadfast_net::{Channel, Port, TlsIdentity};
use steadfast_proto::v1::next_task_reply::Next;
use steadfast_proto::v1::next_task_request::Report;
use steadfast_proto::v1::{Caller, Dispatch, Finished, NextTaskReply, NextTaskRequest};
use steadfast_tests::{EtcdServer, Process, Scene, within};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::server::UnaryService;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use uuid::Uuid;

use crate::rig::connect;
use crate::sample::Sample;
use crate::tasks::{KEYS_OF_ONE, RequestLoop, TRAINERS, all_at_once, changes};
use crate::unary::Unary;

/// A call that waits for its commit.
type Waiting = (NextTaskRequest, oneshot::Sender<NextTaskReply>);

/// Answers calls once the writer has committed them.
#[derive(Clone)]
struct Counter {
    calls: mpsc::Sender<Waiting>,
}

impl UnaryService<NextTaskRequest> for Counter {
    type Response = NextTaskReply;
    type Future = BoxFuture<'static, Result<Response<NextTaskReply>, Status>>;

    fn call(&mut self, request: Request<NextTaskRequest>) -> Self::Future {
        let calls = self.calls.clone();
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let ended = || Status::unavailable("the writer has ended");
            calls.send((request.into_inner(), reply)).await.map_err(|_| ended())?;
            Ok(Response::new(answer.await.map_err(|_| ended())?))
        })
    }
}

/// Serves until it is killed. Prints its address first.
pub async fn serve(etcd: &str) -> std::io::Result<()> {
    let (calls, waiting) = mpsc::channel(1024);
    let port = Port::bind("127.0.0.1:0".parse().expect("an address")).await?;
    println!("{}", port.local_addr()?);
    tokio::spawn(write(etcd.to_owned(), waiting));
    let served = port.serve(
        Routes::new(Unary::new(Counter { calls })),
        |_| &[],
        &TlsIdentity::default(),
        CancellationToken::new(),
    );
    served.await.map_err(std::io::Error::other)?.map_err(std::io::Error::other)
}

/// Commits all waiting calls together, then answers them.
async fn write(etcd: String, mut waiting: mpsc::Receiver<Waiting>) {
    let client = connect(&etcd).await;
    let session = Session::open(&client, Duration::from_secs(30)).await.expect("a lease");
    let leadership = Leadership::acquire(&client, &session, "/bench/lock", b"bench").await;
    let mut leadership = leadership.expect("etcd answers").expect("the lock is free");
    let (mut batch, mut number) = (Vec::new(), 0);
    while 0 < waiting.recv_many(&mut batch, (OPS_MAX - 1) / KEYS_OF_ONE).await {
        let ops: Vec<Op> = changes(number, batch.len());
        leadership.commit(&client, &ops).await.expect("etcd answers");
        for (_, reply) in batch.drain(..) {
            number += 1;
            let task =
                Dispatch { task: number as u32, attempt: number as u64, ..Dispatch::default() };
            // The caller waits for the reply.
            let _ = reply.send(NextTaskReply { accepted: true, next: Some(Next::Task(task)) });
        }
    }
}

struct Client {
    grpc: tonic::client::Grpc<Channel>,
    report: Option<Report>,
}

impl RequestLoop for Client {
    async fn turn(&mut self) {
        let request = NextTaskRequest {
            caller: Some(Caller { trainer: Uuid::new_v4().to_string(), generation: 1 }),
            request_id: Uuid::new_v4().to_string(),
            report: self.report.take(),
            more: true,
            ..NextTaskRequest::default()
        };
        self.grpc.ready().await.expect("it is there");
        let path = PathAndQuery::from_static("/steadfast.bench.Unary/NextTask");
        let codec = ProstCodec::<NextTaskRequest, NextTaskReply>::default();
        let reply = self.grpc.unary(Request::new(request), path, codec).await;
        let next = reply.expect("it answers").into_inner().next;
        let Some(Next::Task(dispatch)) = next else { panic!("there are tasks: {next:?}") };
        self.report = Some(finished(&dispatch));
    }
}

/// Returns the report of a finished task.
fn finished(dispatch: &Dispatch) -> Report {
    Report::Finished(Finished {
        attempt: dispatch.attempt,
        task: dispatch.task,
        records: 1,
        loss_sum: 0.5,
        version: 0,
    })
}

/// Makes as many calls from as many clients as the sample of our implementation.
pub async fn dispatch() -> Sample {
    let scene = Scene::new();
    let etcd = EtcdServer::durable(&scene);
    let own = std::env::current_exe().expect("we run");
    let mut command = scene.command(&own);
    command.args(["serve-counter", &etcd.url()]).stdin(Stdio::null());
    let process = Process::start(scene.directory(), "counter", &mut command);
    let address: SocketAddr =
        within(Duration::from_secs(10), "it listens", || process.stdout().trim().parse().ok());
    let mut clients = Vec::new();
    for _ in 0..TRAINERS {
        let channel =
            TlsIdentity::default().dial(&address.to_string(), Role::Master).expect("an address");
        let mut client = Client { grpc: tonic::client::Grpc::new(channel), report: None };
        client.turn().await;
        clients.push(client);
    }
    all_at_once(clients, vec![etcd.pid().as_raw(), process.pid().as_raw()]).await
}
