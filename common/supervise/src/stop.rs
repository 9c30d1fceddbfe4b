//! Stops workers with all their descendants: SIGTERM, a grace period, SIGKILL.

use std::time::Duration;

use futures::future::join_all;
use nix::sys::signal::Signal;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tracing::warn;

use crate::Worker;
use crate::guard::KILL_TIMEOUT;
use crate::processes::{Scope, Swept};

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
        terminate(&running, &scope).await;
        let ended = join_all(running.iter_mut().map(|it| it.ended()));
        // A worker may be a shell, whose command saves its state after SIGTERM.
        if timeout_at(deadline, ended).await.is_ok() {
            until_empty(&scope, deadline).await;
        }
    }
    for worker in &running {
        worker.signal(Signal::SIGKILL);
    }
    let left = sweep(scope).await.left;
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

/// Sends SIGTERM to the process groups, and to the descendants that have left them.
async fn terminate(workers: &[&mut &mut Worker], scope: &Scope) {
    let mut others = scope.clone();
    let mut groups = Vec::new();
    for worker in workers.iter().filter(|it| it.id().is_some()) {
        worker.signal(Signal::SIGTERM);
        // A suspended process handles SIGTERM when it continues.
        worker.signal(Signal::SIGCONT);
        groups.push(worker.group.as_raw());
    }
    others.groups.retain(|it| !groups.contains(it));
    let sent = spawn_blocking(move || {
        let found = others.processes();
        for process in found.iter().filter(|it| !groups.contains(&it.group)) {
            process.send(rustix::process::Signal::TERM);
        }
    });
    // SIGKILL follows in any case.
    let _ = timeout(KILL_TIMEOUT, sent).await;
}

async fn until_empty(scope: &Scope, deadline: Instant) {
    while Instant::now() < deadline {
        let scope = scope.clone();
        match timeout_at(deadline, spawn_blocking(move || scope.processes())).await {
            Ok(Ok(found)) if !found.is_empty() => sleep(CHECK_PERIOD).await,
            Ok(_) | Err(_) => return,
        }
    }
}
