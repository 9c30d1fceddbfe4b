//! Streams through a text file once and notes where its records lie, in little memory.

use bytes::Bytes;
use csv_core::ReadRecordResult;
use steadfast_host::task::blocking;
use steadfast_store::Location;

use super::{Dialect, Layout, RECORD_BYTES_MAX};
use crate::cuts::{Marks, Places, Shape};
use crate::error::DataError;

/// Bytes fetched at a time; the next ones are under way while these are looked at.
const BLOCK_BYTES: u64 = 1024 * 1024;

/// Notes the place of every record of `file` and checks that all have as many fields as there are
/// columns.
pub(crate) async fn scan(
    file: &Location,
    size: u64,
    dialect: Dialect,
    layout: &Layout,
    records_per_task: Option<u32>,
) -> Result<Shape, DataError> {
    let block = |start: u64| file.read_range(start..size.min(start.saturating_add(BLOCK_BYTES)));
    let mut scanner = Scanner::new(file, dialect, layout, records_per_task);
    let mut start = layout.data_start;
    let mut bytes = block(start).await?;
    while !bytes.is_empty() {
        start += bytes.len() as u64;
        let feeding = feed(scanner, bytes);
        let (fed, next) = tokio::join!(feeding, block(start));
        scanner = fed?;
        bytes = next?;
    }
    scanner.finish()
}

/// Looks at a block off the threads that serve requests.
async fn feed(mut scanner: Scanner, block: Bytes) -> Result<Scanner, DataError> {
    let file = scanner.file.clone();
    blocking(move || scanner.feed(&block).map(|()| scanner))
        .await
        .unwrap_or_else(|error| Err(DataError::bad_file(&file, error.to_string())))
}

/// A record that is being looked at, in however many blocks.
struct Scanner {
    file: String,
    parser: csv_core::Reader,
    columns: usize,
    /// Fields of the current record so far.
    fields: usize,
    /// Bytes of the file that were looked at.
    position: u64,
    /// Where the current record starts.
    start: u64,
    /// Whether the last byte was a line feed, which the parser then has counted already.
    after_line_feed: bool,
    marks: Marks,
    /// Unquoted content, of which nothing is needed.
    scratch: Vec<u8>,
    ends: Vec<usize>,
}

impl Scanner {
    fn new(
        file: &Location,
        dialect: Dialect,
        layout: &Layout,
        records_per_task: Option<u32>,
    ) -> Self {
        let mut parser = csv_core::ReaderBuilder::new().delimiter(dialect.delimiter).build();
        parser.set_line(layout.data_line);
        Self {
            file: file.url().to_owned(),
            parser,
            columns: layout.columns.len(),
            fields: 0,
            position: layout.data_start,
            start: layout.data_start,
            after_line_feed: false,
            marks: Marks::new(records_per_task),
            scratch: vec![0; 16 * 1024],
            ends: vec![0; 1024],
        }
    }

    fn feed(&mut self, mut block: &[u8]) -> Result<(), DataError> {
        while !block.is_empty() {
            let used = self.step(block)?;
            block = &block[used..];
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Shape, DataError> {
        // An empty block tells the parser that the file has ended: the last record may lack its
        // line end.
        self.step(&[])?;
        Ok(Shape { records: self.marks.records(), places: Places::Bytes(self.marks) })
    }

    /// Lets the parser go on until it has something to say; returns the bytes that it used.
    fn step(&mut self, block: &[u8]) -> Result<usize, DataError> {
        let (result, used, _, fields) =
            self.parser.read_record(block, &mut self.scratch, &mut self.ends);
        self.position += used as u64;
        self.fields += fields;
        if used > 0 {
            self.after_line_feed = block[used - 1] == b'\n';
        }
        match result {
            ReadRecordResult::Record => self.end_record()?,
            // There is more of the record; its content is not kept, so the buffers are free again.
            ReadRecordResult::InputEmpty
            | ReadRecordResult::OutputFull
            | ReadRecordResult::OutputEndsFull => self.check_length()?,
            ReadRecordResult::End => {}
        }
        Ok(used)
    }

    fn end_record(&mut self) -> Result<(), DataError> {
        if self.fields != self.columns {
            return Err(DataError::FieldCount {
                file: self.file.clone(),
                record: self.marks.records(),
                line: self.parser.line() - u64::from(self.after_line_feed),
                expected: self.columns,
                found: self.fields,
            });
        }
        self.marks.push(self.start, self.position);
        self.start = self.position;
        self.fields = 0;
        Ok(())
    }

    fn check_length(&self) -> Result<(), DataError> {
        if self.position - self.start <= RECORD_BYTES_MAX {
            return Ok(());
        }
        let record = self.marks.records();
        Err(DataError::bad_file(
            &self.file,
            format!(
                "record {record} is longer than {RECORD_BYTES_MAX} bytes; is a quote not closed?"
            ),
        ))
    }
}
