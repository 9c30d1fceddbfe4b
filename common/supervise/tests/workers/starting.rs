//! Rules about the start of workers.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use steadfast_common::error::ErrorKind;
use steadfast_supervise::{MARKER_VARIABLE, StartError, WorkerSpec};

use super::support::scenario::stdout_of;
use super::support::{id_in, shell, supervisor, text_of, until_gone};

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
    assert!(supervisor().start_all(&specs).await.is_err());
    // The first worker may have been killed before it wrote the file.
    if directory.path().join("id").exists() {
        until_gone(id_in(&directory.path().join("id")).await).await;
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
