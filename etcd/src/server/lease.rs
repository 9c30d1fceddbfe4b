//! The Lease service.

use super::status::{status_of, stopped};
use crate::core::LeaseId;
use crate::node::{Node, Stage};
use etcd_client::proto::{
    PbLeaseGrantRequest, PbLeaseGrantResponse, PbLeaseKeepAliveRequest, PbLeaseKeepAliveResponse,
    PbLeaseLeasesRequest, PbLeaseLeasesResponse, PbLeaseRevokeRequest, PbLeaseRevokeResponse,
    PbLeaseService, PbLeaseTimeToLiveRequest, PbLeaseTimeToLiveResponse,
};
use futures::stream::{BoxStream, StreamExt, unfold};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use steadfast_host::time::unix_ms;
use tonic::{Request, Response, Status, Streaming};

/// Bits of a lease id for the counter; the others are the start time of the server in milliseconds.
const COUNTER_BITS: u32 = 20;

pub struct LeaseService {
    node: Arc<Node>,
    next_id: AtomicI64,
}

impl LeaseService {
    pub fn new(node: Arc<Node>) -> Self {
        LeaseService { node, next_id: AtomicI64::new(first_id()) }
    }
}

/// Returns an id that no earlier server on the same data has used: a client that returns with the id of
/// an expired lease must not find the lease of another client.
fn first_id() -> LeaseId {
    let millis = i64::try_from(unix_ms()).unwrap_or_default();
    (millis << COUNTER_BITS) & LeaseId::MAX | 1
}

#[tonic::async_trait]
impl PbLeaseService for LeaseService {
    type LeaseKeepAliveStream = BoxStream<'static, Result<PbLeaseKeepAliveResponse, Status>>;

    async fn lease_grant(
        &self,
        request: Request<PbLeaseGrantRequest>,
    ) -> Result<Response<PbLeaseGrantResponse>, Status> {
        let request = request.into_inner();
        let fresh_id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let reply = self.node.write(|core| core.grant(&request, fresh_id)).await;
        reply.map(Response::new).map_err(status_of)
    }

    async fn lease_revoke(
        &self,
        request: Request<PbLeaseRevokeRequest>,
    ) -> Result<Response<PbLeaseRevokeResponse>, Status> {
        let id = request.into_inner().id;
        let reply = self.node.write(|core| core.revoke(id)).await;
        reply.map(Response::new).map_err(status_of)
    }

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<PbLeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        let (node, requests) = (self.node.clone(), request.into_inner());
        let replies = unfold(Some((node, requests)), |state| async move {
            let (node, mut requests) = state?;
            match keep_alive(&node, &mut requests).await {
                Ok(Some(reply)) => Some((Ok(reply), Some((node, requests)))),
                Ok(None) => None,
                Err(status) => Some((Err(status), None)),
            }
        });
        Ok(Response::new(replies.boxed()))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<PbLeaseTimeToLiveRequest>,
    ) -> Result<Response<PbLeaseTimeToLiveResponse>, Status> {
        let request = request.into_inner();
        let reply = self.node.read(|core, now| Ok(core.time_to_live(&request, now))).await;
        reply.map(Response::new).map_err(status_of)
    }

    async fn lease_leases(
        &self,
        _: Request<PbLeaseLeasesRequest>,
    ) -> Result<Response<PbLeaseLeasesResponse>, Status> {
        let reply = self.node.read(|core, _| Ok(core.leases())).await;
        reply.map(Response::new).map_err(status_of)
    }
}

/// Replies to the next request of a stream; `None` at its end.
async fn keep_alive(
    node: &Node,
    requests: &mut Streaming<PbLeaseKeepAliveRequest>,
) -> Result<Option<PbLeaseKeepAliveResponse>, Status> {
    let mut progress = node.progress();
    let request = tokio::select! {
        biased;
        request = requests.message() => request?,
        _ = progress.wait_for(|progress| progress.stage != Stage::Serving) => return Err(stopped()),
    };
    let Some(request) = request else { return Ok(None) };
    let reply = node.read(|core, now| Ok(core.keep_alive(request.id, now))).await;
    reply.map(Some).map_err(status_of)
}
