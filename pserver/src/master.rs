//! What a pserver asks of the acting master, which is little.

use std::time::Duration;

use steadfast_common::keys::Keys;
use steadfast_common::records::MasterRecord;
use steadfast_coord::Etcd;
use steadfast_host::net::{Wire, dial};
use steadfast_host::role::Role;
use steadfast_host::time::timeout;
use steadfast_proto::v1::TakeCheckpointRequest;
use steadfast_proto::v1::master_client::MasterClient;
use tracing::{info, warn};

/// A connection to the acting master.
///
/// # Errors
/// Why there is none, for a log.
pub async fn acting(etcd: &Etcd, keys: &Keys) -> Result<MasterClient<Wire>, String> {
    let record = etcd.get_json::<MasterRecord>(&keys.master_addr()).await;
    let record = record.map_err(|error| error.to_string())?;
    let address = record.ok_or("no master acts")?.address;
    dial(&address, Role::Master).map(MasterClient::new)
}

/// Asks for a checkpoint, so that what our memory holds outlives us. Leaves without one if the
/// master takes none within `most`.
pub async fn save_before_leaving(etcd: &Etcd, keys: &Keys, most: Duration) {
    let asked = async {
        let mut master = acting(etcd, keys).await?;
        let reply = master.take_checkpoint(TakeCheckpointRequest {}).await;
        reply.map(tonic::Response::into_inner).map_err(|status| status.message().to_owned())
    };
    match timeout(most, asked).await {
        Ok(Ok(reply)) if reply.trouble.is_empty() => {
            info!(checkpoint = reply.checkpoint, "leaves a checkpoint behind");
        }
        Ok(Ok(reply)) => warn!(reason = reply.trouble, "leaves without a checkpoint"),
        Ok(Err(reason)) => warn!(reason, "leaves without a checkpoint"),
        Err(_) => warn!("leaves without a checkpoint: none was taken in time"),
    }
}
