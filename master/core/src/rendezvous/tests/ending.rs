//! When a job is over, and what becomes of members that have succeeded while others fail.

use steadfast_common::records::JobOutcome;
use steadfast_common::records::rendezvous::EXIT_TAG;

use super::*;

fn succeed(master: &mut Master, node: usize) {
    let exit = barrier_id(master.state.number().0, EXIT_TAG, 0);
    master.enter(node, &exit, b"").unwrap();
}

fn outcome(master: &Master) -> Option<JobOutcome> {
    master.state.result().map(|result| result.state)
}

/// S003-25: the job has succeeded when each member has.
#[test]
fn a_job_succeeds_with_its_last_member() {
    let mut master = Master::with_round(3, 1, 3);
    for node in 0..3 {
        assert_eq!(outcome(&master), None);
        succeed(&mut master, node);
    }
    assert_eq!(outcome(&master), Some(JobOutcome::Finished));
    let exit = barrier_id(1, EXIT_TAG, 0);
    assert!(matches!(master.barrier(0, &exit), Outcome::Released(_)));
}

/// S003-25: a worker that fails after another node has succeeded: both run again, and the job has succeeded only
/// when both have.
#[test]
fn a_member_that_fails_after_the_success_of_another_brings_both_into_the_next_round() {
    let mut master = Master::with_round(2, 2, 2);
    succeed(&mut master, 1);
    master.join(0, 1);
    assert_eq!(outcome(&master), None);
    let exit = barrier_id(1, EXIT_TAG, 0);
    assert!(matches!(master.barrier(1, &exit), Outcome::Ended(EndedBy::Rejoined(_))));
    master.join(1, 1);
    assert_eq!(master.members(), [id(0), id(1)]);
    assert_eq!(master.state.number(), Round(2));
    (0..2).for_each(|node| succeed(&mut master, node));
    assert_eq!(outcome(&master), Some(JobOutcome::Finished));
}

/// S003-25: a node that is lost in its last save has not succeeded, whatever the others have done before or after.
#[test]
fn a_member_that_is_lost_before_its_success_makes_the_others_run_again() {
    for is_first in [true, false] {
        let mut master = Master::with_round(3, 2, 3);
        if is_first {
            succeed(&mut master, 1);
        }
        master.lose(0);
        succeed(&mut master, 2);
        assert_eq!((outcome(&master), master.waiting_nodes(1)), (None, -1));
        let exit = barrier_id(1, EXIT_TAG, 0);
        let Outcome::Ended(EndedBy::Lost(names)) = master.barrier(2, &exit) else {
            panic!("{:?}", master.barrier(2, &exit))
        };
        assert_eq!(addresses(&names), [address(0)]);
        (1..3).for_each(|node| master.join(node, 1));
        assert_eq!((master.members(), outcome(&master)), (vec![id(1), id(2)], None));
        (1..3).for_each(|node| succeed(&mut master, node));
        assert_eq!(outcome(&master), Some(JobOutcome::Finished));
    }
}

/// A member that has succeeded may be lost: its success stays, and the others go on.
#[test]
fn the_loss_of_a_member_that_has_succeeded_disturbs_no_other() {
    let mut master = Master::with_round(3, 2, 3);
    succeed(&mut master, 0);
    master.lose(0);
    assert_eq!(master.ask(1, 1), Directive::Continue { round: Round(1) });
    assert!(matches!(master.barrier(1, &barrier_id(1, EXIT_TAG, 0)), Outcome::Waiting { .. }));
    master.fail_over();
    (1..3).for_each(|node| succeed(&mut master, node));
    assert_eq!(outcome(&master), Some(JobOutcome::Finished));
}

/// A program that has finished does not run again because of a node that arrives.
#[test]
fn a_node_that_arrives_after_a_success_waits() {
    let mut master = Master::with_round(2, 1, 3);
    succeed(&mut master, 0);
    master.join(2, 0);
    assert_eq!(master.waiting_nodes(1), 0);
    let Directive::Wait { awaited, .. } = master.ask(2, 0) else {
        panic!("{:?}", master.ask(2, 0))
    };
    assert_eq!(addresses(&awaited), [address(1)]);
    succeed(&mut master, 1);
    assert_eq!(outcome(&master), Some(JobOutcome::Finished));
}

/// S003-25: if too few nodes are left to run again, the job fails, and says why.
#[test]
fn a_closing_job_without_enough_nodes_for_another_round_fails() {
    let mut master = Master::with_round(2, 2, 2);
    succeed(&mut master, 1);
    master.lose(0);
    master.join(1, 1);
    master.pass(JOIN_TIMEOUT_MS - 1);
    assert_eq!(outcome(&master), None);
    master.pass(1);
    assert_eq!(outcome(&master), Some(JobOutcome::Failed));
    let reason = master.state.result().and_then(|result| result.reason.clone()).unwrap();
    assert_eq!(
        reason,
        "round 1: host-0:29500 did not succeed, others did, and 1 of at least 2 nodes joined another round within \
         the join timeout"
    );
}

/// S003-25: a node that gives up leaves the others alone, if they are enough for a round.
#[test]
fn a_job_fails_with_the_node_that_leaves_too_few_others() {
    let mut master = Master::with_round(3, 2, 3);
    let give_up = |master: &mut Master, node| {
        let facts = master.state.give_up(Master::caller(node), "exit code 7", 2);
        master.decide(facts);
    };
    give_up(&mut master, 0);
    assert_eq!((outcome(&master), master.waiting_nodes(1)), (None, -1));
    (1..3).for_each(|node| master.join(node, 1));
    give_up(&mut master, 2);
    assert_eq!(outcome(&master), Some(JobOutcome::Failed));
    let reason = master.state.result().and_then(|result| result.reason.clone());
    assert_eq!(reason.as_deref(), Some("host-2:29500 gave up: exit code 7"));
}
