//! Scans a text file once, in bounded memory, for the locations of its records.

use std::ops::Range;

use bytes::Bytes;
use csv_core::ReadRecordResult;
use steadfast_host::task::blocking;
use steadfast_store::Location;

use super::{Beginning, Blocks, Dialect, Layout, RECORD_BYTES_MAX, quotes};
use crate::error::DataError;
use crate::task_split::{Access, Marks, Places, Shape};

/// Finds the location of every record of `file` and checks that each has as many fields as there are
/// columns.
pub(crate) async fn scan(
    file: &Location,
    size: u64,
    dialect: Dialect,
    layout: &Layout,
    records_per_task: Option<u32>,
) -> Result<Shape, DataError> {
    let refusal = match records(file, size, dialect, layout, records_per_task).await {
        Ok(shape) => return Ok(shape),
        Err(refusal) => refusal,
    };
    let open = match refusal {
        Refusal::Final(error) => return Err(error),
        Refusal::OpenQuote(open) => open,
    };
    let text = super::range(file, size, layout.codec, open.bytes.clone()).await?;
    let beginning = Beginning::at(open.bytes.start);
    let before = &text[..quotes::open(dialect, &text, beginning).unwrap_or(0)];
    Err(DataError::UnclosedQuote {
        file: file.url().to_owned(),
        place: format!("record {}", open.record),
        line: open.start_line + quotes::lines(before),
    })
}

/// The reason to reject a file.
enum Refusal {
    Final(DataError),
    OpenQuote(OpenQuote),
}

impl From<DataError> for Refusal {
    fn from(error: DataError) -> Self {
        Self::Final(error)
    }
}

/// A record with an unclosed quote, whose position is not known yet.
struct OpenQuote {
    record: u64,
    /// The bytes from the end of the previous record on.
    bytes: Range<u64>,
    /// The line at which `bytes` starts.
    start_line: u64,
}

async fn records(
    file: &Location,
    size: u64,
    dialect: Dialect,
    layout: &Layout,
    records_per_task: Option<u32>,
) -> Result<Shape, Refusal> {
    let mut scanner = Scanner::new(file, dialect, layout, records_per_task);
    let mut blocks = Blocks::new(file, size, layout.codec, layout.data_start).await?;
    let mut bytes = blocks.next().await?;
    while !bytes.is_empty() {
        let feeding = feed(scanner, bytes);
        // Fetches the next block while this one is scanned.
        let (fed, next) = tokio::join!(feeding, blocks.next());
        scanner = fed?;
        bytes = next?;
    }
    scanner.finish()
}

/// Scans a block on another thread than those that serve requests.
async fn feed(mut scanner: Scanner, block: Bytes) -> Result<Scanner, Refusal> {
    let file = scanner.file.clone();
    blocking(move || scanner.feed(&block).map(|()| scanner))
        .await
        .unwrap_or_else(|error| Err(DataError::bad_file(&file, error.to_string()).into()))
}

/// The state of a scan; a record may span any number of blocks.
struct Scanner {
    file: String,
    parser: csv_core::Reader,
    columns: usize,
    /// Fields of the current record so far.
    fields: usize,
    /// Bytes scanned so far.
    position: u64,
    /// The start of the current record, including blank lines before it.
    start: u64,
    /// The line of `start`.
    start_line: u64,
    /// The line of the current record's first byte; absent before that.
    first_line: Option<u64>,
    /// Whether the last byte was a line feed, which the parser's line number already includes.
    after_line_feed: bool,
    marks: Marks,
    /// Buffer for unquoted content, which is discarded.
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
        let access = match layout.codec {
            None => Access::Anywhere,
            Some(_) => Access::FromStart,
        };
        let mut parser = dialect.parser(Beginning::at(layout.data_start));
        parser.set_line(layout.data_line);
        Self {
            file: file.url().to_owned(),
            parser,
            columns: layout.columns.len(),
            fields: 0,
            position: layout.data_start,
            start: layout.data_start,
            start_line: layout.data_line,
            first_line: None,
            after_line_feed: false,
            marks: Marks::new(records_per_task, access),
            scratch: vec![0; 16 * 1024],
            ends: vec![0; 1024],
        }
    }

    fn feed(&mut self, mut block: &[u8]) -> Result<(), Refusal> {
        while !block.is_empty() {
            let used = self.step(block)?;
            block = &block[used..];
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Shape, Refusal> {
        // The last record may lack its line end.
        if self.first_line.is_some() {
            let Some(fields) = quotes::end_line(&mut self.parser) else {
                return Err(self.open_quote());
            };
            self.fields += fields;
            self.after_line_feed = true;
            self.end_record()?;
        }
        Ok(Shape { records: self.marks.records(), places: Places::Bytes(self.marks) })
    }

    /// Runs the parser until its next result; returns the number of bytes used.
    fn step(&mut self, block: &[u8]) -> Result<usize, Refusal> {
        let line = self.parser.line();
        let (result, used, _, fields) =
            self.parser.read_record(block, &mut self.scratch, &mut self.ends);
        self.position += used as u64;
        self.fields += fields;
        if self.first_line.is_none() {
            let blank = block[..used].iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
            let blank = blank.count();
            self.first_line = (blank < used).then(|| line + quotes::lines(&block[..blank]));
        }
        if used > 0 {
            self.after_line_feed = block[used - 1] == b'\n';
        }
        match result {
            ReadRecordResult::Record => self.end_record()?,
            // The record continues. Its content is discarded, so the buffers can be reused.
            ReadRecordResult::InputEmpty
            | ReadRecordResult::OutputFull
            | ReadRecordResult::OutputEndsFull => self.check_length()?,
            ReadRecordResult::End => {}
        }
        Ok(used)
    }

    fn end_record(&mut self) -> Result<(), DataError> {
        let last_line = self.parser.line() - u64::from(self.after_line_feed);
        if self.fields != self.columns {
            return Err(DataError::FieldCount {
                file: self.file.clone(),
                record: self.marks.records(),
                line: self.first_line.unwrap_or(last_line),
                last_line,
                expected: self.columns,
                found: self.fields,
            });
        }
        self.marks.push(self.start, self.position);
        self.start = self.position;
        self.start_line = self.parser.line();
        self.first_line = None;
        self.fields = 0;
        Ok(())
    }

    fn check_length(&mut self) -> Result<(), Refusal> {
        if self.position - self.start <= RECORD_BYTES_MAX {
            return Ok(());
        }
        if quotes::end_line(&mut self.parser).is_none() {
            return Err(self.open_quote());
        }
        let record = self.marks.records();
        let reason = format!("record {record} is longer than {RECORD_BYTES_MAX} bytes");
        Err(DataError::bad_file(&self.file, reason).into())
    }

    fn open_quote(&self) -> Refusal {
        Refusal::OpenQuote(OpenQuote {
            record: self.marks.records(),
            bytes: self.start..self.position,
            start_line: self.start_line,
        })
    }
}
