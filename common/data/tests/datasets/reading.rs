//! Reading: from chunks to numbers.

use std::sync::Arc;

use crate::files::{Folder, PageIndex, example, large_parquet, parquet, parquet_of, spec};
use arrow_array::types::{Decimal256Type, Float16Type};
use arrow_array::{
    ArrayRef, ArrowPrimitiveType, BooleanArray, Decimal128Array, Decimal256Array, Float16Array,
    Float32Array, Float64Array, Int64Array, UInt8Array,
};
use bytes::Bytes;
use parquet::file::metadata::ParquetMetaDataReader;
use steadfast_common::dataset::{Chunk, Manifest, ReadOptions, Records};
use steadfast_common::ids::TaskId;
use steadfast_common::spec::{DataFormat, DatasetSpec};
use steadfast_data::{DataError, ErrorKind, plan, read};
use steadfast_store::StoreError;

/// All records of a dataset, task by task.
async fn all(spec: &DatasetSpec, base: Option<&str>) -> Result<(Manifest, Records), DataError> {
    let manifest = plan(spec, 0.0, base).await?;
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
async fn the_generated_line_is_one() {
    let (_, records) = all(&spec(DataFormat::Csv, &[&example("linear.csv")]), None).await.unwrap();
    let weights = [2.0, -3.0, 0.5, 1.25, -0.75, 4.0];
    for (x, y) in records.features.chunks(6).zip(&records.labels) {
        let line: f32 = x.iter().zip(weights).map(|(x, weight)| x * weight).sum();
        assert!((line - y).abs() < 0.06, "{line} {y}");
    }
}

#[tokio::test]
async fn rows_of_any_row_group_and_page_are_found() {
    let folder = Folder::new();
    let x: Vec<f64> = (0..1000).map(f64::from).collect();
    folder.write_bytes("a.parquet", &parquet_of(&x, &x, 300));
    for records_per_task in [1, 7, 64, 299, 300, 301, 5000] {
        let mut spec = spec(DataFormat::Parquet, &["a.parquet"]);
        spec.records_per_task = Some(records_per_task);
        let (_, records) = all(&spec, Some(folder.path())).await.unwrap();
        assert!(records.labels.iter().map(|v| f64::from(*v)).eq(x.iter().copied()));
    }
}

#[tokio::test]
async fn rows_within_a_large_row_group_are_found_page_by_page() {
    let folder = Folder::new();
    let values: Vec<f64> = (0..700_000).map(f64::from).collect();
    for index in [PageIndex::Present, PageIndex::Absent] {
        folder.write_bytes("a.parquet", &large_parquet(&values, index));
        let mut spec = spec(DataFormat::Parquet, &["a.parquet"]);
        spec.records_per_task = Some(7000);
        let manifest = plan(&spec, 0.0, Some(folder.path())).await.unwrap();
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
async fn every_kind_of_number_is_read() {
    let decimals = |values, precision, scale| -> ArrayRef {
        let array = Decimal128Array::from(values);
        Arc::new(array.with_precision_and_scale(precision, scale).unwrap())
    };
    type I256 = <Decimal256Type as ArrowPrimitiveType>::Native;
    let wide = Decimal256Array::from(vec![I256::from_i128(5), I256::from_i128(-7)]);
    type F16 = <Float16Type as ArrowPrimitiveType>::Native;
    let halves = Float16Array::from(vec![F16::from_f32(0.25), F16::from_f32(-8.0)]);
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("x_bool", Arc::new(BooleanArray::from(vec![true, false]))),
        ("x_u8", Arc::new(UInt8Array::from(vec![255, 0]))),
        ("x_i64", Arc::new(Int64Array::from(vec![-(1 << 40), 3]))),
        ("x_f32", Arc::new(Float32Array::from(vec![0.1, -0.5]))),
        ("x_f16", Arc::new(halves)),
        ("x_decimal", decimals(vec![150, -25], 10, 2)),
        // Not representable as a float without rounding.
        ("x_long", decimals(vec![12_345_678_901_234_567_890_123, 1], 38, 22)),
        ("x_wide", Arc::new(wide.with_precision_and_scale(60, 1).unwrap())),
        ("y", Arc::new(Float64Array::from(vec![0.1, 2.0]))),
    ];
    let folder = Folder::new();
    folder.write_bytes("a.parquet", &parquet(columns, 10));
    let spec = spec(DataFormat::Parquet, &["a.parquet"]);
    let (_, records) = all(&spec, Some(folder.path())).await.unwrap();
    let big = -(2_f32.powi(40));
    let first = [1.0, 255.0, big, 0.1, 0.25, 1.5, 1.234_567_9, 0.5];
    let second = [0.0, 0.0, 3.0, -0.5, -8.0, -0.25, 1e-22, -0.7];
    assert_eq!(records.features, [first, second].concat());
    assert_eq!(records.labels, [0.1, 2.0]);
}

/// D9: an unreadable value is an error of the task; records are never skipped silently.
#[tokio::test]
async fn a_bad_value_is_named_with_its_record() {
    let folder = Folder::new();
    let column = |values: Vec<Option<f64>>| Arc::new(Float64Array::from(values)) as ArrayRef;
    let good = column(vec![Some(1.0); 5]);
    for (name, bad) in [("null", None), ("nan", Some(f64::NAN)), ("big", Some(1e300))] {
        let x = column(vec![Some(1.0), Some(2.0), Some(3.0), bad, Some(5.0)]);
        let file = format!("{name}.parquet");
        folder.write_bytes(&file, &parquet(vec![("x", x), ("y", Arc::clone(&good))], 2));
        let spec = spec(DataFormat::Parquet, &[&file]);
        expect_bad_record(&folder, &spec).await;
    }
    for bad in ["", "nan", "1e300", "many"] {
        folder.write("a.csv", &format!("x,y\n1,1\n2,1\n\n3,1\n{bad},1\n5,1\n"));
        let mut spec = spec(DataFormat::Csv, &["a.csv"]);
        expect_bad_record(&folder, &spec).await;
        spec.records_per_task = Some(2);
        expect_bad_record(&folder, &spec).await;
    }
}

async fn expect_bad_record(folder: &Folder, spec: &DatasetSpec) {
    let error = all(spec, Some(folder.path())).await.unwrap_err();
    let DataError::BadRecord { record: 3, column, file, .. } = &error else { panic!("{error}") };
    assert!(column == "x" && file.contains(&spec.source[0]), "{error}");
    assert_eq!(error.kind(), ErrorKind::Permanent);
}

/// D9: a file that cannot be opened fails the task.
#[tokio::test]
async fn a_file_that_changed_or_went_away_is_an_error() {
    let folder = Folder::new();
    let records = "x,y\n1,1\n2,2\n";
    folder.write("a.csv", records);
    let spec = spec(DataFormat::Csv, &["a.csv"]);
    let manifest = plan(&spec, 0.0, Some(folder.path())).await.unwrap();
    let options = ReadOptions::new(&spec, &manifest);
    let chunks = manifest.chunks_of(TaskId(0));
    read(&manifest, &options, chunks).await.unwrap();

    folder.write("a.csv", "x,y\n1,1\n2,2\n3,3\n");
    let error = read(&manifest, &options, chunks).await.unwrap_err();
    assert!(
        matches!(error, DataError::Changed { planned_bytes: 12, found_bytes: 16, .. }),
        "{error}"
    );
    folder.write("a.csv", &records.replace("1\n2", "111"));
    let error = read(&manifest, &options, chunks).await.unwrap_err();
    assert!(error.to_string().contains("has it changed?"), "{error}");
    std::fs::remove_file(format!("{}/a.csv", folder.path())).unwrap();
    let error = read(&manifest, &options, chunks).await.unwrap_err();
    assert!(matches!(error, DataError::Store(StoreError::NotFound { .. })), "{error}");
}

#[tokio::test]
async fn a_manifest_that_does_not_fit_is_an_error() {
    let folder = Folder::new();
    folder.write_bytes("a.parquet", &parquet_of(&[1.0; 20], &[1.0; 20], 10));
    folder.write("a.csv", "x,y\n1,1\n2,2\n");
    for (format, name) in [(DataFormat::Parquet, "a.parquet"), (DataFormat::Csv, "a.csv")] {
        let spec = spec(format, &[name]);
        let manifest = plan(&spec, 0.0, Some(folder.path())).await.unwrap();
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
async fn no_cut_off_parquet_file_is_taken_for_a_whole_one() {
    let folder = Folder::new();
    let whole = parquet_of(&[1.0; 200], &[2.0; 200], 50);
    let spec = spec(DataFormat::Parquet, &["a.parquet"]);
    for length in (0..whole.len()).step_by(97) {
        folder.write_bytes("a.parquet", &whole[..length]);
        let error = plan(&spec, 0.0, Some(folder.path())).await.unwrap_err();
        assert!(matches!(error, DataError::BadFile { .. }), "{length}: {error}");
        assert_eq!(error.kind(), ErrorKind::Permanent);
    }
}

/// After any bit flip, the result is the records, other records, or an error; never a panic, and never
/// another number of records.
#[tokio::test]
async fn a_corrupt_parquet_file_stops_no_process() {
    let folder = Folder::new();
    let x: Vec<f64> = (0..200).map(f64::from).collect();
    let whole = parquet_of(&x, &x, 50);
    let spec = spec(DataFormat::Parquet, &["a.parquet"]);
    let mut random = 1_u64;
    for position in (0..whole.len()).step_by(3) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        let mut corrupt = whole.clone();
        corrupt[position] ^= 1 << (random >> 61);
        folder.write_bytes("a.parquet", &corrupt);
        if let Ok((manifest, records)) = all(&spec, Some(folder.path())).await {
            assert_eq!(records.len() as u64, manifest.training_records());
        }
    }
}

#[tokio::test]
async fn tabs_separate_too() {
    let folder = Folder::new();
    folder.write("a.tsv", "x\ty\n1\t2\n3\t4\n");
    let spec = spec(DataFormat::Tsv, &["a.tsv"]);
    let (_, records) = all(&spec, Some(folder.path())).await.unwrap();
    assert_eq!((records.features, records.labels), (vec![1.0, 3.0], vec![2.0, 4.0]));
}

/// F54: no memory is allocated for a page index that claims more pages than it has bytes.
#[tokio::test]
async fn a_list_of_pages_that_lies_about_its_length_is_refused() {
    let folder = Folder::new();
    let mut bytes = parquet_of(&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0], 10);
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&Bytes::from(bytes.clone()));
    let metadata = metadata.unwrap();
    let start = metadata.row_group(0).column(0).offset_index_offset().unwrap() as usize;
    // After the field header: a list of structs, of length 2³¹ − 1.
    bytes[start + 1..start + 7].copy_from_slice(&[0xfc, 0xff, 0xff, 0xff, 0xff, 0x07]);
    folder.write_bytes("a.parquet", &bytes);
    let error =
        all(&spec(DataFormat::Parquet, &["a.parquet"]), Some(folder.path())).await.unwrap_err();
    assert!(error.to_string().contains("claims 2147483647 pages"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Permanent);
}
