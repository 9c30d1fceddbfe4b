//! Rules of a mirror, with an etcd behind a proxy that ends streams.

use etcd_client::proto::{
    PbCompactionRequest, PbCompactionResponse, PbDeleteRequest, PbDeleteResponse, PbKvServer,
    PbKvService, PbPutRequest, PbPutResponse, PbRangeRequest, PbRangeResponse,
    PbRangeStreamResponse, PbTxnRequest, PbTxnResponse, PbWatchRequest, PbWatchResponse,
    PbWatchServer, PbWatchService,
};
use futures::stream::{Empty, empty};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::*;
use crate::EtcdOptions;

/// An empty etcd that counts lists, and whose watches end at once.
#[derive(Clone, Default)]
struct NoWatches(watch::Sender<u32>);

type Reply<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl PbWatchService for NoWatches {
    type WatchStream = Empty<Result<PbWatchResponse, Status>>;

    async fn watch(&self, _: Request<Streaming<PbWatchRequest>>) -> Reply<Self::WatchStream> {
        Ok(Response::new(empty()))
    }
}

#[tonic::async_trait]
impl PbKvService for NoWatches {
    type RangeStreamStream = Empty<Result<PbRangeStreamResponse, Status>>;

    async fn range(&self, _: Request<PbRangeRequest>) -> Reply<PbRangeResponse> {
        self.0.send_modify(|lists| *lists += 1);
        Ok(Response::new(PbRangeResponse::default()))
    }

    async fn range_stream(&self, _: Request<PbRangeRequest>) -> Reply<Self::RangeStreamStream> {
        Err(Status::unimplemented(""))
    }

    async fn put(&self, _: Request<PbPutRequest>) -> Reply<PbPutResponse> {
        Err(Status::unimplemented(""))
    }

    async fn delete_range(&self, _: Request<PbDeleteRequest>) -> Reply<PbDeleteResponse> {
        Err(Status::unimplemented(""))
    }

    async fn txn(&self, _: Request<PbTxnRequest>) -> Reply<PbTxnResponse> {
        Err(Status::unimplemented(""))
    }

    async fn compact(&self, _: Request<PbCompactionRequest>) -> Reply<PbCompactionResponse> {
        Err(Status::unimplemented(""))
    }
}

/// F19: a proxy that ends each stream at once makes no process ask etcd without a pause.
#[tokio::test]
async fn a_mirror_whose_watches_end_at_once_lists_a_few_times_a_second() {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = incoming.local_addr().unwrap();
    let server = NoWatches::default();
    let serving = Server::builder()
        .add_service(PbKvServer::new(server.clone()))
        .add_service(PbWatchServer::new(server.clone()))
        .serve_with_incoming(incoming);
    tokio::spawn(serving);
    let endpoints = vec![format!("http://{address}")];
    let etcd = Etcd::connect(&EtcdOptions { endpoints, ..EtcdOptions::default() }).await.unwrap();
    let started = Instant::now();
    let _mirror = Mirror::start(&etcd, Range::Key("/key".to_owned())).await.unwrap();
    let mut lists = server.0.subscribe();
    let first = *lists.borrow_and_update();
    lists.wait_for(|lists| first + 4 <= *lists).await.unwrap();
    assert!(3 * RETRY <= started.elapsed(), "{:?}", started.elapsed());
}
