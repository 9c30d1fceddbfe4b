//! When rounds are formed, and of which nodes.

use super::*;

/// S002-5: nodes that announce themselves make one round, however long they take to start, also if the gaps
/// between them are longer than the last call.
#[test]
fn eight_nodes_that_arrive_within_a_minute_make_one_round() {
    for arrivals_s in [[0, 8, 16, 25, 33, 42, 51, 60], [0, 1, 2, 35, 36, 37, 38, 60]] {
        let mut master = Master::new(2, 8);
        let start = master.now.0;
        for node in 0..8 {
            master.announce(node);
        }
        for (node, arrival_s) in arrivals_s.into_iter().enumerate() {
            master.pass(start + arrival_s * 1_000 - master.now.0);
            assert_eq!(master.state.number(), Round(0));
            master.join(node, 0);
        }
        assert_eq!(master.state.number(), Round(1));
        assert_eq!(master.members(), Vec::from_iter((0..8).map(id)));
    }
}

/// S002-5: a node that announces itself while others wait is waited for, too; the round does not wait for
/// its maximum.
#[test]
fn a_node_is_waited_for_as_soon_as_it_is_starting() {
    let mut master = Master::new(2, 9);
    master.announce(0);
    for node in 0..8 {
        master.join(node, 0);
        master.announce(node + 1);
        master.pass(LAST_CALL_MS + 1);
    }
    assert_eq!(master.state.number(), Round(0));
    master.lose(8);
    master.pass(LAST_CALL_MS);
    assert_eq!((master.state.number(), master.members().len()), (Round(1), 8));
}

/// S003-2: without announcements, the first round is open until no node has arrived for the last call.
#[test]
fn the_first_round_has_a_last_call_after_each_arrival() {
    let mut master = Master::new(2, 4);
    master.join(0, 0);
    master.pass(LAST_CALL_MS);
    assert_eq!(master.state.number(), Round(0), "below the minimum");
    for node in 1..3 {
        master.join(node, 0);
        master.pass(LAST_CALL_MS - 1);
        assert_eq!(master.state.number(), Round(0));
    }
    master.pass(1);
    assert_eq!(master.members().len(), 3);
}

/// S003-2: no node waits once the maximum is reached, and a round never has more nodes.
#[test]
fn a_round_is_formed_at_once_when_the_maximum_is_reached() {
    let mut master = Master::new(2, 3);
    master.announce(3);
    (0..3).for_each(|node| master.join(node, 0));
    assert_eq!(master.members(), [id(0), id(1), id(2)]);
}

/// S001-11: ranks have no gaps; the workers of a node have adjacent ranks.
#[test]
fn workers_are_ranked_without_gaps() {
    let master = Master::with_round(5, 2, 5);
    let round = master.state.round().unwrap();
    let ranks: Vec<(u32, u32)> = round.members.iter().map(|it| (it.first_rank, it.slots)).collect();
    assert_eq!(ranks, [(0, 1), (1, 2), (3, 3), (6, 1), (7, 2)]);
    assert_eq!(round.world_size, 9);
}

/// S001-11: nodes that a launcher starts together are ranked in its order, whichever registers first; the others,
/// and those that came when the round was full, by age.
#[test]
fn new_nodes_are_ranked_by_the_order_that_they_ask_for() {
    let mut master = Master::new(3, 4);
    let join = |master: &mut Master, node: usize, order: u32, after: u64| {
        let agent = AgentRecord { order: Some(order), ..agent(node) };
        master.join_as(node, &agent, after);
    };
    join(&mut master, 1, 30, 0);
    join(&mut master, 2, 10, 0);
    master.join(0, 0);
    join(&mut master, 3, 20, 0);
    assert_eq!(master.members(), [id(2), id(3), id(1), id(0)], "without an order the last");
    join(&mut master, 5, 2, 1);
    join(&mut master, 4, 3, 1);
    master.lose(3);
    join(&mut master, 1, 30, 1);
    join(&mut master, 2, 10, 1);
    master.join(0, 1);
    assert_eq!(master.members(), [id(2), id(1), id(0), id(4)], "survivors first, and the oldest");
}

/// S001-11: survivors keep their order and come first; then the oldest node.
#[test]
fn survivors_keep_their_order_and_come_before_new_nodes() {
    let mut master = Master::new(2, 4);
    // Node 5 is older than node 6, and node 4 older than both.
    for node in [6, 5, 7, 4] {
        master.join(node, 0);
    }
    assert_eq!(master.members(), [id(4), id(5), id(6), id(7)], "the oldest first");
    master.join(1, 0);
    master.join(0, 0);
    master.lose(5);
    for node in [7, 6, 4] {
        master.join(node, 1);
    }
    assert_eq!(master.members(), [id(4), id(6), id(7), id(0)]);
}

/// S002-5, S001-20: after a loss, the survivors make the next round at once when all have asked.
#[test]
fn survivors_of_a_loss_need_no_last_call() {
    let mut master = Master::with_round(4, 2, 4);
    master.lose(1);
    for node in [3, 0] {
        master.join(node, 1);
        assert_eq!(master.state.number(), Round(1), "two nodes suffice, and node 2 is awaited");
    }
    master.join(2, 1);
    assert_eq!((master.state.number(), master.members()), (Round(2), vec![id(0), id(2), id(3)]));
}

/// S001-24: nodes of which none was in the last round are gathered like the first ones.
#[test]
fn a_round_without_survivors_has_a_last_call() {
    let mut master = Master::with_round(2, 2, 4);
    (0..2).for_each(|node| master.lose(node));
    (2..4).for_each(|node| master.join(node, 0));
    assert_eq!(master.state.number(), Round(1));
    master.join(4, 0);
    master.pass(LAST_CALL_MS);
    assert_eq!(master.members(), [id(2), id(3), id(4)]);
}

/// S003-3, S003-4: a late node waits, the members learn of it, and join the next round with it.
#[test]
fn a_late_node_waits_and_triggers_a_re_formation() {
    let mut master = Master::with_round(2, 2, 3);
    assert_eq!(master.waiting_nodes(0), 0);
    master.join(2, 0);
    let Directive::Wait { awaited, missing: _, until: None } = master.ask(2, 0) else {
        panic!("{:?}", master.ask(2, 0));
    };
    assert_eq!(addresses(&awaited), [address(0), address(1)]);
    let joins = Directive::Join { added: 1, surplus: 0, lost: Names::default() };
    assert_eq!((master.ask(0, 1), master.waiting_nodes(1)), (joins, 1));
    master.join(0, 1);
    assert_eq!(master.waiting_nodes(1), 2, "node 0 has left the round for the next one");
    master.join(1, 1);
    assert!(matches!(master.ask(2, 0), Directive::Start(round) if round.members.len() == 3));
    assert_eq!(master.ask(2, 2), Directive::Continue { round: Round(2) });
}

/// S002-5: a round goes on while a new node is still starting; it is interrupted once for all new nodes.
#[test]
fn a_round_is_not_interrupted_before_the_new_nodes_have_started() {
    let mut master = Master::with_round(2, 2, 4);
    master.announce(3);
    master.join(2, 0);
    assert_eq!(master.ask(0, 1), Directive::Continue { round: Round(1) });
    let Directive::Wait { awaited, until: Some(until), .. } = master.ask(2, 0) else {
        panic!("{:?}", master.ask(2, 0));
    };
    assert_eq!(
        (addresses(&awaited), until.0),
        (vec!["host-3:29500"], master.now.0 + JOIN_TIMEOUT_MS)
    );
    master.join(3, 0);
    assert_eq!(master.waiting_nodes(0), 2);
}

/// S002-11: a starting node that never comes delays others no longer than the join timeout.
#[test]
fn a_starting_node_that_never_joins_is_not_waited_for_for_ever() {
    let mut master = Master::with_round(2, 2, 4);
    master.announce(3);
    master.join(2, 0);
    master.pass(JOIN_TIMEOUT_MS - 1);
    assert_eq!(master.waiting_nodes(0), 0);
    master.pass(1);
    assert_eq!(master.waiting_nodes(0), 1);
    (0..2).for_each(|node| master.join(node, 1));
    assert_eq!(master.members(), [id(0), id(1), id(2)], "it is not waited for a second time");

    let mut first = Master::new(2, 4);
    first.announce(3);
    (0..2).for_each(|node| first.join(node, 0));
    first.pass(JOIN_TIMEOUT_MS - 1);
    let Directive::Wait { awaited, .. } = first.ask(0, 0) else { panic!("{:?}", first.ask(0, 0)) };
    assert_eq!((addresses(&awaited), first.state.number()), (vec!["host-3:29500"], Round(0)));
    first.pass(1);
    assert_eq!(first.members(), [id(0), id(1)]);
}

/// S002-11: a survivor that never asks again is named, and left behind at the join timeout. It may join
/// later.
#[test]
fn a_survivor_that_never_joins_is_named_and_then_left_behind() {
    let mut master = Master::with_round(4, 2, 4);
    master.lose(0);
    (1..3).for_each(|node| master.join(node, 1));
    let Directive::Wait { awaited, missing: 0, until: Some(until) } = master.ask(1, 1) else {
        panic!("{:?}", master.ask(1, 1));
    };
    assert_eq!(
        (addresses(&awaited), until.0),
        (vec!["host-3:29500"], master.now.0 + JOIN_TIMEOUT_MS)
    );
    master.pass(JOIN_TIMEOUT_MS);
    assert_eq!(master.members(), [id(1), id(2)]);
    assert_eq!(master.waiting_nodes(3), -1, "it was removed itself");
    master.join(3, 1);
    assert_eq!(master.waiting_nodes(1), 1);
    (1..3).for_each(|node| master.join(node, 2));
    assert_eq!(master.members(), [id(1), id(2), id(3)]);
}

/// S003-2: a round has at least the minimum of nodes. After the join timeout the nodes are told.
#[test]
fn below_the_minimum_no_round_is_formed() {
    let mut master = Master::with_round(3, 3, 4);
    master.lose(2);
    (0..2).for_each(|node| master.join(node, 1));
    let wait = master.ask(0, 1);
    assert!(matches!(wait, Directive::Wait { missing: 1, until: Some(_), .. }), "{wait:?}");
    master.pass(JOIN_TIMEOUT_MS);
    let awaited = Names::default();
    assert_eq!(master.ask(0, 1), Directive::TooFew { awaited, waiting: 2, nodes_min: 3 });
    master.join(5, 0);
    assert_eq!(master.members(), [id(0), id(1), id(5)]);
}

/// S003-2: a node beyond the maximum waits for a place, without disturbing the round; a loss gives it one.
#[test]
fn a_node_over_the_maximum_waits_until_one_is_lost() {
    let mut master = Master::with_round(3, 2, 3);
    (3..5).for_each(|node| master.join(node, 0));
    let waits = Directive::WaitForPlace { round: Round(1), limit: Limit::Nodes(3) };
    assert_eq!((master.ask(3, 0), master.waiting_nodes(0)), (waits.clone(), 0));
    assert_eq!(master.ask(0, 1), Directive::Continue { round: Round(1) });
    assert_eq!(master.state.deadline(&master.settings, &master.timers, master.now), None);
    master.lose(1);
    assert_eq!(master.waiting_nodes(0), -1);
    [0, 2].into_iter().for_each(|node| master.join(node, 1));
    assert_eq!(master.members(), [id(0), id(2), id(3)]);
    assert_eq!(
        master.ask(4, 0),
        Directive::WaitForPlace { round: Round(2), limit: Limit::Nodes(3) }
    );
}

/// S003-25: a member may ask for the next round by itself, such as after its workers failed.
#[test]
fn a_member_that_asks_again_brings_all_members_into_the_next_round() {
    let mut master = Master::with_round(3, 2, 3);
    master.join(4, 0);
    master.join(1, 1);
    assert_eq!(master.ask(0, 1), Directive::Join { added: 1, surplus: 0, lost: Names::default() });
    [0, 2].into_iter().for_each(|node| master.join(node, 1));
    assert_eq!(master.members(), [id(0), id(1), id(2)], "node 4 is over the maximum");
}
