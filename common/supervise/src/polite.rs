//! Which processes of a worker a signal goes to.
//!
//! A signal goes to the worker's main process alone: what this has started, such as the processes that load its data,
//! is for it to end, and may be needed until then. A wrapper must not swallow the signal, though. So it also goes to
//! the children of
//!
//! - a process that has no handler for it: SIGTERM ends such a wrapper, and would leave the program behind;
//! - a shell, which waits for its command before it runs its own handler.
//!
//! Other wrappers that handle a signal pass it on themselves, as `uv run` and `torchrun` do, whatever the program behind
//! them does with it. So SIGTERM takes the place of another signal that asks for the end unless all processes handle
//! that.

use nix::sys::signal::Signal;

use crate::processes::{Process, Processes};

/// A signal, and what is sent to processes without a handler for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Asks for the end: SIGTERM in place of a signal that not all processes of the worker handle.
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
    let signal = match message {
        Message::End(signal) if tree(processes, root).all(|it| it.handles(signal)) => signal,
        Message::End(_) => Signal::SIGTERM,
        Message::Notice(signal) => signal,
    };
    let (mut found, mut next) = (Vec::new(), vec![root]);
    while let Some(process) = next.pop() {
        let is_handled = process.handles(signal);
        if !is_handled || process.is_shell() {
            next.extend(processes.children(process.id));
        }
        match message {
            Message::Notice(_) if !is_handled => {}
            Message::End(_) | Message::Notice(_) => found.push((process, signal)),
        }
    }
    found
}

/// Returns a process and its descendants.
fn tree(processes: &Processes, root: Process) -> impl Iterator<Item = Process> {
    let mut next = vec![root];
    std::iter::from_fn(move || {
        let process = next.pop()?;
        next.extend(processes.children(process.id));
        Some(process)
    })
}
