//! Claims the first free slot below the desired number, or waits as a spare.

use std::sync::Arc;
use std::time::Duration;

use steadfast_common::ids::{Incarnation, Slot};
use steadfast_common::records::PserverRecord;
use steadfast_common::records::keys::Keys;
use steadfast_coord::{CoordError, Entry, Etcd, Mirror, Op, Range, Session, Unchanged, View};
use steadfast_host::time::sleep;
use steadfast_process::Readiness;
use tokio::sync::watch;
use tracing::{info, warn};

/// Interval of retries without a change in etcd.
const RETRY: Duration = Duration::from_secs(5);

/// Waits until a slot is claimed; returns it with the create-revision of its key.
///
/// # Errors
/// If the lease ends meanwhile, or `ps_desired` is not a number.
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
        // A request that timed out may have succeeded.
        let ours = taken_by(keys, &taken, record).find(|(_, it)| it.lease == session.lease());
        if let Some((slot, entry)) = ours {
            info!(%slot, "slot claimed");
            return Ok((slot, Incarnation(entry.create_revision)));
        }
        let free = wanted.and_then(|wanted| first_free(keys, wanted, &taken));
        if let Some(slot) = free {
            match etcd.create(&keys.ps(slot), &value, session.lease()).await {
                Ok(Ok(revision)) => {
                    info!(%slot, "slot claimed");
                    return Ok((slot, Incarnation(revision)));
                }
                // Another pserver claimed it first; the mirror will show it.
                Ok(Err(_)) => {}
                Err(error) if error.is_transient() => warn!(%error, "slot not claimed yet"),
                Err(_) if !session.is_live() => return Err(CoordError::LeaseLost),
                Err(error) => return Err(error),
            }
        } else {
            readiness.set_not_ready(match wanted {
                None => format!("waiting for {}", keys.ps_desired()),
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

/// Releases every slot but `own` that is held under this pserver's id, until dropped: a claim that timed
/// out may reach etcd after another slot was claimed.
pub async fn release_other_slots(
    etcd: &Etcd,
    keys: &Keys,
    own: Slot,
    record: &PserverRecord,
    mut slots: watch::Receiver<Arc<View>>,
) {
    loop {
        let taken = slots.borrow_and_update().clone();
        let mut pause = Duration::MAX;
        for (slot, entry) in taken_by(keys, &taken, record).filter(|(slot, _)| *slot != own) {
            let key = keys.ps(slot);
            let unchanged = [Unchanged { key: key.clone(), mod_revision: entry.mod_revision }];
            match etcd.put_if(&Op::delete(&key), &unchanged).await {
                Ok(_) => warn!(%slot, "a delayed claim took a second slot; released it"),
                Err(error) => {
                    warn!(%slot, %error, "second slot not released yet");
                    pause = RETRY;
                }
            }
        }
        tokio::select! {
            biased;
            changed = slots.changed() => if changed.is_err() { std::future::pending().await },
            () = sleep(pause), if pause != Duration::MAX => {}
        }
    }
}

/// Completes when the job has too few slots for `own`. A missing or invalid number is ignored.
pub async fn surplus(own: Slot, mut desired: watch::Receiver<Arc<View>>) {
    let is_surplus = |view: &Arc<View>| {
        view.single::<u32>().ok().flatten().is_some_and(|desired| desired <= own.0)
    };
    if desired.wait_for(is_surplus).await.is_err() {
        std::future::pending().await
    }
    info!(slot = %own, "the job has fewer slots now; releasing the slot");
}

/// Returns the slots held under the id of `record`.
fn taken_by<'a>(
    keys: &'a Keys,
    taken: &'a View,
    record: &'a PserverRecord,
) -> impl Iterator<Item = (Slot, &'a Entry)> {
    taken.entries.iter().filter_map(|(key, entry)| {
        let slot = key.strip_prefix(&keys.ps_prefix())?.parse().ok().map(Slot)?;
        let holder: PserverRecord = entry.json().ok()?;
        (holder.id == record.id).then_some((slot, entry))
    })
}

fn first_free(keys: &Keys, wanted: u32, taken: &View) -> Option<Slot> {
    (0..wanted).map(Slot).find(|slot| !taken.entries.contains_key(&keys.ps(*slot)))
}
