//! Planning: from files to tasks.

use crate::files::{Directory, parquet_of, parquet_with_text, spec};
use proptest::prelude::*;
use steadfast_common::job::dataset::ReadOptions;
use steadfast_common::job::spec::{DataFormat, EvaluationSpec, Header};
use steadfast_data::{DataError, ErrorKind, plan, read, stream_files};
use steadfast_store::StoreError;

async fn error_of(
    directory: &Directory,
    spec: &steadfast_common::job::spec::DatasetSpec,
) -> DataError {
    plan(spec, &Default::default(), Some(directory.path())).await.unwrap_err()
}

/// S004-15: an empty match is an error, not an empty job.
#[tokio::test]
async fn a_source_that_matches_nothing_is_an_error() {
    let directory = Directory::new();
    let error = error_of(&directory, &spec(DataFormat::Csv, &["*.csv"])).await;
    assert!(matches!(error, DataError::Store(StoreError::NoMatch { .. })), "{error}");
    let error = error_of(&directory, &spec(DataFormat::Csv, &["a.csv"])).await;
    assert!(matches!(error, DataError::Store(StoreError::NotFound { .. })), "{error}");
    let error = error_of(&directory, &spec(DataFormat::Csv, &[])).await;
    assert!(matches!(error, DataError::NoSource), "{error}");
    assert_eq!(error.kind(), ErrorKind::Permanent);
}

#[tokio::test]
async fn a_dataset_without_records_is_an_error() {
    let directory = Directory::new();
    directory.write("a.csv", "x0,x1,y\n");
    let error = error_of(&directory, &spec(DataFormat::Csv, &["*.csv"])).await;
    assert!(matches!(error, DataError::NoRecords { files: 1, .. }), "{error}");
    directory.write("b.csv", "");
    let error = error_of(&directory, &spec(DataFormat::Csv, &["b.csv"])).await;
    assert!(matches!(error, DataError::BadFile { .. }), "{error}");
    directory.write_bytes("c.parquet", &parquet_of(&[], &[], 10));
    let error = error_of(&directory, &spec(DataFormat::Parquet, &["c.parquet"])).await;
    assert!(matches!(error, DataError::NoRecords { files: 1, .. }), "{error}");
}

#[tokio::test]
async fn files_keep_the_order_of_the_sources_and_appear_once() {
    let directory = Directory::new();
    for name in ["b/2.csv", "b/1.csv", "a.csv"] {
        directory.write(name, "x0,x1,y\n1,2,3\n");
    }
    let spec = spec(DataFormat::Csv, &["b/*.csv", "a.csv", "**/*.csv"]);
    let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
    let names: Vec<_> = manifest.files.iter().map(|f| f.url.rsplit('/').next().unwrap()).collect();
    assert_eq!(names, ["1.csv", "2.csv", "a.csv"]);
    assert!(manifest.files.iter().all(|f| f.url.starts_with("file:///") && f.size_bytes == 14));
}

#[tokio::test]
async fn a_record_of_the_wrong_length_is_named_with_its_line() {
    let rows = "x0,x1,y\n1,2,3\n\"4\n4\",5,6\n7,8\n";
    for text in [rows.to_owned(), rows.replace('\n', "\r\n")] {
        let directory = Directory::new();
        directory.write("a.csv", &text);
        let error = error_of(&directory, &spec(DataFormat::Csv, &["a.csv"])).await;
        let DataError::FieldCount { record, line, expected, found, ref file, .. } = error else {
            panic!("{error}");
        };
        assert_eq!((record, line, expected, found), (2, 5, 3, 2), "{text:?}");
        assert!(file.ends_with("/a.csv"));
    }
}

#[tokio::test]
async fn the_columns_of_all_files_must_fit_the_job() {
    let directory = Directory::new();
    directory.write("1.csv", "x0,x1,y\n1,2,3\n");
    directory.write("2.csv", "y,x1,x0\n30,20,10\n");
    let mut wanted = spec(DataFormat::Csv, &["*.csv"]);
    let manifest = plan(&wanted, &Default::default(), Some(directory.path())).await.unwrap();
    let options = ReadOptions::new(&wanted, &manifest);
    let records = read(&manifest, &options, &manifest.chunks).await.unwrap();
    assert_eq!(records.features, [1.0, 2.0, 10.0, 20.0]);
    assert_eq!(records.labels, [3.0, 30.0]);

    directory.write("3.csv", "x0,x1,x2,y\n1,2,3,4\n");
    let error = error_of(&directory, &wanted).await;
    assert!(matches!(error, DataError::ColumnsDiffer { .. }), "{error}");
    assert!(error.to_string().contains("`x2` is new"), "{error}");
    wanted.label = "Y".to_owned();
    let error = error_of(&directory, &wanted).await;
    let DataError::UnknownColumn { column, candidates, .. } = error else { panic!("{error}") };
    assert_eq!((column.as_str(), candidates), ("Y", vec!["y".to_owned()]));
}

#[tokio::test]
async fn a_text_column_is_rejected_by_the_schema() {
    let directory = Directory::new();
    directory.write_bytes("a.parquet", &parquet_with_text());
    let error = error_of(&directory, &spec(DataFormat::Parquet, &["a.parquet"])).await;
    assert!(matches!(error, DataError::NotNumeric { .. }), "{error}");
}

fn held_out(fraction: f64) -> EvaluationSpec {
    EvaluationSpec { fraction, ..EvaluationSpec::default() }
}

/// A validation set of its own files changes nothing about the tasks that are trained on.
#[tokio::test]
async fn all_records_of_held_out_files_are_held_out() {
    let directory = Directory::new();
    let rows = |from: u32, to: u32| {
        let rows = (from..to).map(|row| format!("{row},{row},0\n"));
        format!("x0,x1,y\n{}", rows.collect::<String>())
    };
    directory.write("train-0.csv", &rows(0, 5));
    directory.write("train-1.csv", &rows(5, 9));
    directory.write("test-0.csv", &rows(100, 103));
    directory.write("test-1.csv", &rows(103, 108));
    let mut spec = spec(DataFormat::Csv, &["train-*.csv"]);
    spec.records_per_task = Some(2);
    let base = Some(directory.path());
    let alone = plan(&spec, &EvaluationSpec::default(), base).await.unwrap();
    let of = |source: &str| EvaluationSpec { source: vec![source.to_owned()], ..held_out(0.0) };
    let manifest = plan(&spec, &of("test-*.csv"), base).await.unwrap();
    let tasks = alone.task_count();
    assert_eq!(manifest.training_tasks(), alone.training_tasks());
    assert_eq!(manifest.chunks[..alone.chunks.len()], alone.chunks);
    assert_eq!(manifest.held_out.first().map(|it| it.0), Some(tasks));
    let options = ReadOptions::new(&spec, &manifest);
    let mut labels = Vec::new();
    for task in &manifest.held_out {
        let records = read(&manifest, &options, manifest.chunks_of(*task)).await.unwrap();
        labels.extend(records.features.chunks(2).map(|features| features[0] as u32));
    }
    assert_eq!(labels, (100..108).collect::<Vec<_>>());

    let twice = plan(&spec, &of("*-1.csv"), base).await.unwrap_err();
    assert!(matches!(twice, DataError::HeldOutTwice { .. }), "{twice}");
    directory.write("empty.csv", "x0,x1,y\n");
    let empty = plan(&spec, &of("empty.csv"), base).await.unwrap_err();
    assert!(matches!(empty, DataError::NoHeldOut { files: 1, .. }), "{empty}");
    directory.write("other.csv", "x0,x2,y\n1,2,3\n");
    let other = plan(&spec, &of("other.csv"), base).await.unwrap_err();
    assert!(
        matches!(other, DataError::ColumnsDiffer { .. } | DataError::UnknownColumn { .. }),
        "{other}"
    );
    assert!(plan(&spec, &of("nothing-*.csv"), base).await.is_err());
}

#[tokio::test]
async fn a_dataset_without_training_tasks_is_rejected() {
    let directory = Directory::new();
    directory.write("a.csv", "x0,x1,y\n1,2,3\n1,2,3\n1,2,3\n1,2,3\n");
    let mut spec = spec(DataFormat::Csv, &["a.csv"]);
    spec.records_per_task = Some(1);
    let manifest = plan(&spec, &held_out(0.5), Some(directory.path())).await.unwrap();
    assert_eq!((manifest.held_out.len(), manifest.training_records()), (2, 2));
    let error = plan(&spec, &held_out(1.0), Some(directory.path())).await.unwrap_err();
    assert!(matches!(error, DataError::NothingToTrain { tasks: 4, .. }), "{error}");
    spec.records_per_task = Some(0);
    let error = error_of(&directory, &spec).await;
    assert!(matches!(error, DataError::BadTaskSize { .. }), "{error}");
}

#[tokio::test]
async fn a_quote_that_is_never_closed_does_not_fill_the_memory() {
    let directory = Directory::new();
    directory.write("a.csv", &format!("x0,x1,y\n1,2,3\n1,2,\"{}", "3,\n".repeat(7 << 20)));
    expect_open_quote(&directory, "a.csv", "record 1", 3).await;
    directory.write("b.csv", &format!("x0,x1,\"y{}", "3,\n".repeat(7 << 20)));
    expect_open_quote(&directory, "b.csv", "the header", 1).await;
    directory.write("c.csv", &format!("x0,x1,y\n1,2,{}", "3".repeat(17 << 20)));
    let error = error_of(&directory, &spec(DataFormat::Csv, &["c.csv"])).await;
    assert!(error.to_string().contains("record 0 is longer than"), "{error}");
}

async fn expect_open_quote(directory: &Directory, name: &str, place: &str, line: u64) {
    let error = error_of(directory, &spec(DataFormat::Csv, &[name])).await;
    let DataError::UnclosedQuote { file, place: found, line: found_line } = &error else {
        panic!("{name}: {error}");
    };
    assert_eq!((found.as_str(), *found_line), (place, line), "{name}: {error}");
    assert!(file.ends_with(name), "{error}");
    assert_eq!(error.kind(), ErrorKind::Permanent);
}

#[tokio::test]
async fn a_quote_that_is_not_closed_is_reported_where_it_opens() {
    let directory = Directory::new();
    let rest = "4,5,6\n".repeat(1000);
    let files = [
        // The record has the right number of fields.
        ("last.csv", format!("x0,x1,y\n1,2,3\n1,2,\"3\n{rest}"), "record 1", 3),
        ("first.csv", format!("x0,x1,y\n1,2,3\n\n\n\"1,2,3\n{rest}"), "record 1", 5),
        ("second.csv", format!("x0,x1,y\n\"1\n\",\"2,3\n{rest}"), "record 0", 3),
        ("windows.csv", format!("x0,x1,y\r\n1,2,3\r\n1,\"2,3\r\n{rest}"), "record 1", 3),
        ("header.csv", format!("x0,\"x1,y\n{rest}"), "the header", 1),
        ("end.csv", "x0,x1,y\n1,2,3\n4,5,\"6".to_owned(), "record 1", 3),
        ("doubled.csv", "x0,x1,y\n1,2,\"3\"\"\n4,5,6\n".to_owned(), "record 0", 2),
    ];
    for (name, text, place, line) in files {
        directory.write(name, &text);
        expect_open_quote(&directory, name, place, line).await;
    }
}

#[tokio::test]
async fn a_quote_that_is_closed_by_a_later_one_is_reported_with_the_lines_between() {
    let directory = Directory::new();
    directory.write("a.csv", "x0,x1,y\n1,2,3\n1,\"2,3\n4,5,6\n7,8,9\"\n");
    let error = error_of(&directory, &spec(DataFormat::Csv, &["a.csv"])).await;
    let DataError::FieldCount { record: 1, line: 3, last_line: 5, .. } = error else {
        panic!("{error}");
    };
    let text = error.to_string();
    assert!(text.contains("(lines 3 to 5)") && text.contains("quote"), "{text}");
}

#[tokio::test]
async fn a_header_longer_than_the_first_read_is_read() {
    let directory = Directory::new();
    let names: Vec<String> = (0..20_000).map(|i| format!("pixel_{i}")).collect();
    directory.write("a.csv", &format!("{},y\n{}1\n", names.join(","), "0,".repeat(20_000)));
    let mut spec = spec(DataFormat::Csv, &["a.csv"]);
    spec.features = vec!["pixel_*".to_owned()];
    let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
    assert_eq!(manifest.features.len(), 20_000);
}

/// Compiles only if the futures are `Send`.
#[tokio::test]
async fn planning_and_reading_are_send() {
    let directory = Directory::new();
    directory.write("a.csv", "x0,x1,y\n1,2,3\n");
    let (spec, base) = (spec(DataFormat::Csv, &["a.csv"]), directory.path().to_owned());
    let job = tokio::spawn(async move {
        let manifest = plan(&spec, &Default::default(), Some(&base)).await.unwrap();
        let options = ReadOptions::new(&spec, &manifest);
        read(&manifest, &options, &manifest.chunks).await.unwrap().len()
    });
    assert_eq!(job.await.unwrap(), 1);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// S004-15: for any file, reading all tasks gives each record once, in order.
    #[test]
    fn every_record_of_a_text_file_is_read_in_exactly_one_task(
        lines in prop::collection::vec((any::<i16>(), any::<bool>(), 0_usize..3), 1..300),
        line_end in prop::sample::select(vec!["\n", "\r\n"]),
        header in prop::sample::select(vec![Header::Present, Header::Absent]),
        byte_order_mark in any::<bool>(),
        closed in any::<bool>(),
        records_per_task in prop::option::of(1_u32..50),
    ) {
        let mut text = String::new();
        if byte_order_mark { text.push('\u{feff}'); }
        if header == Header::Present { text += "note,x,y"; text += line_end; }
        for (number, quoted, blank) in &lines {
            let note = if *quoted { format!("\"a, \"\"{number}\"\"{line_end}\"") } else { "a".into() };
            text += &format!("{note},{number},1{line_end}{}", line_end.repeat(*blank));
        }
        if !closed { text.truncate(text.trim_end().len()); }
        let directory = Directory::new();
        directory.write("a.csv", &text);
        let mut spec = spec(DataFormat::Csv, &["a.csv"]);
        spec.header = header;
        spec.records_per_task = records_per_task;
        let (feature, label) = if header == Header::Present { ("x", "y") } else { ("1", "2") };
        (spec.features, spec.label) = (vec![feature.to_owned()], label.to_owned());
        runtime().block_on(async {
            let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
            let options = ReadOptions::new(&spec, &manifest);
            let mut found = Vec::new();
            for task in manifest.training_tasks() {
                let records = read(&manifest, &options, manifest.chunks_of(task)).await.unwrap();
                assert_eq!(records.len() as u64, manifest.records_of(task));
                found.extend(records.features);
            }
            let expected: Vec<f32> = lines.iter().map(|line| f32::from(line.0)).collect();
            assert_eq!(found, expected);
        });
    }
}

/// Files of other systems lie beside the data; a stream asks for its files again and again.
#[cfg(unix)]
#[tokio::test]
async fn a_file_whose_name_cannot_be_a_path_is_skipped_by_datasets_and_streams() {
    let directory = Directory::new();
    directory.write("a.csv", "x0,y\n1,2\n");
    directory.write("b\n.csv", "x0,y\n1,2\n");
    directory.write("._a.csv", "no data");
    let spec = spec(DataFormat::Csv, &["*.csv"]);
    let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
    assert_eq!(manifest.files.len(), 1);
    let listing = stream_files(&spec, Some(directory.path())).await.unwrap();
    assert_eq!(listing.files.len(), 1);
    let skipped = [format!("file://{}/b\\n.csv", directory.path())];
    assert_eq!(Vec::from_iter(listing.skipped), skipped);
}
