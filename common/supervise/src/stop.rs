//! Stops workers with all their descendants: a signal that asks for the end, a grace period, SIGKILL.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::future::join_all;
use nix::sys::signal::Signal;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tracing::warn;

use crate::Worker;
use crate::guard::KILL_TIMEOUT;
use crate::polite::{Message, receivers};
use crate::processes::{Processes, Scope, Swept};

/// Shortest and longest time between two searches for descendants, unless a search takes long.
const SEARCH_PAUSE_MIN: Duration = Duration::from_millis(10);
const SEARCH_PAUSE_MAX: Duration = Duration::from_millis(50);

/// A search takes at most this part of the time, so that it does not slow down what it waits for.
const SEARCH_SHARE: u32 = 10;

/// Ends the processes of all `workers`; their output remains to be finished.
pub(crate) async fn stop(workers: &mut [&mut Worker], signal: Signal, grace: Duration) {
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
        scope = ask(&running, scope, signal, deadline).await;
        // Without an answer of `/proc`, the workers themselves are waited for.
        let ended = join_all(running.iter_mut().map(|it| it.ended()));
        let _ = timeout_at(deadline, ended).await;
    }
    // Before the workers are killed, others are still found as their descendants.
    let swept = sweep(scope).await;
    for worker in &running {
        worker.signal(Signal::SIGKILL);
    }
    for worker in &mut running {
        if timeout(KILL_TIMEOUT, worker.ended()).await.is_err() {
            worker.abandon();
        }
        worker.swept(&swept);
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

/// Asks the workers to end, and the processes that ended workers have left behind. Waits until no process is left or
/// `deadline` has passed. Returns the scope with the processes that were found.
async fn ask(
    workers: &[&mut &mut Worker],
    mut scope: Scope,
    signal: Signal,
    deadline: Instant,
) -> Scope {
    let (mut asked, mut pause) = (Asked::default(), SEARCH_PAUSE_MIN);
    let mut begun = Instant::now();
    let mut found = find(&scope).await;
    for worker in workers {
        asked.ask(worker, &found, signal);
        // A suspended process handles the signal when it continues.
        worker.signal(Signal::SIGCONT);
    }
    while !found.is_empty() {
        let until = Instant::now() + pause.max(begun.elapsed() * SEARCH_SHARE);
        if deadline <= until {
            sleep_until(deadline).await;
            break;
        }
        sleep_until(until).await;
        pause = (2 * pause).min(SEARCH_PAUSE_MAX);
        scope.known = found.0;
        begun = Instant::now();
        found = find(&scope).await;
        for worker in workers {
            asked.ask(worker, &found, signal);
        }
    }
    scope.known = found.0;
    scope
}

/// The processes that were asked to end: a second signal could end them at once.
#[derive(Debug, Default)]
struct Asked(BTreeSet<(i32, u64)>);

impl Asked {
    /// Asks the main process of a worker, or the processes that it has left behind.
    fn ask(&mut self, worker: &Worker, found: &Processes, signal: Signal) {
        let roots = match found.get(worker.group.as_raw()) {
            Some(main) => vec![main],
            None => found.of(&worker.scope).roots().collect(),
        };
        if found.is_empty() {
            // Most likely it has ended; otherwise `/proc` does not respond.
            worker.terminate();
        }
        let message = Message::End(signal);
        for root in roots {
            if self.0.contains(&root.identity()) {
                continue;
            }
            for (process, signal) in receivers(found, root, message) {
                if self.0.insert(process.identity()) {
                    process.send(signal);
                }
            }
        }
    }
}

/// Searches the processes of `scope`.
async fn find(scope: &Scope) -> Processes {
    let scope = scope.clone();
    let found = spawn_blocking(move || scope.processes());
    // If `/proc` does not respond, the workers are known.
    timeout(KILL_TIMEOUT, found).await.map(Result::unwrap_or_default).unwrap_or_default()
}
