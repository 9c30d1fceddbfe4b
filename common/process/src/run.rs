//! Runs a process from `main` to its exit code.

use std::io::Write;
use std::process::{ExitCode, Termination};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use tracing::info;

use crate::traces;
use crate::{CommonArgs, Failure, Readiness, Shutdown};

/// Allocations up to this size reuse freed memory. glibc's maximum is 32 MiB.
const KEPT_BYTES: usize = 31 << 20;

/// Number of places in which the allocator keeps freed memory, see [`limit_arenas`]. With a table that has 100 MiB of
/// memory for rows, this number halves the memory of the pserver.
#[cfg(target_env = "gnu")]
const ARENAS: i32 = 2;

/// Runs a process to completion on all cores. Prints a failure on stderr (`name: error: …`) and returns
/// the exit code of its kind.
pub fn run<T: Termination>(name: &str, main: impl Future<Output = Result<T, Failure>>) -> ExitCode {
    match to_completion(main) {
        Ok(ending) => ending.report(),
        Err(failure) => ExitCode::from(print(name, &failure)),
    }
}

/// Runs a process as [`run`] does, and ends it without the destructors of libraries, for programs with a library that
/// destroys what its threads still use.
pub fn run_and_exit(name: &str, main: impl Future<Output = Result<(), Failure>>) -> ! {
    let code = match to_completion(main) {
        Ok(()) => 0,
        Err(failure) => print(name, &failure),
    };
    exit_at_once(code)
}

/// Ends the process without destructors, whatever its other threads do.
pub fn exit_at_once(code: u8) -> ! {
    // A failed write must not change the exit code.
    let _ = std::io::stdout().flush();
    // SAFETY: the process ends here.
    unsafe { nix::libc::_exit(code.into()) }
}

fn to_completion<T>(main: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    open_many_files();
    receive_signals();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    match runtime {
        Ok(runtime) => {
            let outcome = runtime.block_on(async {
                let outcome = main.await;
                tokio::task::block_in_place(traces::end);
                outcome
            });
            // The process exits now. Shutting the runtime down first would make calls in flight panic.
            std::mem::forget(runtime);
            outcome
        }
        Err(error) => Err(Failure::io("cannot start threads", &error)),
    }
}

/// Prints a failure; returns the exit code of its kind.
fn print(name: &str, failure: &Failure) -> u8 {
    for line in failure.message.lines() {
        // A failed write to stderr (full disk) must not change the exit code.
        let _ = match belongs_to_the_line_above(line) {
            true => writeln!(std::io::stderr(), "{line}"),
            false => writeln!(std::io::stderr(), "{name}: error: {line}"),
        };
    }
    failure.kind.exit_code()
}

/// Returns whether a line of an error goes on with the one above, such as a line of a traceback. Each other line is
/// an error of its own.
pub fn belongs_to_the_line_above(line: &str) -> bool {
    line.starts_with(char::is_whitespace)
}

/// Raises the limit on open files to the hard limit; the usual 1024 are fewer than the connections of a
/// large job.
fn open_many_files() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // On failure the lower limit applies.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// Receives signals that the program which started this one has blocked, and the ends of child processes if it has
/// ignored SIGCHLD.
fn receive_signals() {
    // Both fail only for signals that do not exist.
    let _ = SigSet::empty().thread_set_mask();
    // SAFETY: no handler is installed.
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) };
}

/// Waits for a drain request after the job completes, if `--wait-after-completion` is set. The admin port stays
/// available.
pub async fn wait_after_completion(args: &CommonArgs, readiness: &Readiness, shutdown: &Shutdown) {
    if args.wait_after_completion && !shutdown.is_draining() {
        info!("the job is over; waiting for a drain request");
        readiness.set_not_ready("the job is over");
        shutdown.drain().await;
    }
}

/// Makes the allocator keep freed memory for reuse, for processes that transfer tensors.
///
/// By default glibc returns buffers of a block's size to the system at once, and allocating them again
/// costs as much as filling them. Freeing a large allocation raises that threshold (`M_MMAP_THRESHOLD` in
/// mallopt(3)); this allocation is never touched, so it costs nothing.
pub fn keep_freed_memory() {
    drop(std::hint::black_box(Vec::<u8>::with_capacity(KEPT_BYTES)));
}

/// Lets the allocator keep freed memory in two places, for processes whose memory is to stay within a limit.
///
/// By default, the threads share up to eight arenas for each core, and each arena keeps what was freed in it. The
/// environment may set another number (mallopt(3)).
pub fn limit_arenas() {
    let is_set = std::env::var_os("MALLOC_ARENA_MAX").is_some()
        || std::env::var("GLIBC_TUNABLES").is_ok_and(|it| it.contains("arena_max"));
    #[cfg(target_env = "gnu")]
    if !is_set {
        // SAFETY: it sets a parameter of the allocator, which later calls of it read.
        unsafe { nix::libc::mallopt(nix::libc::M_ARENA_MAX, ARENAS) };
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = is_set;
}
