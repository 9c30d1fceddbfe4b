//! Claims a slot: the first free one below the desired number, or waits as a spare.

use std::time::Duration;

use steadfast_common::ids::{Incarnation, Slot};
use steadfast_common::keys::Keys;
use steadfast_common::records::PserverRecord;
use steadfast_coord::{CoordError, Etcd, Mirror, Range, Session, View};
use steadfast_host::time::sleep;
use steadfast_process::Readiness;
use tracing::{info, warn};

/// Time between looks at etcd while nothing tells of a change.
const RETRY: Duration = Duration::from_secs(5);

/// Waits until a slot is ours; returns it with the create-revision of its key.
///
/// # Errors
/// If our lease ends meanwhile, or `ps_desired` is no number.
pub async fn claim(
    etcd: &Etcd,
    session: &Session,
    keys: &Keys,
    record: &PserverRecord,
    readiness: &Readiness,
) -> Result<(Slot, Incarnation), CoordError> {
    let desired = Mirror::start(etcd, Range::Key(keys.ps_desired())).await?;
    let slots = Mirror::start(etcd, Range::Prefix(keys.ps_prefix())).await?;
    let (mut desired_changes, mut slot_changes) = (desired.subscribe(), slots.subscribe());
    let value = serde_json::to_vec(record).expect("records are plain data");
    loop {
        let wanted = desired_changes.borrow_and_update().single::<u32>()?;
        let taken = slot_changes.borrow_and_update().clone();
        let free = wanted.and_then(|wanted| first_free(keys, wanted, &taken));
        if let Some(slot) = free {
            match etcd.create(&keys.ps(slot), &value, session.lease()).await {
                Ok(Ok(revision)) => {
                    info!(%slot, "slot claimed");
                    return Ok((slot, Incarnation(revision)));
                }
                // Somebody was faster; the mirror will show it.
                Ok(Err(_)) => {}
                Err(error) if error.is_transient() => warn!(%error, "slot not claimed yet"),
                Err(_) if !session.is_live() => return Err(CoordError::LeaseLost),
                Err(error) => return Err(error),
            }
        } else {
            readiness.set_not_ready(match wanted {
                None => format!("waits for {}", keys.ps_desired()),
                Some(wanted) => format!("spare: all {wanted} slots are taken"),
            });
        }
        tokio::select! {
            biased;
            _ = desired_changes.changed() => {}
            _ = slot_changes.changed() => {}
            () = sleep(RETRY) => {}
            () = session.lost() => return Err(CoordError::LeaseLost),
        }
    }
}

fn first_free(keys: &Keys, wanted: u32, taken: &View) -> Option<Slot> {
    (0..wanted).map(Slot).find(|slot| !taken.entries.contains_key(&keys.ps(*slot)))
}
