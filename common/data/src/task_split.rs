//! Splits files into tasks. Pure: the locations of the records are the input.

use steadfast_common::job::dataset::Chunk;

use crate::error::DataError;

/// The smallest automatic task size.
const RECORDS_MIN: u32 = 32;
/// The largest automatic task size.
const RECORDS_MAX: u32 = 8192;
/// The number of tasks above which the automatic task size increases, up to [`TASK_BYTES_AIM`].
const TASKS_AIM: u64 = 256;
/// The most bytes of its files that a task has after an increase of the automatic task size.
const TASK_BYTES_AIM: u64 = 32 << 20;

/// The approximate limit on the bytes that all tasks of a text together read, if it can only be read from its start.
/// The task size increases to stay below it, but not below [`FROM_START_TASKS`] tasks.
const FROM_START_BYTES: u64 = 2 << 30;
/// The number of tasks that are allowed even if they read more than [`FROM_START_BYTES`].
const FROM_START_TASKS: u64 = 16;
/// The largest task size: the largest power of two.
const TASK_SIZE_MAX: u32 = 1 << 31;

/// The number of records of one file, and where it can be split.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub records: u64,
    pub places: Places,
}

impl Shape {
    /// Returns the bytes of the records; 0 for a format whose records are not read to plan.
    pub fn bytes(&self) -> u64 {
        match &self.places {
            Places::RowGroups(_) => 0,
            Places::Bytes(marks) => marks.end,
        }
    }

    /// Returns the smallest task size that the file supports, in records.
    pub fn task_size_min(&self) -> u32 {
        match &self.places {
            Places::RowGroups(_) => 1,
            Places::Bytes(marks) => marks.stride,
        }
    }
}

/// The positions at which a file can be split.
#[derive(Clone, Debug)]
pub(crate) enum Places {
    /// Any row, but each chunk is within one of these consecutive row groups.
    RowGroups(Vec<u64>),
    /// The byte offsets of records.
    Bytes(Marks),
}

/// The byte offset of every `stride`-th record of a text file.
#[derive(Clone, Debug)]
pub(crate) struct Marks {
    growth: Growth,
    stride: u32,
    starts: Vec<u64>,
    records: u64,
    end: u64,
}

/// Whether the stride may grow with the size of the file.
#[derive(Clone, Copy, Debug)]
enum Growth {
    Fixed,
    Automatic(Access),
}

/// How a task accesses its part of a text.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Access {
    Anywhere,
    /// The task reads all text before its part.
    FromStart,
}

impl Marks {
    /// Creates the marks for tasks of `records_per_task` records, or of an automatic size.
    pub fn new(records_per_task: Option<u32>, access: Access) -> Self {
        let (growth, stride) = match records_per_task {
            Some(records) => (Growth::Fixed, records),
            None => (Growth::Automatic(access), RECORDS_MIN),
        };
        Self { growth, stride, starts: Vec::new(), records: 0, end: 0 }
    }

    /// Adds the next record, at bytes `start..end`.
    pub fn push(&mut self, start: u64, end: u64) {
        if self.records.is_multiple_of(u64::from(self.stride)) {
            self.starts.push(start);
        }
        self.records += 1;
        self.end = end;
        // Tasks will be at least as large as this file alone requires, so finer marks are useless. This
        // bounds the number of marks by the number of tasks.
        while self.stride < self.task_size_wanted() {
            self.stride *= 2;
            let mut index = 0;
            self.starts.retain(|_| {
                index += 1;
                index % 2 == 1
            });
        }
    }

    /// Returns the task size, in records, that the records so far require.
    fn task_size_wanted(&self) -> u32 {
        match self.growth {
            Growth::Fixed => self.stride,
            Growth::Automatic(Access::Anywhere) => task_size(self.records, self.end),
            Growth::Automatic(Access::FromStart) => {
                let tasks_max = (FROM_START_BYTES / self.end.max(1)).max(FROM_START_TASKS);
                let size = self.records.div_ceil(tasks_max).next_power_of_two();
                let size = u32::try_from(size).unwrap_or(TASK_SIZE_MAX).min(TASK_SIZE_MAX);
                task_size(self.records, self.end).max(size)
            }
        }
    }

    pub fn records(&self) -> u64 {
        self.records
    }

    /// Returns the byte offset of the end of the last record.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Returns the byte range of the records `first..last`. Both are multiples of the stride, except at the end of the
    /// file.
    fn range(&self, first: u64, last: u64) -> (u64, u64) {
        let stride = u64::from(self.stride);
        let at = |record: u64| self.starts.get((record / stride) as usize).copied();
        let end = if last >= self.records { self.end } else { at(last).unwrap_or(self.end) };
        (at(first).unwrap_or(self.end), end)
    }
}

/// Chooses the task size for `records` of together `bytes`: a power of two times the smallest, so that each
/// choice is a multiple of all smaller ones.
pub(crate) fn task_size(records: u64, bytes: u64) -> u32 {
    let record_bytes = bytes / records.max(1);
    let mut size = RECORDS_MIN;
    while size < RECORDS_MAX
        && records > u64::from(size) * TASKS_AIM
        && 2 * u64::from(size) * record_bytes <= TASK_BYTES_AIM
    {
        size *= 2;
    }
    size
}

/// The chunks in order, and for each task the index after its last chunk.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct TaskSplit {
    pub chunks: Vec<Chunk>,
    pub task_ends: Vec<u32>,
}

/// Splits `files` into tasks of `records_per_task` records.
///
/// A file with at least that many records is split on its own, so its last task may be smaller. Smaller
/// files are not split, but combined while they fit into one task.
pub(crate) fn split(files: &[Shape], records_per_task: u32) -> Result<TaskSplit, DataError> {
    let size = u64::from(records_per_task);
    let mut splitter = Splitter::default();
    let mut combined = 0;
    for (index, file) in files.iter().enumerate() {
        if combined > 0 && combined + file.records > size {
            splitter.end_task()?;
            combined = 0;
        }
        let index = u32::try_from(index)
            .map_err(|_| DataError::BadManifest { reason: "too many files".to_owned() })?;
        if file.records < size {
            splitter.add(index, file, 0, file.records);
            combined += file.records;
            continue;
        }
        let mut first = 0;
        while first < file.records {
            let last = file.records.min(first + size);
            splitter.add(index, file, first, last);
            splitter.end_task()?;
            first = last;
        }
    }
    if combined > 0 {
        splitter.end_task()?;
    }
    Ok(splitter.split)
}

#[derive(Default)]
struct Splitter {
    split: TaskSplit,
    /// The row group of the last chunk: its index and its first row.
    group: (usize, u64),
    file: u32,
}

impl Splitter {
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
        self.split.chunks.push(chunk);
    }

    fn end_task(&mut self) -> Result<(), DataError> {
        let chunks = self.split.chunks.len();
        let too_many = |_| DataError::TooManyTasks { tasks: chunks };
        self.split.task_ends.push(u32::try_from(chunks).map_err(too_many)?);
        Ok(())
    }
}

fn count(first: u64, last: u64) -> u32 {
    u32::try_from(last - first).expect("a chunk is no larger than a task, whose size is a u32")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RECORD_BYTES: u64 = 10;

    fn text(records: u64, records_per_task: Option<u32>) -> Shape {
        let mut marks = Marks::new(records_per_task, Access::Anywhere);
        for record in 0..records {
            marks.push(record * RECORD_BYTES, (record + 1) * RECORD_BYTES);
        }
        Shape { records, places: Places::Bytes(marks) }
    }

    fn rows(groups: &[u64]) -> Shape {
        Shape { records: groups.iter().sum(), places: Places::RowGroups(groups.to_vec()) }
    }

    /// Returns the record counts of all tasks.
    fn sizes(split: &TaskSplit) -> Vec<u64> {
        let mut start = 0;
        let mut sizes = Vec::new();
        for &end in &split.task_ends {
            let chunks = &split.chunks[start..end as usize];
            sizes.push(chunks.iter().map(|chunk| u64::from(chunk.records)).sum());
            start = end as usize;
        }
        sizes
    }

    /// Asserts that every record is in exactly one chunk, in order.
    fn assert_complete(split: &TaskSplit, files: &[Shape], bytes_per_record: u64) {
        let mut next = vec![0; files.len()];
        for chunk in &split.chunks {
            let expected = &mut next[chunk.file as usize];
            assert_eq!(chunk.first_record, *expected);
            assert!(chunk.records > 0);
            assert_eq!(chunk.start, *expected * bytes_per_record);
            *expected += u64::from(chunk.records);
            assert_eq!(chunk.end, *expected * bytes_per_record);
        }
        let counts: Vec<u64> = files.iter().map(|file| file.records).collect();
        assert_eq!(next, counts);
        assert_eq!(split.task_ends.last().map_or(0, |end| *end as usize), split.chunks.len());
    }

    proptest! {
        /// S004-15: a task is a list of (file, chunk); all tasks together have each record once.
        #[test]
        fn every_record_of_text_files_is_in_exactly_one_task(
            counts in prop::collection::vec(0_u64..3000, 1..8),
            records_per_task in prop::option::of(1_u32..400),
        ) {
            let files: Vec<Shape> =
                counts.iter().map(|count| text(*count, records_per_task)).collect();
            let size = records_per_task.unwrap_or_else(|| task_size(counts.iter().sum(), 0));
            let split = split(&files, size).unwrap();
            assert_complete(&split, &files, RECORD_BYTES);
            prop_assert!(sizes(&split).iter().all(|task| (1..=u64::from(size)).contains(task)));
        }

        /// S004-15, for Parquet: no chunk crosses a row group.
        #[test]
        fn every_row_is_in_exactly_one_task_and_no_chunk_crosses_a_row_group(
            files in prop::collection::vec(prop::collection::vec(0_u64..500, 0..6), 1..6),
            size in 1_u32..700,
        ) {
            let shapes: Vec<Shape> = files.iter().map(|groups| rows(groups)).collect();
            let split = split(&shapes, size).unwrap();
            assert_complete(&split, &shapes, 1);
            for chunk in &split.chunks {
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
        let split = split(&files, 100).unwrap();
        assert_eq!(sizes(&split), [90, 100, 100, 50, 20]);
    }

    /// S004-4: many more tasks than trainers, of many records each.
    #[test]
    fn the_size_of_tasks_follows_that_of_the_dataset() {
        let tasks = |records: u64| records.div_ceil(u64::from(task_size(records, 0)));
        assert_eq!(tasks(1797), 57);
        for records in (2_048..2_000_000).step_by(997) {
            assert!((64..=256).contains(&tasks(records)), "{records}: {}", tasks(records));
        }
        assert_eq!(task_size(u64::MAX, 0), RECORDS_MAX);
        // Images of 100 kB.
        assert_eq!(task_size(1_000_000, 100_000_000_000), 256);
    }

    #[test]
    fn a_large_file_has_no_more_marks_than_tasks() {
        let Places::Bytes(marks) = text(3_000_000, None).places else { panic!("text") };
        assert!(marks.starts.len() as u64 <= 3_000_000 / u64::from(RECORDS_MAX) + 1);
    }

    /// Each task decompresses the file from its start.
    #[test]
    fn the_tasks_of_a_compressed_file_are_few_if_it_is_large() {
        for (records, record_bytes, tasks) in [
            (1797, 300, 57),         // Small: as for an uncompressed file.
            (2_000_000, 4, 245),     // 8 MB.
            (2_000_000, 100, 16),    // 200 MB.
            (20_000_000, 1_000, 10), // 20 GB.
        ] {
            let mut marks = Marks::new(None, Access::FromStart);
            for record in 0..records {
                marks.push(record * record_bytes, (record + 1) * record_bytes);
            }
            let shape = Shape { records, places: Places::Bytes(marks) };
            let size = shape.task_size_min().max(task_size(records, shape.bytes()));
            let split = split(&[shape], size).unwrap();
            assert_complete(&split, &[text(records, Some(size))], record_bytes);
            assert_eq!(split.task_ends.len(), tasks, "{records} of {record_bytes} bytes");
        }
    }

    #[test]
    fn a_dataset_splits_into_a_million_tasks() {
        let files = [rows(&[1_000_000; 2]), text(2_000_000, Some(4))];
        let split = split(&files, 4).unwrap();
        assert_eq!(split.task_ends.len(), 1_000_000);
    }
}
