//! Rules about the start of workers.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use steadfast_common::error::ErrorKind;
use steadfast_supervise::{
    Connection, Input, MARKER_VARIABLE, Notified, Output, Signal, StartError, WorkerSpec,
};
use tokio::io::AsyncWriteExt;

use super::support::scenario::stdout_of;
use super::support::{id_in, python, shell, start_all, supervisor, text_of, until_gone};

#[tokio::test]
async fn a_missing_program_is_named() {
    let directory = tempfile::tempdir().unwrap();
    for program in [directory.path().join("nothing"), "no-such-program".into()] {
        let error = supervisor().start(&WorkerSpec::new("rank 0", &program)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(error.to_string(), format!("program {} does not exist", program.display()));
    }
}

#[tokio::test]
async fn a_program_that_is_not_executable_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("train");
    fs::write(&program, "#!/bin/sh\n").unwrap();
    let error = supervisor().start(&WorkerSpec::new("rank 0", &program)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert_eq!(error.to_string(), format!("program {} is not executable", program.display()));
}

#[tokio::test]
async fn a_missing_interpreter_or_directory_is_not_a_missing_program() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("train");
    fs::write(&program, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut spec = WorkerSpec::new("rank 0", &program);
    let error = supervisor().start(&spec).unwrap_err();
    assert!(matches!(error, StartError::NoInterpreter { .. }), "{error}");
    spec.directory = Some(directory.path().join("nowhere"));
    let error = supervisor().start(&spec).unwrap_err();
    assert!(matches!(error, StartError::NoDirectory { .. }), "{error}");
}

#[tokio::test]
async fn a_worker_gets_its_arguments_variables_and_directory() {
    let directory = tempfile::tempdir().unwrap();
    let script = r#"echo "$1 $A ${HOME-none} $(pwd)"; cat"#;
    let mut spec = shell(directory.path(), script);
    spec.args.extend(["sh".into(), "x y".into()]);
    spec.env.push(("A".into(), "b".into()));
    spec.env_removed.push("HOME".into());
    spec.directory = Some(directory.path().to_owned());
    assert!(supervisor().start(&spec).unwrap().wait().await.is_success());
    let text = text_of(&directory.path().join("stdout.log")).await;
    assert_eq!(text, format!("x y b none {}\n", directory.path().display()));
}

#[tokio::test]
async fn if_one_of_several_workers_cannot_be_started_none_stays() {
    let directory = tempfile::tempdir().unwrap();
    let specs = [
        shell(directory.path(), r#"sleep 1000 & echo $! >"$DIR/id"; wait"#),
        WorkerSpec::new("rank 1", "no-such-program"),
    ];
    assert!(start_all(&supervisor(), &specs).is_err());
    // The first worker may have been killed before it wrote the line, when the file may be there.
    let file = directory.path().join("id");
    if fs::read_to_string(&file).is_ok_and(|text| text.ends_with('\n')) {
        until_gone(id_in(&file).await).await;
    }
}

#[tokio::test]
async fn each_worker_has_a_marker_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let supervisor = supervisor();
    let mut values = Vec::new();
    for name in ["0", "1"] {
        let script = format!("echo ${MARKER_VARIABLE}");
        let spec = shell(&directory.path().join(name), &script);
        assert!(supervisor.start(&spec).unwrap().wait().await.is_success());
        values.push(text_of(&directory.path().join(name).join("stdout.log")).await);
    }
    assert_ne!(values[0], values[1]);
    let run = |value: &str| value.split(',').next().map(str::to_owned);
    assert_eq!(run(&values[0]), run(&values[1]));
}

/// `nohup` ignores SIGHUP for all that it starts, and `sh` SIGINT and SIGQUIT for what runs in the background.
#[test]
fn a_worker_starts_with_default_signals_but_for_an_ignored_sighup() {
    let directory = tempfile::tempdir().unwrap();
    let lines = stdout_of("ignored and blocked signals", directory.path());
    // Those of the C library are not set by programs.
    let standard = |line: &[u8]| {
        let text = String::from_utf8_lossy(line).into_owned();
        let (name, mask) = text.split_once('\t').unwrap();
        (name.to_owned(), u64::from_str_radix(mask, 16).unwrap() & ((1 << 31) - 1))
    };
    let masks: Vec<(String, u64)> = lines.iter().map(|line| standard(line)).collect();
    let expected = [("[rank 0] SigBlk:", 0), ("[rank 0] SigIgn:", 1)];
    assert_eq!(masks, expected.map(|(name, mask)| (name.to_owned(), mask)));
}

/// A debugger reads the terminal, or what stands for it.
#[test]
fn a_worker_can_read_the_input_of_its_supervisor() {
    let directory = tempfile::tempdir().unwrap();
    let lines = stdout_of("inherited input", directory.path());
    assert_eq!(lines, [b"[rank 0] continue"]);
}

/// The output of a worker has what its process printed before it was one.
#[tokio::test]
async fn a_worker_may_be_started_before_its_name_and_its_output_are_known() {
    let directory = tempfile::tempdir().unwrap();
    let (supervisor, script) = (supervisor(), "echo before; read line; echo $line");
    let spec = shell(directory.path(), script);
    let early = WorkerSpec { output: Output::Pending, input: Input::Pipe, ..spec.clone() };
    let mut worker = supervisor.start(&WorkerSpec { name: "early".to_owned(), ..early }).unwrap();
    let notified = async || supervisor.signaller().notify(Signal::SIGUSR1).await;
    assert_eq!(notified().await, Notified::default());
    worker.assign(&spec).unwrap();
    assert_eq!(worker.name(), "rank 0");
    assert_eq!(notified().await.workers_without_handler, 1);
    worker.take_input().unwrap().write_all(b"after\n").await.unwrap();
    assert!(worker.wait().await.is_success());
    let text = text_of(&directory.path().join("stdout.log")).await;
    assert_eq!(text, "before\nafter\n");
}

#[tokio::test]
async fn a_connection_is_inherited_by_one_worker_alone() {
    let directory = tempfile::tempdir().unwrap();
    let (mut connection, theirs) = Connection::new(b"first").unwrap();
    let number = theirs.as_raw_fd();
    let script = format!(
        "import os\n\
         if os.path.exists('/proc/self/fd/{number}'):\n    \
             os.write({number}, b'x')\n    \
             print(open({number}, 'rb').read())"
    );
    let supervisor = supervisor();
    let inherited = Some(Arc::new(theirs));
    let specs = [None, inherited].map(|inherited| {
        let name = if inherited.is_some() { "with" } else { "without" };
        WorkerSpec { inherited, ..python(&directory.path().join(name), &script) }
    });
    let mut workers = start_all(&supervisor, &specs).unwrap();
    drop(specs);
    assert_eq!(connection.receive().await.unwrap(), b'x');
    connection.send_last(b" last").await.unwrap();
    while workers.next_exit().await.is_some() {}
    let text = |name: &str| fs::read_to_string(directory.path().join(name).join("stdout.log"));
    assert_eq!(text("with").unwrap(), "b'first last'\n");
    assert_eq!(text("without").unwrap(), "");
    assert!(connection.receive().await.is_err());
}
