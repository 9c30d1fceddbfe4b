//! The KV service.

use super::limit::{admit_read, admit_write, check_logged};
use super::status::status_of;
use crate::core::is_read_only;
use crate::node::Node;
use etcd_client::proto::{
    PbCompactionRequest, PbCompactionResponse, PbDeleteRequest, PbDeleteResponse, PbKvService,
    PbPutRequest, PbPutResponse, PbRangeRequest, PbRangeResponse, PbRangeStreamResponse,
    PbTxnRequest, PbTxnResponse,
};
use futures::stream::Empty;
use std::sync::Arc;
use tonic::{Request, Response, Status};

pub struct KvService {
    node: Arc<Node>,
}

impl KvService {
    pub fn new(node: Arc<Node>) -> Self {
        KvService { node }
    }
}

#[tonic::async_trait]
impl PbKvService for KvService {
    type RangeStreamStream = Empty<Result<PbRangeStreamResponse, Status>>;

    async fn range(
        &self,
        request: Request<PbRangeRequest>,
    ) -> Result<Response<PbRangeResponse>, Status> {
        let request = admit_read(request)?;
        let reply = self.node.read(|core, _| core.range(&request)).await;
        reply.map(Response::new).map_err(status_of)
    }

    async fn range_stream(
        &self,
        _: Request<PbRangeRequest>,
    ) -> Result<Response<Self::RangeStreamStream>, Status> {
        Err(Status::unimplemented("ranges are not streamed: page them with a limit"))
    }

    async fn put(&self, request: Request<PbPutRequest>) -> Result<Response<PbPutResponse>, Status> {
        let request = admit_write(request)?;
        let reply = self.node.write(|core| core.put(&request)).await;
        reply.map(Response::new).map_err(status_of)
    }

    async fn delete_range(
        &self,
        request: Request<PbDeleteRequest>,
    ) -> Result<Response<PbDeleteResponse>, Status> {
        let request = admit_write(request)?;
        let reply = self.node.write(|core| core.delete(&request)).await;
        reply.map(Response::new).map_err(status_of)
    }

    async fn txn(&self, request: Request<PbTxnRequest>) -> Result<Response<PbTxnResponse>, Status> {
        let request = admit_read(request)?;
        if !is_read_only(&request) {
            check_logged(&request)?;
        }
        let reply = self.node.write(|core| core.txn(&request)).await;
        reply.map(Response::new).map_err(status_of)
    }

    async fn compact(
        &self,
        request: Request<PbCompactionRequest>,
    ) -> Result<Response<PbCompactionResponse>, Status> {
        let revision = request.into_inner().revision;
        let reply = self.node.write(|core| core.compact(revision)).await;
        reply.map(Response::new).map_err(status_of)
    }
}
