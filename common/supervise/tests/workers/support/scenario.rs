//! What the test program does as supervising process.

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use std::{fs, io};

use nix::sys::signal::{SigHandler, SigSet, Signal, kill, signal};
use nix::unistd::Pid;
use steadfast_supervise::{Input, Output, Supervisor, WorkerSpec};

use super::{python, shell, start_all, supervisor, until_gone, wait_for};

const SCENARIO_VARIABLE: &str = "TEST_SCENARIO";
const DIRECTORY_VARIABLE: &str = "TEST_DIRECTORY";

/// Make this program run as supervising process.
const ARGS: [&str; 4] = ["--exact", "supervisor_process", "--nocapture", "--test-threads=1"];

/// Separates the output of workers from that of the test harness.
const MARK: &str = "\n---- output ----\n";

/// The processes that a worker of [`tree`] starts; each writes its id to a file of this name.
pub const TREE: [&str; 4] = ["worker", "child", "session", "bare"];

/// A process in each position that can be missed: a child, one in a session of its own, and one in the process
/// group whose environment is cleared. All ignore SIGTERM.
const TREE_SCRIPT: &str = r#"
    trap '' TERM
    echo $$ >"$DIR/worker"
    sh -c 'echo $$ >"$DIR/child"; exec sleep 1000' &
    setsid sh -c '(echo $(exec sh -c "echo \$PPID") >"$DIR/session"; exec sleep 1000) &' &
    env -i DIR="$DIR" PATH="$PATH" sh -c 'echo $$ >"$DIR/bare"; exec env -i sleep 1000' &
    wait
    sleep 1000
"#;

/// Starts this program as supervising process.
pub fn start(scenario: &str, directory: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(ARGS)
        .env(SCENARIO_VARIABLE, scenario)
        .env(DIRECTORY_VARIABLE, directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Returns this program as a worker that is itself a supervising process.
pub fn nested(scenario: &str, directory: &Path) -> WorkerSpec {
    let mut spec = WorkerSpec::new("rank 0", std::env::current_exe().unwrap());
    spec.args = ARGS.map(OsString::from).to_vec();
    spec.env = vec![
        (SCENARIO_VARIABLE.into(), scenario.into()),
        (DIRECTORY_VARIABLE.into(), directory.into()),
    ];
    spec.output = Output::Files { directory: directory.to_owned() };
    spec
}

/// Runs a scenario to its end, and returns the lines that its workers wrote to stdout.
pub fn stdout_of(scenario: &str, directory: &Path) -> Vec<Vec<u8>> {
    let output = start(scenario, directory).wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let mark = MARK.as_bytes();
    let text = &output.stdout;
    let at = |from: usize| {
        let found = text[from..].windows(mark.len()).position(|it| it == mark);
        from + found.expect("the output has two marks")
    };
    let start = at(0) + mark.len();
    let written = &text[start..at(start - 1)];
    written
        .strip_suffix(b"\n")
        .unwrap_or(written)
        .split(|it| *it == b'\n')
        .map(<[u8]>::to_vec)
        .collect()
}

/// Returns the guard processes that are children of a process.
pub fn guards_of(parent: i32) -> Vec<i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_guard = |id: &i32| {
        let read = |name: &str| fs::read(format!("/proc/{id}/{name}")).unwrap_or_default();
        let (stat, environment) = (read("stat"), read("environ"));
        let stat = String::from_utf8_lossy(&stat).into_owned();
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let found_parent = fields.nth(1).and_then(|it| it.parse::<i32>().ok());
        found_parent == Some(parent)
            && environment.split(|it| *it == 0).any(|it| it.starts_with(b"STEADFAST_GUARD="))
    };
    ids.filter(is_guard).collect()
}

pub fn run_if_requested() {
    let Ok(scenario) = std::env::var(SCENARIO_VARIABLE) else { return };
    let directory = PathBuf::from(std::env::var_os(DIRECTORY_VARIABLE).unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        match scenario.as_str() {
            "hold" => hold(&supervisor(), &directory).await,
            "hold with a new guard" => {
                let supervisor = supervisor();
                kill_guard().await;
                hold(&supervisor, &directory).await;
            }
            "two workers" => two_workers(&directory).await,
            "a long line" => {
                print_lines(vec![python(&directory, "print('x' * 150_000, end='')")]).await;
            }
            "bytes" => {
                print_lines(vec![shell(&directory, r"printf '\377\376\n\none\r\ntwo'")]).await;
            }
            "ignored and blocked signals" => ignored_signals().await,
            "inherited input" => inherited_input(&directory).await,
            "another prefix" => another_prefix(&directory).await,
            _ => panic!("no such scenario: {scenario}"),
        }
    });
}

/// Runs a worker with a tree of processes until it ends.
async fn hold(supervisor: &Supervisor, directory: &Path) {
    let mut worker = supervisor.start(&tree(directory)).unwrap();
    worker.wait().await;
}

pub fn tree(directory: &Path) -> WorkerSpec {
    shell(directory, TREE_SCRIPT)
}

async fn kill_guard() {
    let own = i32::try_from(std::process::id()).unwrap();
    let guard = wait_for("guard", || guards_of(own).first().copied()).await;
    kill(Pid::from_raw(guard), Signal::SIGKILL).unwrap();
    until_gone(guard).await;
}

async fn two_workers(directory: &Path) {
    let script = |letter: char| {
        format!(
            "import os\n\
             for i in range(3000):\n \
               os.write(1, b'{letter}' * 50)\n \
               os.write(1, b'{letter}' * (i % 100) + b'\\n')\n"
        )
    };
    print_lines(vec![python(directory, &script('a')), python(directory, &script('b'))]).await;
}

/// Runs workers, and prints their lines.
async fn print_lines(mut specs: Vec<WorkerSpec>) {
    mark();
    for (rank, spec) in specs.iter_mut().enumerate() {
        spec.output = Output::Lines { prefix: format!("[rank {rank}] ") };
    }
    let supervisor = supervisor();
    let mut workers = start_all(&supervisor, &specs).unwrap();
    while let Some((_, exit)) = workers.next_exit().await {
        assert!(exit.is_success(), "{exit}: {:?}", exit.last_lines);
    }
    workers.stop(Duration::ZERO).await;
    supervisor.close().await.unwrap();
    mark();
}

/// Runs a worker in a process that ignores and blocks signals.
async fn ignored_signals() {
    use Signal::*;
    for it in [SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGTERM, SIGPIPE] {
        // SAFETY: no handler is installed.
        unsafe { signal(it, SigHandler::SigIgn) }.unwrap();
    }
    SigSet::all().thread_block().unwrap();
    let mut spec = WorkerSpec::new("rank 0", "grep");
    spec.args = ["-E", "Sig(Ign|Blk)", "/proc/self/status"].map(OsString::from).to_vec();
    print_lines(vec![spec]).await;
}

/// Runs a worker that reads the stdin of this process: a file in place of a terminal.
async fn inherited_input(directory: &Path) {
    let path = directory.join("input");
    fs::write(&path, "continue\n").unwrap();
    let file = fs::File::open(path).unwrap();
    // SAFETY: both descriptors are open, and nothing reads stdin.
    assert_eq!(unsafe { nix::libc::dup2(file.as_raw_fd(), 0) }, 0);
    let mut spec = WorkerSpec::new("rank 0", "cat");
    spec.input = Input::Inherit;
    print_lines(vec![spec]).await;
}

/// Changes the prefix of a worker that runs.
async fn another_prefix(directory: &Path) {
    mark();
    let [seen, go] = ["seen", "go"].map(|name| directory.join(name));
    let until = |file: &Path| format!("until [ -e {} ]; do sleep 0.02; done", file.display());
    let script = format!("echo one; {}; echo; {}; echo two", until(&seen), until(&go));
    let mut spec = shell(directory, &script);
    spec.output = Output::Lines { prefix: "[rank 1] ".to_owned() };
    let supervisor = supervisor();
    let mut worker = supervisor.start(&spec).unwrap();
    let started = worker.last_output();
    wait_for("its first line", || (started < worker.last_output()).then_some(())).await;
    let first = worker.last_output();
    fs::write(seen, "").unwrap();
    // The next line is read after the first one was printed.
    wait_for("its next line", || (first < worker.last_output()).then_some(())).await;
    worker.set_prefix("[rank 0] ");
    fs::write(go, "").unwrap();
    assert!(worker.wait().await.is_success());
    supervisor.close().await.unwrap();
    mark();
}

fn mark() {
    // Unlike that of `print!`, this output is not captured.
    io::stdout().write_all(MARK.as_bytes()).unwrap();
    io::stdout().flush().unwrap();
}
