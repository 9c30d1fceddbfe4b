//! Selects the events of a watcher, and detects one that has fallen too far behind.

use super::fact::{Change, Key, Revision, Write};
use super::history::History;
use super::span::Span;
use etcd_client::proto::{PbEvent, PbKeyValue};

const EVENT_PUT: i32 = 0;
const EVENT_DELETE: i32 = 1;

/// A position in the history. It holds no events, so a slow watcher uses no memory, but may be cancelled.
#[derive(Debug, Clone)]
pub struct Watcher {
    pub key: Key,
    pub range_end: Key,
    /// The first revision that the watcher has not received.
    pub next: Revision,
    pub options: WatchOptions,
}

/// The options of a watcher.
#[derive(Debug, Clone, Copy, Default)]
pub struct WatchOptions {
    pub prev_kv: bool,
    pub no_put: bool,
    pub no_delete: bool,
}

/// The next update for a watcher.
#[derive(Debug, PartialEq)]
pub enum WatchUpdate {
    Nothing,
    /// Whole revisions, up to and including `through`.
    Events {
        events: Vec<PbEvent>,
        through: Revision,
    },
    /// The events that it needs are compacted.
    Compacted,
}

impl Watcher {
    /// Advances the watcher through the revisions up to `latest` and returns its events; stops early
    /// once they exceed `bytes_max`. A revision is never split.
    pub fn advance(
        &mut self,
        history: &History,
        latest: Revision,
        bytes_max: usize,
    ) -> WatchUpdate {
        if self.next < history.floor() {
            return WatchUpdate::Compacted;
        }
        let mut events = Vec::new();
        let mut bytes = 0;
        for write in history.writes(self.next, latest) {
            for event in self.events_of(history, write) {
                bytes += size(&event);
                events.push(event);
            }
            self.next = write.revision + 1;
            if bytes >= bytes_max {
                break;
            }
        }
        match events.is_empty() {
            true => WatchUpdate::Nothing,
            false => WatchUpdate::Events { events, through: self.next - 1 },
        }
    }

    fn events_of<'a>(
        &'a self,
        history: &'a History,
        write: &'a Write,
    ) -> impl Iterator<Item = PbEvent> + 'a {
        let span = Span::new(&self.key, &self.range_end);
        let matching = write.changes.iter().filter(move |change| match change {
            Change::Put(kv) => !self.options.no_put && span.contains(&kv.key),
            Change::Delete(key) => !self.options.no_delete && span.contains(key),
        });
        matching.map(|change| self.event(history, write.revision, change))
    }

    fn event(&self, history: &History, revision: Revision, change: &Change) -> PbEvent {
        let (r#type, kv) = match change {
            Change::Put(kv) => (EVENT_PUT, kv.as_ref().clone()),
            Change::Delete(key) => {
                let tombstone =
                    PbKeyValue { key: key.clone(), mod_revision: revision, ..Default::default() };
                (EVENT_DELETE, tombstone)
            }
        };
        // A key that is deleted and put again in one revision counts as created: it has no previous value.
        let is_creation = r#type == EVENT_PUT && kv.create_revision == revision;
        let prev_kv = match self.options.prev_kv && !is_creation {
            true => previous(history, change.key(), revision),
            false => None,
        };
        PbEvent { r#type, kv: Some(kv), prev_kv }
    }
}

/// Returns the value of a key before a revision, unless it is compacted.
fn previous(history: &History, key: &[u8], revision: Revision) -> Option<PbKeyValue> {
    let before = revision - 1;
    if before < history.compacted() {
        return None;
    }
    history.get(key, before).map(|kv| kv.as_ref().clone())
}

/// Returns the approximate size of an event on the wire.
pub fn size(event: &PbEvent) -> usize {
    const OVERHEAD: usize = 64;
    let kv_size = |kv: &PbKeyValue| kv.key.len() + kv.value.len();
    OVERHEAD + event.kv.as_ref().map_or(0, kv_size) + event.prev_kv.as_ref().map_or(0, kv_size)
}
