//! Claims the first free slot below the desired number, or waits as a spare.

use std::sync::Arc;
use std::time::Duration;

use steadfast_common::ids::{Incarnation, Slot};
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{FollowerRecord, GenerationRecord, PserverRecord};
use steadfast_coord::{CoordError, Entry, Etcd, Mirror, Op, Range, Session, Unchanged, View};
use steadfast_host::time::{sleep, timeout};
use steadfast_process::Readiness;
use tokio::sync::watch;
use tracing::{info, warn};

use crate::event::Event;
use crate::event_loop::EventLoopHandle;
use crate::handover::HANDOVER_MAX;

/// Interval of retries without a change in etcd.
const RETRY: Duration = Duration::from_secs(5);

/// Waits until a slot is claimed; returns it with the create-revision of its key. Leaves a slot whose holder has a
/// follower to that one.
///
/// # Errors
/// If the lease ends meanwhile, or `ps_desired` is not a number.
pub async fn claim(
    etcd: &Etcd,
    session: &Session,
    keys: &Keys,
    record: &PserverRecord,
    followers: Option<&Mirror>,
    readiness: &Readiness,
) -> Result<(Slot, Incarnation), CoordError> {
    let desired = Mirror::start(etcd, Range::Key(keys.ps_desired())).await?;
    let slots = Mirror::start(etcd, Range::Prefix(keys.ps_prefix())).await?;
    let (mut desired_changes, mut slot_changes) = (desired.subscribe(), slots.subscribe());
    let mut follower_changes = changes_of(followers);
    let value = serde_json::to_vec(record).expect("records are plain data");
    loop {
        let wanted = desired_changes.borrow_and_update().single::<u32>()?;
        let taken = slot_changes.borrow_and_update().clone();
        let followed = follower_changes.borrow_and_update().clone();
        // A request that timed out may have succeeded.
        let mut ours = taken_by(keys, &taken, record);
        let ours = ours.find(|(_, it, how)| it.lease == session.lease() && *how == Taken::Free);
        if let Some((slot, entry, _)) = ours {
            info!(%slot, "slot claimed");
            return Ok((slot, Incarnation(entry.create_revision)));
        }
        let free = wanted.and_then(|wanted| first_free(keys, wanted, &taken, &followed));
        if let Some(slot) = free {
            let absent = |key| Unchanged { key, mod_revision: 0 };
            let absent = [absent(keys.ps(slot)), absent(keys.follower(slot))];
            let put = Op::put_leased(&keys.ps(slot), value.clone(), session.lease());
            match etcd.put_if(&put, &absent).await {
                Ok(Some(revision)) => {
                    info!(%slot, "slot claimed");
                    return Ok((slot, Incarnation(revision)));
                }
                // Another pserver claimed it first; the mirror will show it.
                Ok(None) => {}
                Err(error) if error.is_transient() => warn!(%error, "slot not claimed yet"),
                Err(error) if !session.is_live() || error.is_lease_gone() => {
                    return Err(CoordError::LeaseLost);
                }
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
            Ok(()) = follower_changes.changed() => {}
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
        let others = taken_by(keys, &taken, record).filter(|(slot, ..)| *slot != own);
        for (slot, entry, _) in others {
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

/// Returns the changes of a mirror; without one, of a view that stays empty.
fn changes_of(mirror: Option<&Mirror>) -> watch::Receiver<Arc<View>> {
    mirror.map_or_else(|| watch::channel(Arc::default()).1, Mirror::subscribe)
}

/// Deletes the records that this pserver, which holds a slot, follows one, until dropped: the holders of slots would wait
/// for it.
pub async fn stop_following(
    etcd: &Etcd,
    record: &PserverRecord,
    mut followers: watch::Receiver<Arc<View>>,
) {
    loop {
        let all = followers.borrow_and_update().clone();
        let mut pause = Duration::MAX;
        for (key, entry) in &all.entries {
            if !entry.json::<FollowerRecord>().is_ok_and(|follower| follower.id == record.id) {
                continue;
            }
            let unchanged = [Unchanged { key: key.clone(), mod_revision: entry.mod_revision }];
            if let Err(error) = etcd.put_if(&Op::delete(key), &unchanged).await {
                warn!(key, %error, "the record of a follower is not deleted yet");
                pause = RETRY;
            }
        }
        tokio::select! {
            biased;
            changed = followers.changed() => if changed.is_err() { std::future::pending().await },
            () = sleep(pause), if pause != Duration::MAX => {}
        }
    }
}

/// Completes when the job has too few slots for that of `event_loop`, and the slots of a generation without it have read
/// what they need of its state, or if no such generation begins for some time. A missing or invalid number is ignored.
pub async fn surplus(
    event_loop: EventLoopHandle,
    mut desired: watch::Receiver<Arc<View>>,
    mut generation: watch::Receiver<Arc<View>>,
) {
    let own = event_loop.slot;
    let is_surplus = |view: &Arc<View>| {
        view.single::<u32>().ok().flatten().is_some_and(|desired| desired <= own.0)
    };
    if desired.wait_for(is_surplus).await.is_err() {
        std::future::pending().await
    }
    info!(slot = %own, "the job has fewer slots now");
    let goes_on = |view: &Arc<View>| {
        let record = view.single::<GenerationRecord>().ok().flatten();
        record.is_some_and(|record| record.slots.len() <= own.0 as usize)
    };
    let begun = timeout(HANDOVER_MAX, generation.wait_for(goes_on)).await;
    let record = begun.ok().and_then(|view| view.ok()?.single::<GenerationRecord>().ok()?);
    if let Some(record) = record.filter(|record| record.handover.is_some()) {
        let number = record.generation;
        event_loop.send(Event::GenerationWithout { record }).await;
        let is_over = |view: &Arc<View>| {
            let present = view.single::<GenerationRecord>().ok().flatten();
            present.is_none_or(|present| present.generation != number)
        };
        let mut published = event_loop.published();
        tokio::select! {
            biased;
            _ = published.wait_for(|it| !it.hands_over) => {}
            _ = generation.wait_for(is_over) => {}
        }
    }
    info!(slot = %own, "releasing the slot");
}

/// States from whom a slot was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    Free,
    /// From a holder that was followed.
    Over,
}

/// Returns the slots held under the id of `record`.
fn taken_by<'a>(
    keys: &'a Keys,
    taken: &'a View,
    record: &'a PserverRecord,
) -> impl Iterator<Item = (Slot, &'a Entry, Taken)> {
    taken.entries.iter().filter_map(|(key, entry)| {
        let slot = key.strip_prefix(&keys.ps_prefix())?.parse().ok().map(Slot)?;
        let holder: PserverRecord = entry.json().ok()?;
        let how = if holder.followed.is_some() { Taken::Over } else { Taken::Free };
        (holder.id == record.id).then_some((slot, entry, how))
    })
}

fn first_free(keys: &Keys, wanted: u32, taken: &View, followed: &View) -> Option<Slot> {
    let is_free = |slot: &Slot| {
        !taken.entries.contains_key(&keys.ps(*slot))
            && !followed.entries.contains_key(&keys.follower(*slot))
    };
    (0..wanted).map(Slot).find(is_free)
}
