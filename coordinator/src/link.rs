//! The connection to one worker; reports to the machine when it opens and ends.

use std::sync::Arc;
use std::time::Duration;

use steadfast_common::tensor::layout::ParamSpec;
use steadfast_coord::backoff;
use steadfast_coordinator_core::{Input, WorkerIndex};
use steadfast_host::time::{Instant, sleep};
use steadfast_net::Channel;
use steadfast_proto::v1::closures_client::ClosuresClient;
use steadfast_proto::v1::{AttendRequest, Param};
use tokio::sync::mpsc;
use tonic::Status;
use tracing::{info, warn};
use uuid::Uuid;

use crate::driver::send;
use crate::table::Shared;

/// The maximum pause between attempts to connect.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// A worker without a connection is reported after this time.
const SAID_AFTER: Duration = Duration::from_secs(10);

/// A connection that lasted so long is followed by a quick attempt.
const SETTLED_AFTER: Duration = Duration::from_secs(5);

/// Holds what a coordinator tells each worker.
#[derive(Debug)]
pub(crate) struct Attended {
    pub coordinator: Uuid,
    /// The prefix of the keys of the job whose parameters closures train, and these parameters; empty without.
    pub root: String,
    pub params: Vec<ParamSpec>,
}

/// Follows a worker for as long as the coordinator runs.
pub(crate) struct Link {
    pub attended: Arc<Attended>,
    pub worker: WorkerIndex,
    pub channel: Channel,
    pub shared: Arc<Shared>,
    pub outbox: mpsc::UnboundedSender<Input>,
}

impl Link {
    pub async fn follow(self) {
        let mut pauses = backoff();
        // Since when there is no connection, unless that was said already.
        let mut lost_at = Some(Instant::now());
        loop {
            // One that was removed is not looked for, until it is added again.
            while self.shared.lock().workers.get(&self.worker).is_some_and(|it| it.is_stopped) {
                sleep(PAUSE_MAX).await;
            }
            let begun = Instant::now();
            let reason = match self.attend().await {
                Ok(()) => "the worker has ended".to_owned(),
                Err(status) if status.message().is_empty() => status.code().to_string(),
                Err(status) => status.message().to_owned(),
            };
            if self.note_end(&reason) {
                lost_at = Some(Instant::now());
            }
            if SETTLED_AFTER <= begun.elapsed() {
                pauses = backoff();
            }
            if lost_at.is_some_and(|at| SAID_AFTER <= at.elapsed()) {
                lost_at = None;
                let address = self.shared.lock().address(self.worker).map(str::to_owned);
                warn!(worker = address, reason, "there is no connection to a worker");
            }
            sleep(pauses.next().unwrap_or(PAUSE_MAX).min(PAUSE_MAX)).await;
        }
    }

    /// Returns when the connection has ended.
    async fn attend(&self) -> Result<(), Status> {
        let mut client = ClosuresClient::new(self.channel.clone());
        let Attended { coordinator, root, params } = &*self.attended;
        let request = AttendRequest {
            coordinator: coordinator.to_string(),
            root: root.clone(),
            params: params.iter().map(Param::from).collect(),
        };
        let mut states = client.attend(request).await?.into_inner();
        while let Some(state) = states.message().await? {
            let worker = self.worker;
            // Never 0: such a worker would be waited for without end.
            let threads = state.threads.max(1);
            let (opens, leaves) = self.shared.change(|table| {
                let Some(row) = table.workers.get_mut(&worker) else { return (false, false) };
                let opens = row.threads.replace(threads).is_none();
                let leaves = state.leaves && !std::mem::replace(&mut row.leaves, state.leaves);
                (opens, leaves)
            });
            if opens {
                info!(%worker, threads, "a worker is connected");
                send(&self.outbox, Input::Connected { worker, threads: threads as usize });
            }
            if leaves {
                info!(%worker, "a worker leaves");
                send(&self.outbox, Input::Leaves(worker));
            }
        }
        Ok(())
    }

    /// Notes that there is no connection; returns whether there was one.
    fn note_end(&self, reason: &str) -> bool {
        let worker = self.worker;
        let was_open = self.shared.change(|table| {
            let Some(row) = table.workers.get_mut(&worker) else { return false };
            reason.clone_into(&mut row.reason);
            row.leaves = false;
            row.threads.take().is_some()
        });
        if was_open {
            info!(%worker, reason, "a worker is lost");
            send(&self.outbox, Input::Lost(worker));
        }
        was_open
    }
}
