//! Streams: which files of a followed dataset are complete, and how they become passes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use steadfast_common::ids::Pass;
use steadfast_common::job::spec::Mode;
use steadfast_common::records::stream::{
    LeftOut, PASS_FILES_MAX, StreamFile, StreamPassRecord, StreamRecord,
};

use crate::job_state::Fact;

/// How long a file must stay as it is to count as complete, in milliseconds.
pub const COMPLETE_AFTER_MS: u64 = 2_000;

/// Passes that are divided ahead of the one that is trained on: others wait as names of files.
const AHEAD_MAX: u32 = 64;

/// Passes that are forgotten in one transaction.
const FORGOTTEN_TOGETHER: u32 = 32;

/// The durable state of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stream {
    pub record: StreamRecord,
    /// The passes from `record.first` up to, but not including, `record.next`.
    passes: Arc<BTreeMap<Pass, Arc<StreamPassRecord>>>,
}

/// The reason why a pass is not added: the proposer knows an earlier state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the stream is at another pass")]
    OtherPass,
    #[error("the stream has ended")]
    Ended,
}

impl Stream {
    pub(crate) fn set_pass(&mut self, pass: Pass, record: Option<Arc<StreamPassRecord>>) {
        let passes = Arc::make_mut(&mut self.passes);
        match record {
            Some(record) => drop(passes.insert(pass, record)),
            None => drop(passes.remove(&pass)),
        }
    }

    /// Returns the known passes: those that were added and not forgotten.
    pub fn passes(&self) -> &BTreeMap<Pass, Arc<StreamPassRecord>> {
        &self.passes
    }

    /// Returns a pass, or `None` if it was not added yet or was forgotten.
    pub fn pass(&self, pass: Pass) -> Option<&StreamPassRecord> {
        self.passes.get(&pass).map(|it| &**it)
    }

    /// Returns the number of records in all passes before `pass`. For a pass that is not known, these are the records
    /// of all passes.
    pub fn records_before(&self, pass: Pass) -> u64 {
        self.pass(pass).map_or(self.record.records, |it| it.records_before)
    }

    /// Adds the next pass.
    ///
    /// # Errors
    /// If it is not the next one, or the stream has ended.
    pub fn add(&self, pass: Pass, added: StreamPassRecord) -> Result<Vec<Fact>, Refusal> {
        let StreamRecord { next, end, files, records, .. } = &self.record;
        if *next != pass || added.records_before != *records {
            return Err(Refusal::OtherPass);
        }
        if end.is_some() {
            return Err(Refusal::Ended);
        }
        let head = StreamRecord {
            next: Pass(pass.0 + 1),
            files: files + added.files.len() as u64,
            records: records + added.records,
            ..self.record.clone()
        };
        Ok(vec![Fact::StreamPass { pass, record: Some(added.into()) }, Fact::Stream(head)])
    }

    /// Ends the stream after the passes so far, unless it has ended.
    pub fn end(&self, left_out: LeftOut) -> Option<Fact> {
        let end = Some(self.record.next);
        let is_new = self.record.end.is_none();
        is_new.then(|| Fact::Stream(StreamRecord { end, left_out, ..self.record.clone() }))
    }

    /// Forgets passes before `to`, whose files are in the object `forgotten`: as many as fit into a transaction.
    pub fn forget(&self, to: Pass, forgotten: String) -> Vec<Fact> {
        let first = self.record.first;
        let to = to.min(self.record.next).min(Pass(first.0.saturating_add(FORGOTTEN_TOGETHER)));
        if to <= first {
            return Vec::new();
        }
        let passes = self.passes.range(first..to).map(|(pass, _)| *pass);
        let mut facts: Vec<Fact> =
            passes.map(|pass| Fact::StreamPass { pass, record: None }).collect();
        let forgotten = Some(forgotten);
        facts.push(Fact::Stream(StreamRecord { first: to, forgotten, ..self.record.clone() }));
        facts
    }
}

/// The files of a stream that are not taken yet, as its listings show them.
#[derive(Debug, Default)]
pub struct Watched {
    taken: BTreeSet<String>,
    /// Since when each file has been as it is, in milliseconds of the observer's own clock.
    waiting: BTreeMap<StreamFile, u64>,
    /// Files that cannot be used as they are, with the reason.
    left_out: BTreeMap<StreamFile, String>,
}

impl Watched {
    /// Creates the state before the first listing. `taken` holds the URLs of the files of all passes.
    pub fn new(taken: BTreeSet<String>) -> Self {
        Self { taken, ..Self::default() }
    }

    /// Notes a listing. A file is new until it is taken; one that has changed waits anew.
    pub fn note(&mut self, listed: Vec<StreamFile>, now_ms: u64) {
        let listed = BTreeSet::from_iter(listed);
        self.left_out.retain(|file, _| listed.contains(file));
        let is_new = |file: &StreamFile| {
            !self.taken.contains(&file.url) && !self.left_out.contains_key(file)
        };
        let waiting = listed.into_iter().filter(is_new).map(|file| {
            let since = self.waiting.get(&file).copied().unwrap_or(now_ms);
            (file, since)
        });
        self.waiting = waiting.collect();
    }

    /// Returns the files that are complete, in the order in which they are taken: by time, then by name.
    pub fn complete(&self, now_ms: u64) -> Vec<StreamFile> {
        let is_complete = |since: &u64| since + COMPLETE_AFTER_MS <= now_ms;
        self.waiting.iter().filter(|(_, since)| is_complete(since)).map(|it| it.0.clone()).collect()
    }

    /// Returns the files that are in no pass yet, whether they are complete or not.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &StreamFile> {
        self.waiting.keys()
    }

    /// Notes that files belong to a pass.
    pub fn take(&mut self, files: &[StreamFile]) {
        for file in files {
            self.waiting.remove(file);
            self.taken.insert(file.url.clone());
        }
    }

    /// Notes that a file cannot be used as it is.
    pub fn leave_out(&mut self, file: &StreamFile, reason: String) {
        self.waiting.remove(file);
        self.left_out.insert(file.clone(), reason);
    }

    /// Returns the files that cannot be used, each with the reason.
    pub fn left_out(&self) -> &BTreeMap<StreamFile, String> {
        &self.left_out
    }

    /// Returns the URLs of the files of all passes.
    pub fn taken(&self) -> &BTreeSet<String> {
        &self.taken
    }

    /// Removes the URLs for which `is_gone` is true: those of files that no listing has shown for a long time.
    pub fn forget(&mut self, is_gone: impl Fn(&str) -> bool) {
        self.taken.retain(|url| !is_gone(url));
    }
}

/// Returns how many of the complete files become the next pass, `present` being the one that is trained on.
///
/// In synchronous mode this is one file, so that the result depends on the sequence of files and not on when they are
/// found. In asynchronous mode these are all files, as late as possible, because a pass ends only when all its tasks
/// are done.
pub fn files_of_next(mode: Mode, complete: usize, next: Pass, present: Pass) -> usize {
    match mode {
        Mode::Sync if next.0 < present.0.saturating_add(AHEAD_MAX) => complete.min(1),
        Mode::Async if next.0 <= present.0.saturating_add(1) => complete.min(PASS_FILES_MAX),
        Mode::Sync | Mode::Async => 0,
    }
}
