//! A small world, and in it every single thing that can go wrong, at every moment at which it can.
//!
//! The schedule of an undisturbed small job is repeated again and again, each time with one detour:
//! a process is killed, or stopped for longer than its lease, before one particular turn; one particular
//! call breaks, loses its answer or arrives again late; one particular choice between tasks that could
//! run goes another way. Besides, with every two faults that can come between the transactions which
//! lock, slots and generations are made of. Whatever the detours, everything has to hold, and the job
//! has to end as it would without.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use steadfast_common::spec::Mode;

use crate::cluster::{Member, Role, Shape};
use crate::fault::{End, Fault};
use crate::host::Addresses;
use crate::job::Job;
use crate::plan::Plan;
use crate::run::{Outcome, run};
use crate::store::StoreWeather;
use crate::weather::{Fate, Weather};

/// When a fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before the turn of this number.
    Turn(u64),
    /// As soon as etcd has this revision, before anybody has heard of it.
    Revision(u64),
}

/// One detour from a schedule.
#[derive(Clone, Debug, PartialEq)]
pub enum Detour {
    /// A fault strikes.
    Strike(Moment, Fault),
    /// This becomes of the call of this number.
    Call(u64, Fate),
    /// When tasks are chosen from for the so-many-th time, the one so many places further on runs.
    Choice(u64, u64),
}

/// Detours of one run.
#[derive(Clone, Debug, Default)]
pub struct Detours {
    pub strikes: Vec<(Moment, Fault)>,
    pub calls: BTreeMap<u64, Fate>,
    pub choices: BTreeMap<u64, u64>,
}

impl Detours {
    /// Takes one more.
    #[must_use]
    pub fn and(mut self, detour: Detour) -> Self {
        match detour {
            Detour::Strike(moment, fault) => self.strikes.push((moment, fault)),
            Detour::Call(number, fate) => drop(self.calls.insert(number, fate)),
            Detour::Choice(number, further) => drop(self.choices.insert(number, further)),
        }
        self
    }
}

impl fmt::Display for Detour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Strike(Moment::Turn(turn), fault) => write!(f, "before turn {turn}: {fault}"),
            Self::Strike(Moment::Revision(at), fault) => write!(f, "at revision {at}: {fault}"),
            Self::Call(number, fate) => write!(f, "call {number}: {fate:?}"),
            Self::Choice(number, further) => write!(f, "choice {number}: {further} further on"),
        }
    }
}

/// A small job of `mode`: a master and one that stands by, two slots and a spare, two trainers.
pub fn small(mode: Mode) -> Plan {
    let latency = (Duration::from_millis(2), Duration::from_millis(2));
    Plan {
        seed: 1,
        job: Job::smallest(mode),
        shape: Shape {
            addresses: Addresses::ManyHosts,
            masters: 2,
            slots: 2,
            pservers: 3,
            trainers: 2,
            lease_ttl: Duration::from_secs(2),
            sync: latency,
            drift: 0.0,
        },
        weather: Weather::fair(latency),
        store_weather: StoreWeather::fair(latency),
        faults: Vec::new(),
        detours: Detours::default(),
    }
}

/// Every two faults that come, one after the other or both at once, between the transactions of
/// `plan`, but only each `stride`-th pair, from `first` on.
pub fn pairs(plan: &Plan, first: usize, stride: usize) -> Vec<Vec<Detour>> {
    let longer = plan.shape.lease_ttl * 2;
    let mut faults = vec![Fault::EtcdKill(Duration::from_millis(300)), Fault::EtcdStop(longer)];
    for member in members(plan) {
        faults.push(Fault::Kill(member));
        faults.push(Fault::Stop(member, longer));
        faults.push(Fault::Cut(End::Member(member), End::Etcd, longer));
    }
    let faults = &faults;
    let revisions = run(plan).revisions;
    let strikes = |at| {
        let strike = move |fault: &Fault| Detour::Strike(Moment::Revision(at), fault.clone());
        faults.iter().map(strike)
    };
    let from = |at, one: Detour| {
        let later = (at..=revisions).flat_map(strikes);
        later.map(move |two| vec![one.clone(), two])
    };
    let all = (1..=revisions).flat_map(|at| strikes(at).flat_map(move |one| from(at, one)));
    all.skip(first).step_by(stride.max(1)).collect()
}

fn members(plan: &Plan) -> Vec<Member> {
    let shape = &plan.shape;
    let of = |role, count| (0..count).map(move |number| Member { role, number });
    of(Role::Master, shape.masters)
        .chain(of(Role::Pserver, shape.pservers))
        .chain(of(Role::Trainer, shape.trainers))
        .collect()
}

/// Every single detour from the schedule of `plan`, but only each `stride`-th, from `first` on.
pub fn singles(plan: &Plan, first: usize, stride: usize) -> Vec<Vec<Detour>> {
    let base = run(plan);
    let all = strikes(plan, &base).into_iter().chain(calls(&base)).chain(choices(&base));
    all.skip(first).step_by(stride.max(1)).map(|it| vec![it]).collect()
}

/// Every detour of a single call.
pub fn single_calls(plan: &Plan) -> Vec<Vec<Detour>> {
    calls(&run(plan)).into_iter().map(|it| vec![it]).collect()
}

fn strikes(plan: &Plan, base: &Outcome) -> Vec<Detour> {
    let (members, longer) = (members(plan), plan.shape.lease_ttl * 2);
    let mut all = Vec::new();
    for turn in (0..base.turns).map(Moment::Turn) {
        for member in &members {
            all.push(Detour::Strike(turn, Fault::Kill(*member)));
            all.push(Detour::Strike(turn, Fault::Stop(*member, longer)));
        }
        all.push(Detour::Strike(turn, Fault::EtcdKill(Duration::from_millis(300))));
        all.push(Detour::Strike(turn, Fault::EtcdStop(longer)));
    }
    all
}

fn calls(base: &Outcome) -> Vec<Detour> {
    let late = [5, 10, 20, 30, 40, 60, 100, 3000].map(Duration::from_millis);
    let ghosts = late.map(Fate::Ghost);
    let fates = [Fate::BrokenBefore, Fate::CutOff(500), Fate::AnswerLost];
    let fates = fates.into_iter().chain(ghosts);
    let fates: Vec<Fate> = fates.collect();
    let of = |call| fates.iter().map(move |fate| Detour::Call(call, *fate));
    (1..=base.calls).flat_map(of).collect()
}

fn choices(base: &Outcome) -> Vec<Detour> {
    let of = |choice| [1, 2].map(|further| Detour::Choice(choice, further));
    (1..=base.choices).flat_map(of).collect()
}
