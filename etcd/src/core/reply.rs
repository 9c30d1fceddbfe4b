//! The header of replies.

use super::fact::Revision;
use etcd_client::proto::PbResponseHeader;

/// The cluster has one member, so its ids are constants.
pub const CLUSTER_ID: u64 = 0x5354_4541_4446_4153;
pub const MEMBER_ID: u64 = 0x5354_4541_4459;
pub const RAFT_TERM: u64 = 1;

pub fn header(revision: Revision) -> PbResponseHeader {
    PbResponseHeader {
        cluster_id: CLUSTER_ID,
        member_id: MEMBER_ID,
        revision,
        raft_term: RAFT_TERM,
    }
}

/// Returns the header of a reply inside of a transaction's reply, which has only a revision.
pub fn inner_header(revision: Revision) -> PbResponseHeader {
    PbResponseHeader { revision, ..Default::default() }
}
