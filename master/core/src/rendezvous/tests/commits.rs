//! Commits of a job whose records are counted.

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::Pass;
use steadfast_common::records::commits::{COMMIT_TAG, CommitId, DataPosition};

use super::*;

const RECORDS: u64 = 10;

fn at(pass: u32, used: u64, seen: u64) -> DataPosition {
    DataPosition { pass: Pass(pass), used, seen }
}

/// A master of a job with records, whose nodes 0 … `nodes` − 1 are the members of round 1.
fn master(nodes: usize) -> Master {
    let mut master = Master::new(1, 3);
    master.settings.records = Some(RECORDS);
    (0..nodes).for_each(|node| master.announce(node));
    (0..nodes).for_each(|node| master.join(node, 0));
    master.pass(LAST_CALL_MS);
    assert_eq!(master.state.members().len(), nodes);
    master
}

impl Master {
    fn has(&mut self, node: usize, phase: u64, position: DataPosition) -> Result<(), Refusal> {
        let barrier = barrier_id(self.state.number().0, COMMIT_TAG, phase);
        self.enter(node, &barrier, &position.to_json())
    }

    fn all_have(&mut self, nodes: &[usize], phase: u64, position: DataPosition) {
        nodes.iter().for_each(|node| self.has(*node, phase, position).unwrap());
    }

    fn last(&self) -> Option<(CommitId, DataPosition)> {
        self.state.commit().map(|commit| (commit.id, commit.position))
    }
}

fn id(round: u64, phase: u64) -> CommitId {
    CommitId { round: Round(round), phase: Phase(phase) }
}

/// S003-9: a state counts when all members have it, and no record counts before; a new master knows.
#[test]
fn a_commit_is_decided_when_all_members_have_the_state() {
    let mut master = master(2);
    master.all_have(&[0, 1], 0, at(0, 0, 0));
    assert_eq!(master.last(), Some((id(1, 0), at(0, 0, 0))));
    master.has(0, 1, at(0, 4, 4)).unwrap();
    master.fail_over();
    assert_eq!(master.last(), Some((id(1, 0), at(0, 0, 0))));
    master.has(1, 1, at(0, 4, 4)).unwrap();
    master.fail_over();
    assert_eq!(master.last(), Some((id(1, 1), at(0, 4, 4))));
}

/// S002-9: a state that a lost member did not have does not count, and the next round is told which one does.
#[test]
fn a_round_begins_with_the_last_commit_that_was_decided() {
    let mut master = master(2);
    master.all_have(&[0, 1], 0, at(0, 0, 0));
    master.all_have(&[0, 1], 1, at(0, 4, 4));
    master.has(0, 2, at(0, 8, 8)).unwrap();
    master.lose(1);
    master.join(0, 1);
    let data = master.state.round().unwrap().data.unwrap();
    assert_eq!((data.records, data.commit), (RECORDS, Some(id(1, 1))));
    let refusal = master.has(0, 0, at(0, 8, 8)).unwrap_err();
    assert!(refusal.to_string().contains("cannot follow commit 1.1"), "{refusal}");
    master.has(0, 0, at(0, 4, 4)).unwrap();
    master.has(0, 1, at(0, 8, 8)).unwrap();
    assert_eq!(master.last(), Some((id(2, 1), at(0, 8, 8))));
}

/// S003-51: a state goes back together with its position, if no member has the last one any more.
#[test]
fn a_round_may_begin_with_an_earlier_commit() {
    let mut master = master(1);
    for (phase, position) in [at(0, 0, 0), at(0, 5, 5), at(1, 2, 12)].into_iter().enumerate() {
        master.all_have(&[0], phase as u64, position);
    }
    master.lose(0);
    master.announce(1);
    master.join(1, 0);
    master.pass(LAST_CALL_MS);
    master.all_have(&[1], 0, at(0, 5, 5));
    assert_eq!(master.last(), Some((id(2, 0), at(0, 5, 5))));
    master.all_have(&[1], 1, at(1, 2, 12));
}

#[test]
fn a_record_counts_once_in_a_pass() {
    let start = at(1, 4, 14);
    let next = |position| {
        let mut master = master(1);
        master.all_have(&[0], 0, start);
        master.has(0, 1, position)
    };
    // The last but one has left out two records of its pass, the last one a whole pass, too.
    for position in [start, at(1, 10, 20), at(2, 0, 20), at(2, 3, 23), at(2, 3, 21), at(3, 0, 18)] {
        assert_eq!(next(position), Ok(()), "{position:?}");
    }
    for position in [
        at(1, 3, 13),
        at(1, 6, 15),
        at(1, 6, 17),
        at(1, 11, 21),
        at(2, 3, 24),
        at(2, 3, 16),
        at(3, 0, 31),
        at(0, 9, 19),
    ] {
        let refusal = next(position).unwrap_err();
        assert_eq!(
            refusal.kind(),
            if position.used <= RECORDS { ErrorKind::Conflict } else { ErrorKind::Invalid }
        );
    }
}

#[test]
fn members_that_have_other_states_are_told() {
    let mut master = master(2);
    master.has(0, 0, at(0, 2, 2)).unwrap();
    let refusal = master.has(1, 0, at(0, 4, 4)).unwrap_err().to_string();
    assert!(refusal.contains("all workers commit after the same update"), "{refusal}");
    let barrier = barrier_id(1, COMMIT_TAG, 0);
    let refusal = master.enter(1, &barrier, b"4").unwrap_err().to_string();
    assert_eq!(refusal, "a member passes 4, which is not a position in 10 records");
    master.settings.records = None;
    assert_eq!(master.has(1, 0, at(0, 2, 2)), Err(Refusal::NoRecords));
}
