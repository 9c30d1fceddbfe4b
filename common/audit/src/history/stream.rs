//! The passes of a stream: a list that only grows, in which each file occurs once.

use std::collections::BTreeSet;

use steadfast_common::ids::Pass;
use steadfast_common::records::keys::Keys;
use steadfast_common::records::stream::{StreamPassRecord, StreamRecord};

use super::keyspace::Keyspace;
use super::records::read;
use super::{Change, HistoryReport, Revision, Rule};

/// The list as of the last revision.
pub(super) struct StreamKeys<'a> {
    keys: &'a Keys,
    head: StreamRecord,
    /// The files of all passes that were added.
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

    /// Checks that a deleted pass is old, and that no checkpoint needs it.
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

#[cfg(test)]
mod tests {
    use super::*;
    use steadfast_common::records::stream::StreamFile;

    /// Returns the changes of a commit: the head, and passes with one file each.
    fn changes(head: &StreamRecord, passes: &[(u32, Option<&str>)]) -> Vec<Change> {
        let keys = Keys::of_job("stream");
        let put = |key: String, value: Option<String>| Change {
            key,
            value,
            create_revision: 1,
            version: 1,
        };
        let pass = |(pass, file): &(u32, Option<&str>)| {
            let record = file.map(|url| StreamPassRecord {
                manifest: String::new(),
                files: vec![StreamFile { modified_unix_ms: 1, url: url.to_owned(), size_bytes: 1 }],
                tasks: 1,
                records: 10,
                records_before: u64::from(*pass) * 10,
            });
            let json = record.map(|it| serde_json::to_string(&it).expect("it is plain data"));
            put(keys.stream_pass(Pass(*pass)), json)
        };
        let head = serde_json::to_string(head).expect("it is plain data");
        let mut all: Vec<Change> = passes.iter().map(pass).collect();
        all.push(put(keys.stream(), Some(head)));
        all
    }

    fn head(next: u32, first: u32, end: Option<u32>) -> StreamRecord {
        let records = u64::from(next) * 10;
        let (next, first, end) = (Pass(next), Pass(first), end.map(Pass));
        StreamRecord { next, first, end, records, ..StreamRecord::default() }
    }

    fn broken(commits: &[Vec<Change>]) -> usize {
        let keys = Keys::of_job("stream");
        let (mut stream, keyspace) = (StreamKeys::new(&keys, &[]), Keyspace::new(&keys, &[]));
        let mut report = HistoryReport::default();
        for (revision, changes) in (1..).zip(commits) {
            let revision = Revision { revision, changes: changes.clone() };
            stream.check(&revision, &keyspace, &mut report);
        }
        assert!(report.broken.iter().all(|it| it.rule == Rule::Stream));
        report.broken.len()
    }

    /// I6: each way to count a file twice, or to lose one, breaks the rule.
    #[test]
    fn a_list_of_passes_that_does_more_than_grow_is_found() {
        let first = changes(&head(1, 0, None), &[(0, Some("a"))]);
        let second = changes(&head(2, 0, None), &[(1, Some("b"))]);
        let end = changes(&head(2, 0, Some(2)), &[]);
        let forgotten = changes(&head(2, 1, Some(2)), &[(0, None)]);
        assert_eq!(broken(&[first.clone(), second.clone(), end.clone(), forgotten]), 0);
        let bad = [
            ("a file twice", changes(&head(2, 0, None), &[(1, Some("a"))])),
            ("a gap", changes(&head(3, 0, None), &[(2, Some("b"))])),
            ("written again", changes(&head(1, 0, None), &[(0, Some("b"))])),
            ("no head", changes(&head(1, 0, None), &[(1, Some("b"))])),
            ("deleted early", changes(&head(1, 0, None), &[(0, None)])),
            ("another end", changes(&head(1, 0, Some(2)), &[])),
        ];
        for (what, commit) in bad {
            assert!(0 < broken(&[first.clone(), commit]), "{what}");
        }
        let late = changes(&head(3, 0, Some(2)), &[(2, Some("c"))]);
        assert!(0 < broken(&[first, second, end, late]), "after the end");
    }
}
