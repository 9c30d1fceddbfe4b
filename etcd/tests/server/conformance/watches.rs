//! The watches of one server, all on one stream, and their events.

use super::generate::NewWatch;
use etcd_client::proto::{PbEvent, PbWatchResponse};
use etcd_client::{Client, WatchFilterType, WatchOptions, WatchStream};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::timeout;

const ANSWER_MAX: Duration = Duration::from_secs(20);

#[derive(Default)]
pub struct Watches {
    stream: Option<WatchStream>,
    /// Live watches by id.
    watches: BTreeMap<i64, Watch>,
}

struct Watch {
    request: NewWatch,
    /// Not yet compared.
    events: Vec<PbEvent>,
}

/// A response without events and without the ids of the server.
#[derive(Debug, PartialEq)]
pub struct Control {
    pub id: i64,
    revision: i64,
    created: bool,
    pub canceled: bool,
    compact_revision: i64,
    cancel_reason: String,
}

/// The revisions of a put and a delete that end a comparison.
#[derive(Debug, Clone, Copy)]
pub struct Position {
    pub put: i64,
    pub delete: i64,
}

impl Watches {
    pub fn ids(&self) -> Vec<i64> {
        self.watches.keys().copied().collect()
    }

    pub fn request(&self, id: i64) -> NewWatch {
        self.watches[&id].request.clone()
    }

    /// Creates a watch and returns the server's response.
    pub async fn start(&mut self, client: &mut Client, request: &NewWatch) -> Control {
        match &mut self.stream {
            Some(stream) => {
                stream.watch(request.key.clone(), Some(options(request))).await.unwrap();
            }
            None => {
                let stream = client.watch(request.key.clone(), Some(options(request))).await;
                self.stream = Some(stream.unwrap());
            }
        }
        let control = self.next_control().await;
        if !control.canceled {
            let watch = Watch { request: request.clone(), events: Vec::new() };
            self.watches.insert(control.id, watch);
        }
        control
    }

    /// Waits for a watch to be cancelled by the server.
    pub async fn lost(&mut self) -> Control {
        let control = self.next_control().await;
        self.watches.remove(&control.id);
        control
    }

    pub async fn cancel(&mut self, id: i64) -> Control {
        self.stream.as_mut().unwrap().cancel(id).await.unwrap();
        self.lost().await
    }

    /// Returns the new events of a watch, up to a position that the watch includes.
    pub async fn events_up_to(&mut self, id: i64, mark: Position) -> Vec<PbEvent> {
        let last = match self.watches[&id].request.filter {
            Some(WatchFilterType::NoDelete) => mark.put,
            Some(WatchFilterType::NoPut) | None => mark.delete,
        };
        while self.watches[&id].events.last().is_none_or(|event| revision(event) < last) {
            if let Some(control) = self.next().await {
                panic!("watch {id} waits for revision {last} but received {control:?}");
            }
        }
        std::mem::take(&mut self.watches.get_mut(&id).unwrap().events)
    }

    async fn next_control(&mut self) -> Control {
        loop {
            if let Some(control) = self.next().await {
                return control;
            }
        }
    }

    /// Receives one response; events are added to their watch.
    async fn next(&mut self) -> Option<Control> {
        let stream = self.stream.as_mut().unwrap();
        let message = timeout(ANSWER_MAX, stream.message()).await.expect("a response in time");
        let response: PbWatchResponse = message.unwrap().expect("an open stream").0;
        if response.created || response.canceled {
            return Some(Control {
                id: response.watch_id,
                revision: response.header.unwrap_or_default().revision,
                created: response.created,
                canceled: response.canceled,
                compact_revision: response.compact_revision,
                cancel_reason: response.cancel_reason,
            });
        }
        if let Some(watch) = self.watches.get_mut(&response.watch_id) {
            watch.events.extend(response.events);
        }
        None
    }
}

fn revision(event: &PbEvent) -> i64 {
    event.kv.as_ref().unwrap().mod_revision
}

fn options(request: &NewWatch) -> WatchOptions {
    let mut options = WatchOptions::new().with_start_revision(request.start_revision);
    if !request.range_end.is_empty() {
        options = options.with_range(request.range_end.clone());
    }
    if request.prev_kv {
        options = options.with_prev_key();
    }
    if let Some(filter) = request.filter {
        options = options.with_filters([filter]);
    }
    if request.fragment { options.with_fragment() } else { options }
}
