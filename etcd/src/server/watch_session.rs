//! The watchers of one stream and their pending responses.

use crate::core::{Core, Revision, Span, WatchOptions, WatchUpdate, Watcher, event_bytes, header};
use etcd_client::proto::{
    PbEvent, PbResponseHeader, PbWatchRequest, PbWatchRequestUnion, PbWatchResponse,
};
use std::collections::{BTreeMap, VecDeque};

/// Responses are collected up to about this size before any is sent.
const COLLECTED_BYTES_MAX: usize = 1 << 20;
/// Responses to a watcher that accepts fragments are split at this size.
const FRAGMENT_BYTES: usize = 1 << 20;
/// The watch id of a response that does not belong to a watch.
const NO_WATCH: i64 = -1;

const FILTER_NO_PUT: i32 = 0;
const FILTER_NO_DELETE: i32 = 1;

const EMPTY_RANGE: &str = "mvcc: watcher range is empty";
const DUPLICATE_ID: &str = "mvcc: duplicate watch ID provided on the WatchStream";

/// The watches of one stream. It never waits; its driver does.
#[derive(Default)]
pub struct Session {
    watches: BTreeMap<i64, Watch>,
    next_id: i64,
    /// The watch to advance first, so that a busy one cannot starve the others.
    turn: i64,
    responses: VecDeque<PbWatchResponse>,
    /// The revision up to which every watcher has all of its events.
    synced: Revision,
    /// The client has requested progress, which is sent once `synced` is the latest revision.
    owes_progress: bool,
}

struct Watch {
    watcher: Watcher,
    wants_progress: bool,
    takes_fragments: bool,
    /// Whether the client has received no event since the last tick.
    is_idle: bool,
}

impl Session {
    pub fn next_response(&mut self) -> Option<PbWatchResponse> {
        self.responses.pop_front()
    }

    pub fn has_response(&self) -> bool {
        !self.responses.is_empty()
    }

    /// Processes a request. `latest` is the latest revision on disk.
    pub fn request(&mut self, core: &Core, latest: Revision, request: PbWatchRequest) {
        match request.request_union {
            Some(PbWatchRequestUnion::CreateRequest(create)) => {
                let options = WatchOptions {
                    prev_kv: create.prev_kv,
                    no_put: create.filters.contains(&FILTER_NO_PUT),
                    no_delete: create.filters.contains(&FILTER_NO_DELETE),
                };
                // The zero byte is the smallest key, so an empty key means "from the first".
                let key = if create.key.is_empty() { vec![0] } else { create.key };
                let next = match create.start_revision {
                    0 => latest + 1,
                    revision => revision,
                };
                let watch = Watch {
                    watcher: Watcher { key, range_end: create.range_end, next, options },
                    wants_progress: create.progress_notify,
                    takes_fragments: create.fragment,
                    is_idle: false,
                };
                self.create(core, latest, create.watch_id, watch);
            }
            Some(PbWatchRequestUnion::CancelRequest(cancel)) => {
                self.cancel(latest, cancel.watch_id);
            }
            Some(PbWatchRequestUnion::ProgressRequest(_)) => self.owes_progress = true,
            None => {}
        }
    }

    /// Collects events up to revision `latest`, up to about `COLLECTED_BYTES_MAX`.
    pub fn collect(&mut self, core: &Core, latest: Revision) {
        let mut order: Vec<i64> = self.watches.range(self.turn..).map(|(id, _)| *id).collect();
        order.extend(self.watches.range(..self.turn).map(|(id, _)| *id));
        let mut room = COLLECTED_BYTES_MAX;
        for id in order {
            if room == 0 {
                self.turn = id;
                return;
            }
            room = room.saturating_sub(self.advance(core, latest, id, room));
        }
        if room == 0 {
            return;
        }
        self.synced = latest;
        if std::mem::take(&mut self.owes_progress) {
            self.responses.push_back(response(NO_WATCH, latest));
        }
    }

    /// Sends the current revision to idle watchers that requested progress notifications.
    pub fn notify_idle(&mut self) {
        for (id, watch) in &mut self.watches {
            let was_idle = std::mem::replace(&mut watch.is_idle, true);
            if was_idle && watch.wants_progress {
                self.responses.push_back(response(*id, self.synced));
            }
        }
    }

    /// Adds a watch under the id that the client chose, or under a free id for zero.
    fn create(&mut self, core: &Core, latest: Revision, wanted_id: i64, mut watch: Watch) {
        let Watcher { key, range_end, next, .. } = &mut watch.watcher;
        let is_empty = Span::new(key, range_end).bounds().is_none();
        let is_duplicate = wanted_id != 0 && self.watches.contains_key(&wanted_id);
        if is_empty || is_duplicate {
            let reason = if is_empty { EMPTY_RANGE } else { DUPLICATE_ID };
            return self.responses.push_back(PbWatchResponse {
                created: true,
                canceled: true,
                cancel_reason: reason.into(),
                ..response(NO_WATCH, latest)
            });
        }
        let id = if wanted_id == 0 { self.free_id() } else { wanted_id };
        self.responses.push_back(PbWatchResponse { created: true, ..response(id, latest) });
        if *next < core.history().compacted() {
            return self.responses.push_back(lost(core, id));
        }
        // A negative revision means "from the first" as long as nothing is compacted.
        *next = (*next).max(core.history().floor());
        self.watches.insert(id, watch);
    }

    fn cancel(&mut self, latest: Revision, id: i64) {
        if self.watches.remove(&id).is_some() {
            let canceled = PbWatchResponse { canceled: true, ..response(id, latest) };
            self.responses.push_back(canceled);
        }
    }

    fn free_id(&mut self) -> i64 {
        while self.watches.contains_key(&self.next_id) {
            self.next_id += 1;
        }
        self.next_id += 1;
        self.next_id - 1
    }

    /// Advances one watch and returns the size of its responses.
    fn advance(&mut self, core: &Core, latest: Revision, id: i64, bytes_max: usize) -> usize {
        let Some(watch) = self.watches.get_mut(&id) else { return 0 };
        match watch.watcher.advance(core.history(), latest, bytes_max) {
            WatchUpdate::Nothing => 0,
            WatchUpdate::Events { events, through } => {
                watch.is_idle = false;
                let bytes = events.iter().map(event_bytes).sum();
                let fragments = match watch.takes_fragments {
                    true => split(events),
                    false => vec![events],
                };
                let last = fragments.len() - 1;
                for (index, events) in fragments.into_iter().enumerate() {
                    let fragment = index < last;
                    let response = response(id, through);
                    self.responses.push_back(PbWatchResponse { events, fragment, ..response });
                }
                bytes
            }
            WatchUpdate::Compacted => {
                self.watches.remove(&id);
                self.responses.push_back(lost(core, id));
                0
            }
        }
    }
}

/// Splits events into fragments of limited size, with at least one event each.
fn split(events: Vec<PbEvent>) -> Vec<Vec<PbEvent>> {
    let mut fragments = vec![Vec::new()];
    let mut bytes = 0;
    for event in events {
        if bytes >= FRAGMENT_BYTES {
            fragments.push(Vec::new());
            bytes = 0;
        }
        bytes += event_bytes(&event);
        fragments.last_mut().expect("there is at least one fragment").push(event);
    }
    fragments
}

/// Cancels a watcher whose events are compacted. Real etcd omits the header's revision here.
fn lost(core: &Core, id: i64) -> PbWatchResponse {
    let compact_revision = core.history().compacted();
    PbWatchResponse { canceled: true, compact_revision, ..response(id, 0) }
}

fn response(watch_id: i64, revision: Revision) -> PbWatchResponse {
    let header: Option<PbResponseHeader> = Some(header(revision));
    PbWatchResponse { header, watch_id, ..Default::default() }
}
