//! The reference for small steps: a ping-pong of the same number of bytes over the same HTTP/2, without
//! pauses.

use bytes::Bytes;
use steadfast_proto::v1::BlockData;
use steadfast_tests::Scene;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::server::UnaryService;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::sample::Sample;
use crate::unary;
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
    unary::serve(Echo).await
}

/// Makes as many exchanges as a sample of small steps has steps.
pub async fn ping_pong() -> Sample {
    let scene = Scene::new();
    let (process, channel) = unary::start(&scene, "serve-echo");
    let mut client = tonic::client::Grpc::new(channel);
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
