//! SIGUSR1 and SIGUSR2: notices of a scheduler or a user, which are passed on to workers.

use std::convert::Infallible;

use steadfast_process::Shutdown;
use steadfast_supervise::Signaller;
use tokio::sync::broadcast::error::RecvError;
use tracing::{info, warn};

/// Passes notices on for as long as this is polled. A worker that does not handle one does not get it: it would end.
pub async fn pass_on(workers: Signaller, shutdown: &Shutdown) -> Infallible {
    let mut notices = shutdown.notices();
    loop {
        match notices.recv().await {
            Ok(signal) => {
                let notified = workers.notify(signal).await;
                let processes = notified.processes;
                info!(%signal, processes, "passed a signal on to the workers");
                if let without @ 1.. = notified.workers_without_handler {
                    warn!(%signal, workers = without, "some workers do not handle the signal, and did not get it");
                }
            }
            // The others arrive.
            Err(RecvError::Lagged(_)) => {}
            // Not reached: `shutdown` holds a sender.
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}
