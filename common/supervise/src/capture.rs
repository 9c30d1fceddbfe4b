//! Runs a short program and returns what it prints, within limits of time and size.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use steadfast_common::error::ErrorKind;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::spawn::{Leads, prepare};
use crate::{Ending, StartError};

/// How much of stderr is kept: its end.
const STDERR_BYTES_MAX: usize = 2048;

const READ_BYTES: usize = 4096;

/// Limits on the time and the output of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureLimits {
    pub time: Duration,
    /// Length of its stdout.
    pub bytes: usize,
}

/// Why there is no output.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    #[error(transparent)]
    Start(#[from] StartError),
    #[error("it has not ended, or not closed its output, after {0:?}, and was killed")]
    TimedOut(Duration),
    #[error("it printed more than {0} bytes, and was killed")]
    TooLong(usize),
    #[error("it ended with {ending}{}", quoted(stderr))]
    Failed { ending: Ending, stderr: String },
    #[error("cannot read its output: {0}")]
    Io(#[from] io::Error),
}

impl CaptureError {
    /// Returns the kind of the error: what the caller can do.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Start(error) => error.kind(),
            Self::TimedOut(_) => ErrorKind::NotYet,
            Self::TooLong(_) => ErrorKind::TooLarge,
            Self::Failed { .. } => ErrorKind::Invalid,
            Self::Io(_) => ErrorKind::Internal,
        }
    }
}

/// Runs a program to its end, and returns its stdout. At a limit, its process group is killed. Must run on a
/// thread that lives as long as the runtime, as [`crate::Supervisor::start`].
///
/// # Errors
/// If the program cannot be started, exceeds a limit, or does not succeed.
pub async fn capture(
    program: &Path,
    args: &[OsString],
    limits: CaptureLimits,
) -> Result<Vec<u8>, CaptureError> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.kill_on_drop(true);
    prepare(&mut command, Leads::Group);
    let child = command.spawn();
    let mut child = child.map_err(|error| StartError::of_program(program, None, error))?;
    let group = child.id().and_then(|id| i32::try_from(id).ok());
    let group = Group(Pid::from_raw(group.expect("a process that was not waited for has an id")));
    let read = timeout(limits.time, output(&mut child, limits.bytes, group));
    let (ending, stdout, stderr) = match read.await {
        Ok(read) => read?,
        Err(_) => return Err(CaptureError::TimedOut(limits.time)),
    };
    match ending {
        Ending::Code(0) => Ok(stdout),
        Ending::Code(_) | Ending::Signal(_) | Ending::Unknown(_) => {
            Err(CaptureError::Failed { ending, stderr })
        }
    }
}

/// A process group whose leader was not waited for, so that its id is not used again. It is killed on drop.
struct Group(Pid);

impl Drop for Group {
    fn drop(&mut self) {
        // An error means that no process is left to receive it.
        let _ = killpg(self.0, Signal::SIGKILL);
    }
}

async fn output(
    child: &mut Child,
    bytes_max: usize,
    group: Group,
) -> Result<(Ending, Vec<u8>, String), CaptureError> {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (stdout, stderr) = tokio::try_join!(read(stdout, bytes_max), read_end(stderr))?;
    // The pipes are closed, but the process may go on.
    let ending = child.wait().await?.into();
    // From now on, the id may belong to another group.
    std::mem::forget(group);
    Ok((ending, stdout, stderr))
}

async fn read(
    pipe: Option<impl AsyncRead + Unpin>,
    bytes_max: usize,
) -> Result<Vec<u8>, CaptureError> {
    let mut bytes = Vec::new();
    let Some(pipe) = pipe else { return Ok(bytes) };
    pipe.take(bytes_max as u64 + 1).read_to_end(&mut bytes).await?;
    match bytes.len() <= bytes_max {
        true => Ok(bytes),
        false => Err(CaptureError::TooLong(bytes_max)),
    }
}

/// Reads a pipe to its end, and returns the last text.
async fn read_end(pipe: Option<impl AsyncRead + Unpin>) -> Result<String, CaptureError> {
    let Some(mut pipe) = pipe else { return Ok(String::new()) };
    let (mut end, mut buffer) = (Vec::new(), [0; READ_BYTES]);
    loop {
        match pipe.read(&mut buffer).await? {
            0 => return Ok(String::from_utf8_lossy(&end).trim().to_owned()),
            count => end.extend_from_slice(&buffer[..count]),
        }
        end.drain(..end.len().saturating_sub(STDERR_BYTES_MAX));
    }
}

fn quoted(stderr: &str) -> String {
    match stderr.lines().next_back() {
        Some(line) => format!(": {}", line.escape_debug()),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn sh(script: &str, limits: CaptureLimits) -> Result<Vec<u8>, CaptureError> {
        capture(Path::new("/bin/sh"), &["-c".into(), script.into()], limits).await
    }

    const LIMITS: CaptureLimits = CaptureLimits { time: Duration::from_secs(20), bytes: 4 };

    #[tokio::test]
    async fn the_output_of_a_success_is_returned() {
        assert_eq!(sh("echo abc", LIMITS).await.unwrap(), b"abc\n");
        let error = sh("echo abcd", LIMITS).await.unwrap_err();
        assert!(matches!(error, CaptureError::TooLong(4)), "{error}");
        let error = sh("cat /dev/zero", LIMITS).await.unwrap_err();
        assert!(matches!(error, CaptureError::TooLong(4)), "{error}");
    }

    #[tokio::test]
    async fn a_failure_tells_the_last_line_of_stderr() {
        let error = sh("echo a >&2; echo b >&2; exit 3", LIMITS).await.unwrap_err();
        assert_eq!(error.to_string(), "it ended with exit code 3: b");
        let error = capture(Path::new("/no/such"), &[], LIMITS).await.unwrap_err();
        assert_eq!(error.to_string(), "program /no/such does not exist");
    }

    #[tokio::test]
    async fn a_program_that_hangs_is_killed_with_its_group() {
        for rest in ["wait", "exit 0", "exec >/dev/null 2>&1; wait"] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("pid");
            let script = format!("sleep 1000 & echo $! > {}; {rest}", path.display());
            let mut time = Duration::from_millis(200);
            // On a busy machine the program may be killed before it has begun.
            let id = loop {
                let error = sh(&script, CaptureLimits { time, bytes: 100 }).await.unwrap_err();
                assert!(matches!(error, CaptureError::TimedOut(_)), "{rest}: {error}");
                match std::fs::read_to_string(&path).ok().and_then(|id| id.trim().parse().ok()) {
                    Some(id) => break id,
                    None => time *= 2,
                }
            };
            until_dead(id).await;
        }
    }

    async fn until_dead(id: u32) {
        for _ in 0..1000 {
            let stat = std::fs::read_to_string(format!("/proc/{id}/stat"));
            if !stat.is_ok_and(|it| !it.contains(") Z ")) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("process {id} is alive");
    }
}
