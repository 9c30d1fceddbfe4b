//! Records the follower of a slot in etcd, and removes it from there.
//!
//! As long as `followers/<slot>` exists, the follower may take the slot over without a checkpoint. So the key is put
//! only when each step waits for the follower, and no step goes on without the follower before the key is gone for
//! certain. Each transaction compares the key of the slot: a process that has lost it changes nothing.

use std::sync::Arc;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::{FollowerRecord, PserverRecord};
use steadfast_coord::{CoordError, Etcd, Op, Unchanged, View, backoff};
use steadfast_host::time::sleep;
use tokio::sync::watch;
use tracing::{info, warn};
use uuid::Uuid;

use crate::event::Event;
use crate::event_loop::{EventLoopHandle, Published};

/// The pause before an attempt is repeated because a key has changed meanwhile, and the longest one after a failure.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The record that etcd is to have, and the lease that it is bound to.
type Wanted = Option<(FollowerRecord, i64)>;

/// Keeps the record in etcd as the event loop wants it, until dropped. `own` is the id of this pserver, which holds the
/// slot, and `followers` shows the followers of all slots.
pub async fn keep(
    event_loop: EventLoopHandle,
    etcd: &Etcd,
    keys: &Keys,
    own: Uuid,
    mut followers: watch::Receiver<Arc<View>>,
) {
    let keeper = Keeper { etcd, keys, own, event_loop: &event_loop };
    let mut published = event_loop.published();
    let key = keys.follower(event_loop.slot);
    // What etcd has, as this process has written it, and since which revision. An earlier holder may have left a record.
    let (mut written, mut is_first) = (None::<(Wanted, i64)>, true);
    // A lease that has ended: its owner cannot be recorded.
    let mut ended = None;
    let mut pauses = None;
    loop {
        let shown = published.borrow_and_update().clone();
        let wanted = keeper.wanted(&shown).filter(|(_, lease)| Some(*lease) != ended);
        let view = followers.borrow_and_update().clone();
        let mut pause = Duration::MAX;
        match &written {
            Some((known, since)) if *known == wanted => {
                pauses = None;
                if let Some((record, lease)) = known
                    && *since <= view.revision
                    && !view.entries.contains_key(&key)
                {
                    ended = Some(*lease);
                    event_loop.send(Event::FollowerGone { follower: record.id }).await;
                    continue;
                }
                // It left before it was recorded.
                let is_leaving = shown.follower.as_ref().is_some_and(|it| it.is_leaving);
                if known.is_none() && is_leaving {
                    event_loop.send(Event::NotRecorded).await;
                }
            }
            Some(_) | None => match keeper.write(wanted.as_ref(), is_first).await {
                Ok(Some(revision)) => {
                    if wanted.is_none() {
                        event_loop.send(Event::NotRecorded).await;
                    }
                    (written, is_first) = (Some((wanted, revision)), false);
                    continue;
                }
                Ok(None) => pause = PAUSE_MIN,
                Err(error) => {
                    // It may be written nevertheless, or may still be.
                    (written, is_first) = (None, false);
                    let slot = event_loop.slot;
                    warn!(%slot, %error, "the follower of the slot is not recorded yet");
                    let is_lease_lost = error.kind() == ErrorKind::NotFound;
                    if let Some((record, lease)) = wanted.filter(|_| is_lease_lost) {
                        ended = Some(lease);
                        event_loop.send(Event::FollowerGone { follower: record.id }).await;
                    }
                    let pauses = pauses.get_or_insert_with(backoff);
                    pause = pauses.next().unwrap_or(PAUSE_MAX).min(PAUSE_MAX);
                }
            },
        }
        tokio::select! {
            biased;
            changed = published.changed() => if changed.is_err() { return std::future::pending().await },
            _ = followers.changed() => {}
            () = sleep(pause), if pause != Duration::MAX => {}
        }
    }
}

struct Keeper<'a> {
    etcd: &'a Etcd,
    keys: &'a Keys,
    own: Uuid,
    event_loop: &'a EventLoopHandle,
}

impl Keeper<'_> {
    fn wanted(&self, published: &Published) -> Wanted {
        let follower = published.follower.as_ref().filter(|it| it.is_following)?;
        let applicant = &follower.applicant;
        let record = FollowerRecord {
            id: applicant.id,
            address: applicant.address.clone(),
            admin: applicant.admin.clone(),
            of: self.event_loop.incarnation,
            generation: published.generation,
        };
        Some((record, applicant.lease))
    }

    /// Puts the record, or removes it; returns the revision from which on etcd has it so. Returns `None` if a key has
    /// changed meanwhile.
    async fn write(
        &self,
        wanted: Option<&(FollowerRecord, i64)>,
        is_first: bool,
    ) -> Result<Option<i64>, CoordError> {
        let (ps, follower) =
            (self.keys.ps(self.event_loop.slot), self.keys.follower(self.event_loop.slot));
        let Some(slot) = self.etcd.get(&ps).await? else { return Ok(None) };
        if slot.json::<PserverRecord>()?.id != self.own {
            return Ok(None);
        }
        let (revision, known) = self.etcd.get_at(&follower).await?;
        let holds = |mod_revision| Unchanged { key: ps.clone(), mod_revision };
        if let Some((record, lease)) = wanted {
            let mod_revision = known.map_or(0, |entry| entry.mod_revision);
            let unchanged =
                [holds(slot.mod_revision), Unchanged { key: follower.clone(), mod_revision }];
            let value = serde_json::to_vec(record).expect("records are plain data");
            let put = Op::put_leased(&follower, value, *lease);
            let put = self.etcd.put_if(&put, &unchanged).await?;
            if put.is_some() {
                info!(slot = %self.event_loop.slot, follower = %record.id, "the slot is followed");
            }
            return Ok(put);
        }
        if is_first && known.is_none() {
            return Ok(Some(revision));
        }
        // A put of this process that is still under way would come after the deletion: it compares the key of the slot,
        // which changes first.
        let again = Op::put_leased(&ps, slot.value.clone(), slot.lease);
        let Some(changed) = self.etcd.put_if(&again, &[holds(slot.mod_revision)]).await? else {
            return Ok(None);
        };
        self.etcd.put_if(&Op::delete(&follower), &[holds(changed)]).await
    }
}
