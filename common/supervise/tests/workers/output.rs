//! Rules about the output of workers.

use std::fs;
use std::time::Duration;

use steadfast_supervise::Output;

use super::support::scenario::stdout_of;
use super::support::{python, shell, supervisor, text_of, wait_for};

#[test]
fn lines_of_two_workers_never_mix() {
    let directory = tempfile::tempdir().unwrap();
    let lines = stdout_of("two workers", directory.path());
    for (prefix, letter) in [("[rank 0] ", b'a'), ("[rank 1] ", b'b')] {
        let own = lines.iter().filter_map(|line| line.strip_prefix(prefix.as_bytes()));
        let lengths: Vec<usize> = own
            .inspect(|text| assert!(text.iter().all(|it| *it == letter)))
            .map(<[u8]>::len)
            .collect();
        assert_eq!(lengths, (0..3000).map(|it| 50 + it % 100).collect::<Vec<_>>());
    }
    assert_eq!(lines.len(), 6000);
}

/// S003-25: a worker that stays for another round may have another rank in it.
#[test]
fn the_prefix_of_a_worker_that_runs_can_change() {
    let directory = tempfile::tempdir().unwrap();
    let lines = stdout_of("another prefix", directory.path());
    assert_eq!(lines.first().unwrap(), b"[rank 1] one");
    assert_eq!(lines.last().unwrap(), b"[rank 0] two");
}

#[test]
fn a_long_line_is_cut_into_lines_with_the_prefix() {
    let directory = tempfile::tempdir().unwrap();
    let lines = stdout_of("a long line", directory.path());
    let lengths: Vec<usize> =
        lines.iter().map(|line| line.strip_prefix(b"[rank 0] ").unwrap().len()).collect();
    assert_eq!(lengths, [65_536, 65_536, 150_000 - 2 * 65_536]);
}

#[test]
fn bytes_that_are_not_text_and_a_line_without_end_are_printed() {
    let directory = tempfile::tempdir().unwrap();
    let lines = stdout_of("bytes", directory.path());
    let expected: [&[u8]; 4] =
        [b"[rank 0] \xff\xfe", b"[rank 0] ", b"[rank 0] one", b"[rank 0] two"];
    assert_eq!(lines, expected);
}

#[tokio::test]
async fn log_files_are_appended_to_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let supervisor = supervisor();
    let mut spec = shell(directory.path(), r"printf '\r1%%\r2%%\n\377'; echo problem >&2");
    for _ in 0..2 {
        spec.output = Output::Files { directory: directory.path().join("logs/3") };
        let exit = supervisor.start(&spec).unwrap().wait().await;
        assert!(exit.is_success());
        assert_eq!(exit.last_lines, ["problem"]);
    }
    let read = |name: &str| fs::read(directory.path().join("logs/3").join(name)).unwrap();
    assert_eq!(read("stdout.log"), b"\r1%\r2%\n\xff\r1%\r2%\n\xff");
    assert_eq!(read("stderr.log"), b"problem\nproblem\n");
}

#[tokio::test]
async fn the_exit_has_the_last_twenty_lines_of_stderr() {
    let directory = tempfile::tempdir().unwrap();
    let script = "import sys\n\
                  for i in range(30): print(f'line {i}', file=sys.stderr)\n\
                  raise SystemExit('the \\x1b[31mreason')";
    let exit = supervisor().start(&python(directory.path(), script)).unwrap().wait().await;
    assert_eq!(exit.to_string(), "exit code 1");
    let mut expected: Vec<String> = (11..30).map(|it| format!("line {it}")).collect();
    expected.push("the [31mreason".to_owned());
    assert_eq!(exit.last_lines, expected);
}

#[tokio::test]
async fn the_time_of_the_last_output_advances_with_output_only() {
    let directory = tempfile::tempdir().unwrap();
    let script = r#"until [ -e "$DIR/go" ]; do sleep 0.02; done; echo two; exec sleep 1000"#;
    let mut worker = supervisor().start(&shell(directory.path(), script)).unwrap();
    let started = worker.last_output().unwrap();
    fs::write(directory.path().join("go"), "").unwrap();
    assert_eq!(text_of(&directory.path().join("stdout.log")).await, "two\n");
    let last = wait_for("later output", || worker.last_output().filter(|it| started < *it)).await;
    assert_eq!(worker.stop(Duration::ZERO).await.to_string(), "signal SIGKILL");
    assert_eq!(worker.last_output(), Some(last));
}
