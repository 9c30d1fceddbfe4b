//! Parquet: a column of required values for each column, lists as groups.

use std::sync::Arc;

use parquet::basic::{Compression, ConvertedType, LogicalType, Repetition, Type as PhysicalType};
use parquet::data_type::{
    BoolType, ByteArray, ByteArrayType, DataType, DoubleType, FloatType, Int32Type, Int64Type,
};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::types::{Type, TypePtr};
use steadfast_common::job::columns::{Column, ColumnSpec, ColumnType, Element, Shape, Values};

use super::failed;
use crate::error::DataError;

/// The most rows of a row group, and the bytes of values after which one ends.
const GROUP_ROWS: usize = 1 << 16;
const GROUP_BYTES: usize = 64 << 20;

/// A file that is being written.
pub(crate) struct ParquetEncoder {
    writer: SerializedFileWriter<Vec<u8>>,
    /// Rows of the next group.
    pending: Vec<Column>,
}

impl ParquetEncoder {
    pub fn new(columns: &[ColumnSpec]) -> Result<Self, DataError> {
        let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
        let schema = schema(columns).map_err(failed)?;
        let writer = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties));
        let pending = columns.iter().map(Column::new).collect();
        Ok(Self { writer: writer.map_err(failed)?, pending })
    }

    /// Appends records; returns the bytes that are complete.
    pub fn push(&mut self, columns: &[Column]) -> Result<Vec<u8>, DataError> {
        for (pending, column) in self.pending.iter_mut().zip(columns) {
            pending.extend(column);
        }
        let rows = self.pending.first().map_or(0, Column::len);
        let size: usize = self.pending.iter().map(Column::size_bytes).sum();
        if GROUP_ROWS <= rows || GROUP_BYTES <= size {
            self.end_group().map_err(failed)?;
        }
        self.writer.flush().map_err(failed)?;
        Ok(std::mem::take(self.writer.inner_mut()))
    }

    /// Returns the rest of the file.
    pub fn finish(mut self) -> Result<Vec<u8>, DataError> {
        self.end_group().map_err(failed)?;
        self.writer.into_inner().map_err(failed)
    }

    fn end_group(&mut self) -> Result<(), ParquetError> {
        if self.pending.iter().all(Column::is_empty) {
            return Ok(());
        }
        let mut group = self.writer.next_row_group()?;
        for column in &mut self.pending {
            let rows = column.select(&[]);
            let rows = std::mem::replace(column, rows);
            if let Some(mut writer) = group.next_column()? {
                write(&mut writer, &rows)?;
                writer.close()?;
            }
        }
        group.close().map(|_| ())
    }
}

fn write(writer: &mut SerializedColumnWriter, column: &Column) -> Result<(), ParquetError> {
    match &column.values {
        Values::Bool(values) => batch::<BoolType>(writer, column, values),
        Values::Uint8(values) => {
            let values: Vec<i32> = values.iter().map(|value| i32::from(*value)).collect();
            batch::<Int32Type>(writer, column, &values)
        }
        Values::Int64(values) => batch::<Int64Type>(writer, column, values),
        Values::Uint64(values) => {
            // The format stores unsigned integers in signed ones.
            let values: Vec<i64> = values.iter().map(|value| *value as i64).collect();
            batch::<Int64Type>(writer, column, &values)
        }
        Values::Float32(values) => batch::<FloatType>(writer, column, values),
        Values::Float64(values) => batch::<DoubleType>(writer, column, values),
        Values::Text(values) | Values::Bytes(values) => {
            let record = |record| ByteArray::from(values[column.elements_of(record)].to_vec());
            let values: Vec<ByteArray> = (0..column.len()).map(record).collect();
            writer.typed::<ByteArrayType>().write_batch(&values, None, None).map(|_| ())
        }
    }
}

fn batch<T: DataType>(
    writer: &mut SerializedColumnWriter,
    column: &Column,
    values: &[T::T],
) -> Result<(), ParquetError> {
    let writer = writer.typed::<T>();
    if column.shape == Shape::One {
        return writer.write_batch(values, None, None).map(|_| ());
    }
    let (mut definitions, mut repetitions) = (Vec::new(), Vec::new());
    for record in 0..column.len() {
        let count = column.elements_of(record).len();
        // An empty list has levels, but no value.
        definitions.extend(std::iter::repeat_n(i16::from(0 < count), count.max(1)));
        repetitions.push(0);
        repetitions.extend(std::iter::repeat_n(1, count.saturating_sub(1)));
    }
    writer.write_batch(values, Some(&definitions), Some(&repetitions)).map(|_| ())
}

fn schema(columns: &[ColumnSpec]) -> Result<TypePtr, ParquetError> {
    let fields = columns.iter().map(field).collect::<Result<_, _>>()?;
    Type::group_type_builder("schema").with_fields(fields).build().map(Arc::new)
}

fn field(column: &ColumnSpec) -> Result<TypePtr, ParquetError> {
    let ColumnType { element, shape } = column.kind;
    if shape == Shape::One {
        return leaf(&column.name, element);
    }
    let list = Type::group_type_builder("list")
        .with_repetition(Repetition::REPEATED)
        .with_fields(vec![leaf("element", element)?])
        .build()?;
    Type::group_type_builder(&column.name)
        .with_repetition(Repetition::REQUIRED)
        .with_logical_type(Some(LogicalType::List))
        .with_converted_type(ConvertedType::LIST)
        .with_fields(vec![Arc::new(list)])
        .build()
        .map(Arc::new)
}

fn leaf(name: &str, element: Element) -> Result<TypePtr, ParquetError> {
    let (physical, logical, converted) = match element {
        Element::Bool => (PhysicalType::BOOLEAN, None, ConvertedType::NONE),
        Element::Uint8 => {
            (PhysicalType::INT32, Some(LogicalType::integer(8, false)), ConvertedType::UINT_8)
        }
        Element::Int64 => (PhysicalType::INT64, None, ConvertedType::NONE),
        Element::Uint64 => {
            (PhysicalType::INT64, Some(LogicalType::integer(64, false)), ConvertedType::UINT_64)
        }
        Element::Float32 => (PhysicalType::FLOAT, None, ConvertedType::NONE),
        Element::Float64 => (PhysicalType::DOUBLE, None, ConvertedType::NONE),
        Element::Text => (PhysicalType::BYTE_ARRAY, Some(LogicalType::String), ConvertedType::UTF8),
        Element::Bytes => (PhysicalType::BYTE_ARRAY, None, ConvertedType::NONE),
    };
    Type::primitive_type_builder(name, physical)
        .with_repetition(Repetition::REQUIRED)
        .with_logical_type(logical)
        .with_converted_type(converted)
        .build()
        .map(Arc::new)
}
