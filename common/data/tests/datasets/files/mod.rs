//! Small datasets for tests.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use parquet::basic::{Compression, Encoding};
use parquet::data_type::{
    BoolType, ByteArray, ByteArrayType, DataType, DoubleType, FixedLenByteArray,
    FixedLenByteArrayType, FloatType, Int32Type, Int64Type, Int96, Int96Type,
};
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterVersion};
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::parser::parse_message_type;
use steadfast_common::job::spec::{DataFormat, DatasetSpec, Header};

/// A temporary directory.
pub struct Directory(tempfile::TempDir);

impl Directory {
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
        classes: Vec::new(),
        weight: None,
        categories: vec![],
        crosses: Default::default(),
        columns: vec![],
        types: Default::default(),
        missing: None,
        transform: Default::default(),
        feature_scale: 1.0,
        records_per_task: None,
        header: Header::Present,
        follow: false,
    }
}

pub fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/data").join(name);
    path.to_str().unwrap().to_owned()
}

/// The values of a column, one for each row.
pub enum Values {
    Bool(Vec<bool>),
    Int32(Vec<i32>),
    Int64(Vec<i64>),
    Int96(Vec<Int96>),
    Float(Vec<f32>),
    Double(Vec<f64>),
    Nullable(Vec<Option<f64>>),
    Bytes(Vec<ByteArray>),
    Fixed(Vec<FixedLenByteArray>),
}

impl Values {
    fn len(&self) -> usize {
        match self {
            Self::Bool(values) => values.len(),
            Self::Int32(values) => values.len(),
            Self::Int64(values) => values.len(),
            Self::Int96(values) => values.len(),
            Self::Float(values) => values.len(),
            Self::Double(values) => values.len(),
            Self::Nullable(values) => values.len(),
            Self::Bytes(values) => values.len(),
            Self::Fixed(values) => values.len(),
        }
    }

    fn write(&self, column: &mut SerializedColumnWriter, rows: Range<usize>) {
        match self {
            Self::Bool(values) => present::<BoolType>(column, &values[rows]),
            Self::Int32(values) => present::<Int32Type>(column, &values[rows]),
            Self::Int64(values) => present::<Int64Type>(column, &values[rows]),
            Self::Int96(values) => present::<Int96Type>(column, &values[rows]),
            Self::Float(values) => present::<FloatType>(column, &values[rows]),
            Self::Double(values) => present::<DoubleType>(column, &values[rows]),
            Self::Nullable(values) => {
                let levels: Vec<i16> =
                    values[rows.clone()].iter().map(|value| value.is_some().into()).collect();
                let present: Vec<f64> = values[rows].iter().copied().flatten().collect();
                column.typed::<DoubleType>().write_batch(&present, Some(&levels), None).unwrap();
            }
            Self::Bytes(values) => present::<ByteArrayType>(column, &values[rows]),
            Self::Fixed(values) => present::<FixedLenByteArrayType>(column, &values[rows]),
        }
    }
}

/// Writes values none of which is null; each begins a list if the column is repeated.
fn present<T: DataType>(column: &mut SerializedColumnWriter, values: &[T::T]) {
    let column = column.typed::<T>();
    let levels = vec![column.get_descriptor().max_def_level(); values.len()];
    let starts = vec![0; values.len()];
    column.write_batch(values, Some(&levels), Some(&starts)).unwrap();
}

/// A file with small pages. The schema declares the columns, and each of its leaves has `Values`.
pub fn parquet(schema: &str, columns: &[Values], rows_per_group: usize) -> Vec<u8> {
    paged(schema, columns, rows_per_group, WriterVersion::PARQUET_1_0)
}

fn paged(
    schema: &str,
    columns: &[Values],
    rows_per_group: usize,
    version: WriterVersion,
) -> Vec<u8> {
    let properties = WriterProperties::builder()
        .set_writer_version(version)
        .set_data_page_row_count_limit(64)
        .set_write_batch_size(64)
        .build();
    written(schema, columns, rows_per_group, properties)
}

fn written(
    schema: &str,
    columns: &[Values],
    rows_per_group: usize,
    properties: WriterProperties,
) -> Vec<u8> {
    let schema = Arc::new(parse_message_type(&format!("message file {{ {schema} }}")).unwrap());
    let mut bytes = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).unwrap();
    let rows = columns[0].len();
    for first in (0..rows).step_by(rows_per_group) {
        let mut group = writer.next_row_group().unwrap();
        for values in columns {
            let mut column = group.next_column().unwrap().unwrap();
            values.write(&mut column, first..rows.min(first + rows_per_group));
            column.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
    bytes
}

const X_AND_Y: &str = "required double x; required double y;";

/// One row group of many pages, too large to be fetched whole, with or without a page index.
pub fn large_parquet(values: &[f64], index: PageIndex) -> Vec<u8> {
    let properties = WriterProperties::builder()
        .set_offset_index_disabled(index == PageIndex::Absent)
        .set_statistics_enabled(EnabledStatistics::Chunk)
        .build();
    written(X_AND_Y, &doubles(&[values; 2]), values.len(), properties)
}

#[derive(Clone, Copy, PartialEq)]
pub enum PageIndex {
    Present,
    Absent,
}

/// Columns `x` and `y`.
pub fn parquet_of(x: &[f64], y: &[f64], rows_per_group: usize) -> Vec<u8> {
    parquet(X_AND_Y, &doubles(&[x, y]), rows_per_group)
}

/// The same with the other version of data pages.
pub fn parquet_of_new_pages(x: &[f64], y: &[f64], rows_per_group: usize) -> Vec<u8> {
    paged(X_AND_Y, &doubles(&[x, y]), rows_per_group, WriterVersion::PARQUET_2_0)
}

/// Integers that are stored as differences, in one row group.
pub fn parquet_of_differences(schema: &str, columns: &[Values]) -> Vec<u8> {
    let properties = WriterProperties::builder()
        .set_dictionary_enabled(false)
        .set_encoding(Encoding::DELTA_BINARY_PACKED)
        .build();
    written(schema, columns, columns[0].len(), properties)
}

/// Columns `x` and `y` of the same values, in one row group.
pub fn compressed_parquet(values: &[f64], codec: Compression) -> Vec<u8> {
    let properties = WriterProperties::builder().set_compression(codec).build();
    written(X_AND_Y, &doubles(&[values; 2]), values.len(), properties)
}

/// Columns `x0`, `x1`, … and `y`.
pub fn parquet_of_columns(columns: usize, rows: usize) -> Vec<u8> {
    let names = (0..columns).map(|i| format!("x{i}")).chain(["y".to_owned()]);
    let schema: String = names.map(|name| format!("required double {name};")).collect();
    let values = vec![0.5; rows];
    let columns = doubles(&vec![&values[..]; columns + 1]);
    written(&schema, &columns, rows, WriterProperties::default())
}

pub fn parquet_with_text() -> Vec<u8> {
    let text = Values::Bytes(vec!["a".into(), "b".into()]);
    let schema = "required binary x (STRING); required double y;";
    parquet(schema, &[text, Values::Double(vec![1.0, 2.0])], 10)
}

fn doubles(columns: &[&[f64]]) -> Vec<Values> {
    columns.iter().map(|values| Values::Double(values.to_vec())).collect()
}
