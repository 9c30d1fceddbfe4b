//! The reference for small steps: a ping-pong of the same number of bytes over the same HTTP/2, without
//! pauses.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use steadfast_common::role::Role;
use steadfast_net::{Port, TlsIdentity};
use steadfast_proto::v1::BlockData;
use steadfast_tests::{Process, Scene, within};
use tokio_util::sync::CancellationToken;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::server::UnaryService;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::sample::Sample;
use crate::unary::Unary;
use crate::watch::Watch;
use crate::wire::{SMALL, SMALL_STEPS};

/// Returns each request.
#[derive(Clone)]
struct Echo;

impl UnaryService<BlockData> for Echo {
    type Response = BlockData;
    type Future = std::future::Ready<Result<Response<BlockData>, Status>>;

    fn call(&mut self, request: Request<BlockData>) -> Self::Future {
        std::future::ready(Ok(Response::new(request.into_inner())))
    }
}

/// Serves until it is killed. Prints its address first.
pub async fn serve() -> std::io::Result<()> {
    let port = Port::bind("127.0.0.1:0".parse().expect("an address")).await?;
    println!("{}", port.local_addr()?);
    let served = port
        .serve(
            Routes::new(Unary::new(Echo)),
            |_| &[],
            &TlsIdentity::default(),
            CancellationToken::new(),
        )
        .await;
    served.map_err(std::io::Error::other)?.map_err(std::io::Error::other)
}

/// Makes as many exchanges as a sample of small steps has steps.
pub async fn ping_pong() -> Sample {
    let scene = Scene::new();
    let own = std::env::current_exe().expect("we run");
    let mut command = scene.command(&own);
    command.arg("serve-echo").stdin(Stdio::null());
    let process = Process::start(scene.directory(), "echo", &mut command);
    let address: SocketAddr =
        within(Duration::from_secs(10), "it listens", || process.stdout().trim().parse().ok());
    let mut client = tonic::client::Grpc::new(
        TlsIdentity::default().dial(&address.to_string(), Role::Pserver).expect("an address"),
    );
    let data = Bytes::from(vec![7; SMALL * size_of::<f32>()]);
    let path = PathAndQuery::from_static("/steadfast.bench.Unary/Echo");
    let mut exchange = async || {
        client.ready().await.expect("it is there");
        let block = Request::new(BlockData { block: 0, data: data.clone() });
        let codec = ProstCodec::<BlockData, BlockData>::default();
        client.unary(block, path.clone(), codec).await.expect("it answers");
    };
    exchange().await;
    let watch = Watch::start(vec![process.pid().as_raw()]);
    for _ in 0..SMALL_STEPS {
        exchange().await;
    }
    watch.stop(SMALL_STEPS as f64)
}
