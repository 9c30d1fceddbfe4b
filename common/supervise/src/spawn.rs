//! The state in which this process starts others: signals, process group, and an end with this process.
//!
//! A started process has the default action for each signal and blocks none, whatever this process, or the one that
//! started it, handles, ignores or blocks: `sh` starts commands with `&` with SIGINT and SIGQUIT ignored, and they
//! could never handle them. The exception is SIGHUP: `nohup` ignores it for all that it starts.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::Arc;

use nix::errno::Errno;
use nix::libc;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getpid, getppid, setsid};
use rustix::io::{FdFlags, fcntl_setfd};
use tokio::process::Command;

/// The greatest number of a signal on Linux.
const SIGNAL_MAX: i32 = 64;

/// The group of processes that a started process leads. A terminal sends Ctrl-C to its foreground process group, which must not include it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leads {
    /// A process group.
    Group,
    /// A session: then it may read a terminal that it has inherited, as no process in the background may.
    Session,
}

/// Lets `command` start with default signals, lead a group, and end when the thread that starts it ends.
pub(crate) fn prepare(command: &mut Command, leads: Leads) {
    match leads {
        Leads::Group => drop(command.process_group(0)),
        Leads::Session => {}
    }
    let parent = getpid();
    let prepare = move || {
        reset_signals()?;
        if leads == Leads::Session {
            setsid()?;
        }
        set_pdeathsig(Signal::SIGKILL)?;
        // If the parent died before the call above, the signal is never sent.
        if getppid() == parent { Ok(()) } else { Err(io::Error::from(Errno::ESRCH)) }
    };
    // SAFETY: between fork and exec the closure only calls sigaction, pthread_sigmask, setsid, prctl and getppid,
    // which are safe there; it does not allocate or lock.
    unsafe { command.pre_exec(prepare) };
}

/// Lets the program of `command` inherit a descriptor, and no other program that this process starts.
pub(crate) fn inherit(command: &mut Command, descriptor: Arc<OwnedFd>) {
    let inherit = move || Ok(fcntl_setfd(&descriptor, FdFlags::empty())?);
    // SAFETY: between fork and exec the closure only calls fcntl, which is safe there; it does not allocate or lock.
    unsafe { command.pre_exec(inherit) };
}

/// Gives each signal its default action, and unblocks it.
fn reset_signals() -> io::Result<()> {
    for number in 1..=SIGNAL_MAX {
        if number != libc::SIGHUP || !is_ignored(number) {
            // SAFETY: no handler is installed. An error means that the signal cannot be handled.
            unsafe { libc::signal(number, libc::SIG_DFL) };
        }
    }
    SigSet::empty().thread_set_mask()?;
    Ok(())
}

fn is_ignored(number: i32) -> bool {
    // SAFETY: all zeroes is a valid value of this structure of numbers, and the call only writes to it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(number, ptr::null(), &raw mut action) == 0
            && action.sa_sigaction == libc::SIG_IGN
    }
}
