//! Incarnations, repeated requests and refusals.

use steadfast_common::error::ErrorKind;
use steadfast_common::records::rendezvous::{EXIT_TAG, SLOTS_MAX};
use steadfast_common::status::WorkersPhase;

use super::*;

fn joined(master: &Master, caller: Caller, agent: &AgentRecord) -> Result<Vec<Fact>, Refusal> {
    master.state.join(caller, agent, &master.terms(0), &master.settings)
}

/// S003-1: all nodes agree with the job about the number of nodes.
#[test]
fn a_node_that_expects_another_number_of_nodes_is_refused() {
    let master = Master::new(2, 4);
    let terms = JoinTerms { nodes_max: 5, ..master.terms(0) };
    let refusal =
        master.state.join(Master::caller(0), &agent(0), &terms, &master.settings).unwrap_err();
    assert_eq!(refusal.to_string(), "the node expects 2 to 5 nodes, and the job 2 to 4");
    assert_eq!(refusal.kind(), ErrorKind::Conflict);
}

/// S003-4: an unknown node is told to register again.
#[test]
fn an_unknown_node_gets_an_error() {
    let master = Master::with_round(2, 2, 3);
    let (settings, timers) = (&master.settings, &master.timers);
    let newer = Caller { incarnation: Incarnation(99), ..Master::caller(0) };
    for caller in [Master::caller(7), newer] {
        let refusal = master.state.ask(caller, Round(0), settings, timers, master.now).unwrap_err();
        assert_eq!((refusal.kind(), refusal), (ErrorKind::NotFound, Refusal::Unknown(caller)));
        assert!(master.state.waiting_nodes(caller, settings, timers, master.now).is_err());
    }
}

/// S003-8: an answer that was lost with a master is given again by the next one.
#[test]
fn a_lost_answer_is_repeated_after_a_failover() {
    let mut master = Master::new(2, 3);
    (0..2).for_each(|node| master.join(node, 0));
    master.pass(LAST_CALL_MS);
    let answer = master.ask(0, 0);
    assert!(matches!(answer, Directive::Start(_)));
    master.fail_over();
    for _ in 0..2 {
        let facts = joined(&master, Master::caller(0), &agent(0)).unwrap();
        assert_eq!((facts, master.ask(0, 0)), (Vec::new(), answer.clone()));
    }
    // The other member leaves the round. Node 0 gets the same answer, and learns that it is to join later.
    master.join(1, 1);
    assert_eq!(master.ask(0, 0), answer);
    assert!(matches!(master.ask(0, 1), Directive::Join { .. }));
}

/// S003-8: a node that waits is not forgotten by the next master.
#[test]
fn a_waiting_node_waits_on_after_a_failover() {
    let mut master = Master::new(2, 3);
    master.announce(1);
    master.join(0, 0);
    master.fail_over();
    let Directive::Wait { awaited, .. } = master.ask(0, 0) else {
        panic!("{:?}", master.ask(0, 0))
    };
    assert_eq!(addresses(&awaited), ["host-1:29500"]);
    master.join(1, 0);
    master.pass(LAST_CALL_MS);
    assert_eq!(master.members(), [id(0), id(1)]);
}

/// S001-11: an agent that restarted is another member, younger than all others; its former incarnation is
/// lost to the round.
#[test]
fn a_restarted_agent_is_a_new_node() {
    let mut master = Master::with_round(3, 2, 3);
    let restarted = Caller { incarnation: Incarnation(50), ..Master::caller(0) };
    master.decide(joined(&master, restarted, &agent(0)));
    let Directive::Join { lost, .. } = master.ask(1, 1) else { panic!("{:?}", master.ask(1, 1)) };
    assert_eq!(addresses(&lost), [address(0)]);
    assert_eq!(master.waiting_nodes(2), -1);
    (1..3).for_each(|node| master.join(node, 1));
    assert_eq!(master.members(), [id(1), id(2), id(0)]);
    assert!(master.state.remove(Master::caller(0)).is_empty(), "that incarnation is over");
}

/// S004-43: a former incarnation changes nothing.
#[test]
fn a_former_incarnation_is_refused() {
    let mut master = Master::with_round(2, 2, 3);
    master.lose(0);
    for request in [
        joined(&master, Master::caller(0), &agent(0)),
        master.state.announce(Master::caller(0), &agent(0)),
    ] {
        assert_eq!(request, Err(Refusal::Unknown(Master::caller(0))), "it was removed");
    }
    let restarted = Caller { incarnation: Incarnation(50), ..Master::caller(0) };
    master.decide(master.state.announce(restarted, &agent(0)));
    assert!(joined(&master, Master::caller(0), &agent(0)).is_err());
    assert!(joined(&master, restarted, &agent(0)).is_ok());
}

/// A delayed duplicate of a request changes nothing, either.
#[test]
fn only_the_first_announcement_of_an_incarnation_counts() {
    let mut master = Master::with_round(2, 2, 3);
    assert_eq!(master.state.announce(Master::caller(0), &agent(0)), Ok(Vec::new()));
    master.join(2, 0);
    assert_eq!(master.state.announce(Master::caller(2), &agent(2)), Ok(Vec::new()));
    assert_eq!(joined(&master, Master::caller(2), &agent(2)), Ok(Vec::new()));
    assert_eq!(joined(&master, Master::caller(0), &agent(0)), Ok(Vec::new()));
}

#[test]
fn an_invalid_registration_is_refused() {
    let master = Master::new(1, 2);
    let refusal = |change: fn(&mut AgentRecord)| {
        let mut agent = agent(0);
        change(&mut agent);
        joined(&master, Master::caller(0), &agent).unwrap_err().to_string()
    };
    assert_eq!(refusal(|it| it.address.clear()), "`` is not an address (`host:port`)");
    assert_eq!(refusal(|it| it.slots = 0), "the node has 0 slots; 1 to 4096 are allowed");
    let many = refusal(|it| it.slots = SLOTS_MAX + 1);
    assert_eq!(many, "the node has 4097 slots; 1 to 4096 are allowed");
}

/// Whatever a round waits for, the nodes that block it are named.
#[test]
fn the_nodes_that_are_waited_for_are_named() {
    let awaited = |master: &Master| {
        let Master { state, settings, timers, now, .. } = master;
        let names = state.awaited(settings, timers, *now);
        addresses(&names).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let mut master = Master::new(1, 3);
    master.announce(0);
    master.announce(1);
    master.join(0, 0);
    assert_eq!(awaited(&master), [address(1)], "a node that is starting");
    let mut master = Master::with_round(3, 1, 3);
    assert!(awaited(&master).is_empty());
    (0..2).for_each(|node| master.enter(node, &barrier_id(1, "tag", 0), b"").unwrap());
    assert_eq!(awaited(&master), [address(2)], "a member that has not entered a barrier");
    master.lose(1);
    assert_eq!(awaited(&master), [address(0), address(2)], "members that have to join again");
    master.join(0, 1);
    assert_eq!(awaited(&master), [address(2)], "a member that has not joined again");
    master.join(2, 1);
    assert!(awaited(&master).is_empty());
    master.enter(2, &barrier_id(2, EXIT_TAG, 0), b"").unwrap();
    assert_eq!(awaited(&master), [address(0)], "a member whose workers have not ended");
    let succeeded = |master: &Master| {
        let nodes = master.state.nodes_shown().into_iter();
        nodes.map(|it| it.workers == Some(WorkersPhase::Succeeded)).collect::<Vec<_>>()
    };
    assert_eq!(succeeded(&master), [false, true]);
}
