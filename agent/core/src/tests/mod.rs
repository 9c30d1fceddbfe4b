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

use steadfast_common::ids::Millis;
use steadfast_common::launch::{HostRecord, LauncherRecord, Outcome, Phase, StopReason};

use crate::Exit;
use crate::hosts::{Host, HostName};
use crate::launcher::{Action, Change, Fact, Launcher};
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

/// A driver whose commits always succeed.
#[derive(Clone, Debug)]
struct Driver {
    settings: Settings,
    launcher: Launcher,
    timers: Timers,
    discovered: Option<Vec<Host>>,
    now: Millis,
    /// The keys in etcd.
    etcd: (Option<LauncherRecord>, BTreeMap<HostName, HostRecord>),
    /// Facts so far.
    facts: Vec<Fact>,
}

impl Driver {
    fn new(settings: Settings) -> Self {
        let mut driver = Self {
            settings,
            launcher: Launcher::default(),
            timers: Timers::default(),
            discovered: None,
            now: Millis(1_000_000),
            etcd: (None, BTreeMap::new()),
            facts: Vec::new(),
        };
        driver.follow();
        driver
    }

    /// A driver after its first poll.
    fn with(settings: Settings, hosts: &str) -> Self {
        let mut driver = Self::new(settings);
        driver.discovers(hosts);
        driver
    }

    fn context(&self) -> Context<'_> {
        let discovered = self.discovered.as_deref();
        Context { settings: &self.settings, discovered, timers: &self.timers, now: self.now }
    }

    fn follow(&mut self) {
        let discovered = self.discovered.as_deref();
        self.timers.follow(self.now, &self.launcher, &self.settings, discovered);
    }

    fn commit(&mut self, facts: &[Fact]) {
        for change in self.launcher.changes(facts) {
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
        facts.iter().for_each(|fact| self.launcher.evolve(fact));
        self.facts.extend_from_slice(facts);
        self.follow();
    }

    /// Commits what is due; returns the actions.
    fn settle(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        for _ in 0..1_000 {
            let facts = self.launcher.due(self.context());
            if facts.is_empty() {
                return actions;
            }
            self.commit(&facts);
            actions.extend(facts.iter().filter_map(Fact::action));
        }
        panic!("there is always something due: {:?}", self.launcher);
    }

    fn discovers(&mut self, text: &str) -> Vec<String> {
        self.discovered = Some(hosts(text));
        self.follow();
        texts(self.settle())
    }

    fn exits(&mut self, host: &str, exit: Exit) -> Vec<String> {
        let launch = self.launcher.agent(&name(host)).unwrap().launch;
        let facts = self.launcher.exited(&name(host), launch, exit, 0, self.context());
        self.commit(&facts);
        texts(self.settle())
    }

    fn passes(&mut self, ms: u64) -> Vec<String> {
        self.now.0 += ms;
        texts(self.settle())
    }

    /// The launcher ends, and another one reads its records. Its clock is another one.
    fn restarts(&mut self) {
        let (record, hosts) = self.etcd.clone();
        self.launcher = Launcher::from_records(record, hosts);
        self.timers = Timers::default();
        self.discovered = None;
        self.now = Millis(7);
        self.follow();
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
