//! Stops workers with all their descendants: SIGTERM, a grace period, SIGKILL.

use std::time::Duration;

use futures::future::join_all;
use nix::sys::signal::Signal;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::warn;

use crate::Worker;
use crate::guard::KILL_TIMEOUT;
use crate::processes::{Process, Scope, Swept};

/// Time between two checks whether descendants have ended.
const CHECK_PERIOD: Duration = Duration::from_millis(50);

/// Ends the processes of all `workers`; their output remains to be finished.
pub(crate) async fn stop(workers: &mut [&mut Worker], grace: Duration) {
    let deadline = Instant::now() + grace;
    let mut running: Vec<&mut &mut Worker> =
        workers.iter_mut().filter(|it| !it.is_finished()).collect();
    let mut scope = Scope::default();
    for worker in &running {
        scope.extend(&worker.scope);
    }
    if running.is_empty() {
        return;
    }
    if !grace.is_zero() {
        scope.known = find(&scope).await;
        terminate(&running, &scope.known);
        let ended = join_all(running.iter_mut().map(|it| it.ended()));
        // A worker may be a shell, whose command saves its state after SIGTERM.
        if timeout_at(deadline, ended).await.is_ok() {
            until_empty(&scope, deadline).await;
        }
    }
    // Before the workers are killed, others are still found as their descendants.
    let left = sweep(scope).await.left;
    for worker in &running {
        worker.signal(Signal::SIGKILL);
    }
    for worker in &mut running {
        if timeout(KILL_TIMEOUT, worker.ended()).await.is_err() {
            worker.abandon();
        }
        if left.is_empty() {
            worker.forget();
        }
    }
}

/// Kills all processes of `scope`.
pub(crate) async fn sweep(scope: Scope) -> Swept {
    let swept = spawn_blocking(move || scope.sweep(KILL_TIMEOUT));
    // The kernel may block a read in `/proc` for as long as it blocks the process.
    match timeout(2 * KILL_TIMEOUT, swept).await {
        Ok(swept) => {
            let swept = swept.unwrap_or_default();
            if !swept.left.is_empty() {
                warn!(processes = ?swept.left, "processes did not end after SIGKILL");
            }
            swept
        }
        Err(_) => {
            warn!("cannot search /proc for processes that were left behind: it does not respond");
            Swept::default()
        }
    }
}

/// Sends SIGTERM to the process groups, and to those of the `found` processes that are in none of them.
fn terminate(workers: &[&mut &mut Worker], found: &[Process]) {
    let mut groups = Vec::new();
    for worker in workers.iter().filter(|it| it.id().is_some()) {
        worker.signal(Signal::SIGTERM);
        // A suspended process handles SIGTERM when it continues.
        worker.signal(Signal::SIGCONT);
        groups.push(worker.group.as_raw());
    }
    for process in found.iter().filter(|it| !groups.contains(&it.group)) {
        process.send(rustix::process::Signal::TERM);
    }
}

async fn until_empty(scope: &Scope, deadline: Instant) {
    while !find(scope).await.is_empty() && Instant::now() < deadline {
        sleep(CHECK_PERIOD).await;
    }
}

/// Searches the processes of `scope`.
async fn find(scope: &Scope) -> Vec<Process> {
    let scope = scope.clone();
    let found = spawn_blocking(move || scope.processes());
    // If `/proc` does not respond, the process groups are known.
    timeout(KILL_TIMEOUT, found).await.map(Result::unwrap_or_default).unwrap_or_default()
}
