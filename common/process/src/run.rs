//! From `main` to an exit code.

use std::process::{ExitCode, Termination};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tracing::info;

use crate::traces;
use crate::{CommonArgs, Failure, Readiness, Shutdown};

/// Allocations up to this size are made of memory that was freed before. The most that glibc takes is
/// 32 MiB.
const KEPT_BYTES: usize = 31 << 20;

/// Runs a process to its end on all cores. A failure becomes a line on stderr (`name: error: …`)
/// and the exit code of its kind.
pub fn run<T: Termination>(name: &str, main: impl Future<Output = Result<T, Failure>>) -> ExitCode {
    open_many_files();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let outcome = match runtime {
        Ok(runtime) => {
            let outcome = runtime.block_on(async {
                let outcome = main.await;
                tokio::task::block_in_place(traces::end);
                outcome
            });
            // The process ends now, and its threads with it. To shut the runtime down first would
            // only make calls that are still in flight panic on their way out.
            std::mem::forget(runtime);
            outcome
        }
        Err(error) => Err(Failure::io("cannot start threads", &error)),
    };
    match outcome {
        Ok(ending) => ending.report(),
        Err(failure) => {
            for line in failure.message.lines() {
                eprintln!("{name}: error: {line}");
            }
            ExitCode::from(failure.kind.exit_code())
        }
    }
}

/// Raises the number of files and connections that this process may have to what the system lets it have;
/// the usual 1024 are fewer than the connections of a large job.
fn open_many_files() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // Without it there is room for fewer.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// Waits to be told to leave once the job is over, if that is wanted; the admin port goes on answering.
pub async fn linger(args: &CommonArgs, readiness: &Readiness, shutdown: &Shutdown) {
    if args.linger && !shutdown.is_draining() {
        info!("the job is over; stays until it is told to leave");
        readiness.set_not_ready("the job is over");
        shutdown.drain().await;
    }
}

/// Lets the allocator keep what is freed for what is asked for next: for processes that move tensors.
///
/// glibc gives buffers of the size of a tensor's pieces back to the system at once, and asking for them
/// anew costs as much as filling them. A large allocation that is freed raises the bounds for that
/// (`M_MMAP_THRESHOLD` in mallopt(3)); this one is never touched, so it costs nothing.
pub fn keep_freed_memory() {
    drop(std::hint::black_box(Vec::<u8>::with_capacity(KEPT_BYTES)));
}
