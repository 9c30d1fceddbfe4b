//! An embedding table of a trained model as a Parquet file: a column `id` (unsigned 64-bit integers) and a column
//! `values` (lists of 32-bit floats, all of the table's width).

use std::sync::Arc;

use parquet::basic::{Compression, ConvertedType, LogicalType, Repetition, Type as PhysicalType};
use parquet::data_type::{FloatType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::{Type, TypePtr};
use steadfast_common::tensor::layout::file_name;
use steadfast_common::tensor::table::Rows;

/// The most rows of a row group, and the most values.
const GROUP_ROWS: usize = 1 << 16;
const GROUP_VALUES: usize = 1 << 22;

/// A table file that is being written.
pub struct TableFile {
    writer: SerializedFileWriter<Vec<u8>>,
    width: usize,
    /// Rows of the next group.
    ids: Vec<u64>,
    values: Vec<f32>,
}

impl TableFile {
    /// Begins the file of a table whose rows have `width` values. `about` is shown in its metadata.
    ///
    /// # Errors
    /// If the library refuses the schema.
    pub fn new(width: usize, about: &[(&str, &str)]) -> Result<Self, ParquetError> {
        let entry =
            |(key, value): &(&str, &str)| KeyValue::new((*key).to_owned(), (*value).to_owned());
        let properties = WriterProperties::builder()
            .set_compression(Compression::UNCOMPRESSED)
            // Ids and weights hardly repeat.
            .set_dictionary_enabled(false)
            .set_key_value_metadata(Some(about.iter().map(entry).collect()))
            .build();
        let writer = SerializedFileWriter::new(Vec::new(), schema()?, Arc::new(properties))?;
        Ok(Self { writer, width, ids: Vec::new(), values: Vec::new() })
    }

    /// Appends rows.
    ///
    /// # Errors
    /// If the library fails.
    pub fn push(&mut self, rows: &Rows) -> Result<(), ParquetError> {
        let of_group = GROUP_ROWS.min(GROUP_VALUES / self.width.max(1));
        let mut from = 0;
        while from < rows.len() {
            let to = rows.len().min(from + of_group - self.ids.len());
            self.ids.extend_from_slice(&rows.ids()[from..to]);
            self.values.extend_from_slice(&rows.values()[from * self.width..to * self.width]);
            if self.ids.len() == of_group {
                self.end_group()?;
            }
            from = to;
        }
        Ok(())
    }

    /// Returns the bytes of the file since the last call.
    ///
    /// # Errors
    /// If the library fails.
    pub fn take(&mut self) -> Result<Vec<u8>, ParquetError> {
        self.writer.flush()?;
        Ok(std::mem::take(self.writer.inner_mut()))
    }

    /// Returns the rest of the file.
    ///
    /// # Errors
    /// If the library fails.
    pub fn finish(mut self) -> Result<Vec<u8>, ParquetError> {
        self.end_group()?;
        self.writer.into_inner()
    }

    fn end_group(&mut self) -> Result<(), ParquetError> {
        if self.ids.is_empty() {
            return Ok(());
        }
        let mut group = self.writer.next_row_group()?;
        // The format stores unsigned integers in signed ones.
        let ids: Vec<i64> = self.ids.drain(..).map(|id| id as i64).collect();
        if let Some(mut column) = group.next_column()? {
            column.typed::<Int64Type>().write_batch(&ids, None, None)?;
            column.close()?;
        }
        if let Some(mut column) = group.next_column()? {
            // Each list begins with a value of repetition level 0.
            let level = |index: usize| i16::from(!index.is_multiple_of(self.width));
            let repetitions: Vec<i16> = (0..self.values.len()).map(level).collect();
            let definitions = vec![1; self.values.len()];
            let column_of = column.typed::<FloatType>();
            column_of.write_batch(&self.values, Some(&definitions), Some(&repetitions))?;
            column.close()?;
        }
        self.values.clear();
        group.close().map(|_| ())
    }
}

fn schema() -> Result<TypePtr, ParquetError> {
    let id = Type::primitive_type_builder("id", PhysicalType::INT64)
        .with_repetition(Repetition::REQUIRED)
        .with_logical_type(Some(LogicalType::integer(64, false)))
        .with_converted_type(ConvertedType::UINT_64)
        .build()?;
    let element = Type::primitive_type_builder("element", PhysicalType::FLOAT)
        .with_repetition(Repetition::REQUIRED)
        .build()?;
    let list = Type::group_type_builder("list")
        .with_repetition(Repetition::REPEATED)
        .with_fields(vec![Arc::new(element)])
        .build()?;
    let values = Type::group_type_builder("values")
        .with_repetition(Repetition::REQUIRED)
        .with_logical_type(Some(LogicalType::List))
        .with_converted_type(ConvertedType::LIST)
        .with_fields(vec![Arc::new(list)])
        .build()?;
    let fields = vec![Arc::new(id), Arc::new(values)];
    Type::group_type_builder("table").with_fields(fields).build().map(Arc::new)
}

/// Returns the name of the object with a table of a model, beside `model.safetensors`.
pub fn table_file_name(table: &str) -> String {
    format!("model.{}.parquet", file_name(table))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::RowAccessor;

    use super::*;

    #[test]
    fn a_table_is_read_as_it_is_written() {
        let rows = |ids: std::ops::Range<u64>| {
            let mut rows = Rows::new(3);
            // Beyond signed integers.
            ids.for_each(|id| rows.push(id << 40 | 1 << 63, &[id as f32, 0.5, -1.0]));
            rows
        };
        let mut file = TableFile::new(3, &[("job", "clicks")]).unwrap();
        let mut bytes = Vec::new();
        // Two groups, and a part of a third one that is not written before the end.
        for first in [0, 40_000, 80_000, 120_000] {
            file.push(&rows(first..first + 40_000)).unwrap();
            bytes.append(&mut file.take().unwrap());
        }
        file.push(&Rows::new(3)).unwrap();
        assert!(1 << 20 < bytes.len());
        bytes.append(&mut file.finish().unwrap());
        let reader = SerializedFileReader::new(Bytes::from(bytes)).unwrap();
        let metadata = reader.metadata().file_metadata();
        assert_eq!((metadata.num_rows(), reader.metadata().num_row_groups()), (160_000, 3));
        assert_eq!(metadata.key_value_metadata().unwrap()[0].value.as_deref(), Some("clicks"));
        for (id, row) in (0..).zip(reader.get_row_iter(None).unwrap()) {
            let row = row.unwrap();
            assert_eq!(row.get_ulong(0).unwrap(), id << 40 | 1 << 63);
            let values = row.get_list(1).unwrap();
            let expected = [id as f32, 0.5, -1.0].map(parquet::record::Field::Float);
            assert_eq!(values.elements(), expected);
        }
    }

    #[test]
    fn an_empty_table_has_a_file() {
        let file = TableFile::new(2, &[]).unwrap().finish().unwrap();
        assert_eq!(
            SerializedFileReader::new(Bytes::from(file)).unwrap().metadata().num_row_groups(),
            0
        );
        assert_eq!(table_file_name("user/item é"), "model.user_item__.parquet");
    }
}
