//! Rules of the launcher: scenarios by name, every sequence of events in a small world, and random walks in a
//! larger one.

mod blacklist;
mod discovery;
mod exits;
mod hosts;
mod placement;
mod recovery;
mod walks;

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use steadfast_common::ids::Millis;
use steadfast_common::machine::{Decision, Machine, Moment};
use steadfast_common::records::launch::{HostRecord, LauncherRecord, Outcome, Phase, StopReason};

use crate::Exit;
use crate::hosts::{Host, HostName};
use crate::launcher::{Action, Change, Fact, Launcher};
use crate::machine::{Effect, Input, LaunchMachine};
use crate::settings::{Context, Settings, WorkerRange};
use crate::timers::Timers;

fn name(text: &str) -> HostName {
    text.parse().unwrap()
}

/// Hosts of a text like `a:2 b:4`.
fn hosts(text: &str) -> Vec<Host> {
    let host = |text: &str| {
        let (host, slots) = text.split_once(':').unwrap();
        Host { name: name(host), slots: slots.parse().unwrap() }
    };
    text.split_whitespace().map(host).collect()
}

fn settings(min_np: u32, max_np: u32) -> Settings {
    Settings::new(WorkerRange::new(min_np, max_np).unwrap())
}

/// A driver whose commits always succeed. The fields of the machine are found in it, too.
#[derive(Clone, Debug)]
struct Driver {
    machine: LaunchMachine,
    now: Millis,
    /// The keys in etcd.
    etcd: (Option<LauncherRecord>, BTreeMap<HostName, HostRecord>),
    /// Facts so far.
    facts: Vec<Fact>,
}

impl Deref for Driver {
    type Target = LaunchMachine;

    fn deref(&self) -> &LaunchMachine {
        &self.machine
    }
}

impl DerefMut for Driver {
    fn deref_mut(&mut self) -> &mut LaunchMachine {
        &mut self.machine
    }
}

impl Driver {
    fn new(settings: Settings) -> Self {
        let now = Millis(1_000_000);
        let (launcher, timers) = (Launcher::default(), Timers::default());
        let machine = LaunchMachine::new(settings, launcher, timers, None, now);
        Self { machine, now, etcd: (None, BTreeMap::new()), facts: Vec::new() }
    }

    /// A driver after its first poll.
    fn with(settings: Settings, hosts: &str) -> Self {
        let mut driver = Self::new(settings);
        driver.discovers(hosts);
        driver
    }

    fn context(&self) -> Context<'_> {
        self.machine.context(self.now)
    }

    fn follow(&mut self) {
        self.machine.follow(self.now);
    }

    fn moment(&self) -> Moment {
        Moment { now: self.now, ..Moment::default() }
    }

    fn commit(&mut self, facts: &[Fact]) {
        let mut decision = Decision::default();
        self.machine.apply(facts.to_vec(), &mut decision);
        self.complete(decision);
    }

    /// Commits a decision; returns the actions.
    fn complete(&mut self, decision: Decision<LaunchMachine>) -> Vec<Action> {
        let Decision { ahead, facts: changes, effects } = decision;
        assert!(ahead.is_empty());
        let has_changed = !changes.is_empty();
        for change in changes {
            match change {
                Change::Launcher(record) => self.etcd.0 = Some(record),
                Change::Host { host, record: Some(record) } => {
                    self.etcd.1.insert(host, record);
                }
                Change::Host { host, record: None } => {
                    self.etcd.1.remove(&host);
                }
            }
        }
        if has_changed {
            let moment = self.moment();
            self.machine.committed(moment, &mut Vec::new());
        }
        let mut actions = Vec::new();
        for effect in effects {
            if let Effect::Committed(fact) = effect {
                actions.extend(fact.action());
                self.facts.push(fact);
            }
        }
        actions
    }

    fn handle(&mut self, input: Input) -> Vec<Action> {
        let (moment, mut decision) = (self.moment(), Decision::default());
        self.machine.handle(moment, input, &mut decision);
        self.complete(decision)
    }

    /// Commits what is due; returns the actions.
    fn settle(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        for _ in 0..1_000 {
            let (moment, mut decision) = (self.moment(), Decision::default());
            self.machine.due(moment, &mut decision);
            if decision.facts.is_empty() {
                return actions;
            }
            actions.extend(self.complete(decision));
        }
        panic!("there is always something due: {:?}", self.launcher);
    }

    fn discovers(&mut self, text: &str) -> Vec<String> {
        self.handle(Input::Discovered(hosts(text)));
        texts(self.settle())
    }

    fn exits(&mut self, host: &str, exit: Exit) -> Vec<String> {
        let launch = self.launcher.agent(&name(host)).unwrap().launch;
        self.handle(Input::Exited { host: name(host), launch, exit, seed: 0 });
        texts(self.settle())
    }

    fn passes(&mut self, ms: u64) -> Vec<String> {
        self.now.0 += ms;
        texts(self.settle())
    }

    /// The launcher ends, and another one reads its records. Its clock is another one.
    fn restarts(&mut self) {
        let (record, hosts) = self.etcd.clone();
        let (launcher, timers) = (Launcher::from_records(record, hosts), Timers::default());
        self.now = Millis(7);
        self.machine = LaunchMachine::new(self.settings, launcher, timers, None, self.now);
    }

    fn outcome(&self) -> Option<&Outcome> {
        self.launcher.record().outcome.as_ref()
    }

    /// The agents by age, like `a:2 b:4`.
    fn running(&self) -> String {
        let agents = self.launcher.agents().filter(|(_, agent)| agent.phase == Phase::Running);
        let mut agents: Vec<_> = agents.collect();
        agents.sort_by_key(|(_, agent)| agent.place);
        let texts = agents.into_iter().map(|(host, agent)| format!("{host}:{}", agent.slots));
        Vec::from_iter(texts).join(" ")
    }
}

/// Actions like `+a:2` and `-b surplus`.
fn texts(actions: Vec<Action>) -> Vec<String> {
    let text = |action| match action {
        Action::Start { host, slots, .. } => format!("+{host}:{slots}"),
        Action::Stop { host, reason, .. } => format!(
            "-{host} {}",
            match reason {
                StopReason::Removed => "removed",
                StopReason::SlotsChanged => "slots",
                StopReason::Surplus => "surplus",
                StopReason::JobEnded => "ended",
            }
        ),
    };
    actions.into_iter().map(text).collect()
}
