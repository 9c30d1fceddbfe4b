//! The state machine of a launcher: decides what follows from the ends of agents, the hosts that were found, and the
//! time.

use steadfast_common::ids::Millis;
use steadfast_common::machine::{Decision, Machine, Moment, Size};
use steadfast_common::records::launch::Outcome;

use crate::Exit;
use crate::hosts::{Host, HostName};
use crate::launcher::{Change, FACTS_MAX, Fact, Launcher};
use crate::settings::{Context, Settings};
use crate::timers::Timers;

/// Most bytes of one change: a record of a host or of the launcher with its texts.
const CHANGE_BYTES_MAX: usize = 4096;

/// The machine decides one input after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// An agent has ended. `seed` is a random number.
    Exited { host: HostName, launch: u64, exit: Exit, seed: u64 },
    /// These hosts were found last.
    Discovered(Vec<Host>),
    /// The job has to end.
    End(Outcome),
    /// A deadline may have passed.
    Deadline,
}

/// An effect is released after the commit of the facts that were decided with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A fact is committed: its action can be performed.
    Committed(Fact),
    /// The facts that the end of an agent led to are committed.
    Exited { host: HostName, exit: Exit, has_failed: bool },
    /// The timers or the state have changed.
    Changed,
}

/// A launcher in one term.
#[derive(Clone, Debug)]
pub struct LaunchMachine {
    pub(crate) settings: Settings,
    pub(crate) launcher: Launcher,
    pub(crate) timers: Timers,
    pub(crate) discovered: Option<Vec<Host>>,
}

impl LaunchMachine {
    /// Creates the machine of a new term. A wait that began in another term goes on, if the state is the same.
    pub fn new(
        settings: Settings,
        launcher: Launcher,
        timers: Timers,
        discovered: Option<Vec<Host>>,
        now: Millis,
    ) -> Self {
        let mut machine = Self { settings, launcher, timers, discovered };
        machine.follow(now);
        machine
    }

    /// Returns the durable state.
    pub fn launcher(&self) -> &Launcher {
        &self.launcher
    }

    /// Returns since when the hosts and the job are in their state.
    pub fn timers(&self) -> &Timers {
        &self.timers
    }

    /// Returns when something is due without another input.
    pub fn deadline(&self, now: Millis) -> Option<Millis> {
        self.launcher.deadline(self.context(now))
    }

    pub(crate) fn context(&self, now: Millis) -> Context<'_> {
        let discovered = self.discovered.as_deref();
        Context { settings: &self.settings, discovered, timers: &self.timers, now }
    }

    pub(crate) fn follow(&mut self, now: Millis) {
        let discovered = self.discovered.as_deref();
        self.timers.follow(now, &self.launcher, &self.settings, discovered);
    }

    pub(crate) fn apply(&mut self, facts: Vec<Fact>, decision: &mut Decision<Self>) {
        decision.facts.extend(self.launcher.changes(&facts));
        for fact in facts {
            self.launcher.evolve(&fact);
            decision.effects.push(Effect::Committed(fact));
        }
    }
}

impl Machine for LaunchMachine {
    type Input = Input;
    type Fact = Change;
    type Effect = Effect;

    fn handle(&mut self, moment: Moment, input: Input, decision: &mut Decision<Self>) {
        match input {
            Input::Exited { host, launch, exit, seed } => {
                let facts =
                    self.launcher.exited(&host, launch, exit, seed, self.context(moment.now));
                let has_failed = facts.iter().any(|fact| matches!(fact, Fact::Failed { .. }));
                self.apply(facts, decision);
                decision.effects.push(Effect::Exited { host, exit, has_failed });
            }
            Input::Discovered(hosts) => {
                self.discovered = Some(hosts);
                self.follow(moment.now);
                decision.effects.push(Effect::Changed);
            }
            Input::End(outcome) => self.apply(self.launcher.end(outcome), decision),
            Input::Deadline => {}
        }
    }

    fn committed(&mut self, moment: Moment, effects: &mut Vec<Effect>) {
        self.follow(moment.now);
        effects.push(Effect::Changed);
    }

    fn due(&mut self, moment: Moment, decision: &mut Decision<Self>) {
        let facts = self.launcher.due(self.context(moment.now));
        self.apply(facts, decision);
    }

    fn size_max(&self, _: &Input) -> Size {
        let changes = FACTS_MAX + 1;
        Size { changes, bytes: changes * CHANGE_BYTES_MAX }
    }

    fn is_over(&self) -> bool {
        self.launcher.is_over()
    }
}
