//! The Maintenance and Cluster services, as far as they apply to a cluster of one process.

use super::status::status_of;
use crate::core::{MEMBER_ID, RAFT_TERM, header};
use crate::node::Node;
use etcd_client::proto::{
    PbAlarmRequest, PbAlarmResponse, PbClusterService, PbDefragmentRequest, PbDefragmentResponse,
    PbDowngradeRequest, PbDowngradeResponse, PbHashKvRequest, PbHashKvResponse, PbHashRequest,
    PbHashResponse, PbMaintenanceService, PbMember, PbMemberAddRequest, PbMemberAddResponse,
    PbMemberListRequest, PbMemberListResponse, PbMemberPromoteRequest, PbMemberPromoteResponse,
    PbMemberRemoveRequest, PbMemberRemoveResponse, PbMemberUpdateRequest, PbMemberUpdateResponse,
    PbMoveLeaderRequest, PbMoveLeaderResponse, PbResponseHeader, PbSnapshotRequest,
    PbSnapshotResponse, PbStatusRequest, PbStatusResponse,
};
use futures::stream::Empty;
use std::net::SocketAddr;
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// The version whose behavior this server follows; the suffix marks another implementation.
const VERSION: &str = "3.4.23-steadfast";
const NAME: &str = "steadfast";

#[derive(Clone)]
pub struct MaintenanceService {
    node: Arc<Node>,
    address: SocketAddr,
}

impl MaintenanceService {
    pub fn new(node: Arc<Node>, address: SocketAddr) -> Self {
        MaintenanceService { node, address }
    }

    async fn header(&self) -> Result<Option<PbResponseHeader>, Status> {
        let revision = self.node.read(|core, _| Ok(core.revision())).await;
        revision.map(|revision| Some(header(revision))).map_err(status_of)
    }
}

fn unsupported<T>(what: &str) -> Result<Response<T>, Status> {
    Err(Status::unimplemented(format!("the embedded etcd does not support {what}")))
}

#[tonic::async_trait]
impl PbMaintenanceService for MaintenanceService {
    type SnapshotStream = Empty<Result<PbSnapshotResponse, Status>>;

    /// Replies that there is no alarm: a disk failure stops the server instead.
    async fn alarm(&self, _: Request<PbAlarmRequest>) -> Result<Response<PbAlarmResponse>, Status> {
        Ok(Response::new(PbAlarmResponse { header: self.header().await?, alarms: Vec::new() }))
    }

    async fn status(
        &self,
        _: Request<PbStatusRequest>,
    ) -> Result<Response<PbStatusResponse>, Status> {
        let header = self.header().await?;
        let progress = *self.node.progress().borrow();
        let bytes = i64::try_from(progress.disk_bytes).unwrap_or(i64::MAX);
        Ok(Response::new(PbStatusResponse {
            header,
            version: VERSION.into(),
            db_size: bytes,
            db_size_in_use: bytes,
            leader: MEMBER_ID,
            raft_index: progress.position,
            raft_applied_index: progress.position,
            raft_term: RAFT_TERM,
            ..Default::default()
        }))
    }

    /// Replies with success: files are never fragmented.
    async fn defragment(
        &self,
        _: Request<PbDefragmentRequest>,
    ) -> Result<Response<PbDefragmentResponse>, Status> {
        Ok(Response::new(PbDefragmentResponse { header: self.header().await? }))
    }

    async fn hash(&self, _: Request<PbHashRequest>) -> Result<Response<PbHashResponse>, Status> {
        unsupported("a hash of its files")
    }

    async fn hash_kv(
        &self,
        _: Request<PbHashKvRequest>,
    ) -> Result<Response<PbHashKvResponse>, Status> {
        unsupported("a hash of its keys")
    }

    async fn snapshot(
        &self,
        _: Request<PbSnapshotRequest>,
    ) -> Result<Response<Self::SnapshotStream>, Status> {
        unsupported("snapshots in etcd's file format")
    }

    async fn move_leader(
        &self,
        _: Request<PbMoveLeaderRequest>,
    ) -> Result<Response<PbMoveLeaderResponse>, Status> {
        unsupported("a second member")
    }

    async fn downgrade(
        &self,
        _: Request<PbDowngradeRequest>,
    ) -> Result<Response<PbDowngradeResponse>, Status> {
        unsupported("downgrades")
    }
}

#[tonic::async_trait]
impl PbClusterService for MaintenanceService {
    async fn member_list(
        &self,
        _: Request<PbMemberListRequest>,
    ) -> Result<Response<PbMemberListResponse>, Status> {
        let member = PbMember {
            id: MEMBER_ID,
            name: NAME.into(),
            client_ur_ls: vec![format!("http://{}", self.address)],
            ..Default::default()
        };
        let header = self.header().await?;
        Ok(Response::new(PbMemberListResponse { header, members: vec![member] }))
    }

    async fn member_add(
        &self,
        _: Request<PbMemberAddRequest>,
    ) -> Result<Response<PbMemberAddResponse>, Status> {
        unsupported("a second member")
    }

    async fn member_remove(
        &self,
        _: Request<PbMemberRemoveRequest>,
    ) -> Result<Response<PbMemberRemoveResponse>, Status> {
        unsupported("a second member")
    }

    async fn member_update(
        &self,
        _: Request<PbMemberUpdateRequest>,
    ) -> Result<Response<PbMemberUpdateResponse>, Status> {
        unsupported("peer addresses")
    }

    async fn member_promote(
        &self,
        _: Request<PbMemberPromoteRequest>,
    ) -> Result<Response<PbMemberPromoteResponse>, Status> {
        unsupported("learners")
    }
}
