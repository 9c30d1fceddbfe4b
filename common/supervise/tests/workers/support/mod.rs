//! Workers of tests, and waiting for conditions.

pub mod scenario;

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use steadfast_supervise::{GuardProgram, Output, StartError, Supervisor, WorkerSet, WorkerSpec};

/// Bound of every wait: far longer than needed, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn supervisor() -> Supervisor {
    let program = std::env::current_exe().unwrap();
    let args = ["--exact", "guard_process", "--nocapture"].map(OsString::from).to_vec();
    Supervisor::new(GuardProgram::new(program, args)).unwrap()
}

pub fn start_all(supervisor: &Supervisor, specs: &[WorkerSpec]) -> Result<WorkerSet, StartError> {
    specs.iter().map(|spec| supervisor.start(spec)).collect()
}

/// Returns a shell script as worker; `$DIR` is its directory, where its log files are.
pub fn shell(directory: &Path, script: &str) -> WorkerSpec {
    program(directory, "sh", script)
}

pub fn python(directory: &Path, script: &str) -> WorkerSpec {
    program(directory, "python3", script)
}

fn program(directory: &Path, program: &str, script: &str) -> WorkerSpec {
    let mut spec = WorkerSpec::new("rank 0", program);
    spec.args = vec!["-c".into(), script.into()];
    spec.env = vec![("DIR".into(), directory.into())];
    spec.output = Output::Files { directory: directory.to_owned() };
    spec
}

/// Waits until a file has a complete last line, and returns its text.
pub async fn text_of(path: &Path) -> String {
    let text = || fs::read_to_string(path).ok().filter(|text| text.ends_with('\n'));
    wait_for(&format!("line in {}", path.display()), text).await
}

pub async fn id_in(path: &Path) -> i32 {
    text_of(path).await.trim().parse().unwrap()
}

pub async fn until_gone(id: i32) {
    wait_for(&format!("end of process {id}"), || (!is_alive(id)).then_some(())).await;
}

pub fn is_alive(id: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let fields: Vec<&str> =
        stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // The first thread may be a zombie while others still run, and hold files open.
    let threads = fields.get(17).and_then(|it| it.parse::<u32>().ok()).unwrap_or(0);
    fields.first().is_some_and(|state| !["Z", "X"].contains(state) || 1 < threads)
}

/// Polls a condition.
pub async fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "no {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Kills the processes that a failed test leaves.
#[derive(Debug, Default)]
pub struct KillAtEnd(pub Vec<i32>);

impl Drop for KillAtEnd {
    fn drop(&mut self) {
        for id in self.0.iter().filter(|id| is_alive(**id)) {
            let _ = kill(Pid::from_raw(*id), Signal::SIGKILL);
        }
    }
}
