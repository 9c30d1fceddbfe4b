//! Every sequence of inputs of two workers that their agent can pass.

use super::*;

/// An event of the world of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Succeeds(u32),
    Fails(u32),
    Connects(u32),
    Leaves(u32),
    Changes,
    LosesRegistration,
    JobEnds,
    Refuses,
    AnswersUnchanged,
    AnswersAdded,
    AnswersRemoved,
    AnswersNothing,
    AsksForStacks,
    ReportsHang,
    Drains,
    /// Time passes until the next deadline, or until the workers hang.
    TimePasses,
    /// Another round begins, with a past that explains why the last one ended, or that does not.
    Joins,
    JoinsUnexplained,
}

const EVENTS: [Event; 22] = [
    Event::Succeeds(0),
    Event::Succeeds(1),
    Event::Fails(0),
    Event::Fails(1),
    Event::Connects(0),
    Event::Connects(1),
    Event::Leaves(0),
    Event::Leaves(1),
    Event::Changes,
    Event::LosesRegistration,
    Event::JobEnds,
    Event::Refuses,
    Event::AnswersUnchanged,
    Event::AnswersAdded,
    Event::AnswersRemoved,
    Event::AnswersNothing,
    Event::AsksForStacks,
    Event::ReportsHang,
    Event::Drains,
    Event::TimePasses,
    Event::Joins,
    Event::JoinsUnexplained,
];

/// An agent and its world. All but the agent is computed without the machine.
#[derive(Clone, Debug)]
struct World {
    agent: Agent,
    /// What the machine waits for.
    next: Next,
    running: BTreeSet<u32>,
    killed: BTreeSet<u32>,
    /// Workers that have succeeded in this round.
    succeeded: BTreeSet<u32>,
    /// Set when something in this round keeps it from a success.
    is_spoilt: bool,
    /// The worker that failed while its agent waits for the cause, and whether it was connected.
    failed: Option<(u32, bool)>,
    /// `until_over` completes only once.
    is_over: bool,
    is_drained: bool,
    restarts: u32,
}

impl World {
    fn new() -> Self {
        Self {
            agent: Agent::new(1),
            next: Next::Wait,
            running: [0, 1].into(),
            killed: BTreeSet::new(),
            succeeded: BTreeSet::new(),
            is_spoilt: false,
            failed: None,
            is_over: false,
            is_drained: false,
            restarts: 0,
        }
    }

    fn is_between_rounds(&self) -> bool {
        matches!(self.next, Next::End(End::Stay | End::Restart | End::Succeeded))
    }

    /// Returns whether an agent can pass the event now.
    fn is_possible(&self, event: Event) -> bool {
        let runs = |local_rank: u32| self.running.contains(&local_rank);
        let (view, waits) = (&self.agent.view, self.next == Next::Wait);
        match event {
            Event::Succeeds(it) | Event::Fails(it) => {
                let may_end = waits || self.next == Next::AskForStacks;
                (may_end || self.is_between_rounds()) && runs(it)
            }
            Event::Connects(it) => waits && runs(it) && !view.connected.contains(&it),
            Event::Leaves(it) => {
                waits && runs(it) && view.connected.contains(&it) && !view.left.contains(&it)
            }
            Event::Changes | Event::LosesRegistration | Event::JobEnds | Event::Refuses => {
                waits && !self.is_over
            }
            Event::AnswersUnchanged
            | Event::AnswersAdded
            | Event::AnswersRemoved
            | Event::AnswersNothing => self.next == Next::Ask && !self.is_drained,
            Event::AsksForStacks => self.next == Next::AskForStacks,
            Event::ReportsHang => self.next == Next::ReportHang,
            Event::Drains => waits && !self.is_drained || self.next == Next::Ask,
            Event::TimePasses => waits,
            Event::Joins | Event::JoinsUnexplained => self.is_between_rounds() && !self.is_drained,
        }
    }

    /// Lets an event happen, and checks what follows.
    fn after(&self, event: Event) -> Self {
        let mut world = self.clone();
        world.agent.actions.clear();
        let next = world.pass(event);
        let actions = world.agent.actions.clone();
        for action in &actions {
            if let Action::Kill { local_rank, .. } = action {
                assert!(world.running.contains(local_rank), "{local_rank} does not run");
                assert!(!world.agent.view.left.contains(local_rank), "{local_rank} has left");
                assert!(world.is_spoilt, "a worker is killed in a round that goes on");
                world.killed.insert(*local_rank);
            }
        }
        world.is_spoilt |= actions.iter().any(|it| matches!(it, Action::NoteLeft(_)));
        world.check_counts(self, event, &actions, &next);
        world.check_failures(event, &actions, &next);
        world.check_end(self, event, &next);
        world.next = match next {
            Next::Start(_) => Next::Wait,
            Next::Wait if self.is_between_rounds() => self.next.clone(),
            Next::Wait | Next::Ask | Next::AskForStacks | Next::ReportHang | Next::End(_) => next,
        };
        world
    }

    fn pass(&mut self, event: Event) -> Next {
        let agent = &mut self.agent;
        match event {
            Event::Succeeds(it) => {
                self.running.remove(&it);
                self.succeeded.insert(it);
                agent.succeeds(it)
            }
            Event::Fails(it) => {
                self.running.remove(&it);
                self.is_spoilt = true;
                self.failed = Some((it, agent.view.connected.contains(&it)));
                agent.fails(it)
            }
            Event::Connects(it) => {
                agent.view.connected.insert(it);
                agent.handle(Input::Look)
            }
            Event::Leaves(it) => agent.leaves(it),
            Event::Changes | Event::LosesRegistration | Event::JobEnds | Event::Refuses => {
                (self.is_over, self.is_spoilt) = (true, true);
                agent.handle(Input::Over(match event {
                    Event::LosesRegistration => Over::Unregistered,
                    Event::JobEnds => Over::JobEnded,
                    Event::Refuses => refused(),
                    _ => Over::Changed,
                }))
            }
            Event::AnswersUnchanged => agent.handle(Input::Answered(Answer::Unchanged)),
            Event::AnswersAdded => agent.handle(Input::Answered(added())),
            Event::AnswersRemoved => agent.handle(Input::Answered(removed())),
            Event::AnswersNothing => {
                agent.handle(Input::Answered(Answer::Unknown("no master answers".to_owned())))
            }
            Event::AsksForStacks => agent.handle(Input::StacksAsked),
            Event::ReportsHang => agent.handle(Input::HangReported),
            Event::Drains => {
                self.is_drained = true;
                agent.handle(Input::Drain)
            }
            Event::TimePasses => {
                agent.view.last_output = Some(agent.view.now);
                let deadline = agent.machine.deadline();
                agent.waits(deadline.map_or(HANG, |by| by.saturating_sub(agent.view.now)))
            }
            Event::Joins | Event::JoinsUnexplained => self.join(event),
        }
    }

    fn join(&mut self, event: Event) -> Next {
        let mut past = self.agent.group.past;
        past.incidents += u64::from(event == Event::Joins);
        past.left += 1;
        let next = self.agent.joins_again(past);
        if let Next::Start(missing) = &next {
            let all = BTreeSet::from([0, 1]);
            assert_eq!(*missing, &all - &self.running, "all that do not run are started");
            self.running = all;
            self.killed.clear();
            self.succeeded.clear();
            (self.is_over, self.is_spoilt, self.failed) = (false, false, None);
        }
        next
    }

    /// A restart is counted for a failure without another cause, and for nothing else.
    fn check_counts(&mut self, before: &Self, event: Event, actions: &[Action], next: &Next) {
        let count = actions.iter().filter(|it| is_count(it)).count() as u32;
        let failed = before.failed.filter(|_| before.next == Next::Ask);
        let was_killed = failed.is_some_and(|(it, _)| before.killed.contains(&it));
        let expected = match event {
            Event::AnswersUnchanged => !was_killed,
            Event::AnswersAdded => !was_killed && failed.is_some_and(|(_, connected)| connected),
            Event::ReportsHang | Event::JoinsUnexplained => true,
            Event::Fails(_) => before.is_between_rounds(),
            Event::Succeeds(_)
            | Event::Connects(_)
            | Event::Leaves(_)
            | Event::Changes
            | Event::LosesRegistration
            | Event::JobEnds
            | Event::Refuses
            | Event::AnswersRemoved
            | Event::AnswersNothing
            | Event::Drains
            | Event::TimePasses
            | Event::AsksForStacks
            | Event::Joins => false,
        };
        assert_eq!(count, u32::from(expected), "counted after {event:?}");
        self.restarts += count;
        let is_exhausted = *next == Next::End(End::Exhausted);
        assert_eq!(is_exhausted, 1 < self.restarts, "one restart is allowed");
    }

    /// A failure in a round is noted, and reported to a master before anything else.
    fn check_failures(&self, event: Event, actions: &[Action], next: &Next) {
        let notes = actions.iter().filter(|it| matches!(it, Action::NoteFailure { .. })).count();
        let has_failed = match event {
            Event::Fails(_) | Event::JoinsUnexplained => true,
            _ => *next == Next::ReportHang,
        };
        assert_eq!(notes, usize::from(has_failed), "notes after {event:?}");
    }

    fn check_end(&mut self, before: &Self, event: Event, next: &Next) {
        if let Event::Fails(_) = event
            && !before.is_between_rounds()
        {
            assert_eq!(*next, Next::Ask, "a failure is reported first");
        }
        let is_start = matches!(next, Next::Start(_));
        assert!(!is_start || matches!(event, Event::Joins | Event::JoinsUnexplained));
        let have_succeeded = self.succeeded.len() == 2 && !self.is_spoilt;
        if !before.is_between_rounds() {
            let is_success = *next == Next::End(End::Succeeded);
            assert_eq!(is_success, have_succeeded, "a round succeeds if and only if all have");
        }
        let Next::End(end) = next else { return };
        match end {
            End::Stay => {
                let view = &self.agent.view;
                assert!(!self.running.is_empty());
                assert!(self.running.is_subset(&view.left), "all that stay have left the round");
                assert!(self.running.is_subset(&view.connected), "all that stay are connected");
            }
            // The agent stops them.
            End::Restart => {
                self.running.clear();
                self.agent.view.connected.clear();
            }
            End::Interrupted => assert!(self.is_drained),
            End::JobEnded => assert_eq!(event, Event::JobEnds),
            End::Refused { .. } => assert_eq!(event, Event::Refuses),
            End::Succeeded | End::Exhausted => {}
        }
        self.check_over();
    }

    /// A round that has ended ends no second time, and nothing of it goes on.
    fn check_over(&self) {
        for input in [
            Input::Look,
            Input::Drain,
            Input::StacksAsked,
            Input::HangReported,
            Input::Answered(Answer::Unchanged),
            Input::Over(Over::Changed),
            Input::Over(Over::JobEnded),
        ] {
            let mut agent = self.agent.clone();
            agent.view.now += RESET;
            agent.actions.clear();
            assert_eq!(agent.handle(input), Next::Wait);
            assert_eq!(agent.actions, []);
            assert_eq!(agent.machine.deadline(), None);
        }
    }

    /// If workers print nothing more, only end when they are killed, and the master answers, the round ends.
    fn check_rest(&self) {
        let mut world = self.clone();
        for _ in 0..12 {
            let killed = world.killed.intersection(&world.running).next();
            let event = match (&world.next, killed) {
                (Next::End(_), _) => return,
                (Next::Ask, _) if world.is_drained => Event::Drains,
                (Next::Ask, _) => Event::AnswersUnchanged,
                (Next::AskForStacks, _) => Event::AsksForStacks,
                (Next::ReportHang, _) => Event::ReportsHang,
                (Next::Wait | Next::Start(_), Some(killed)) => Event::Fails(*killed),
                (Next::Wait | Next::Start(_), None) => Event::TimePasses,
            };
            world = world.after(event);
        }
        panic!("the round does not end: {world:?}");
    }
}

/// Lets every event happen in every state that can be reached by `depth` events; returns the number of states.
fn explore(depth: usize) -> usize {
    let key = |world: &World| {
        let mut world = world.clone();
        world.agent.actions.clear();
        format!("{world:?}")
    };
    let mut seen = BTreeSet::from([key(&World::new())]);
    let mut frontier = vec![World::new()];
    for _ in 0..depth {
        let mut next = Vec::new();
        for world in &frontier {
            for event in EVENTS.into_iter().filter(|event| world.is_possible(*event)) {
                let reached = world.after(event);
                if seen.insert(key(&reached)) {
                    reached.check_rest();
                    next.push(reached);
                }
            }
        }
        frontier = next;
    }
    seen.len()
}

/// Enough for two rounds that fail, with a drain, a change or a kill in between.
const DEPTH: usize = 8;

/// S003-25: a round ends once, a success of all is no restart, a change of the members is no failure, a failure is
/// reported before the end, and nothing is started after it.
#[test]
fn every_sequence_of_events_of_two_workers_keeps_the_rules() {
    let states = explore(DEPTH);
    assert!(10_000 < states, "explored only {states} states");
}
