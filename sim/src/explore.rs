//! A small world, and in it every single thing that can go wrong, at every moment at which it can.
//!
//! The schedule of an undisturbed small job is repeated again and again, each time with one detour:
//! a process is killed, or stopped for longer than its lease, before one particular turn; one particular
//! call breaks, loses its answer or arrives again late; one particular choice between tasks that could
//! run goes another way. Whatever the detour, everything has to hold, and the job has to end as it
//! would without.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use steadfast_common::spec::Mode;

use crate::cluster::{Member, Role, Shape};
use crate::fault::Fault;
use crate::host::Addresses;
use crate::job::Job;
use crate::plan::Plan;
use crate::run::{Outcome, run};
use crate::store::StoreWeather;
use crate::weather::{Fate, Weather};

/// One detour from a schedule.
#[derive(Clone, Debug, PartialEq)]
pub enum Detour {
    /// A fault strikes before the turn of this number.
    Strike(u64, Fault),
    /// This becomes of the call of this number.
    Call(u64, Fate),
    /// When tasks are chosen from for the so-many-th time, the one so many places further on runs.
    Choice(u64, u64),
}

/// Detours of one run.
#[derive(Clone, Debug, Default)]
pub struct Detours {
    pub strikes: Vec<(u64, Fault)>,
    pub calls: BTreeMap<u64, Fate>,
    pub choices: BTreeMap<u64, u64>,
}

impl Detours {
    /// Takes one more.
    #[must_use]
    pub fn and(mut self, detour: Detour) -> Self {
        match detour {
            Detour::Strike(turn, fault) => self.strikes.push((turn, fault)),
            Detour::Call(number, fate) => drop(self.calls.insert(number, fate)),
            Detour::Choice(number, further) => drop(self.choices.insert(number, further)),
        }
        self
    }
}

impl fmt::Display for Detour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Strike(turn, fault) => write!(f, "before turn {turn}: {fault}"),
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

/// Every single detour from the schedule of `plan`, but only each `stride`-th, from `first` on.
pub fn detours(plan: &Plan, first: usize, stride: usize) -> Vec<Detour> {
    let base = run(plan);
    let all = strikes(plan, &base).into_iter().chain(calls(&base)).chain(choices(&base));
    all.skip(first).step_by(stride.max(1)).collect()
}

/// Every detour of a single call.
pub fn detours_of_calls(plan: &Plan) -> Vec<Detour> {
    calls(&run(plan))
}

fn strikes(plan: &Plan, base: &Outcome) -> Vec<Detour> {
    let shape = &plan.shape;
    let of = |role, count| (0..count).map(move |number| Member { role, number });
    let members: Vec<Member> = of(Role::Master, shape.masters)
        .chain(of(Role::Pserver, shape.pservers))
        .chain(of(Role::Trainer, shape.trainers))
        .collect();
    let longer = shape.lease_ttl * 2;
    let mut all = Vec::new();
    for turn in 0..base.turns {
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
    let fates = [Fate::BrokenBefore, Fate::AnswerLost].into_iter().chain(ghosts);
    let fates: Vec<Fate> = fates.collect();
    let of = |call| fates.iter().map(move |fate| Detour::Call(call, *fate));
    (1..=base.calls).flat_map(of).collect()
}

fn choices(base: &Outcome) -> Vec<Detour> {
    let of = |choice| [1, 2].map(|further| Detour::Choice(choice, further));
    (1..=base.choices).flat_map(of).collect()
}
