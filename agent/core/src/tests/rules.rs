//! The rules by name.

use super::*;

const STAY: Next = Next::End(End::Stay);
const RESTART: Next = Next::End(End::Restart);
const EXHAUSTED: Next = Next::End(End::Exhausted);
const INTERRUPTED: Next = Next::End(End::Interrupted);

#[test]
fn a_round_succeeds_when_all_workers_have() {
    let mut agent = Agent::new(3);
    assert_eq!(agent.succeeds(1), Next::Wait);
    assert_eq!(agent.succeeds(0), Next::End(End::Succeeded));
    assert_eq!(agent.actions, [Action::Forget(1), Action::Forget(0)]);
}

/// S003-25: a worker that fails is counted, and all workers of the node are started again.
#[test]
fn a_failure_is_reported_and_counted_and_the_workers_are_restarted() {
    let mut agent = Agent::new(3);
    assert_eq!(agent.fails(1), Next::Ask);
    let reason = "the worker of rank 5 ended with exit code 7".to_owned();
    let what = format!("round 1: {reason}");
    let noted = Action::NoteFailure { round: Some(Round(1)), what };
    assert_eq!(agent.actions, [Action::Forget(1), noted, Action::TellWorkers]);
    agent.actions.clear();
    assert_eq!(agent.handle(Input::Answered(Answer::Unchanged)), RESTART);
    let failure = Failure { reason, last_lines: Vec::new() };
    assert_eq!(agent.actions, [Action::Retry { restarts: 1, failure }]);
    assert_eq!(agent.joins_again(Past::default()), Next::Start([0, 1].into()));
}

#[test]
fn a_failure_after_the_last_restart_ends_the_part_of_this_node() {
    let mut agent = Agent::new(1);
    agent.fails(0);
    assert_eq!(agent.handle(Input::Answered(Answer::Unchanged)), RESTART);
    agent.joins_again(agent.machine.past());
    agent.fails(1);
    assert_eq!(agent.handle(Input::Answered(Answer::Unchanged)), EXHAUSTED);
    assert!(matches!(agent.actions.last(), Some(Action::GiveUp { restarts: 2, .. })));
}

#[test]
fn a_failure_does_not_count_if_nodes_came_or_went() {
    for answer in [added(), removed(), Answer::Unknown("no master answers".to_owned())] {
        let mut agent = Agent::new(0);
        agent.fails(0);
        assert_eq!(agent.handle(Input::Answered(answer)), RESTART);
        assert_eq!(agent.restarts(), 0);
        assert!(agent.excuse().is_some());
    }
}

/// Others may wait in another round because of this failure, and not the other way round.
#[test]
fn a_connected_worker_that_fails_counts_unless_a_node_was_lost() {
    let mut agent = Agent::connected(3);
    agent.fails(0);
    assert_eq!(agent.handle(Input::Answered(added())), Next::Wait);
    assert_eq!(agent.restarts(), 1);
    let mut agent = Agent::connected(3);
    agent.fails(0);
    assert_eq!(agent.handle(Input::Answered(removed())), Next::Wait);
    assert_eq!(agent.excuse(), Some("lost host-2:1"));
}

#[test]
fn connected_workers_stay_when_another_one_fails() {
    let mut agent = Agent::connected(3);
    agent.fails(0);
    assert_eq!(agent.handle(Input::Answered(Answer::Unchanged)), Next::Wait);
    assert_eq!(agent.leaves(1), STAY);
    assert_eq!(agent.machine.past(), Past { incidents: 1, left: 0 });
    assert_eq!(agent.joins_again(agent.machine.past()), Next::Start([0].into()));
}

#[test]
fn workers_stay_only_if_all_that_run_are_connected_and_none_has_succeeded() {
    let mut agent = Agent::connected(3);
    assert_eq!(agent.handle(Input::Over(Over::Changed)), Next::Wait);
    let mut agent = Agent::connected(3);
    agent.view.connected.remove(&1);
    assert_eq!(agent.handle(Input::Over(Over::Changed)), RESTART);
    let mut agent = Agent::connected(3);
    agent.succeeds(0);
    assert_eq!(agent.handle(Input::Over(Over::Changed)), RESTART);
}

#[test]
fn a_worker_that_does_not_leave_in_time_is_killed_which_counts_as_no_failure() {
    let mut agent = Agent::connected(0);
    agent.handle(Input::Over(Over::Changed));
    agent.leaves(1);
    assert_eq!(agent.waits(RESET - Duration::from_nanos(1)), Next::Wait);
    assert_eq!(agent.actions, []);
    agent.waits(Duration::from_nanos(1));
    assert_eq!(agent.actions, [Action::Kill { local_rank: 0, rank: 4 }]);
    assert_eq!(agent.machine.deadline(), Some(RESET * 2));
    assert_eq!(agent.fails(0), Next::Ask);
    assert_eq!(agent.handle(Input::Answered(Answer::Unchanged)), STAY);
    assert_eq!(agent.excuse(), Some("it was killed"));
    assert_eq!(agent.machine.past(), Past::default());
}

#[test]
fn another_reason_to_leave_a_round_gives_no_more_time() {
    let mut agent = Agent::connected(3);
    agent.handle(Input::Over(Over::Changed));
    agent.waits(RESET / 2);
    agent.fails(0);
    assert_eq!(agent.handle(Input::Answered(added())), Next::Wait);
    assert_eq!(agent.machine.deadline(), Some(RESET));
}

#[test]
fn a_round_that_is_over_does_not_succeed_any_more() {
    let mut agent = Agent::connected(3);
    agent.handle(Input::Over(Over::Changed));
    agent.succeeds(0);
    assert_eq!(agent.succeeds(1), RESTART);
    assert_eq!(agent.restarts(), 0);
}

#[test]
fn a_lost_registration_is_an_incident_and_restarts_workers_without_counting() {
    let mut agent = Agent::new(0);
    assert_eq!(agent.handle(Input::Over(Over::Unregistered)), RESTART);
    assert_eq!(agent.actions, [Action::TellWorkers]);
    assert!(agent.machine.is_unregistered());
    assert_eq!(agent.machine.past(), Past { incidents: 1, left: 0 });
    agent.joins_again(agent.machine.past());
    assert!(!agent.machine.is_unregistered());
}

#[test]
fn the_end_of_the_job_and_a_refusal_end_the_round_at_once() {
    let mut agent = Agent::connected(3);
    assert_eq!(agent.handle(Input::Over(Over::JobEnded)), Next::End(End::JobEnded));
    let (kind, message) = (ErrorKind::Conflict, "other numbers of nodes".to_owned());
    let mut agent = Agent::connected(3);
    let end = Next::End(End::Refused { kind, message });
    assert_eq!(agent.handle(Input::Over(refused())), end);
}

/// S003-25: workers that print nothing for the time that the user set have failed.
#[test]
fn workers_that_hang_are_reported_and_restarted() {
    let mut agent = Agent::new(1);
    let second = Duration::from_secs(1);
    agent.view.last_output = Some(second);
    assert_eq!(agent.waits(HANG), Next::Wait);
    assert_eq!(agent.waits(second), Next::AskForStacks);
    assert!(!agent.actions.iter().any(|it| matches!(it, Action::NoteFailure { .. })));
    assert_eq!(agent.handle(Input::StacksAsked), Next::ReportHang);
    assert!(matches!(agent.actions.last(), Some(Action::NoteFailure { round: Some(_), .. })));
    assert_eq!(agent.handle(Input::Drain), Next::Wait, "nothing interrupts the report");
    assert_eq!(agent.handle(Input::HangReported), RESTART);
    assert_eq!((agent.restarts(), agent.machine.past().incidents), (1, 1));
    agent.joins_again(agent.machine.past());
    agent.view.last_output = Some(Duration::ZERO);
    assert_eq!(agent.waits(HANG), Next::AskForStacks);
    assert_eq!(agent.handle(Input::StacksAsked), Next::ReportHang);
    assert_eq!(agent.handle(Input::HangReported), EXHAUSTED);
}

/// S002-11: without a setting, workers that have reported progress hang after ten minutes of silence, and not before
/// several times their longest pause. Others are not known to do anything.
#[test]
fn only_workers_that_have_reported_progress_hang_by_themselves() {
    let minutes = |count: u64| Duration::from_secs(60 * count);
    let mut agent = Agent::new(1);
    agent.limit_hangs(HangTimeout::Progress);
    agent.view.last_output = Some(Duration::ZERO);
    assert_eq!(agent.waits(minutes(1000)), Next::Wait);
    agent.view.pause_max = Some(minutes(260));
    assert_eq!(agent.waits(minutes(39)), Next::Wait);
    assert_eq!(agent.waits(minutes(1)), Next::AskForStacks);

    let mut agent = Agent::new(1);
    agent.limit_hangs(HangTimeout::Progress);
    (agent.view.last_output, agent.view.pause_max) = (Some(minutes(1)), Some(minutes(1)));
    assert_eq!(agent.waits(minutes(10)), Next::Wait);
    assert_eq!(agent.waits(minutes(1)), Next::AskForStacks);

    let mut agent = Agent::new(1);
    agent.limit_hangs(HangTimeout::Off);
    (agent.view.last_output, agent.view.pause_max) = (Some(minutes(1)), Some(minutes(1)));
    assert_eq!(agent.waits(minutes(1000)), Next::Wait);
}

/// S003-25: workers that end while they are asked for their stacks do not hang, and a success is one.
#[test]
fn workers_that_end_while_they_are_asked_for_their_stacks_do_not_hang() {
    let mut agent = Agent::new(1);
    agent.view.last_output = Some(Duration::ZERO);
    assert_eq!(agent.waits(HANG), Next::AskForStacks);
    assert_eq!(agent.succeeds(0), Next::AskForStacks, "the other is silent");
    assert_eq!(agent.succeeds(1), Next::End(End::Succeeded));
    assert_eq!((agent.restarts(), agent.machine.past().incidents), (0, 0));

    let mut agent = Agent::new(1);
    agent.view.last_output = Some(Duration::ZERO);
    assert_eq!(agent.waits(HANG), Next::AskForStacks);
    assert_eq!(agent.fails(0), Next::Ask);
    assert_eq!(agent.handle(Input::StacksAsked), Next::Wait);
}

#[test]
fn workers_hang_neither_while_they_leave_nor_if_their_output_is_unknown() {
    let mut agent = Agent::connected(3);
    assert_eq!(agent.waits(HANG * 10), Next::Wait);
    agent.view.last_output = Some(Duration::ZERO);
    assert_eq!(agent.handle(Input::Over(Over::Changed)), Next::Wait);
    assert_eq!(agent.waits(HANG), Next::Wait);
}

/// Their collectives failed, and the agent does not know why.
#[test]
fn a_worker_that_leaves_ends_the_round_for_the_others() {
    let mut agent = Agent::connected(3);
    assert_eq!(agent.leaves(0), Next::Wait);
    assert_eq!(agent.actions, [Action::NoteLeft(Round(1))]);
    assert_eq!(agent.machine.deadline(), Some(RESET));
    assert_eq!(agent.leaves(1), STAY);
    assert_eq!(agent.machine.past(), Past { incidents: 0, left: 1 });
}

#[test]
fn workers_that_left_without_a_loss_have_failed() {
    let left = |agent: &mut Agent| (agent.leaves(0), agent.leaves(1));
    let past = |incidents, left| Past { incidents, left };
    let mut agent = Agent::connected(1);
    left(&mut agent);
    assert_eq!(agent.joins_again(past(0, 1)), Next::Start([].into()));
    assert_eq!(agent.restarts(), 1);
    left(&mut agent);
    assert_eq!(agent.joins_again(past(0, 2)), EXHAUSTED);
    let mut explained = Agent::connected(0);
    left(&mut explained);
    assert_eq!(explained.joins_again(past(1, 1)), Next::Start([].into()));
    let mut fewer = Agent::connected(0);
    left(&mut fewer);
    fewer.group.nodes.pop();
    assert_eq!(fewer.joins_again(past(0, 1)), Next::Start([].into()));
    let mut none_left = Agent::connected(0);
    none_left.handle(Input::Over(Over::Changed));
    left(&mut none_left);
    assert_eq!(none_left.joins_again(past(0, 0)), Next::Start([].into()));
}

#[test]
fn a_drained_node_stops_after_the_next_commit_of_its_workers() {
    let mut agent = Agent::connected(3);
    assert_eq!(agent.handle(Input::Drain), Next::Wait);
    assert_eq!(agent.actions, [Action::Leave]);
    assert!(agent.machine.is_draining());
    assert_eq!(agent.leaves(0), Next::Wait);
    assert_eq!(agent.leaves(1), INTERRUPTED);
    assert_eq!(agent.machine.past(), Past::default(), "they left because of this node");
}

#[test]
fn a_drained_node_waits_for_a_commit_for_half_the_grace() {
    let mut agent = Agent::connected(3);
    agent.handle(Input::Drain);
    agent.leaves(0);
    assert_eq!(agent.machine.deadline(), Some(GRACE / 2));
    assert_eq!(agent.waits(GRACE / 2), INTERRUPTED);
    assert_eq!(agent.actions, [Action::Leave, Action::NoteNoCommit]);
}

#[test]
fn a_drained_node_stops_at_once_if_it_is_alone_or_its_workers_cannot_stay() {
    let mut alone = Agent::connected(3);
    alone.group.nodes.pop();
    alone.leaves(0);
    alone.leaves(1);
    alone.joins();
    assert_eq!(alone.handle(Input::Drain), INTERRUPTED);
    assert_eq!(Agent::new(3).handle(Input::Drain), INTERRUPTED);
}

#[test]
fn a_drain_interrupts_the_question_for_the_cause() {
    let mut agent = Agent::connected(0);
    agent.fails(0);
    assert_eq!(agent.handle(Input::Drain), INTERRUPTED);
    assert_eq!(agent.restarts(), 0);
}

#[test]
fn workers_that_finish_while_their_node_leaves_have_succeeded() {
    let mut agent = Agent::connected(3);
    agent.handle(Input::Drain);
    agent.succeeds(0);
    assert_eq!(agent.succeeds(1), Next::End(End::Succeeded));
}

#[test]
fn a_worker_that_fails_between_rounds_counts_and_is_started_in_the_next_one() {
    let mut agent = Agent::connected(1);
    agent.handle(Input::Over(Over::Changed));
    agent.leaves(0);
    assert_eq!(agent.leaves(1), STAY);
    assert_eq!(agent.fails(1), Next::Wait);
    let what = "worker 1 of this node ended with exit code 7 between rounds".to_owned();
    assert!(agent.actions.contains(&Action::NoteFailure { round: None, what }));
    assert_eq!((agent.restarts(), agent.machine.past().incidents), (1, 1));
    assert_eq!(agent.fails(0), EXHAUSTED);
}

#[test]
fn a_worker_that_finishes_between_rounds_is_an_incident_and_does_not_count() {
    let mut agent = Agent::connected(0);
    agent.handle(Input::Over(Over::Changed));
    agent.leaves(0);
    agent.leaves(1);
    assert_eq!(agent.succeeds(1), Next::Wait);
    assert_eq!((agent.restarts(), agent.machine.past().incidents), (0, 1));
    assert_eq!(agent.joins_again(Past::default()), Next::Start([1].into()));
}

#[test]
fn the_last_lines_of_a_worker_come_with_its_failure() {
    let mut agent = Agent::new(0);
    let last_lines = vec!["ValueError".to_owned()];
    let exit = WorkerExit::Failed { how: "exit code 1".to_owned(), last_lines: last_lines.clone() };
    agent.handle(Input::Exited { local_rank: 0, exit });
    agent.handle(Input::Answered(Answer::Unchanged));
    let reason = "the worker of rank 4 ended with exit code 1".to_owned();
    let failure = Failure { reason, last_lines };
    assert_eq!(agent.actions.last(), Some(&Action::GiveUp { restarts: 1, failure }));
}
