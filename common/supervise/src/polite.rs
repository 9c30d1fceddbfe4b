//! Which processes of a worker a signal goes to.
//!
//! A signal goes to the worker's main process alone: what this has started, such as the processes that load its data,
//! is for it to end, and may be needed until then. A wrapper must not swallow the signal, though. So it also goes to
//! the children of
//!
//! - a process that has no handler for it: SIGTERM ends such a wrapper, and would leave the program behind;
//! - a shell, which waits for its command before it runs its own handler.
//!
//! Other wrappers that handle a signal pass it on themselves, as `uv run` and `torchrun` do.

use nix::sys::signal::Signal;

use crate::processes::{Process, Processes};

/// A signal, and what is sent to processes without a handler for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Asks for the end: SIGTERM in place of a signal that a process does not handle.
    End(Signal),
    /// Nothing is sent to a process that does not handle it.
    Notice(Signal),
}

/// Returns the processes that get a message to `root`, and the signal for each of them.
pub(crate) fn receivers(
    processes: &Processes,
    root: Process,
    message: Message,
) -> Vec<(Process, Signal)> {
    let (mut found, mut next) = (Vec::new(), vec![root]);
    while let Some(process) = next.pop() {
        let (signal, is_sent) = match message {
            Message::End(signal) if process.catches(signal) => (signal, true),
            Message::End(_) => (Signal::SIGTERM, true),
            Message::Notice(signal) => (signal, process.catches(signal)),
        };
        if !process.catches(signal) || process.is_shell() {
            next.extend(processes.children(process.id));
        }
        if is_sent {
            found.push((process, signal));
        }
    }
    found
}
