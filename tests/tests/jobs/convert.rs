//! `steadfast convert` as a command.

use std::fs;
use std::path::PathBuf;

use steadfast_tests::{Ended, Process, Scene, examples, program};

use crate::own_loop::BOUND;

fn convert(scene: &Scene, args: &[&str]) -> Ended {
    let mut command = scene.command(&program("steadfast"));
    command.arg("convert").args(args);
    Process::start(scene.directory(), "convert", &mut command).end(BOUND)
}

/// Converts files in a directory of the scene; returns those that were written, as stdout lists them.
fn written(scene: &Scene, args: &[&str]) -> Vec<PathBuf> {
    let ended = convert(scene, args);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let path = |line: &str| PathBuf::from(line.strip_prefix("file://").expect("a URL of a file"));
    ended.stdout.lines().map(path).collect()
}

/// S004-80, S004-81: the command writes numbered files with the same values, keeps existing ones unless it is told
/// otherwise, and refuses what a format cannot hold by its column.
#[test]
fn a_dataset_is_converted_to_and_fro() {
    let scene = Scene::new();
    let source = examples().join("data/linear.csv").display().to_string();
    let to = |directory: &str| scene.path(directory).display().to_string();
    let (parquet, direct, back) = (to("parquet"), to("direct"), to("back"));
    let files =
        written(&scene, &[&source, "--to", &parquet, "--format", "parquet", "--shards", "3"]);
    let names: Vec<_> = files.iter().filter_map(|it| it.file_name()?.to_str()).collect();
    let expected = (0..3).map(|number| format!("data-{number:05}-of-00003.parquet"));
    assert_eq!(names, expected.collect::<Vec<_>>());
    let pattern = format!("{parquet}/*.parquet");
    let from_parquet = written(&scene, &[&pattern, "--to", &back, "--format", "jsonl"]);
    let from_csv = written(&scene, &[&source, "--to", &direct, "--format", "jsonl"]);
    let text = |files: &[PathBuf]| fs::read_to_string(&files[0]).expect("the file was written");
    assert_eq!(text(&from_parquet), text(&from_csv));
    let records = fs::read_to_string(&source).expect("an example").lines().count() - 1;
    assert_eq!(text(&from_csv).lines().count(), records);

    let again: &[&str] = &[&source, "--to", &direct, "--format", "jsonl"];
    let refused = convert(&scene, again);
    assert_eq!(refused.code, Some(4), "{}", refused.stderr);
    assert!(refused.stderr.contains("--force"), "{}", refused.stderr);
    written(&scene, &[again, &["--force"]].concat());

    let lists = scene.write("lists.jsonl", "{\"id\": 1, \"seen\": [1, 2]}\n").display().to_string();
    let refused = convert(&scene, &[&lists, "--to", &to("csv"), "--format", "csv"]);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("`seen`"), "{}", refused.stderr);
    assert!(!scene.path("csv").exists(), "a refused conversion leaves nothing");
}
