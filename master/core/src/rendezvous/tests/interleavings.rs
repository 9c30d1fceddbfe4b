//! Every interleaving of a small world, and random ones of a larger world.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use super::world::{Event, Fate, World};

fn events(nodes: usize) -> Vec<Event> {
    let of = |node| {
        [
            Event::Boots(node),
            Event::Announces(node),
            Event::Joins(node, Fate::Answered),
            Event::Joins(node, Fate::MasterDies),
            Event::JoinIsRepeated(node),
            Event::Polls(node),
            Event::Enters(node, Fate::Answered),
            Event::Enters(node, Fate::MasterDies),
            Event::Succeeds(node, Fate::Answered),
            Event::Succeeds(node, Fate::MasterDies),
            Event::Dies(node),
            Event::Noticed(node),
        ]
    };
    let others = [
        Event::Scales(1, Fate::Answered),
        Event::Scales(3, Fate::MasterDies),
        Event::Scales(100, Fate::Answered),
        Event::TimePasses,
    ];
    (0..nodes).flat_map(of).chain(others).collect()
}

/// Applies every event in every state that can be reached in `depth` events; returns the number of states.
fn explore(start: World, nodes: usize, depth: usize) -> usize {
    let events = events(nodes);
    let mut seen = BTreeSet::from([start.key()]);
    let mut frontier = vec![start];
    for _ in 0..depth {
        let mut next = Vec::new();
        for world in &frontier {
            for after in events.iter().filter_map(|event| world.after(*event)) {
                if seen.insert(after.key()) {
                    after.check();
                    if seen.len() % 8 == 0 {
                        after.check_progress();
                    }
                    next.push(after);
                }
            }
        }
        frontier = next;
    }
    seen.len()
}

fn world_after(nodes: usize, events: &[Event]) -> World {
    let start = World::new(nodes, 2, 3);
    events.iter().fold(start, |world, event| world.after(*event).expect("it is possible"))
}

/// Returns the world after some events in a full round of three nodes, two of which know of it.
fn full_round_after(events: &[Event]) -> World {
    let round = [
        Event::Boots(0),
        Event::Boots(1),
        Event::Boots(2),
        Event::Joins(1, Fate::Answered),
        Event::Joins(0, Fate::Answered),
        Event::Joins(2, Fate::Answered),
        Event::Polls(0),
        Event::Polls(1),
    ];
    world_after(3, &[&round, events].concat())
}

/// The build without optimization explores less.
const DEPTH: usize = if cfg!(debug_assertions) { 6 } else { 9 };

/// S001-11, S002-5, S003-2, S003-8: from nothing, every interleaving of three nodes keeps the rules.
#[test]
fn every_interleaving_of_three_starting_nodes_keeps_the_rules() {
    let states = explore(World::new(3, 2, 3), 3, DEPTH);
    assert!(500 < states, "explored only {states} states");
}

/// The same from a round of two nodes, with a third one that boots.
#[test]
fn every_interleaving_around_a_late_node_keeps_the_rules() {
    let start = world_after(
        3,
        &[
            Event::Boots(1),
            Event::Boots(0),
            Event::Joins(0, Fate::Answered),
            Event::Joins(1, Fate::Answered),
            Event::TimePasses,
            Event::Boots(2),
        ],
    );
    let states = explore(start, 3, DEPTH);
    assert!(500 < states, "explored only {states} states");
}

/// S003-5: the same from a full round of three nodes of which two are in a barrier.
#[test]
fn every_interleaving_around_a_barrier_keeps_the_rules() {
    let start =
        full_round_after(&[Event::Enters(0, Fate::Answered), Event::Enters(1, Fate::MasterDies)]);
    let states = explore(start, 3, DEPTH);
    assert!(500 < states, "explored only {states} states");
}

/// S003-25: the same from a full round of three nodes of which one has succeeded.
#[test]
fn every_interleaving_around_the_end_keeps_the_rules() {
    let start = full_round_after(&[Event::Succeeds(0, Fate::Answered)]);
    let states = explore(start, 3, DEPTH);
    assert!(500 < states, "explored only {states} states");
}

/// S002-10: the same from a full round of three nodes that is to have fewer workers, which some have heard.
#[test]
fn every_interleaving_around_a_smaller_round_keeps_the_rules() {
    let start =
        full_round_after(&[Event::Scales(3, Fate::MasterDies), Event::Joins(1, Fate::Answered)]);
    let states = explore(start, 3, DEPTH);
    assert!(500 < states, "explored only {states} states");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(debug_assertions) { 100 } else { 1_000 },
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("proptest-regressions"))),
        ..ProptestConfig::default()
    })]

    /// S002-5, S003-3: random walks of seven nodes, of which a round takes four, keep the rules.
    #[test]
    fn random_walks_of_seven_nodes_keep_the_rules(
        choices in proptest::collection::vec(any::<prop::sample::Index>(), 100..400),
    ) {
        // Rounds are formed often only if requests are more frequent than losses.
        let is_loss = |it: &Event| matches!(it, Event::Dies(_) | Event::Noticed(_));
        let (losses, requests): (Vec<_>, Vec<_>) = events(7).into_iter().partition(is_loss);
        let events = [losses, requests.clone(), requests.clone(), requests].concat();
        let mut world = World::new(7, 2, 4);
        for choice in choices {
            if let Some(after) = world.after(*choice.get(&events)) {
                after.check();
                world = after;
            }
        }
        world.check_progress();
    }
}
