//! Which checkpoint a generation begins from.
//!
//! The pointer names the newest one. Where that one is damaged, set aside, or not there at all, the
//! one before it does; a manifest that is newer than the pointer was never committed by a master and
//! counts for nothing. Where no checkpoint is left, training begins anew.

use steadfast_common::records::CheckpointRecord;

/// A manifest as etcd holds it.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub id: String,
    /// When it was committed, in etcd's revisions.
    pub create_revision: i64,
    /// The record, or why it cannot be read.
    pub record: Result<CheckpointRecord, String>,
}

/// What a generation begins from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RestorePoint {
    /// Absent when training begins anew.
    pub checkpoint: Option<(String, CheckpointRecord)>,
    /// What was passed over, and why.
    pub skipped: Vec<(String, String)>,
}

/// Chooses among all manifests, given the pointer's value and `is_whole`, which names what is wrong
/// with a record that can be read.
pub fn choose(
    pointer: Option<&str>,
    mut candidates: Vec<Candidate>,
    fault: impl Fn(&CheckpointRecord) -> Option<String>,
) -> RestorePoint {
    let mut point = RestorePoint::default();
    candidates.sort_by_key(|it| std::cmp::Reverse(it.create_revision));
    let pointed = pointer.map(|id| (id, candidates.iter().find(|it| it.id == id)));
    let newest = match pointed {
        // Nobody ever committed one.
        None => return point,
        Some((_, Some(pointed))) => pointed.create_revision,
        Some((id, None)) => {
            point.skipped.push((id.to_owned(), "its manifest is gone".to_owned()));
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
        match record.set_aside.clone().or_else(|| fault(&record)) {
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

    fn record(set_aside: Option<&str>) -> CheckpointRecord {
        CheckpointRecord { set_aside: set_aside.map(str::to_owned), ..CheckpointRecord::default() }
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

    /// F34: where the newest is damaged the one before it is used, aloud.
    #[test]
    fn what_is_set_aside_or_unreadable_is_passed_over() {
        let aside = Candidate { record: Ok(record(Some("damaged"))), ..candidate("b", 2) };
        let broken = Candidate { record: Err("no JSON".to_owned()), ..candidate("c", 3) };
        let all = vec![candidate("a", 1), aside.clone(), broken.clone()];
        assert_eq!(chosen(Some("c"), all), (Some("a".into()), 2));
        assert_eq!(chosen(Some("c"), vec![aside, broken]), (None, 2));
    }

    /// F35: a manifest that no commit points at is ignored.
    #[test]
    fn a_manifest_newer_than_the_pointer_is_ignored() {
        let forged = candidate("z", 9);
        assert_eq!(chosen(Some("a"), vec![candidate("a", 1), forged]), (Some("a".into()), 0));
    }

    /// S004-67: a pointer to nothing does not throw the older checkpoints away.
    #[test]
    fn a_pointer_to_nothing_falls_back_to_the_newest_manifest() {
        let all = vec![candidate("a", 1), candidate("b", 2)];
        assert_eq!(chosen(Some("gone"), all), (Some("b".into()), 1));
    }
}
