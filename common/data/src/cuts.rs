//! Cuts files into tasks. Pure: given where each file's records lie.

use steadfast_common::dataset::Chunk;

use crate::error::DataError;

/// Smallest task that is chosen automatically.
const RECORDS_MIN: u32 = 32;
/// Largest task that is chosen automatically.
const RECORDS_MAX: u32 = 8192;
/// Number of tasks above which larger ones are chosen.
const TASKS_AIM: u64 = 256;

/// One file, as far as cutting it goes.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub records: u64,
    pub places: Places,
}

/// Where a file can be cut.
#[derive(Clone, Debug)]
pub(crate) enum Places {
    /// Anywhere, but a chunk lies within one of these consecutive groups of rows.
    RowGroups(Vec<u64>),
    /// At these bytes.
    Bytes(Marks),
}

/// The byte at which every `stride`-th record of a text file starts.
#[derive(Clone, Debug)]
pub(crate) struct Marks {
    growth: Growth,
    stride: u32,
    starts: Vec<u64>,
    records: u64,
    end: u64,
}

/// Whether marks may be thinned out as the file turns out to be large.
#[derive(Clone, Copy, Debug)]
enum Growth {
    Fixed,
    Automatic,
}

impl Marks {
    /// Starts to mark a file for tasks of `records_per_task` records, or of a size to be chosen.
    pub fn new(records_per_task: Option<u32>) -> Self {
        let (growth, stride) = match records_per_task {
            Some(records) => (Growth::Fixed, records),
            None => (Growth::Automatic, RECORDS_MIN),
        };
        Self { growth, stride, starts: Vec::new(), records: 0, end: 0 }
    }

    /// Notes the next record, which lies in `start..end`.
    pub fn push(&mut self, start: u64, end: u64) {
        if self.records.is_multiple_of(u64::from(self.stride)) {
            self.starts.push(start);
        }
        self.records += 1;
        self.end = end;
        // Tasks will be at least as large as this file alone makes them, so that finer marks are
        // of no use: their number stays that of the tasks.
        if matches!(self.growth, Growth::Automatic) && task_size(self.records) > self.stride {
            self.stride *= 2;
            let mut index = 0;
            self.starts.retain(|_| {
                index += 1;
                index % 2 == 1
            });
        }
    }

    /// Records so far.
    pub fn records(&self) -> u64 {
        self.records
    }

    /// The bytes of the records from `first` on, up to `last` (exclusive). Both are multiples of
    /// the stride, but for the end of the file.
    fn range(&self, first: u64, last: u64) -> (u64, u64) {
        let stride = u64::from(self.stride);
        let at = |record: u64| self.starts.get((record / stride) as usize).copied();
        let end = if last >= self.records { self.end } else { at(last).unwrap_or(self.end) };
        (at(first).unwrap_or(self.end), end)
    }
}

/// Chooses the size of tasks: a power of two times the smallest, so that any choice is a multiple
/// of all smaller ones.
pub(crate) fn task_size(records: u64) -> u32 {
    let mut size = RECORDS_MIN;
    while size < RECORDS_MAX && records > u64::from(size) * TASKS_AIM {
        size *= 2;
    }
    size
}

/// Chunks in order, and for each task the number of chunks up to its end.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Cut {
    pub chunks: Vec<Chunk>,
    pub task_ends: Vec<u32>,
}

/// Cuts `files` into tasks of `records_per_task` records.
///
/// A file with at least that many records is cut by itself, so its last task may be smaller.
/// Smaller files are put together, uncut, as long as they fit into one task.
pub(crate) fn cut(files: &[Shape], records_per_task: u32) -> Result<Cut, DataError> {
    let size = u64::from(records_per_task);
    let mut cutter = Cutter::default();
    let mut gathered = 0;
    for (index, file) in files.iter().enumerate() {
        if gathered > 0 && gathered + file.records > size {
            cutter.end_task()?;
            gathered = 0;
        }
        let index = u32::try_from(index)
            .map_err(|_| DataError::BadManifest { reason: "too many files".to_owned() })?;
        if file.records < size {
            cutter.add(index, file, 0, file.records);
            gathered += file.records;
            continue;
        }
        let mut first = 0;
        while first < file.records {
            let last = file.records.min(first + size);
            cutter.add(index, file, first, last);
            cutter.end_task()?;
            first = last;
        }
    }
    if gathered > 0 {
        cutter.end_task()?;
    }
    Ok(cutter.cut)
}

#[derive(Default)]
struct Cutter {
    cut: Cut,
    /// The row group that the last chunk lies in: its index, and the row where it starts.
    group: (usize, u64),
    file: u32,
}

impl Cutter {
    fn add(&mut self, file: u32, shape: &Shape, first: u64, last: u64) {
        if first >= last {
            return;
        }
        match &shape.places {
            Places::Bytes(marks) => {
                let (start, end) = marks.range(first, last);
                self.push(Chunk {
                    file,
                    start,
                    end,
                    first_record: first,
                    records: count(first, last),
                });
            }
            Places::RowGroups(rows) => self.add_rows(file, rows, first, last),
        }
    }

    fn add_rows(&mut self, file: u32, groups: &[u64], mut first: u64, last: u64) {
        if self.file != file || first == 0 {
            self.group = (0, 0);
            self.file = file;
        }
        while first < last {
            let (index, start) = self.group;
            let Some(rows) = groups.get(index) else { return };
            let end = start + rows;
            if first >= end {
                self.group = (index + 1, end);
                continue;
            }
            let stop = last.min(end);
            let records = count(first, stop);
            self.push(Chunk { file, start: first, end: stop, first_record: first, records });
            first = stop;
        }
    }

    fn push(&mut self, chunk: Chunk) {
        self.cut.chunks.push(chunk);
    }

    fn end_task(&mut self) -> Result<(), DataError> {
        let chunks = self.cut.chunks.len();
        let too_many = |_| DataError::TooManyTasks { tasks: chunks };
        self.cut.task_ends.push(u32::try_from(chunks).map_err(too_many)?);
        Ok(())
    }
}

fn count(first: u64, last: u64) -> u32 {
    u32::try_from(last - first)
        .expect("a chunk is no larger than a task, which has a u32 of records")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RECORD_BYTES: u64 = 10;

    fn text(records: u64, records_per_task: Option<u32>) -> Shape {
        let mut marks = Marks::new(records_per_task);
        for record in 0..records {
            marks.push(record * RECORD_BYTES, (record + 1) * RECORD_BYTES);
        }
        Shape { records, places: Places::Bytes(marks) }
    }

    fn rows(groups: &[u64]) -> Shape {
        Shape { records: groups.iter().sum(), places: Places::RowGroups(groups.to_vec()) }
    }

    /// The record counts of all tasks.
    fn sizes(cut: &Cut) -> Vec<u64> {
        let mut start = 0;
        let mut sizes = Vec::new();
        for &end in &cut.task_ends {
            let chunks = &cut.chunks[start..end as usize];
            sizes.push(chunks.iter().map(|chunk| u64::from(chunk.records)).sum());
            start = end as usize;
        }
        sizes
    }

    /// Every record is in exactly one chunk, in order.
    fn assert_complete(cut: &Cut, files: &[Shape], bytes_per_record: u64) {
        let mut next = vec![0; files.len()];
        for chunk in &cut.chunks {
            let expected = &mut next[chunk.file as usize];
            assert_eq!(chunk.first_record, *expected);
            assert!(chunk.records > 0);
            assert_eq!(chunk.start, *expected * bytes_per_record);
            *expected += u64::from(chunk.records);
            assert_eq!(chunk.end, *expected * bytes_per_record);
        }
        let counts: Vec<u64> = files.iter().map(|file| file.records).collect();
        assert_eq!(next, counts);
        assert_eq!(cut.task_ends.last().map_or(0, |end| *end as usize), cut.chunks.len());
    }

    proptest! {
        /// S004-15: a task is a list of (file, chunk); all of them are all the records, once.
        #[test]
        fn every_record_of_text_files_is_in_exactly_one_task(
            counts in prop::collection::vec(0_u64..3000, 1..8),
            records_per_task in prop::option::of(1_u32..400),
        ) {
            let files: Vec<Shape> =
                counts.iter().map(|count| text(*count, records_per_task)).collect();
            let size = records_per_task.unwrap_or_else(|| task_size(counts.iter().sum()));
            let cut = cut(&files, size).unwrap();
            assert_complete(&cut, &files, RECORD_BYTES);
            prop_assert!(sizes(&cut).iter().all(|task| (1..=u64::from(size)).contains(task)));
        }

        /// S004-15, for Parquet: no chunk crosses a row group.
        #[test]
        fn every_row_is_in_exactly_one_task_and_no_chunk_crosses_a_row_group(
            files in prop::collection::vec(prop::collection::vec(0_u64..500, 0..6), 1..6),
            size in 1_u32..700,
        ) {
            let shapes: Vec<Shape> = files.iter().map(|groups| rows(groups)).collect();
            let cut = cut(&shapes, size).unwrap();
            assert_complete(&cut, &shapes, 1);
            for chunk in &cut.chunks {
                let mut start = 0;
                let inside = files[chunk.file as usize].iter().any(|rows| {
                    let group = start..start + rows;
                    start = group.end;
                    group.contains(&chunk.start) && chunk.end <= group.end
                });
                prop_assert!(inside, "{chunk:?}");
            }
        }
    }

    #[test]
    fn a_task_spans_files_only_if_they_are_smaller_than_a_task() {
        let files =
            [text(30, Some(100)), text(60, Some(100)), text(250, Some(100)), text(20, Some(100))];
        let cut = cut(&files, 100).unwrap();
        assert_eq!(sizes(&cut), [90, 100, 100, 50, 20]);
    }

    /// S004-4: many more tasks than trainers, of many records each.
    #[test]
    fn the_size_of_tasks_follows_that_of_the_dataset() {
        let tasks = |records: u64| records.div_ceil(u64::from(task_size(records)));
        assert_eq!(tasks(1797), 57);
        for records in (2_048..2_000_000).step_by(997) {
            assert!((64..=256).contains(&tasks(records)), "{records}: {}", tasks(records));
        }
        assert_eq!(task_size(u64::MAX), RECORDS_MAX);
    }

    #[test]
    fn the_marks_of_a_large_file_stay_as_few_as_its_tasks() {
        let Places::Bytes(marks) = text(3_000_000, None).places else { panic!("text") };
        assert!(marks.starts.len() as u64 <= 3_000_000 / u64::from(RECORDS_MAX) + 1);
    }

    #[test]
    fn a_million_tasks_are_cut_at_once() {
        let files = [rows(&[1_000_000; 2]), text(2_000_000, Some(4))];
        let cut = cut(&files, 4).unwrap();
        assert_eq!(cut.task_ends.len(), 1_000_000);
    }
}
