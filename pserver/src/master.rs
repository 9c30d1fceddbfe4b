//! Calls from a pserver to the acting master.

use std::time::Duration;

use steadfast_common::keys::Keys;
use steadfast_common::records::MasterRecord;
use steadfast_coord::Etcd;
use steadfast_host::net::{Channel, dial};
use steadfast_host::role::Role;
use steadfast_host::time::timeout;
use steadfast_proto::v1::TakeCheckpointRequest;
use steadfast_proto::v1::master_client::MasterClient;
use tracing::{info, warn};

/// Connects to the acting master.
///
/// # Errors
/// The reason, for a log.
pub async fn acting(etcd: &Etcd, keys: &Keys) -> Result<MasterClient<Channel>, String> {
    let record = etcd.get_json::<MasterRecord>(&keys.master_addr()).await;
    let record = record.map_err(|error| error.to_string())?;
    let address = record.ok_or("no master acts")?.address;
    dial(&address, Role::Master).map(MasterClient::new)
}

/// Requests a checkpoint to preserve the shard. Returns without one if the master takes none within
/// `most`.
pub async fn save_before_leaving(etcd: &Etcd, keys: &Keys, most: Duration) {
    let asked = async {
        let mut master = acting(etcd, keys).await?;
        let reply = master.take_checkpoint(TakeCheckpointRequest {}).await;
        reply.map(tonic::Response::into_inner).map_err(|status| status.message().to_owned())
    };
    match timeout(most, asked).await {
        Ok(Ok(reply)) if reply.error.is_empty() => {
            info!(checkpoint = reply.checkpoint, "checkpoint taken before leaving");
        }
        Ok(Ok(reply)) => warn!(reason = reply.error, "leaving without a checkpoint"),
        Ok(Err(reason)) => warn!(reason, "leaving without a checkpoint"),
        Err(_) => warn!("leaving without a checkpoint: timeout"),
    }
}
