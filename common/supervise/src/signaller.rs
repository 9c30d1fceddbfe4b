//! Sends signals to the workers that run.

use std::sync::Arc;

use nix::sys::signal::Signal;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::guard::{Guard, KILL_TIMEOUT};
use crate::polite::{Message, receivers};
use crate::processes::Scope;

/// Sends signals to all workers of a supervisor that run at the time.
#[derive(Clone, Debug)]
pub struct Signaller {
    pub(crate) guard: Arc<Guard>,
}

/// Counts the processes that got a signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Notified {
    pub processes: usize,
    /// Workers in which no process handles the signal, which would kill them.
    pub workers_without_handler: usize,
}

impl Signaller {
    /// Sends a signal to the workers that handle it, and not to other workers, which it would end.
    pub async fn notify(&self, signal: Signal) -> Notified {
        let scope = self.guard.scope();
        let notified = spawn_blocking(move || notify(&scope, signal));
        // The kernel may block a read in `/proc` for as long as it blocks the process.
        timeout(KILL_TIMEOUT, notified).await.map(Result::unwrap_or_default).unwrap_or_default()
    }
}

fn notify(scope: &Scope, signal: Signal) -> Notified {
    let processes = scope.processes();
    let mut notified = Notified::default();
    for main in scope.groups.iter().filter_map(|group| processes.get(*group)) {
        let receivers = receivers(&processes, main, Message::Notice(signal));
        if receivers.is_empty() {
            notified.workers_without_handler += 1;
        }
        notified.processes += receivers.len();
        receivers.iter().for_each(|(process, signal)| process.send(*signal));
    }
    notified
}
