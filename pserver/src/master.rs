//! Calls from a pserver to the acting master.

use std::time::Duration;

use steadfast_common::records::MasterRecord;
use steadfast_common::records::keys::Keys;
use steadfast_common::role::Role;
use steadfast_coord::{Etcd, backoff};
use steadfast_host::time::{Instant, sleep, timeout};
use steadfast_net::{Channel, TlsIdentity};
use steadfast_proto::v1::TakeCheckpointRequest;
use steadfast_proto::v1::master_client::MasterClient;
use tracing::{info, warn};

/// For so many leases a pserver that leaves waits for a master.
const LEASES_WAITED: u32 = 3;

/// Connects to the acting master.
///
/// # Errors
/// The reason, for a log.
pub async fn acting(
    etcd: &Etcd,
    keys: &Keys,
    tls: &TlsIdentity,
) -> Result<MasterClient<Channel>, String> {
    let record = etcd.get_json::<MasterRecord>(&keys.master_addr()).await;
    let record = record.map_err(|error| error.to_string())?;
    let address = record.ok_or("no acting master")?.address;
    tls.dial(&address, Role::Master).map(MasterClient::new)
}

/// Requests a checkpoint before the pserver exits. Returns without one after `limit`, or when no master has answered
/// for three leases: a standby acts within one.
pub async fn take_final_checkpoint(
    etcd: &Etcd,
    keys: &Keys,
    tls: &TlsIdentity,
    limit: Duration,
    lease_ttl: Duration,
) {
    let began = Instant::now();
    let request = async || {
        let mut master = acting(etcd, keys, tls).await?;
        let reply = master.take_checkpoint(TakeCheckpointRequest {}).await;
        reply.map(tonic::Response::into_inner).map_err(|status| status.message().to_owned())
    };
    let requested = async {
        let mut pauses = backoff();
        loop {
            match request().await {
                Err(reason) if began.elapsed() < LEASES_WAITED * lease_ttl => {
                    info!(reason, "no final checkpoint yet");
                    sleep(pauses.next().unwrap_or(lease_ttl)).await;
                }
                requested => return requested,
            }
        }
    };
    match timeout(limit, requested).await {
        Ok(Ok(reply)) if reply.error.is_empty() => {
            info!(checkpoint = reply.checkpoint, "final checkpoint taken");
        }
        Ok(Ok(reply)) => warn!(reason = reply.error, "exiting without a final checkpoint"),
        Ok(Err(reason)) => warn!(reason, "exiting without a final checkpoint"),
        Err(_) => warn!("exiting without a final checkpoint: timeout"),
    }
}
