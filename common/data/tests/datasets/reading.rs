//! Reading: from chunks to numbers.

use crate::files::{
    Directory, PageIndex, Values, example, large_parquet, parquet, parquet_of, spec,
};
use bytes::Bytes;
use half::f16;
use parquet::file::metadata::ParquetMetaDataReader;
use steadfast_common::ids::TaskId;
use steadfast_common::job::dataset::{Chunk, Manifest, ReadOptions, Records};
use steadfast_common::job::spec::{DataFormat, DatasetSpec};
use steadfast_data::{DataError, ErrorKind, plan, read};
use steadfast_store::StoreError;

/// All records of a dataset, task by task.
async fn all(spec: &DatasetSpec, base: Option<&str>) -> Result<(Manifest, Records), DataError> {
    let manifest = plan(spec, &Default::default(), base).await?;
    let options = ReadOptions::new(spec, &manifest);
    let mut records = Records::default();
    for task in manifest.training_tasks() {
        records.extend(&read(&manifest, &options, manifest.chunks_of(task)).await?);
    }
    Ok((manifest, records))
}

/// S004-82: the records read do not depend on how they are stored.
#[tokio::test]
async fn parquet_and_csv_give_the_same_records() {
    let digits = |format, name: &str| DatasetSpec {
        features: vec!["pixel_*".to_owned()],
        label: "digit".to_owned(),
        feature_scale: 0.0625,
        ..spec(format, &[&example(name)])
    };
    let (manifest, table) =
        all(&digits(DataFormat::Parquet, "digits.parquet"), None).await.unwrap();
    let (_, text) = all(&digits(DataFormat::Csv, "digits.csv"), None).await.unwrap();
    assert_eq!(table, text);
    assert_eq!((table.len(), table.width, manifest.task_count()), (1797, 64, 57));
    assert_eq!(table.labels[..10], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]);
    assert!(table.features.iter().all(|value| (0.0..=1.0).contains(value)));
}

#[tokio::test]
async fn the_generated_dataset_is_the_expected_line() {
    let (_, records) = all(&spec(DataFormat::Csv, &[&example("linear.csv")]), None).await.unwrap();
    let weights = [2.0, -3.0, 0.5, 1.25, -0.75, 4.0];
    for (x, y) in records.features.chunks(6).zip(&records.labels) {
        let line: f32 = x.iter().zip(weights).map(|(x, weight)| x * weight).sum();
        assert!((line - y).abs() < 0.06, "{line} {y}");
    }
}

#[tokio::test]
async fn rows_of_any_row_group_and_page_are_found() {
    let directory = Directory::new();
    let x: Vec<f64> = (0..1000).map(f64::from).collect();
    directory.write_bytes("a.parquet", &parquet_of(&x, &x, 300));
    for records_per_task in [1, 7, 64, 299, 300, 301, 5000] {
        let mut spec = spec(DataFormat::Parquet, &["a.parquet"]);
        spec.records_per_task = Some(records_per_task);
        let (_, records) = all(&spec, Some(directory.path())).await.unwrap();
        assert!(records.labels.iter().map(|v| f64::from(*v)).eq(x.iter().copied()));
    }
}

#[tokio::test]
async fn rows_within_a_large_row_group_are_found_page_by_page() {
    let directory = Directory::new();
    let values: Vec<f64> = (0..700_000).map(f64::from).collect();
    for index in [PageIndex::Present, PageIndex::Absent] {
        directory.write_bytes("a.parquet", &large_parquet(&values, index));
        let mut spec = spec(DataFormat::Parquet, &["a.parquet"]);
        spec.records_per_task = Some(7000);
        let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
        let options = ReadOptions::new(&spec, &manifest);
        for task in [0, 1, 50, 99] {
            let records =
                read(&manifest, &options, manifest.chunks_of(TaskId(task))).await.unwrap();
            let first = task * 7000;
            let expected: Vec<f32> = (first..first + 7000).map(|value| value as f32).collect();
            assert_eq!(records.features, expected);
            assert_eq!(records.labels, expected);
        }
    }
}

#[tokio::test]
async fn every_numeric_type_is_read() {
    let halves = [0.25, -8.0].map(|value| f16::from_f32(value).to_le_bytes().to_vec().into());
    let columns = [
        ("required boolean x", Values::Bool(vec![true, false]), [1.0, 0.0]),
        ("required int32 x (INT_8)", Values::Int32(vec![-128, 127]), [-128.0, 127.0]),
        ("required int32 x (INTEGER(8,false))", Values::Int32(vec![255, 0]), [255.0, 0.0]),
        ("required int32 x (INTEGER(16,true))", Values::Int32(vec![-300, 300]), [-300.0, 300.0]),
        ("required int32 x (UINT_16)", Values::Int32(vec![65_535, 1]), [65_535.0, 1.0]),
        ("required int32 x", Values::Int32(vec![-(1 << 20), 5]), [-1_048_576.0, 5.0]),
        ("required int32 x (UINT_32)", Values::Int32(vec![-1, 2]), [4_294_967_295.0, 2.0]),
        ("required int64 x", Values::Int64(vec![-(1 << 40), 3]), [-(2_f32.powi(40)), 3.0]),
        ("required int64 x (INTEGER(64,false))", Values::Int64(vec![-1, 4]), [2_f32.powi(64), 4.0]),
        (
            "required fixed_len_byte_array (2) x (FLOAT16)",
            Values::Fixed(halves.to_vec()),
            [0.25, -8.0],
        ),
        ("required float x", Values::Float(vec![0.1, -0.5]), [0.1, -0.5]),
        ("optional double x", Values::Double(vec![0.1, 2.0]), [0.1, 2.0]),
    ];
    for (column, values, expected) in columns {
        expect_numbers(column, values, expected).await;
    }
}

/// S004-82: the records read do not depend on how they are stored.
#[tokio::test]
async fn a_decimal_is_the_number_that_its_text_is() {
    let long = 12_345_678_901_234_567_890_123;
    let fixed = |values: [i128; 2], len| {
        Values::Fixed(values.map(|value| big_endian(value, len).into()).to_vec())
    };
    let mut power_of_two = vec![0; 26];
    power_of_two[0] = 1;
    let columns = [
        ("required int32 x (DECIMAL(9,1))", Values::Int32(vec![1, -25]), [0.1, -2.5]),
        ("required int64 x (DECIMAL(10,2))", Values::Int64(vec![150, -25]), [1.5, -0.25]),
        // Not representable as a float without rounding.
        (
            "required fixed_len_byte_array (16) x (DECIMAL(38,22))",
            fixed([long, 1], 16),
            [1.234_567_9, 1e-22],
        ),
        ("required fixed_len_byte_array (26) x (DECIMAL(60,1))", fixed([5, -7], 26), [0.5, -0.7]),
        (
            "required fixed_len_byte_array (26) x (DECIMAL(62,30))",
            Values::Fixed(vec![power_of_two.into(), big_endian(0, 26).into()]),
            [1.606_938e30, 0.0],
        ),
        (
            "optional binary x (DECIMAL(76,2))",
            Values::Bytes(vec![vec![0x80].into(), big_endian(-1, 32).into()]),
            [-1.28, -0.01],
        ),
    ];
    for (column, values, expected) in columns {
        expect_numbers(column, values, expected).await;
    }
}

/// The number in `len` bytes.
fn big_endian(value: i128, len: usize) -> Vec<u8> {
    let sign = if value < 0 { 0xff } else { 0 };
    let bytes = value.to_be_bytes();
    std::iter::repeat_n(sign, len - bytes.len()).chain(bytes).collect()
}

async fn expect_numbers(column: &str, values: Values, expected: [f32; 2]) {
    let directory = Directory::new();
    let columns = [values, Values::Double(vec![1.0, 2.0])];
    directory
        .write_bytes("a.parquet", &parquet(&format!("{column}; required double y;"), &columns, 10));
    let spec = spec(DataFormat::Parquet, &["a.parquet"]);
    let (_, records) = all(&spec, Some(directory.path())).await.unwrap();
    assert_eq!(records.features, expected, "{column}");
    assert_eq!(records.labels, [1.0, 2.0], "{column}");
}

#[tokio::test]
async fn a_column_without_numbers_is_refused_with_its_content() {
    let columns = [
        ("required int32 x (DATE)", Values::Int32(vec![1]), "dates"),
        ("required int32 x (TIME_MILLIS)", Values::Int32(vec![1]), "times of day"),
        ("required int64 x (TIME(NANOS,true))", Values::Int64(vec![1]), "times of day"),
        ("required int64 x (TIMESTAMP_MICROS)", Values::Int64(vec![1]), "timestamps"),
        ("required int64 x (TIMESTAMP(NANOS,true))", Values::Int64(vec![1]), "timestamps"),
        ("required int96 x", Values::Int96(vec![vec![1, 2, 3].into()]), "timestamps"),
        ("required binary x (STRING)", Values::Bytes(vec!["1".into()]), "text"),
        ("required binary x", Values::Bytes(vec!["1".into()]), "bytes"),
        ("repeated double x", Values::Double(vec![1.0]), "lists"),
        ("optional group x { required double x; }", Values::Double(vec![1.0]), "nested columns"),
    ];
    for (column, values, content) in columns {
        let directory = Directory::new();
        let columns = [values, Values::Double(vec![1.0])];
        let schema = format!("{column} ; required double y;").replace("} ;", "}");
        directory.write_bytes("a.parquet", &parquet(&schema, &columns, 10));
        let spec = spec(DataFormat::Parquet, &["a.parquet"]);
        let error = all(&spec, Some(directory.path())).await.unwrap_err();
        let DataError::NotNumeric { found, .. } = &error else { panic!("{column}: {error}") };
        assert_eq!(found, content, "{column}");
    }
}

#[tokio::test]
async fn columns_beside_nested_ones_are_read() {
    let schema = "optional group a { required double x; required double y; } required double x;
        repeated double z; required double y;";
    let columns = [1.0, 2.0, 3.0, 4.0, 5.0].map(|value| Values::Double(vec![value]));
    let directory = Directory::new();
    directory.write_bytes("a.parquet", &parquet(schema, &columns, 10));
    let spec = spec(DataFormat::Parquet, &["a.parquet"]);
    let (_, records) = all(&spec, Some(directory.path())).await.unwrap();
    assert_eq!((records.features, records.labels), (vec![3.0], vec![5.0]));
}

/// D9: an unreadable value is an error of the task; records are never skipped silently.
#[tokio::test]
async fn a_bad_value_is_named_with_its_record() {
    let directory = Directory::new();
    for (name, bad) in [("null", None), ("nan", Some(f64::NAN)), ("big", Some(1e300))] {
        let x = Values::Nullable(vec![Some(1.0), Some(2.0), Some(3.0), bad, Some(5.0)]);
        let file = format!("{name}.parquet");
        let columns = [x, Values::Double(vec![1.0; 5])];
        let schema = "optional double x; required double y;";
        directory.write_bytes(&file, &parquet(schema, &columns, 2));
        let spec = spec(DataFormat::Parquet, &[&file]);
        expect_bad_record(&directory, &spec).await;
    }
    for bad in ["", "nan", "1e300", "many"] {
        directory.write("a.csv", &format!("x,y\n1,1\n2,1\n\n3,1\n{bad},1\n5,1\n"));
        let mut spec = spec(DataFormat::Csv, &["a.csv"]);
        expect_bad_record(&directory, &spec).await;
        spec.records_per_task = Some(2);
        expect_bad_record(&directory, &spec).await;
    }
}

async fn expect_bad_record(directory: &Directory, spec: &DatasetSpec) {
    let error = all(spec, Some(directory.path())).await.unwrap_err();
    let DataError::BadRecord { record: 3, column, file, .. } = &error else { panic!("{error}") };
    assert!(column == "x" && file.contains(&spec.source[0]), "{error}");
    assert_eq!(error.kind(), ErrorKind::Permanent);
}

/// D9: a file that cannot be opened fails the task.
#[tokio::test]
async fn a_changed_or_deleted_file_is_an_error() {
    let directory = Directory::new();
    let records = "x,y\n1,1\n2,2\n";
    directory.write("a.csv", records);
    let spec = spec(DataFormat::Csv, &["a.csv"]);
    let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
    let options = ReadOptions::new(&spec, &manifest);
    let chunks = manifest.chunks_of(TaskId(0));
    read(&manifest, &options, chunks).await.unwrap();

    directory.write("a.csv", "x,y\n1,1\n2,2\n3,3\n");
    let error = read(&manifest, &options, chunks).await.unwrap_err();
    assert!(
        matches!(&error, DataError::Changed { how, .. } if how == "16 bytes instead of 12"),
        "{error}"
    );
    // Of a file of a stream, the time counts as well.
    directory.write("a.csv", records);
    let mut followed = manifest.clone();
    followed.files[0].modified_unix_s = Some(1_700_000_000);
    let error = read(&followed, &options, chunks).await.unwrap_err();
    assert!(error.to_string().contains("instead of 1700000000"), "{error}");
    directory.write("a.csv", &records.replace("1\n2", "111"));
    let error = read(&manifest, &options, chunks).await.unwrap_err();
    assert!(error.to_string().contains("has it changed?"), "{error}");
    std::fs::remove_file(format!("{}/a.csv", directory.path())).unwrap();
    let error = read(&manifest, &options, chunks).await.unwrap_err();
    assert!(matches!(error, DataError::Store(StoreError::NotFound { .. })), "{error}");
}

#[tokio::test]
async fn chunks_outside_of_their_file_are_an_error() {
    let directory = Directory::new();
    directory.write_bytes("a.parquet", &parquet_of(&[1.0; 20], &[1.0; 20], 10));
    directory.write("a.csv", "x,y\n1,1\n2,2\n");
    for (format, name) in [(DataFormat::Parquet, "a.parquet"), (DataFormat::Csv, "a.csv")] {
        let spec = spec(format, &[name]);
        let manifest = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap();
        let options = ReadOptions::new(&spec, &manifest);
        let good = Chunk { file: 0, start: 4, end: 8, first_record: 0, records: 4 };
        let bad = [
            Chunk { file: 1, ..good },
            Chunk { start: 9, ..good },
            Chunk { end: u64::MAX, ..good },
            Chunk { start: u64::MAX - 4, end: u64::MAX, ..good },
            Chunk { end: 12, records: 8, ..good },
            Chunk { records: u32::MAX, ..good },
            Chunk { start: 0, end: 0, ..good },
        ];
        for chunk in bad {
            assert!(read(&manifest, &options, &[chunk]).await.is_err(), "{name} {chunk:?}");
        }
    }
}

#[tokio::test]
async fn a_truncated_parquet_file_is_never_read_as_complete() {
    let directory = Directory::new();
    let whole = parquet_of(&[1.0; 200], &[2.0; 200], 50);
    let spec = spec(DataFormat::Parquet, &["a.parquet"]);
    for length in (0..whole.len()).step_by(97) {
        directory.write_bytes("a.parquet", &whole[..length]);
        let error = plan(&spec, &Default::default(), Some(directory.path())).await.unwrap_err();
        assert!(matches!(error, DataError::BadFile { .. }), "{length}: {error}");
        assert_eq!(error.kind(), ErrorKind::Permanent);
    }
}

/// After any bit flip, the result is the records, other records, or an error; never a panic, and never
/// another number of records.
#[tokio::test]
async fn a_corrupt_parquet_file_does_not_panic() {
    let directory = Directory::new();
    let x: Vec<f64> = (0..200).map(f64::from).collect();
    let whole = parquet_of(&x, &x, 50);
    let spec = spec(DataFormat::Parquet, &["a.parquet"]);
    let mut random = 1_u64;
    for position in (0..whole.len()).step_by(3) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        let mut corrupt = whole.clone();
        corrupt[position] ^= 1 << (random >> 61);
        directory.write_bytes("a.parquet", &corrupt);
        if let Ok((manifest, records)) = all(&spec, Some(directory.path())).await {
            assert_eq!(records.len() as u64, manifest.training_records());
        }
    }
}

#[tokio::test]
async fn tabs_separate_too() {
    let directory = Directory::new();
    directory.write("a.tsv", "x\ty\n1\t2\n3\t4\n");
    let spec = spec(DataFormat::Tsv, &["a.tsv"]);
    let (_, records) = all(&spec, Some(directory.path())).await.unwrap();
    assert_eq!((records.features, records.labels), (vec![1.0, 3.0], vec![2.0, 4.0]));
}

/// F54: no memory is allocated for a page index that claims more pages than it has bytes.
#[tokio::test]
async fn a_page_index_with_a_wrong_length_is_rejected() {
    let directory = Directory::new();
    let mut bytes = parquet_of(&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0], 10);
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&Bytes::from(bytes.clone()));
    let metadata = metadata.unwrap();
    let start = metadata.row_group(0).column(0).offset_index_offset().unwrap() as usize;
    // After the field header: a list of structs, of length 2³¹ − 1.
    bytes[start + 1..start + 7].copy_from_slice(&[0xfc, 0xff, 0xff, 0xff, 0xff, 0x07]);
    directory.write_bytes("a.parquet", &bytes);
    let error =
        all(&spec(DataFormat::Parquet, &["a.parquet"]), Some(directory.path())).await.unwrap_err();
    assert!(error.to_string().contains("claims 2147483647 pages"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Permanent);
}

/// A weight is a column of its own, which no wildcard matches, and as it is in the file.
#[tokio::test]
async fn a_column_of_weights_is_no_feature() {
    let directory = Directory::new();
    let line = |weight: &str| format!("{{\"x0\": 1, \"xw\": {weight}, \"y\": 2}}\n");
    for (format, name) in [(DataFormat::Csv, "a.csv"), (DataFormat::Jsonl, "a.jsonl")] {
        let text = |weight: &str| match format {
            DataFormat::Csv => format!("x0,xw,y\n3,0,4\n1,{weight},2\n"),
            _ => line("0") + &line(weight),
        };
        let weighted = DatasetSpec {
            weight: Some("xw".to_owned()),
            missing: Some(7.0),
            feature_scale: 2.0,
            ..spec(format, &[name])
        };
        directory.write(name, &text("0.5"));
        let (manifest, found) = all(&weighted, Some(directory.path())).await.unwrap();
        assert_eq!((&manifest.features[..], found.width), (&["x0".to_owned()][..], 1));
        assert_eq!(found.weights, [0.0, 0.5]);
        assert_eq!(found.select(&[1]).weights, [0.5]);
        directory.write(name, &text("-1"));
        let refused = all(&weighted, Some(directory.path())).await.unwrap_err().to_string();
        assert!(
            refused.contains("xw") && refused.contains("the weight -1 is negative"),
            "{refused}"
        );
        let unknown = DatasetSpec { weight: Some("w".to_owned()), ..weighted };
        let refused = all(&unknown, Some(directory.path())).await.unwrap_err().to_string();
        assert!(refused.contains("has no column `w`"), "{refused}");
    }
}

/// A class is named by its text or by the same number, in every format.
#[tokio::test]
async fn labels_name_classes() {
    let directory = Directory::new();
    directory.write("a.csv", "x,y\n1,dog\n2, cat \n");
    directory.write("b.jsonl", "{\"x\":1,\"y\":\"dog\"}\n{\"x\":2,\"y\":\"cat\"}\n");
    directory.write("c.csv", "x,y\n1,1\n2,-1.0\n");
    directory.write("d.jsonl", "{\"x\":1,\"y\":1}\n{\"x\":2,\"y\":-1.0}\n");
    directory.write("e.svm", "+1 1:1\n-1 1:2\n");
    directory.write_bytes("f.parquet", &parquet_of(&[1.0, 2.0], &[1.0, -1.0], 10));
    let (words, signs) = (["cat", "dog"], ["-1", "1"]);
    let of = |format, name: &str, classes: [&str; 2], directory: &Directory| {
        let label = if format == DataFormat::Libsvm { "label" } else { "y" };
        let features = if format == DataFormat::Libsvm { "*" } else { "x" };
        let spec = DatasetSpec {
            features: vec![features.to_owned()],
            label: label.to_owned(),
            classes: classes.map(str::to_owned).to_vec(),
            ..spec(format, &[name])
        };
        let path = directory.path().to_owned();
        async move { all(&spec, Some(&path)).await.map(|(_, records)| records.labels) }
    };
    for (format, name, classes) in [
        (DataFormat::Csv, "a.csv", words),
        (DataFormat::Jsonl, "b.jsonl", words),
        (DataFormat::Csv, "c.csv", signs),
        (DataFormat::Jsonl, "d.jsonl", signs),
        (DataFormat::Libsvm, "e.svm", signs),
        (DataFormat::Parquet, "f.parquet", signs),
    ] {
        assert_eq!(of(format, name, classes, &directory).await.unwrap(), [1.0, 0.0], "{name}");
        let refused = of(format, name, ["cow", "7"], &directory).await.unwrap_err().to_string();
        assert!(refused.contains("is none of `dataset.classes`"), "{name}: {refused}");
    }
}

/// A label of text in a Parquet file, as `steadfast convert` and others write it.
#[tokio::test]
async fn text_of_a_parquet_file_names_classes() {
    let directory = Directory::new();
    let schema = "required double x; required binary y (UTF8);";
    let text = |it: &str| parquet::data_type::ByteArray::from(it);
    let values =
        [Values::Double(vec![1.0, 2.0, 3.0]), Values::Bytes(vec![text("b"), text("a"), text("b")])];
    directory.write_bytes("a.parquet", &parquet(schema, &values, 2));
    let named = |classes: [&str; 2]| DatasetSpec {
        features: vec!["x".to_owned()],
        classes: classes.map(str::to_owned).to_vec(),
        ..spec(DataFormat::Parquet, &["a.parquet"])
    };
    let (_, found) = all(&named(["a", "b"]), Some(directory.path())).await.unwrap();
    assert_eq!((found.features, found.labels), (vec![1.0, 2.0, 3.0], vec![1.0, 0.0, 1.0]));
    let refused = all(&named(["a", "c"]), Some(directory.path())).await.unwrap_err().to_string();
    assert!(refused.contains("`b` is none of `dataset.classes`"), "{refused}");
}
