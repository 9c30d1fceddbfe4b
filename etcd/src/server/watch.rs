//! The Watch service: one session for each stream.

use super::status::stopped;
use super::watch_session::Session;
use crate::node::{Node, Progress, Stage};
use etcd_client::proto::{PbWatchRequest, PbWatchResponse, PbWatchService};
use futures::FutureExt;
use futures::stream::{BoxStream, StreamExt, unfold};
use std::sync::Arc;
use std::time::Duration;
use steadfast_host::time::{Interval, interval};
use tokio::sync::watch::Receiver;
use tonic::{Request, Response, Status, Streaming};

pub struct WatchService {
    node: Arc<Node>,
    progress_interval: Duration,
}

impl WatchService {
    pub fn new(node: Arc<Node>, progress_interval: Duration) -> Self {
        WatchService { node, progress_interval }
    }
}

#[tonic::async_trait]
impl PbWatchService for WatchService {
    type WatchStream = BoxStream<'static, Result<PbWatchResponse, Status>>;

    async fn watch(
        &self,
        request: Request<Streaming<PbWatchRequest>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let driver = Driver {
            progress: self.node.progress(),
            node: self.node.clone(),
            requests: request.into_inner(),
            session: Session::default(),
            progress_ticks: ticks(self.progress_interval),
        };
        let responses = unfold(Some(driver), |driver| async move {
            let mut driver = driver?;
            match driver.next().await {
                Ok(Some(response)) => Some((Ok(response), Some(driver))),
                Ok(None) => None,
                Err(status) => Some((Err(status), None)),
            }
        });
        Ok(Response::new(responses.boxed()))
    }
}

fn ticks(period: Duration) -> Interval {
    // A period of zero would panic.
    let mut ticks = interval(period.max(Duration::from_millis(1)));
    ticks.reset();
    ticks
}

/// Drives a session with requests, changes of the store and time. It is polled only when the client can
/// take a response, so a client that does not read stalls it, and nothing is buffered.
struct Driver {
    node: Arc<Node>,
    progress: Receiver<Progress>,
    requests: Streaming<PbWatchRequest>,
    session: Session,
    progress_ticks: Interval,
}

impl Driver {
    /// Returns the next response; `None` when the client has ended the stream.
    async fn next(&mut self) -> Result<Option<PbWatchResponse>, Status> {
        loop {
            if let Some(response) = self.session.next_response() {
                return Ok(Some(response));
            }
            // Requests take precedence over events, so that a watch that is always behind can be cancelled.
            if let Some(request) = self.requests.message().now_or_never() {
                let Some(request) = request? else { return Ok(None) };
                self.request(request);
                continue;
            }
            let progress = *self.progress.borrow_and_update();
            if progress.stage != Stage::Serving {
                return Err(stopped());
            }
            self.node.peek(|core| self.session.collect(core, progress.revision));
            if self.session.has_response() {
                continue;
            }
            tokio::select! {
                biased;
                request = self.requests.message() => {
                    let Some(request) = request? else { return Ok(None) };
                    self.request(request);
                }
                changed = self.progress.changed() => changed.map_err(|_| stopped())?,
                _ = self.progress_ticks.tick() => self.session.notify_idle(),
            }
        }
    }

    fn request(&mut self, request: PbWatchRequest) {
        let revision = self.progress.borrow().revision;
        self.node.peek(|core| self.session.request(core, revision, request));
    }
}
