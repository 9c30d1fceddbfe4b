//! Small datasets for tests.

use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, Float64Array, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use steadfast_common::spec::{DataFormat, DatasetSpec, Header};

/// A temporary folder.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }

    pub fn write(&self, name: &str, text: &str) {
        self.write_bytes(name, text.as_bytes());
    }

    pub fn write_bytes(&self, name: &str, bytes: &[u8]) {
        let path = self.0.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

/// Features `x*`, label `y`.
pub fn spec(format: DataFormat, source: &[&str]) -> DatasetSpec {
    DatasetSpec {
        source: source.iter().map(|source| (*source).to_owned()).collect(),
        format,
        features: vec!["x*".to_owned()],
        label: "y".to_owned(),
        feature_scale: 1.0,
        records_per_task: None,
        header: Header::Present,
    }
}

pub fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/data").join(name);
    path.to_str().unwrap().to_owned()
}

pub fn parquet(columns: Vec<(&str, ArrayRef)>, rows_per_group: usize) -> Vec<u8> {
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(rows_per_group))
        .set_data_page_row_count_limit(64)
        .set_write_batch_size(64)
        .build();
    written(&batch, properties)
}

fn written(batch: &RecordBatch, properties: WriterProperties) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), Some(properties)).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
    bytes
}

/// One row group of many pages, too large to be fetched whole, with or without a page index.
pub fn large_parquet(values: &[f64], index: PageIndex) -> Vec<u8> {
    let column = Arc::new(Float64Array::from(values.to_vec())) as ArrayRef;
    let batch = RecordBatch::try_from_iter([("x", Arc::clone(&column)), ("y", column)]).unwrap();
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(values.len()))
        .set_offset_index_disabled(index == PageIndex::Absent)
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .build();
    written(&batch, properties)
}

#[derive(Clone, Copy, PartialEq)]
pub enum PageIndex {
    Present,
    Absent,
}

/// Columns `x` and `y`.
pub fn parquet_of(x: &[f64], y: &[f64], rows_per_group: usize) -> Vec<u8> {
    let column = |values: &[f64]| Arc::new(Float64Array::from(values.to_vec())) as ArrayRef;
    parquet(vec![("x", column(x)), ("y", column(y))], rows_per_group)
}

/// Columns `x` and `y` of the same values, in one row group.
pub fn compressed_parquet(values: &[f64], codec: Compression) -> Vec<u8> {
    let column = Arc::new(Float64Array::from(values.to_vec())) as ArrayRef;
    let batch = RecordBatch::try_from_iter([("x", Arc::clone(&column)), ("y", column)]).unwrap();
    written(&batch, WriterProperties::builder().set_compression(codec).build())
}

/// Columns `x0`, `x1`, … and `y`.
pub fn parquet_of_columns(columns: usize, rows: usize) -> Vec<u8> {
    let column = Arc::new(Float64Array::from(vec![0.5; rows])) as ArrayRef;
    let names: Vec<String> = (0..columns).map(|i| format!("x{i}")).collect();
    let named = names.iter().map(String::as_str).chain(["y"]);
    let batch = RecordBatch::try_from_iter(named.map(|name| (name, Arc::clone(&column)))).unwrap();
    written(&batch, WriterProperties::default())
}

pub fn parquet_with_text() -> Vec<u8> {
    let text = Arc::new(StringArray::from(vec!["a", "b"]));
    let numbers = Arc::new(Float64Array::from(vec![1.0, 2.0]));
    parquet(vec![("x", text), ("y", numbers)], 10)
}
