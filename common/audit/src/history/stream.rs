//! The passes of a stream: a list that only grows, in which each file occurs once.

use std::collections::BTreeSet;

use steadfast_common::ids::Pass;
use steadfast_common::keys::Keys;
use steadfast_common::stream::{StreamPassRecord, StreamRecord};

use super::keyspace::Keyspace;
use super::records::read;
use super::{Change, HistoryReport, Revision, Rule};

/// The list as of the last revision.
pub(super) struct StreamKeys<'a> {
    keys: &'a Keys,
    head: StreamRecord,
    /// Of all passes that were added.
    files: BTreeSet<String>,
}

impl<'a> StreamKeys<'a> {
    pub fn new(keys: &'a Keys, start: &[Change]) -> Self {
        let mut stream = Self { keys, head: StreamRecord::default(), files: BTreeSet::new() };
        // Violations within the initial state are not reported.
        let mut unseen = HistoryReport::default();
        for change in start {
            if change.key == keys.stream() {
                stream.head = read(0, change, &mut unseen).unwrap_or_default();
            } else if keys.stream_pass_of(&change.key).is_some() {
                let record: Option<StreamPassRecord> = read(0, change, &mut unseen);
                let files = record.into_iter().flat_map(|it| it.files);
                stream.files.extend(files.map(|file| file.url));
            }
        }
        stream
    }

    /// Checks one revision and applies it.
    pub fn check(
        &mut self,
        revision: &Revision,
        keyspace: &Keyspace<'_>,
        report: &mut HistoryReport,
    ) {
        let at = revision.revision;
        let before = self.head.clone();
        if let Some(change) = revision.changes.iter().find(|it| it.key == self.keys.stream()) {
            match read(at, change, report) {
                Some(head) => self.head = head,
                None => report.breaks(at, Rule::Stream, "the head of the stream was deleted"),
            }
        }
        let (mut next, mut records) = (before.next, before.records);
        for change in &revision.changes {
            let Some(pass) = self.keys.stream_pass_of(&change.key) else { continue };
            if change.value.is_none() {
                self.check_forgotten(at, pass, keyspace, report);
                continue;
            }
            let Some(record) = read::<StreamPassRecord>(at, change, report) else { continue };
            if 1 < change.version || pass != next || before.end.is_some() {
                report.breaks(
                    at,
                    Rule::Stream,
                    format!("pass {pass} was written after {before:?}"),
                );
            }
            if record.records_before != records {
                let text = format!("pass {pass} follows {records} records, and says otherwise");
                report.breaks(at, Rule::Stream, text);
            }
            next = Pass(pass.0 + 1);
            records += record.records;
            for file in record.files {
                if !self.files.insert(file.url.clone()) {
                    let text = format!("{} is in pass {pass} and in one before", file.url);
                    report.breaks(at, Rule::Stream, text);
                }
            }
        }
        let StreamRecord { next: found, records: sum, first, end, .. } = &self.head;
        let ends_well = match (before.end, end) {
            (Some(before), end) => *end == Some(before),
            (None, end) => end.is_none_or(|end| end == next),
        };
        if (*found, *sum) != (next, records) || *first < before.first || !ends_well {
            let text = format!("the head of the stream changed from {before:?} to {:?}", self.head);
            report.breaks(at, Rule::Stream, text);
        }
    }

    /// No checkpoint needs a pass that is forgotten.
    fn check_forgotten(
        &self,
        at: i64,
        pass: Pass,
        keyspace: &Keyspace<'_>,
        report: &mut HistoryReport,
    ) {
        if self.head.first <= pass {
            report.breaks(at, Rule::Stream, format!("pass {pass} was deleted, but is not old"));
        }
        let needed = keyspace.checkpoints().find(|(_, it)| it.first_pass() <= pass);
        if let Some((id, _)) = needed {
            let text = format!("pass {pass} was deleted, which checkpoint {id} needs");
            report.breaks(at, Rule::Stream, text);
        }
    }
}
