//! Rounds have as many workers as a person has chosen.

use steadfast_common::records::rendezvous::EXIT_TAG;
use steadfast_common::records::scale::{ScaleMode, ScaleWish};

use super::*;

fn scale(master: &mut Master, workers: Option<u32>) {
    let wish = ScaleWish { workers: Some(workers), ..ScaleWish::default() };
    master.decide(master.state.choose_scale(wish));
}

/// S002-10: members of a round that is too large join a smaller one, in which the oldest stay, and those that had to go
/// take the place of one that is lost.
#[test]
fn a_smaller_number_makes_a_smaller_round() {
    // They have 1, 2, 3 and 1 workers.
    let mut master = Master::with_round(4, 1, 8);
    scale(&mut master, Some(4));
    let leave = Directive::Join { added: 0, surplus: 2, lost: Names::default() };
    assert_eq!((master.ask(0, 1), master.waiting_nodes(3)), (leave, 2));
    (0..4).for_each(|node| master.join(node, 1));
    assert_eq!(master.members(), [id(0), id(1)]);
    let limit = Limit::Workers(4);
    assert_eq!(master.ask(2, 1), Directive::WaitForPlace { round: Round(2), limit });
    assert_eq!(master.ask(0, 2), Directive::Continue { round: Round(2) });
    assert_eq!(master.state.worker_counts(&master.settings), [1, 3, 6, 7]);
    master.lose(0);
    master.join(1, 2);
    assert_eq!(master.members(), [id(1)], "node 2 would make five");
    scale(&mut master, None);
    master.join(1, 3);
    assert_eq!(master.members(), [id(1), id(2), id(3)]);
}

/// S002-10: a larger number takes in nodes that wait.
#[test]
fn a_larger_number_takes_in_nodes_that_wait() {
    let mut master = Master::with_round(3, 1, 8);
    scale(&mut master, Some(1));
    (0..3).for_each(|node| master.join(node, 1));
    assert_eq!(master.members(), [id(0)]);
    scale(&mut master, Some(3));
    assert_eq!(master.waiting_nodes(0), 1);
    master.fail_over();
    master.join(0, 2);
    assert_eq!(master.members(), [id(0), id(1)]);
}

/// The fewest nodes of the job are more than any number of workers.
#[test]
fn a_round_never_has_fewer_nodes_than_the_minimum() {
    let mut master = Master::with_round(4, 3, 8);
    scale(&mut master, Some(1));
    (0..4).for_each(|node| master.join(node, 1));
    assert_eq!(master.members(), [id(0), id(1), id(2)]);
    assert_eq!(master.ask(0, 2), Directive::Continue { round: Round(2) });
}

/// A job whose workers succeed one after the other ends with those that it has.
#[test]
fn a_round_that_ends_is_not_made_smaller() {
    let mut master = Master::with_round(3, 1, 8);
    master.enter(0, &barrier_id(1, EXIT_TAG, 0), b"").unwrap();
    scale(&mut master, Some(1));
    assert_eq!(master.ask(1, 1), Directive::Continue { round: Round(1) });
    [1, 2].into_iter().for_each(|it| master.enter(it, &barrier_id(1, EXIT_TAG, 0), b"").unwrap());
    assert!(master.state.result().is_some());
}

#[test]
fn what_is_not_asked_for_stays() {
    let mut master = Master::with_round(1, 1, 8);
    scale(&mut master, Some(2));
    let wish = ScaleWish { mode: Some(ScaleMode::Off), ..ScaleWish::default() };
    master.decide(master.state.choose_scale(wish));
    let record = master.state.scale_record();
    assert_eq!((record.mode, record.workers), (ScaleMode::Off, Some(2)));
    assert_eq!(master.state.choose_scale(wish), Ok(Vec::new()), "nothing is written twice");
}

/// S002-11: a round has a multiple of the unit; a node without a partner waits until one comes, and a number of workers is
/// rounded as well.
#[test]
fn a_round_has_a_multiple_of_the_unit() {
    let mut master = Master::new(2, 8);
    master.settings.nodes = master.settings.nodes.in_units_of(2).unwrap();
    (0..3).for_each(|node| master.join(node, 0));
    master.pass(LAST_CALL_MS);
    assert_eq!(master.members(), [id(0), id(1)]);
    let limit = Limit::Unit(2);
    assert_eq!(master.ask(2, 0), Directive::WaitForPlace { round: Round(1), limit });
    assert_eq!(master.ask(0, 1), Directive::Continue { round: Round(1) });
    assert_eq!(master.state.worker_counts(&master.settings), [3]);
    master.join(3, 0);
    assert_eq!(master.waiting_nodes(0), 2);
    (0..2).for_each(|node| master.join(node, 1));
    assert_eq!(master.members(), [id(0), id(1), id(2), id(3)]);
    assert_eq!(master.state.worker_counts(&master.settings), [3, 7]);
    // One that is lost takes its partner out.
    master.lose(3);
    (0..3).for_each(|node| master.join(node, 2));
    assert_eq!(master.members(), [id(0), id(1)]);
    master.join(4, 0);
    (0..2).for_each(|node| master.join(node, 3));
    assert_eq!(master.members(), [id(0), id(1), id(2), id(4)]);
    scale(&mut master, Some(5));
    (0..4).filter(|it| *it != 3).chain([4]).for_each(|node| master.join(node, 4));
    assert_eq!(master.members(), [id(0), id(1)]);
}
