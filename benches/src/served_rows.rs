//! Rows of an embedding table between a trainer and a pserver, compared with a hash map behind unary calls of the same
//! gRPC.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use steadfast_common::ids::{Lane, Version};
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::{ID_BYTES, Initial, Rows, encode_ids};
use steadfast_proto::v1::BlockData;
use steadfast_tests::{EtcdServer, Scene};
use steadfast_training_client::Gradient;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::server::UnaryService;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use crate::rig::{Rig, Via};
use crate::rows::{self, HashMapRows, WIDTH};
use crate::sample::Sample;
use crate::unary;
use crate::watch::Watch;
use crate::wire::{lane, synchronous};

/// Bytes of a row with its id.
const ROW_BYTES: usize = ID_BYTES + WIDTH * size_of::<f32>();

/// What a request of the reference asks for, in place of the number of a block.
const READ: u32 = 0;
const UPDATE: u32 = 1;

fn ids_of(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|id| u64::from_le_bytes(*id)).collect()
}

fn values_of(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
}

fn gradient(ids: &[u64]) -> Rows {
    Rows::of(WIDTH, ids.to_vec(), vec![0.01; ids.len() * WIDTH])
}

/// Pulls the rows of each step from one pserver, and pushes their gradients.
pub async fn steps() -> Sample {
    let scene = Scene::new();
    let etcd = EtcdServer::embedded(&scene);
    let job = synchronous().with("kind = \"sgd\"", "kind = \"adagrad\"");
    let table = ParamSpec::table("rows", WIDTH, Initial::Uniform(0.1));
    let rig = Rig::start(scene, etcd, &job, 1, vec![table], Via::Tcp).await;
    let step = async |version: u64, ids: &Vec<u64>, rows: Rows| {
        let pulled =
            rig.pservers.pull_rows(Some(Version(version)), vec![RowIds::new(ids.clone())]).await;
        let pulled = pulled.expect("the pserver gives them").expect("the step is not over");
        assert_eq!(pulled.rows[0].len(), ids.len());
        let (values, rows) = (Arc::new(Vec::new()), vec![rows]);
        let gradient =
            Gradient { records: 1, loss_sum: 0.5, checksum: 1, values, rows, weight: None };
        let pushed = rig.pservers.push(lane(version, Lane(0)), gradient).await;
        pushed.expect("the pserver takes them");
    };
    let steps = rows::steps();
    let gradients: Vec<Rows> = steps.iter().map(|ids| gradient(ids)).collect();
    step(0, &steps[0], gradients[0].clone()).await;
    let watch = Watch::start(rig.pids());
    for ((version, ids), rows) in (1..).zip(&steps).zip(gradients) {
        step(version, ids, rows).await;
    }
    watch.stop(rows::amount(&steps))
}

/// Rows in a hash map.
#[derive(Clone, Default)]
struct ServedMap(Arc<Mutex<HashMapRows>>);

impl UnaryService<BlockData> for ServedMap {
    type Response = BlockData;
    type Future = std::future::Ready<Result<Response<BlockData>, Status>>;

    fn call(&mut self, request: Request<BlockData>) -> Self::Future {
        let BlockData { block, data } = request.into_inner();
        let mut map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let data = if block == READ {
            let ids = ids_of(&data);
            Bytes::from_owner(AsBytes(map.read(&ids)))
        } else {
            let (ids, values) = data.split_at(data.len() / ROW_BYTES * ID_BYTES);
            let (ids, values) = (ids_of(ids), values_of(values));
            map.update(ids.into_iter().zip(values.chunks(WIDTH)));
            Bytes::new()
        };
        std::future::ready(Ok(Response::new(BlockData { block, data })))
    }
}

/// Values that are sent without a copy.
struct AsBytes(Vec<f32>);

impl AsRef<[u8]> for AsBytes {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// Serves until it is killed. Prints its address first.
pub async fn serve() -> std::io::Result<()> {
    unary::serve(ServedMap::default()).await
}

/// Does the same as [`steps`] with the hash map of another process.
pub async fn hash_map() -> Sample {
    let scene = Scene::new();
    let (process, channel) = unary::start(&scene, "serve-rows");
    let mut client = tonic::client::Grpc::new(channel).max_decoding_message_size(usize::MAX);
    let path = PathAndQuery::from_static("/steadfast.bench.Unary/Rows");
    let mut call = async |block: u32, data: Vec<u8>| {
        client.ready().await.expect("it is there");
        let codec = ProstCodec::<BlockData, BlockData>::default();
        let request = Request::new(BlockData { block, data: data.into() });
        let answer = client.unary(request, path.clone(), codec).await;
        answer.expect("it answers").into_inner().data
    };
    let mut step = async |ids: &Vec<u64>, rows: Rows| {
        let values = values_of(&call(READ, encode_ids(ids)).await);
        assert_eq!(values.len(), ids.len() * WIDTH);
        call(UPDATE, rows.encode(0..rows.len())).await;
    };
    let steps = rows::steps();
    let gradients: Vec<Rows> = steps.iter().map(|ids| gradient(ids)).collect();
    step(&steps[0], gradients[0].clone()).await;
    let watch = Watch::start(vec![process.pid().as_raw()]);
    for (ids, rows) in steps.iter().zip(gradients) {
        step(ids, rows).await;
    }
    watch.stop(rows::amount(&steps))
}
