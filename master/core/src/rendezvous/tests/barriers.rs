//! Barriers and synchronized values.

use steadfast_common::records::rendezvous::EXIT_TAG;

use super::*;

/// S003-5: a barrier is released when every member has entered, and not before; entering twice counts once.
#[test]
fn a_barrier_is_released_when_all_members_have_entered() {
    let mut master = Master::with_round(3, 2, 3);
    let at = barrier_id(1, "exit", 0);
    for (node, entered) in [(0, 1), (1, 2), (1, 2), (0, 2)] {
        master.enter(node, &at, b"").unwrap();
        assert_eq!(master.barrier(node, &at), Outcome::Waiting { entered, members: 3 });
    }
    assert_eq!(addresses(&master.state.missing("exit", Phase(0))), [address(2)]);
    master.enter(2, &at, b"").unwrap();
    (0..3).for_each(|node| assert!(matches!(master.barrier(node, &at), Outcome::Released(_))));
}

/// S003-6: every member gets the data of all members; the first data of a member count.
#[test]
fn synchronized_data_reach_every_member() {
    let mut master = Master::with_round(2, 2, 3);
    let at = barrier_id(1, "rank-info", 0);
    master.enter(0, &at, b"zero").unwrap();
    master.enter(0, &at, b"again").unwrap();
    master.enter(1, &at, b"one").unwrap();
    let expected: Vec<(NodeId, Arc<[u8]>)> =
        vec![(id(0), Arc::from(*b"zero")), (id(1), Arc::from(*b"one"))];
    for node in 0..2 {
        assert_eq!(data_of(&master.barrier(node, &at)), expected);
    }
    master.fail_over();
    assert_eq!(data_of(&master.barrier(0, &at)), expected, "an answer that was lost");
}

/// S003-5: barriers of different tags do not mix, nor do phases of a tag.
#[test]
fn two_tags_are_two_barriers() {
    let mut master = Master::with_round(2, 2, 3);
    let (a, b, next) = (barrier_id(1, "a", 0), barrier_id(1, "b", 0), barrier_id(1, "a", 1));
    master.enter(0, &a, b"a").unwrap();
    master.enter(1, &b, b"b").unwrap();
    assert_eq!(master.barrier(0, &a), Outcome::Waiting { entered: 1, members: 2 });
    assert_eq!(master.barrier(1, &b), Outcome::Waiting { entered: 1, members: 2 });
    master.enter(1, &a, b"a").unwrap();
    assert!(matches!(master.barrier(0, &a), Outcome::Released(_)));
    assert_eq!(master.barrier(0, &next), Outcome::Waiting { entered: 0, members: 2 });
    assert_eq!(master.barrier(1, &b), Outcome::Waiting { entered: 1, members: 2 });
}

/// S003-5: a member's death ends the barriers of its round with its name; a released one stays released.
#[test]
fn the_death_of_a_member_ends_a_barrier_with_its_name() {
    let mut master = Master::with_round(3, 2, 3);
    let (done, open) = (barrier_id(1, "done", 0), barrier_id(1, "open", 0));
    (0..3).for_each(|node| master.enter(node, &done, b"").unwrap());
    (0..2).for_each(|node| master.enter(node, &open, b"").unwrap());
    // The one that dies entered as well, in a barrier that others have not reached.
    let third = barrier_id(1, "third", 0);
    master.enter(2, &third, b"").unwrap();
    master.lose(2);
    for _ in 0..2 {
        for at in [&open, &third] {
            master.enter(0, at, b"").unwrap();
            let Outcome::Ended(EndedBy::Lost(names)) = master.barrier(0, at) else {
                panic!("{:?}", master.barrier(0, at));
            };
            assert_eq!(addresses(&names), [address(2)]);
        }
        assert!(matches!(master.barrier(0, &done), Outcome::Released(_)));
        master.fail_over();
    }
}

/// S003-5: a member that was lost after its success disturbs no round, but it cannot enter a barrier any more: the
/// barriers that it has not entered end with its name, and others are released without it.
#[test]
fn a_barrier_ends_that_a_member_lost_after_its_success_has_not_entered() {
    let mut master = Master::with_round(3, 2, 3);
    let (entered, missed) = (barrier_id(1, "entered", 0), barrier_id(1, "missed", 0));
    master.enter(0, &entered, b"").unwrap();
    master.enter(1, &missed, b"").unwrap();
    master.enter(0, &barrier_id(1, EXIT_TAG, 0), b"").unwrap();
    assert_eq!(master.barrier(1, &missed), Outcome::Waiting { entered: 1, members: 3 });
    master.lose(0);
    for _ in 0..2 {
        let Outcome::Ended(EndedBy::Lost(names)) = master.barrier(1, &missed) else {
            panic!("{:?}", master.barrier(1, &missed));
        };
        assert_eq!(addresses(&names), [address(0)]);
        master.fail_over();
    }
    (1..3).for_each(|node| master.enter(node, &entered, b"").unwrap());
    (1..3).for_each(|node| assert!(matches!(master.barrier(node, &entered), Outcome::Released(_))));
}

/// S003-5: a member that joins the next round, and the next round itself, end the barriers.
#[test]
fn a_barrier_ends_with_its_round() {
    let mut master = Master::with_round(2, 2, 3);
    let at = barrier_id(1, "exit", 0);
    master.enter(0, &at, b"").unwrap();
    master.join(1, 1);
    let Outcome::Ended(EndedBy::Rejoined(names)) = master.barrier(0, &at) else {
        panic!("{:?}", master.barrier(0, &at));
    };
    assert_eq!(addresses(&names), [address(1)]);
    master.join(0, 1);
    assert_eq!(master.barrier(0, &at), Outcome::Ended(EndedBy::NewRound(Round(2))));
    assert!(master.facts.contains(&Fact::TagsDeleted { round: Round(1) }));
    let again = barrier_id(2, "exit", 0);
    assert_eq!(master.barrier(0, &again), Outcome::Waiting { entered: 0, members: 2 });
}

/// S003-3: a waiting node does not end the barriers of a round.
#[test]
fn a_waiting_node_leaves_the_barriers_alone() {
    let mut master = Master::with_round(2, 2, 3);
    let at = barrier_id(1, "step", 0);
    master.enter(0, &at, b"").unwrap();
    master.join(2, 0);
    master.enter(1, &at, b"").unwrap();
    assert!(matches!(master.barrier(0, &at), Outcome::Released(_)));
}

#[test]
fn only_members_enter_barriers() {
    let mut master = Master::with_round(2, 2, 2);
    master.join(2, 0);
    for (node, round) in [(2, 1), (0, 2)] {
        let refusal = master.enter(node, &barrier_id(round, "exit", 0), b"").unwrap_err();
        assert_eq!(refusal, Refusal::NotMember { node: id(node), round: Round(round) });
    }
    let restarted = Caller { incarnation: Incarnation(50), ..Master::caller(0) };
    master.decide(master.state.announce(restarted, &agent(0)));
    assert!(master.state.barrier(restarted, &barrier_id(1, "exit", 0)).is_err());
}

/// A tag is used any number of times in a round, and the data of two phases are kept at most.
#[test]
fn a_tag_keeps_the_data_of_the_released_and_the_open_phase() {
    let mut master = Master::with_round(2, 2, 2);
    for phase in 0..100 {
        for node in 0..2 {
            master.enter(node, &barrier_id(1, "epoch", phase), b"data").unwrap();
            // The answer may have been lost for the others: they still find it.
            let last = phase.saturating_sub(u64::from(node == 0));
            let answer = master.barrier(1 - node, &barrier_id(1, "epoch", last));
            assert_eq!(matches!(answer, Outcome::Released(_)), 0 < phase || node == 1);
        }
        assert!(master.state.tags["epoch"].phases.len() <= 2);
    }
    assert_eq!(master.barrier(0, &barrier_id(1, "epoch", 7)), Outcome::Passed);
    let facts = master.facts.len();
    master.enter(0, &barrier_id(1, "epoch", 7), b"a delayed duplicate").unwrap();
    assert_eq!(master.facts.len(), facts);
    let refusal = master.enter(0, &barrier_id(1, "epoch", 101), b"").unwrap_err();
    assert_eq!(refusal.to_string(), "the tag `epoch` is in phase 100, not 101");
}

/// S003-6: data of one node and of all nodes are limited; the refusal has both numbers.
#[test]
fn too_much_data_is_refused_with_both_numbers() {
    let mut master = Master::with_round(3, 2, 3);
    let at = barrier_id(1, "state", 0);
    let large = vec![0; VALUE_BYTES_MAX];
    let refusal = master.enter(0, &at, &vec![0; VALUE_BYTES_MAX + 1]).unwrap_err();
    let text = "the node's data have 524289 bytes; 524288 are allowed for one node";
    assert_eq!(refusal.to_string(), text);
    (0..2).for_each(|node| master.enter(node, &at, &large).unwrap());
    let refusal = master.enter(2, &at, b"x").unwrap_err();
    let text = "the data of tag `state` would have 1048577 bytes; 1048576 are allowed for all nodes \
                together";
    assert_eq!(refusal.to_string(), text);
    assert_eq!(master.barrier(0, &at), Outcome::Waiting { entered: 2, members: 3 });
    let bytes = |fact: &Fact| if let Fact::Entered { data, .. } = fact { data.len() } else { 0 };
    let largest = master.facts.iter().map(bytes).max();
    assert_eq!(largest, Some(VALUE_BYTES_MAX), "each node's data are a fact of their own");
}

#[test]
fn tags_are_limited_in_length_characters_and_number() {
    let mut master = Master::with_round(2, 2, 2);
    for (tag, text) in [
        ("", "the tag has 0 bytes; 1 to 128 are allowed"),
        (&"t".repeat(129), "the tag has 129 bytes; 1 to 128 are allowed"),
        ("a/b", "the tag `a/b` has characters other than visible ASCII without `/`"),
        ("a b", "the tag `a b` has characters other than visible ASCII without `/`"),
    ] {
        assert_eq!(master.enter(0, &barrier_id(1, tag, 0), b"").unwrap_err().to_string(), text);
    }
    for number in 0..TAGS_MAX {
        master.enter(0, &barrier_id(1, &format!("tag-{number}"), 0), b"").unwrap();
    }
    let refusal = master.enter(0, &barrier_id(1, "one-more", 0), b"").unwrap_err();
    assert_eq!(refusal, Refusal::TooManyTags { limit: TAGS_MAX });
    master.enter(1, &barrier_id(1, "tag-0", 0), b"").unwrap();
}
