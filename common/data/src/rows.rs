//! Formats that hold one record after the other: JSON lines, TFRecord, LibSVM, and tar archives.

mod json;
mod libsvm;
mod lines;
mod tar;
mod tfrecord;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, BufReader, Cursor};
use std::ops::{ControlFlow, Range};

use bytes::Bytes;
use steadfast_common::job::dataset::{Chunk, ReadOptions, Records};
use steadfast_common::job::spec::DataFormat;
use steadfast_host::task::blocking;
use steadfast_store::{Location, StoreError};

use crate::columns::{Column, Content};
use crate::error::DataError;
use crate::file_reader::FileReader;
use crate::format;
use crate::read::Conversion;
use crate::task_split::{Access, Marks, Places, Shape};
use crate::text::{Codec, range};
use crate::values::{Builder, Classes, Inference, Value};

pub(crate) use libsvm::expanded as libsvm_columns;
pub(crate) use tfrecord::{encode as encode_example, is_header as is_tfrecord};

/// Records from which the types of columns are derived.
const SAMPLE_RECORDS: u64 = 256;
/// Bytes after which a sample ends.
const SAMPLE_BYTES: u64 = 4 * 1024 * 1024;

/// A format that holds one record after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowFormat {
    Jsonl,
    Tfrecord,
    Libsvm,
    Webdataset,
}

impl RowFormat {
    pub fn of(format: DataFormat) -> Option<Self> {
        match format {
            DataFormat::Parquet | DataFormat::Csv | DataFormat::Tsv => None,
            DataFormat::Jsonl => Some(Self::Jsonl),
            DataFormat::Tfrecord => Some(Self::Tfrecord),
            DataFormat::Libsvm => Some(Self::Libsvm),
            DataFormat::Webdataset => Some(Self::Webdataset),
        }
    }
}

/// One record.
#[derive(Debug)]
pub(crate) struct Row<'a> {
    /// The byte range of the record in the file, with skipped bytes before it.
    bytes: Range<u64>,
    /// Values by name, in ascending order of the names.
    fields: Vec<(Cow<'a, str>, Value<'a>)>,
}

/// Receives each record in turn.
type Visit<'v> = dyn FnMut(Row) -> ControlFlow<()> + 'v;

/// The reason why a file has no further record.
#[derive(Debug)]
enum Refusal {
    Read(io::Error),
    /// A record that does not have the format, by its index among those that are read.
    Record(u64, String),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}

/// A file, and how it is compressed.
#[derive(Clone)]
pub(crate) struct RowFile {
    file: Location,
    size: u64,
    format: RowFormat,
    codec: Option<Codec>,
}

/// The result of a scan of a file.
pub(crate) struct Scanned {
    pub shape: Shape,
    /// The largest index of a LibSVM file; 0 for others.
    pub index_max: u64,
}

impl RowFile {
    /// Detects the compression of `file`, which has `size` bytes.
    pub async fn open(file: &Location, size: u64, format: RowFormat) -> Result<Self, DataError> {
        let head = file.read_range(0..size.min(format::HEAD_BYTES)).await?;
        let codec = Codec::detect(&head);
        if codec.is_none() {
            format::expect_rows(file.url(), format, &head)?;
        }
        Ok(Self { file: file.clone(), size, format, codec })
    }

    /// Returns the columns that a job can choose from, derived from the first records.
    pub async fn columns(&self) -> Result<Vec<Column>, DataError> {
        if self.format == RowFormat::Libsvm {
            return Ok(libsvm::columns());
        }
        let format = self.format;
        self.visit_all(Contents::Read, move |visit_all| {
            let mut found: BTreeMap<String, Inference> = BTreeMap::new();
            let mut records = 0;
            visit_all(&mut |row: Row| {
                for (name, value) in &row.fields {
                    match found.get_mut(name.as_ref()) {
                        Some(inference) => inference.add(value),
                        None => found.entry(name.to_string()).or_default().add(value),
                    }
                }
                records += 1;
                match records < SAMPLE_RECORDS && row.bytes.end < SAMPLE_BYTES {
                    true => ControlFlow::Continue(()),
                    false => ControlFlow::Break(()),
                }
            })?;
            let column = |(name, inference): (String, Inference)| {
                let content = match format {
                    RowFormat::Webdataset => Content::Text(tar::type_of(&name)),
                    RowFormat::Jsonl | RowFormat::Tfrecord | RowFormat::Libsvm => {
                        inference.finish()
                    }
                };
                Column { name, content }
            };
            Ok(found.into_iter().map(column).collect())
        })
        .await
    }

    /// Finds the location of every record, and checks that each has the format.
    pub async fn scan(&self, records_per_task: Option<u32>) -> Result<Scanned, DataError> {
        let access = match self.codec {
            None => Access::Anywhere,
            Some(_) => Access::FromStart,
        };
        let marks = Marks::new(records_per_task, access);
        let (file, size, is_plain) = (self.file.url().to_owned(), self.size, self.codec.is_none());
        self.visit_all(Contents::Skip, move |visit_all| {
            let (mut marks, mut index_max) = (marks, 0);
            visit_all(&mut |row: Row| {
                marks.push(row.bytes.start, row.bytes.end);
                index_max = index_max.max(libsvm::index_max(&row.fields));
                ControlFlow::Continue(())
            })?;
            if is_plain && size < marks.end() {
                let reason = format!("it ends within record {}", marks.records().saturating_sub(1));
                return Err(DataError::bad_file(&file, reason));
            }
            let shape = Shape { records: marks.records(), places: Places::Bytes(marks) };
            Ok(Scanned { shape, index_max })
        })
        .await
    }

    pub async fn read(&self, chunk: Chunk, options: &ReadOptions) -> Result<Records, DataError> {
        let bytes = range(&self.file, self.size, self.codec, chunk.start..chunk.end).await?;
        let (this, options) = (self.clone(), options.clone());
        self.blocking(move || this.decode(bytes, chunk.first_record, &options)).await
    }

    fn decode(
        &self,
        bytes: Bytes,
        first_record: u64,
        options: &ReadOptions,
    ) -> Result<Records, DataError> {
        let mut collector = Collector::new(self.format, options);
        let mut refused = None;
        let visited =
            self.visit(Cursor::new(bytes), Contents::Read, &mut |row: Row| match collector
                .push(&row)
            {
                Ok(()) => ControlFlow::Continue(()),
                Err(reason) => {
                    refused = Some(reason);
                    ControlFlow::Break(())
                }
            });
        let record = first_record + collector.records;
        match (visited, refused) {
            (Err(refusal), _) => Err(self.error(refusal, first_record)),
            (Ok(()), Some((column, reason))) => {
                let file = self.file.url().to_owned();
                Err(DataError::BadRecord { file, record, column, reason })
            }
            (Ok(()), None) => Ok(collector.finish()),
        }
    }

    /// Runs `work` on a blocking thread, with a function that visits all records of the file.
    async fn visit_all<T: Send + 'static>(
        &self,
        contents: Contents,
        work: impl FnOnce(&mut dyn FnMut(&mut Visit) -> Result<(), DataError>) -> Result<T, DataError>
        + Send
        + 'static,
    ) -> Result<T, DataError> {
        let this = self.clone();
        let file = FileReader::new(&self.file, self.size);
        let working = move || {
            let mut file = Some(file);
            work(&mut |visit| {
                let Some(file) = file.take() else { return Ok(()) };
                let visited = match this.codec {
                    None => this.visit(file, contents, visit),
                    Some(codec) => match codec.decoder(file) {
                        Ok(text) => {
                            this.visit(Unseekable(BufReader::new(text)), Contents::Read, visit)
                        }
                        Err(error) => Err(error.into()),
                    },
                };
                visited.map_err(|refusal| this.error(refusal, 0))
            })
        };
        self.blocking(working).await
    }

    fn visit(
        &self,
        text: impl io::BufRead + io::Seek,
        contents: Contents,
        visit: &mut Visit,
    ) -> Result<(), Refusal> {
        match self.format {
            RowFormat::Jsonl => lines::visit(text, json::fields, visit),
            RowFormat::Libsvm => lines::visit(text, libsvm::fields, visit),
            RowFormat::Tfrecord => tfrecord::visit(text, visit),
            RowFormat::Webdataset => tar::visit(text, contents, visit),
        }
    }

    /// Returns the error for `refusal`. `first_record` is the number in the file of the first record that was read.
    fn error(&self, refusal: Refusal, first_record: u64) -> DataError {
        let file = self.file.url();
        match refusal {
            Refusal::Record(record, reason) => {
                DataError::BadRow { file: file.to_owned(), record: first_record + record, reason }
            }
            Refusal::Read(error) => match (self.codec, error.downcast::<StoreError>()) {
                (_, Ok(error)) => DataError::Store(error),
                (Some(codec), Err(error)) => codec.error(file, error),
                (None, Err(error)) if self.format == RowFormat::Webdataset => {
                    let reason = format!("it is not a whole tar archive ({error})");
                    DataError::bad_file(file, reason)
                }
                (None, Err(error)) => DataError::bad_file(file, error.to_string()),
            },
        }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, DataError> + Send + 'static,
    ) -> Result<T, DataError> {
        let done = blocking(work).await;
        done.unwrap_or_else(|broken| Err(DataError::broken(self.file.url(), &broken)))
    }
}

/// Whether the contents of records are needed, or only their locations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contents {
    Read,
    Skip,
}

/// Text that can only be read forward.
struct Unseekable<T>(T);

impl<T: io::Read> io::Read for Unseekable<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl<T: io::BufRead> io::BufRead for Unseekable<T> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.0.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.0.consume(count);
    }
}

impl<T> io::Seek for Unseekable<T> {
    fn seek(&mut self, _: io::SeekFrom) -> io::Result<u64> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Collects the wanted columns of records.
struct Collector<'a> {
    format: RowFormat,
    options: &'a ReadOptions,
    records: u64,
    numbers: Records,
    builders: Vec<Builder>,
    classes: Option<Classes>,
    /// The places of the features of a LibSVM file.
    places: libsvm::Places,
    /// The values of the categories of a LibSVM file.
    weights: Vec<f32>,
}

impl<'a> Collector<'a> {
    fn new(format: RowFormat, options: &'a ReadOptions) -> Self {
        let numbers = Records { width: options.features.len(), ..Records::default() };
        let (builders, classes) = (Builder::all(options), Classes::of(options));
        let places = match format {
            RowFormat::Libsvm => libsvm::places(&options.features),
            RowFormat::Jsonl | RowFormat::Tfrecord | RowFormat::Webdataset => Default::default(),
        };
        Self {
            format,
            options,
            records: 0,
            numbers,
            builders,
            classes,
            places,
            weights: Vec::new(),
        }
    }

    /// Adds a record. The error is a column whose value does not have its type, and the reason.
    fn push(&mut self, row: &Row) -> Result<(), (String, String)> {
        let find = |name: &str| {
            let found = row.fields.binary_search_by(|(field, _)| field.as_ref().cmp(name));
            found.map_or(&Value::Missing, |place| &row.fields[place].1)
        };
        for (column, builder) in self.options.columns.iter().zip(&mut self.builders) {
            builder.push(find(&column.name)).map_err(|reason| (column.name.clone(), reason))?;
        }
        if let Some(label) = &self.options.label {
            let conversion = Conversion::of_features(self.options);
            let features = &mut self.numbers.features;
            if self.format == RowFormat::Libsvm {
                let named = |reason| (libsvm::VALUE.to_owned(), reason);
                match self.options.features.is_empty() {
                    true => libsvm::append(&row.fields, conversion, &mut self.weights),
                    false => libsvm::fill(&row.fields, &self.places, conversion, features),
                }
                .map_err(named)?;
            } else {
                for name in &self.options.features {
                    let number = find(name).number(conversion);
                    features.push(number.map_err(|reason| (name.clone(), reason))?);
                }
            }
            let number = Classes::label(self.classes.as_ref(), find(label));
            self.numbers.labels.push(number.map_err(|reason| (label.clone(), reason))?);
            if let Some(weight) = &self.options.weight {
                let number = find(weight).number(Conversion::Weight);
                self.numbers.weights.push(number.map_err(|reason| (weight.clone(), reason))?);
            }
        }
        self.records += 1;
        Ok(())
    }

    fn finish(self) -> Records {
        let mut columns: Vec<_> = self.builders.into_iter().map(Builder::finish).collect();
        if let Some(indices) = columns.iter_mut().find(|column| column.name == libsvm::INDEX) {
            indices.weights = self.weights;
        }
        Records { columns, ..self.numbers }
    }
}
