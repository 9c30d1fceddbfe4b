//! From `main` to an exit code.

use std::process::{ExitCode, Termination};

use crate::Failure;

/// Runs a process to its end on all cores. A failure becomes a line on stderr (`name: error: …`)
/// and the exit code of its kind.
pub fn run<T: Termination>(name: &str, main: impl Future<Output = Result<T, Failure>>) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let outcome = match runtime {
        Ok(runtime) => {
            let outcome = runtime.block_on(main);
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
