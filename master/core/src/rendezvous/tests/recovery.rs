//! What a new master refuses to go on from.

use steadfast_common::records::rendezvous::{NodeRecord, NodeState, SLOTS_MAX, SharedRecord};

use super::*;

fn formed(number: u64) -> Fact {
    let (round, world_size, members) = (Round(number), 0, Vec::new());
    Fact::Formed(Arc::new(RoundRecord { round, world_size, members, data: None }))
}

fn node(slots: u32, state: NodeState) -> Fact {
    let (incarnation, address, order) = (Incarnation(1), address(0), None);
    Fact::Node { node: id(0), record: NodeRecord { incarnation, address, slots, order, state } }
}

/// Counting on from such records would overflow.
#[test]
fn records_that_no_master_wrote_are_refused() {
    let error = |fact| Rendezvous::from_records([formed(3), fact]).unwrap_err();
    for number in [0, u64::MAX] {
        assert_eq!(error(formed(number)), InvalidRecord::Round(Round(number)));
    }
    for slots in [0, SLOTS_MAX + 1] {
        let invalid = InvalidRecord::Slots { node: id(0), slots };
        assert_eq!(error(node(slots, NodeState::Starting)), invalid);
    }
    let (tag, phase, round) = ("tag".to_owned(), Phase(u64::MAX), Round(3));
    let released = Fact::Released { round, tag: tag.clone(), phase };
    assert_eq!(error(released), InvalidRecord::Phase { tag, phase });
    let shared = SharedRecord { token: u64::MAX, state: Vec::new() };
    assert_eq!(error(Fact::Shared(Arc::new(shared))), InvalidRecord::Token(u64::MAX));
}

/// One round after the other would be formed, up to the one that the node asked for.
#[test]
fn a_node_that_asked_for_a_round_after_the_last_one_is_refused() {
    let recovered = |after| {
        let asked = node(1, NodeState::Asked { after: Round(after) });
        Rendezvous::from_records([asked, formed(3)])
    };
    assert!(recovered(3).is_ok());
    let (after, last) = (Round(4), Round(3));
    let invalid = InvalidRecord::FutureRound { node: id(0), after, last };
    assert_eq!(recovered(4), Err(invalid));
}
