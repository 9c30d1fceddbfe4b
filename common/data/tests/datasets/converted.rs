//! Datasets that are converted to another format.

use std::fmt::Write;

use steadfast_common::job::columns::Values;
use steadfast_common::job::dataset::{ReadOptions, Records};
use steadfast_common::job::spec::{DataFormat, DatasetSpec};
use steadfast_data::{Converted, DataError, IfThere, Target, convert, plan, read};
use steadfast_store::open;

use crate::columns::column;
use crate::files::{Directory, spec};

/// All columns, with their types.
const TYPES: [(&str, &str); 11] = [
    ("bool", "bool"),
    ("small", "uint8"),
    ("int", "int64"),
    ("unsigned", "uint64"),
    ("single", "float32"),
    ("double", "float64"),
    ("text", "text"),
    ("raw", "bytes"),
    ("ints", "int64[]"),
    ("pair", "float32[2]"),
    ("image", "uint8[]"),
];

/// Formats that are written, with the columns that they cannot hold.
const FORMATS: [(DataFormat, &[&str]); 5] = [
    (DataFormat::Parquet, &[]),
    (DataFormat::Csv, &["raw", "ints", "pair", "image"]),
    (DataFormat::Tsv, &["raw", "ints", "pair", "image"]),
    (DataFormat::Jsonl, &["raw"]),
    (DataFormat::Tfrecord, &["unsigned", "double"]),
];

/// Records with extreme values.
fn records() -> String {
    let ints = [0, -1, i64::MAX, i64::MIN, (1 << 53) + 1];
    let unsigned = [0, u64::MAX, 1 << 63, (1 << 53) + 1];
    let singles = [0.1, -0.0, f32::MAX, f32::MIN_POSITIVE, 1e-45, 16_777_216.0, 8.589_973e9];
    let doubles = [0.1, -0.0, f64::MAX, f64::MIN_POSITIVE, 5e-324, 9_007_199_254_740_992.0];
    let texts = [
        "",
        " ",
        "a,b\tc",
        "\"quoted\"",
        "lines\nof\r\nmany\r",
        "007",
        "null",
        "ä\u{feff}\u{1f600}",
        " spaced ",
        "\\N",
    ];
    let mut lines = String::new();
    for i in 0..500_usize {
        let (int, unsigned) = (ints[i % ints.len()], unsigned[i % unsigned.len()]);
        let single = f64::from(singles[i % singles.len()]);
        let double = doubles[i % doubles.len()];
        let text = texts[i % texts.len()];
        let list = &ints[..i % 4];
        let line = serde_json::json!({
            "bool": i % 3 == 0, "small": i % 256, "int": int, "unsigned": unsigned,
            "single": single, "double": double, "text": text, "raw": text,
            "ints": list, "pair": [single, -single], "image": &[255_u8, 0, 7][..i % 4 % 3],
        });
        writeln!(lines, "{line}").unwrap();
    }
    lines
}

fn of_columns(format: DataFormat, source: &str, names: &[&str]) -> DatasetSpec {
    let typed = TYPES.iter().filter(|(name, _)| names.contains(name));
    DatasetSpec {
        features: vec![],
        label: String::new(),
        columns: names.iter().map(|name| (*name).to_owned()).collect(),
        types: typed.map(|(name, kind)| ((*name).to_owned(), kind.parse().unwrap())).collect(),
        ..spec(format, &[source])
    }
}

/// Reads as a job does.
async fn all(spec: &DatasetSpec) -> Result<Records, DataError> {
    let manifest = plan(spec, &Default::default(), None).await?;
    let options = ReadOptions::new(spec, &manifest);
    let mut records = Records::new(&options);
    for task in manifest.training_tasks() {
        records.extend(&read(&manifest, &options, manifest.chunks_of(task)).await?);
    }
    Ok(records)
}

fn target(directory: &Directory, name: &str, format: DataFormat, shards: u32) -> Target {
    let (directory, prefix) = (open(&format!("{}/{name}", directory.path())), "data".to_owned());
    Target { directory: directory.unwrap(), format, shards, prefix, if_there: IfThere::Fail }
}

/// For each pair of formats: S004-80, S004-81.
#[tokio::test]
async fn a_job_reads_the_same_records_in_the_same_order_from_a_converted_dataset() {
    let directory = Directory::new();
    directory.write("base.jsonl", &records());
    let base = format!("{}/base.jsonl", directory.path());
    let names = || TYPES.iter().map(|(name, _)| *name);
    for (from, (source_format, without)) in FORMATS.iter().enumerate() {
        let held: Vec<&str> = names().filter(|name| !without.contains(name)).collect();
        let source = of_columns(DataFormat::Jsonl, &base, &held);
        let first = target(&directory, &format!("{from}"), *source_format, 3);
        let written = convert(&source, &first).await.unwrap();
        assert_eq!((written.files.len(), written.records), (3, 500));
        for (to, (target_format, without)) in FORMATS.iter().enumerate() {
            let mut names = held.clone();
            names.retain(|name| !without.contains(name));
            let files = format!("{}/{from}/*", directory.path());
            let second = target(&directory, &format!("{from}-{to}"), *target_format, 2);
            convert(&of_columns(*source_format, &files, &names), &second).await.unwrap();
            let files = format!("{}/{from}-{to}/*", directory.path());
            let found = all(&of_columns(*target_format, &files, &names)).await.unwrap();
            let expected = all(&of_columns(DataFormat::Jsonl, &base, &names)).await.unwrap();
            // As text, because -0.0 equals 0.0.
            for (found, expected) in found.columns.iter().zip(&expected.columns) {
                let pair = (source_format, target_format);
                assert_eq!(format!("{found:?}"), format!("{expected:?}"), "{pair:?}");
            }
        }
    }
}

fn whole(format: DataFormat, source: &str) -> DatasetSpec {
    DatasetSpec { types: Default::default(), ..of_columns(format, source, &["*"]) }
}

async fn converted(text: &str, format: DataFormat, shards: u32) -> Result<Converted, DataError> {
    let directory = Directory::new();
    directory.write("f.jsonl", text);
    let source = whole(DataFormat::Jsonl, &format!("{}/f.jsonl", directory.path()));
    let result = convert(&source, &target(&directory, "to", format, shards)).await;
    let is_left = directory_names(&directory, "to").is_empty();
    assert_eq!(is_left, result.is_err(), "a failed conversion leaves no file");
    result
}

fn directory_names(directory: &Directory, name: &str) -> Vec<String> {
    let found = std::fs::read_dir(format!("{}/{name}", directory.path()));
    let entries = found.into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[tokio::test]
async fn what_a_format_cannot_hold_is_refused_by_the_name_of_its_column() {
    let error =
        async |text: &str, format| converted(text, format, 1).await.unwrap_err().to_string();
    assert_eq!(
        error("{\"x\": [1, 2]}", DataFormat::Csv).await,
        "column `x` is int64[], and CSV or TSV cannot hold it; write Parquet or JSON lines, or leave it out"
    );
    for (text, format) in [
        ("{\"x\": 18446744073709551615}", DataFormat::Tfrecord),
        ("{\"x\": 0.1}", DataFormat::Tfrecord),
        ("{\" x\": 1}", DataFormat::Tsv),
        // Values that no column holds.
        ("{\"x\": 1}\n{\"x\": null}", DataFormat::Csv),
        ("{\"x\": 1}\n{}", DataFormat::Parquet),
        ("{\"x\": {\"y\": 1}}", DataFormat::Jsonl),
        ("{\"x\": [\"a\", \"b\"]}", DataFormat::Parquet),
    ] {
        let error = error(text, format).await;
        assert!(error.contains("`x`") || error.contains("` x`"), "{error}");
    }
    let libsvm = error("{\"x\": 1}", DataFormat::Libsvm).await;
    assert!(libsvm.starts_with("LibSVM can be read, not written"), "{libsvm}");
    assert!(matches!(
        converted("{\"x\": 1}", DataFormat::Csv, 2).await,
        Err(DataError::BadShards { shards: 2, records: 1 })
    ));
}

/// S004-81
#[tokio::test]
async fn each_type_that_a_format_cannot_hold_is_refused() {
    let directory = Directory::new();
    directory.write("base.jsonl", &records());
    let base = format!("{}/base.jsonl", directory.path());
    for (format, without) in FORMATS {
        for name in without {
            let source = of_columns(DataFormat::Jsonl, &base, &[*name]);
            let error = convert(&source, &target(&directory, "to", format, 1)).await.unwrap_err();
            assert!(
                error.to_string().contains(&format!("column `{name}` is")),
                "{format:?}: {error}"
            );
        }
    }
    assert!(directory_names(&directory, "to").is_empty());
}

#[tokio::test]
async fn nothing_is_written_if_any_of_the_files_exists() {
    let directory = Directory::new();
    directory.write("f.csv", "x\n1\n2\n3\n");
    let last = "data-00002-of-00003.csv";
    directory.write(&format!("to/{last}"), "mine");
    let source = whole(DataFormat::Csv, &format!("{}/f.csv", directory.path()));
    let to = target(&directory, "to", DataFormat::Csv, 3);
    assert!(matches!(convert(&source, &to).await, Err(DataError::Exists { .. })));
    assert_eq!(directory_names(&directory, "to"), [last]);
}

#[tokio::test]
async fn a_failure_in_the_middle_leaves_no_file() {
    let mut text = String::new();
    (0..5_000).for_each(|i| writeln!(text, "{{\"x\": {i}}}").unwrap());
    text += "{\"x\": 0.5}\n";
    let error = converted(&text, DataFormat::Csv, 1).await.unwrap_err().to_string();
    assert!(error.starts_with("record 5000 of ") && error.contains("column `x`"), "{error}");
}

#[tokio::test]
async fn decimal_numbers_of_text_keep_the_precision_of_64_bits() {
    let directory = Directory::new();
    directory.write("f.csv", "x\n0.1\n16777217.5\n");
    let source = whole(DataFormat::Csv, &format!("{}/f.csv", directory.path()));
    convert(&source, &target(&directory, "to", DataFormat::Parquet, 1)).await.unwrap();
    let files = format!("{}/to/*", directory.path());
    let found = all(&whole(DataFormat::Parquet, &files)).await.unwrap();
    assert_eq!(column(&found, "x").values, Values::Float64(vec![0.1, 16_777_217.5]));
}

#[tokio::test]
async fn files_are_numbered_and_existing_ones_replaced_only_on_request() {
    let directory = Directory::new();
    let mut text = "x\n".to_owned();
    (0..70_000).for_each(|i| writeln!(text, "{i}").unwrap());
    directory.write("f.csv", &text);
    let source = whole(DataFormat::Csv, &format!("{}/f.csv", directory.path()));
    for shards in [1, 3] {
        let name = shards.to_string();
        let mut to = target(&directory, &name, DataFormat::Parquet, shards);
        convert(&source, &to).await.unwrap();
        let names: Vec<String> =
            (0..shards).map(|it| format!("data-{it:05}-of-{shards:05}.parquet")).collect();
        assert_eq!(directory_names(&directory, &name), names);
        let files = format!("{}/{name}/*", directory.path());
        let found = all(&whole(DataFormat::Parquet, &files)).await.unwrap();
        assert_eq!(column(&found, "x").values, Values::Int64((0..70_000).collect()));

        directory.write(&format!("{name}/{}", names[0]), "mine");
        let error = convert(&source, &to).await.unwrap_err();
        assert!(matches!(error, DataError::Exists { .. }), "{error}");
        let path = format!("{}/{name}/{}", directory.path(), names[0]);
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
        to.if_there = IfThere::Replace;
        convert(&source, &to).await.unwrap();
        assert_ne!(std::fs::read(&path).unwrap(), b"mine");
    }
}

#[tokio::test]
async fn formats_that_are_only_read_are_sources() {
    let directory = Directory::new();
    directory.write("f.libsvm", "1 1:0.5 7:2\n-1 3:0.1\n");
    let source = whole(DataFormat::Libsvm, &format!("{}/f.libsvm", directory.path()));
    let done = convert(&source, &target(&directory, "to", DataFormat::Jsonl, 1)).await.unwrap();
    assert_eq!(done.records, 2);
    let text =
        std::fs::read_to_string(format!("{}/to/data-00000-of-00001.jsonl", directory.path()));
    let text = text.unwrap();
    assert!(text.contains("[0.1]") && text.contains("[1,7]"), "{text}");
}
