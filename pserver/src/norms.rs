//! Computes the global norm of a step's gradient: the squares of every slot, added in the order of
//! blocks, which gives every slot the same bits.

use std::collections::BTreeMap;
use std::time::Duration;

use steadfast_common::ids::Slot;
use steadfast_common::records::PserverRecord;
use steadfast_common::records::keys::Keys;
use steadfast_common::role::Role;
use steadfast_coord::{Mirror, View};
use steadfast_host::task::TaskSet;
use steadfast_host::time::{sleep, timeout};
use steadfast_net::{Channel, TlsIdentity};
use steadfast_proto::v1::NormsRequest;
use steadfast_proto::v1::pserver_client::PserverClient;
use tracing::debug;

use crate::event::Event;
use crate::event_loop::{EventLoopHandle, Published, Squares};

/// How long one request waits at a peer.
const WAIT: Duration = Duration::from_secs(5);

/// Pause before a request without an answer is repeated.
const RETRY: Duration = Duration::from_millis(50);

/// Sends the global norm of every complete step to `event_loop`, until dropped.
pub async fn follow(event_loop: EventLoopHandle, keys: Keys, peers: Mirror, tls: TlsIdentity) {
    let mut published = event_loop.published();
    let mut clients = Clients { tls, open: BTreeMap::new() };
    // The step whose norm was sent: other changes may be published before the event loop has applied it, and peers have
    // no norms of it any more soon after.
    let mut sent = None;
    loop {
        let seen = published.borrow_and_update().clone();
        let step = waiting(&seen).map(|squares| (seen.generation, squares.version));
        if let Some(squares) = waiting(&seen).filter(|_| sent != step) {
            let (generation, version) = (seen.generation, squares.version);
            let norm = global(&event_loop, &seen, &squares, &keys, &peers, &mut clients).await;
            if let Some(norm) = norm {
                event_loop.send(Event::Norm { generation, version, norm }).await;
                sent = step;
            }
            // Waits for a change: the event loop may not have published the step yet.
        }
        if published.changed().await.is_err() {
            return;
        }
    }
}

/// Returns the squares of a step that is not applied yet.
fn waiting(published: &Published) -> Option<Squares> {
    let shard = published.shard.as_ref()?;
    published.squares.clone().filter(|squares| squares.version == shard.position.version)
}

/// Connections to peers, by address.
struct Clients {
    tls: TlsIdentity,
    open: BTreeMap<String, PserverClient<Channel>>,
}

async fn global(
    event_loop: &EventLoopHandle,
    seen: &Published,
    squares: &Squares,
    keys: &Keys,
    peers: &Mirror,
    clients: &mut Clients,
) -> Option<f64> {
    let mut all: BTreeMap<u32, f64> = squares.by_block.iter().copied().collect();
    let request = NormsRequest {
        generation: seen.generation.0,
        version: squares.version.0,
        wait_ms: WAIT.as_millis() as u64,
    };
    let mut missing: Vec<Slot> =
        (0..seen.placement.slots()).map(Slot).filter(|slot| *slot != event_loop.slot).collect();
    while !missing.is_empty() {
        if event_loop.published().borrow().generation != seen.generation {
            return None;
        }
        let mut requests = TaskSet::default();
        for slot in missing.drain(..) {
            let client = client(slot, keys, &peers.view(), clients);
            requests.spawn(async move { (slot, request_norms(client, request).await) });
        }
        while let Some(Ok((slot, answer))) = requests.join_next().await {
            match answer {
                Some(squares) => all.extend(squares),
                None => missing.push(slot),
            }
        }
        if !missing.is_empty() {
            sleep(RETRY).await;
        }
    }
    Some(all.values().sum::<f64>().sqrt())
}

fn client(
    slot: Slot,
    keys: &Keys,
    view: &View,
    clients: &mut Clients,
) -> Option<PserverClient<Channel>> {
    let record: PserverRecord = view.entries.get(&keys.ps(slot))?.json().ok()?;
    if let Some(known) = clients.open.get(&record.address) {
        return Some(known.clone());
    }
    let client = PserverClient::new(clients.tls.dial(&record.address, Role::Pserver).ok()?);
    clients.open.insert(record.address, client.clone());
    Some(client)
}

async fn request_norms(
    client: Option<PserverClient<Channel>>,
    request: NormsRequest,
) -> Option<Vec<(u32, f64)>> {
    match timeout(2 * WAIT, client?.norms(request)).await {
        Ok(Ok(reply)) => {
            let reply = reply.into_inner();
            reply.ready.then(|| reply.blocks.into_iter().zip(reply.squares).collect())
        }
        Ok(Err(status)) => {
            debug!(%status, "norms of a peer not available yet");
            None
        }
        Err(_) => None,
    }
}
