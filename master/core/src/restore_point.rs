//! Choice of the checkpoint that a generation starts from.
//!
//! The pointer names the newest checkpoint. If that one is damaged, invalidated or missing, the one
//! before it is used. A manifest that is newer than the pointer was never committed by a master and is
//! ignored. If no checkpoint is left, training starts anew.

use steadfast_common::records::CheckpointRecord;

/// A manifest as it is stored in etcd.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub id: String,
    /// The etcd revision at which it was committed.
    pub create_revision: i64,
    /// The record, or why it cannot be read.
    pub record: Result<CheckpointRecord, String>,
}

/// What a generation starts from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RestorePoint {
    /// Absent when training starts anew.
    pub checkpoint: Option<(String, CheckpointRecord)>,
    /// Skipped checkpoints, with the reason.
    pub skipped: Vec<(String, String)>,
}

/// Chooses among all manifests, given the pointer's value. `error` returns why a readable record cannot
/// be restored.
pub fn choose(
    pointer: Option<&str>,
    mut candidates: Vec<Candidate>,
    error: impl Fn(&CheckpointRecord) -> Option<String>,
) -> RestorePoint {
    let mut point = RestorePoint::default();
    candidates.sort_by_key(|it| std::cmp::Reverse(it.create_revision));
    let pointed = pointer.map(|id| (id, candidates.iter().find(|it| it.id == id)));
    let newest = match pointed {
        // No checkpoint was ever committed.
        None => return point,
        Some((_, Some(pointed))) => pointed.create_revision,
        Some((id, None)) => {
            point.skipped.push((id.to_owned(), "its manifest is missing".to_owned()));
            i64::MAX
        }
    };
    for candidate in candidates.into_iter().filter(|it| it.create_revision <= newest) {
        let record = match candidate.record {
            Ok(record) => record,
            Err(reason) => {
                point.skipped.push((candidate.id, reason));
                continue;
            }
        };
        match record.invalidated.clone().or_else(|| error(&record)) {
            Some(reason) => point.skipped.push((candidate.id, reason)),
            None => {
                point.checkpoint = Some((candidate.id, record));
                break;
            }
        }
    }
    point
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(invalidated: Option<&str>) -> CheckpointRecord {
        CheckpointRecord {
            invalidated: invalidated.map(str::to_owned),
            ..CheckpointRecord::default()
        }
    }

    fn candidate(id: &str, create_revision: i64) -> Candidate {
        Candidate { id: id.to_owned(), create_revision, record: Ok(record(None)) }
    }

    fn chosen(pointer: Option<&str>, candidates: Vec<Candidate>) -> (Option<String>, usize) {
        let point = choose(pointer, candidates, |_| None);
        (point.checkpoint.map(|(id, _)| id), point.skipped.len())
    }

    #[test]
    fn the_one_that_the_pointer_names_is_taken() {
        assert_eq!(
            chosen(Some("b"), vec![candidate("a", 1), candidate("b", 2)]),
            (Some("b".into()), 0)
        );
        assert_eq!(chosen(None, vec![candidate("a", 1)]), (None, 0));
    }

    /// F34: if the newest checkpoint is damaged, the one before it is used, and the reason is reported.
    #[test]
    fn an_invalidated_or_unreadable_checkpoint_is_skipped() {
        let invalidated = Candidate { record: Ok(record(Some("damaged"))), ..candidate("b", 2) };
        let broken = Candidate { record: Err("no JSON".to_owned()), ..candidate("c", 3) };
        let all = vec![candidate("a", 1), invalidated.clone(), broken.clone()];
        assert_eq!(chosen(Some("c"), all), (Some("a".into()), 2));
        assert_eq!(chosen(Some("c"), vec![invalidated, broken]), (None, 2));
    }

    /// F35: a manifest to which no commit points is ignored.
    #[test]
    fn a_manifest_newer_than_the_pointer_is_ignored() {
        let forged = candidate("z", 9);
        assert_eq!(chosen(Some("a"), vec![candidate("a", 1), forged]), (Some("a".into()), 0));
    }

    /// S004-67: a dangling pointer does not discard the older checkpoints.
    #[test]
    fn a_pointer_to_nothing_falls_back_to_the_newest_manifest() {
        let all = vec![candidate("a", 1), candidate("b", 2)];
        assert_eq!(chosen(Some("gone"), all), (Some("b".into()), 1));
    }
}
