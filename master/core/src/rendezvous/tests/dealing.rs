//! Records of a job whose order is dynamic.

use steadfast_common::error::ErrorKind;
use steadfast_common::records::commits::{BegunState, COMMIT_TAG, CommitId, Progress};
use steadfast_common::records::ranges::Ranges;

use super::*;

const RECORDS: u64 = 100;

/// A master of a job of one pass, whose nodes 0 … `nodes` − 1 are the members of round 1. Node *i* has *i* mod 3 + 1
/// workers.
fn master(nodes: usize) -> Master {
    let mut master = Master::new(1, 3);
    (master.settings.records, master.settings.order) = (Some(RECORDS), RecordOrder::Dynamic);
    (0..nodes).for_each(|node| master.announce(node));
    (0..nodes).for_each(|node| master.join(node, 0));
    master.pass(LAST_CALL_MS);
    assert_eq!(master.state.members().len(), nodes);
    master
}

/// Returns the same master, once the workers have begun.
fn begun(nodes: usize) -> Master {
    let mut master = master(nodes);
    (0..nodes).for_each(|node| master.begin(node, 0).unwrap());
    master
}

fn ranges(pairs: &[(u64, u64)]) -> Ranges {
    Ranges::try_from(pairs.to_vec()).unwrap()
}

impl Master {
    fn deal_terms(&self, total: u64, wanted: u64) -> DealTerms {
        DealTerms { round: self.state.number(), total, wanted, least: 1, end: RECORDS }
    }

    /// A node asks for records; returns what it holds.
    fn deal(&mut self, node: usize, total: u64, wanted: u64) -> Result<Held, Refusal> {
        let terms = self.deal_terms(total, wanted);
        let facts = self.state.deal(Self::caller(node), &terms, &self.settings)?;
        self.commit(facts);
        self.state.held(Self::caller(node), &terms, &self.settings)
    }

    fn passes(&mut self, node: usize, phase: u64, progress: &Progress) -> Result<(), Refusal> {
        let barrier = barrier_id(self.state.number().0, COMMIT_TAG, phase);
        self.enter(node, &barrier, &progress.to_json())
    }

    fn begin(&mut self, node: usize, number: u64) -> Result<(), Refusal> {
        self.passes(node, 0, &Progress::State(BegunState { number, commit: None }))
    }

    fn uses(&mut self, node: usize, phase: u64, used: &[(u64, u64)]) -> Result<(), Refusal> {
        self.passes(node, phase, &Progress::Used(ranges(used)))
    }

    /// Returns what the last commit has seen: all records below the first number, and the others.
    fn seen(&self) -> (u64, Ranges) {
        let commit = self.state.commit().unwrap();
        (commit.first_unseen(RECORDS), commit.ahead.clone())
    }
}

fn held(total: u64, pairs: &[(u64, u64)]) -> Held {
    Held { total, ranges: ranges(pairs), is_end: false }
}

/// S002-3: a request that is repeated, also to another master, gets the same answer.
#[test]
fn each_record_is_dealt_to_one_member() {
    let mut master = begun(2);
    assert_eq!(master.deal(0, 0, 10).unwrap(), held(10, &[(0, 10)]));
    assert_eq!(master.deal(1, 0, 5).unwrap(), held(5, &[(10, 15)]));
    master.fail_over();
    assert_eq!(master.deal(0, 0, 10).unwrap(), held(10, &[(0, 10)]));
    assert_eq!(master.deal(0, 10, 3).unwrap(), held(13, &[(0, 10), (15, 18)]));
    assert_eq!(master.deal(1, 5, 1).unwrap(), held(6, &[(10, 15), (18, 19)]));
}

/// S002-2, S003-51: a commit has seen what the workers have used of what they were dealt.
#[test]
fn a_record_counts_when_its_holder_has_used_it() {
    let mut master = begun(2);
    master.deal(0, 0, 10).unwrap();
    master.deal(1, 0, 10).unwrap();
    master.uses(0, 1, &[(0, 4)]).unwrap();
    assert_eq!(master.uses(1, 1, &[(9, 11)]), Err(Refusal::NotHeld { node: id(1) }));
    master.uses(1, 1, &[(10, 16)]).unwrap();
    assert_eq!(master.seen(), (4, ranges(&[(10, 16)])));
    master.fail_over();
    // What counts already does not count again.
    for used in [[(3, 5)], [(10, 11)]] {
        let node = usize::from(used[0].0 == 10);
        assert_eq!(master.uses(node, 2, &used), Err(Refusal::NotHeld { node: id(node) }));
    }
    master.uses(0, 2, &[(4, 10)]).unwrap();
    master.uses(1, 2, &[]).unwrap();
    assert_eq!(master.seen(), (16, Ranges::default()));
    // Of what a member was given it holds what no commit has seen.
    assert_eq!(master.deal(0, 10, 2).unwrap(), held(12, &[(20, 22)]));
}

/// S002-3, S002-9: what a lost member has not trained is dealt again, and nothing else.
#[test]
fn the_records_of_a_lost_member_are_dealt_again() {
    let mut master = begun(2);
    master.deal(0, 0, 10).unwrap();
    master.deal(1, 0, 10).unwrap();
    master.uses(0, 1, &[(0, 10)]).unwrap();
    master.uses(1, 1, &[(12, 15)]).unwrap();
    master.uses(1, 2, &[(10, 12)]).unwrap();
    master.lose(1);
    master.join(0, 1);
    let last = CommitId { round: Round(1), phase: Phase(1) }.number();
    assert_eq!(master.deal(0, 0, 4), Err(Refusal::NotBegun { round: Round(2) }));
    master.begin(0, last).unwrap();
    assert_eq!(master.deal(0, 0, 4).unwrap(), held(4, &[(10, 12), (15, 17)]));
    master.fail_over();
    assert_eq!(master.deal(0, 4, 9).unwrap(), held(13, &[(10, 12), (15, 26)]));
}

/// Shares shrink toward the end, so that a fast worker does not leave a slow one alone with the last ones.
#[test]
fn the_last_records_are_dealt_in_small_shares() {
    let mut master = begun(1);
    let (mut total, mut shares) = (0, Vec::new());
    loop {
        let held = master.deal(0, total, 40).unwrap();
        shares.push(held.total - total);
        total = held.total;
        if held.is_end {
            break;
        }
    }
    assert_eq!(shares, [40, 30, 15, 8, 4, 2, 1]);
    assert_eq!(master.deal(0, total, 40).unwrap().total, RECORDS);
}

#[test]
fn a_member_is_told_why_it_gets_no_records() {
    let mut master = master(2);
    assert_eq!(master.deal(0, 0, 1), Err(Refusal::NotBegun { round: Round(1) }));
    master.begin(0, 0).unwrap();
    let refusal = master.begin(1, 1 << 32).unwrap_err();
    assert!(refusal.to_string().contains("all begin with the same"), "{refusal}");
    master.begin(1, 0).unwrap();
    let refusal = master.deal(2, 0, 1).unwrap_err();
    assert_eq!(refusal.kind(), ErrorKind::NotFound);
    let terms = DealTerms { round: Round(2), ..master.deal_terms(0, 1) };
    let refusal = master.state.deal(Master::caller(0), &terms, &master.settings).unwrap_err();
    assert_eq!(refusal, Refusal::NotMember { node: id(0), round: Round(2) });
    master.settings.order = RecordOrder::Fixed;
    assert_eq!(master.deal(0, 0, 1), Err(Refusal::NotDealt));
}

#[test]
fn a_state_whose_records_are_unknown_is_refused() {
    let mut master = begun(1);
    master.deal(0, 0, 4).unwrap();
    master.uses(0, 1, &[(0, 4)]).unwrap();
    let first = master.state.commit().unwrap().as_ref().clone();
    master.uses(0, 2, &[]).unwrap();
    master.lose(0);
    master.announce(1);
    master.join(1, 0);
    master.pass(LAST_CALL_MS);
    let number = first.id.number();
    assert_eq!(master.begin(1, number), Err(Refusal::OldState { state: number }));
    master.passes(1, 0, &Progress::State(BegunState { number, commit: Some(first) })).unwrap();
    assert_eq!(master.seen(), (4, Ranges::default()));
}
