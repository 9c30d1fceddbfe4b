//! Rules of the workers of a node: each by name, and all after every sequence of inputs of two workers.

use std::collections::BTreeSet;
use std::time::Duration;

use steadfast_common::error::ErrorKind;
use steadfast_common::ids::{NodeId, Round};

use crate::round::{
    Action, Answer, End, Failure, Group, HangTimeout, Input, Limits, Next, Over, Past,
    RoundMachine, Step, View, WorkerExit,
};

mod rules;
mod walks;

const RESET: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_secs(10);
const HANG: Duration = Duration::from_secs(30);

/// An agent without processes.
#[derive(Clone, Debug)]
struct Agent {
    machine: RoundMachine,
    view: View,
    /// What all actions so far were, and the last round.
    actions: Vec<Action>,
    group: Group,
}

impl Agent {
    /// An agent with two workers, of ranks 4 and 5, in the first round of two nodes.
    fn new(restarts_max: u32) -> Self {
        let hang_timeout = HangTimeout::Silence(HANG);
        let limits = Limits { restarts_max, reset_timeout: RESET, grace: GRACE, hang_timeout };
        let (nodes, past) = (vec![node(1), node(2)], Past::default());
        let group = Group { round: Round(1), nodes, first_rank: 4, workers: 2, past };
        let (machine, view) = (RoundMachine::new(limits), View::default());
        let mut agent = Self { machine, view, actions: Vec::new(), group };
        assert_eq!(agent.joins(), Next::Start([0, 1].into()));
        agent
    }

    /// An agent whose workers can go on in another round.
    fn connected(restarts_max: u32) -> Self {
        let mut agent = Self::new(restarts_max);
        agent.view.connected = [0, 1].into();
        agent
    }

    /// Replaces the machine in the first round by one that decides otherwise when workers hang.
    fn limit_hangs(&mut self, hang_timeout: HangTimeout) {
        let limits = Limits { restarts_max: 1, reset_timeout: RESET, grace: GRACE, hang_timeout };
        self.machine = RoundMachine::new(limits);
        assert_eq!(self.joins(), Next::Start([0, 1].into()));
    }

    fn handle(&mut self, input: Input) -> Next {
        let Step { actions, next } = self.machine.handle(&self.view, input);
        for action in &actions {
            if let Action::Forget(local_rank) = action {
                self.view.left.remove(local_rank);
                self.view.connected.remove(local_rank);
            }
        }
        self.actions.extend(actions);
        next
    }

    /// Joins the round of [`Self::group`].
    fn joins(&mut self) -> Next {
        self.view.now = Duration::ZERO;
        self.view.left.clear();
        self.view.last_output = None;
        self.handle(Input::Joined(self.group.clone()))
    }

    /// Joins the next round of the same nodes. All members together have this past.
    fn joins_again(&mut self, past: Past) -> Next {
        self.group.round = Round(self.group.round.0 + 1);
        self.group.past = past;
        self.joins()
    }

    fn succeeds(&mut self, local_rank: u32) -> Next {
        self.handle(Input::Exited { local_rank, exit: WorkerExit::Succeeded })
    }

    fn fails(&mut self, local_rank: u32) -> Next {
        let exit = WorkerExit::Failed { how: "exit code 7".to_owned(), last_lines: vec![] };
        self.handle(Input::Exited { local_rank, exit })
    }

    fn leaves(&mut self, local_rank: u32) -> Next {
        self.view.left.insert(local_rank);
        self.handle(Input::Look)
    }

    /// Time passes.
    fn waits(&mut self, time: Duration) -> Next {
        self.view.now += time;
        self.handle(Input::Look)
    }

    fn restarts(&self) -> u32 {
        let counts = self.actions.iter().filter(|it| is_count(it));
        counts.count() as u32
    }

    fn excuse(&self) -> Option<&str> {
        self.actions.iter().rev().find_map(|action| match action {
            Action::Excuse { change, .. } => Some(change.as_str()),
            _ => None,
        })
    }
}

fn node(id: u32) -> NodeId {
    NodeId::of_address(&format!("host-{id}:1"))
}

fn is_count(action: &Action) -> bool {
    matches!(action, Action::Retry { .. } | Action::GiveUp { .. })
}

fn added() -> Answer {
    Answer::Added("1 more nodes are ready to join".to_owned())
}

fn removed() -> Answer {
    Answer::Removed("lost host-2:1".to_owned())
}

fn refused() -> Over {
    Over::Refused { kind: ErrorKind::Conflict, message: "other numbers of nodes".to_owned() }
}
