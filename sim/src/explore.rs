//! Exhaustive exploration of a small job: every single deviation from its schedule, at every point.
//!
//! The schedule of an undisturbed small job is repeated, each time with one injected deviation: a process
//! is killed, or stopped for longer than its lease, before one turn; one call breaks, loses its reply or
//! arrives late as a duplicate; one scheduling choice takes another task. Pairs of faults are explored
//! between the transactions that implement the lock, the slots and the generations. With each deviation
//! all invariants must hold, and the job must end as it does without.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::cluster::{Member, Role, Shape};
use crate::fault::{End, Fault};
use crate::host::Addresses;
use crate::network_model::{CallOutcome, NetworkModel};
use crate::plan::{Plan, TURNS_MAX};
use crate::run::{Outcome, run};
use crate::store::StoreModel;
use crate::workload::{Mode, Workload};

/// When a fault is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before the turn with this number.
    Turn(u64),
    /// As soon as etcd has this revision, before any client has seen it.
    Revision(u64),
}

/// One deviation from a schedule.
#[derive(Clone, Debug, PartialEq)]
pub enum Deviation {
    /// A fault is injected.
    Strike(Moment, Fault),
    /// The call with this number has this outcome.
    Call(u64, CallOutcome),
    /// The scheduling choice with this number takes the task this many places after the drawn one.
    Choice(u64, u64),
}

/// Deviations of one run.
#[derive(Clone, Debug, Default)]
pub struct Deviations {
    pub strikes: Vec<(Moment, Fault)>,
    pub calls: BTreeMap<u64, CallOutcome>,
    pub choices: BTreeMap<u64, u64>,
}

impl Deviations {
    #[must_use]
    pub fn and(mut self, deviation: Deviation) -> Self {
        match deviation {
            Deviation::Strike(moment, fault) => self.strikes.push((moment, fault)),
            Deviation::Call(number, outcome) => drop(self.calls.insert(number, outcome)),
            Deviation::Choice(number, further) => drop(self.choices.insert(number, further)),
        }
        self
    }
}

impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Strike(Moment::Turn(turn), fault) => write!(f, "before turn {turn}: {fault}"),
            Self::Strike(Moment::Revision(at), fault) => write!(f, "at revision {at}: {fault}"),
            Self::Call(number, outcome) => write!(f, "call {number}: {outcome:?}"),
            Self::Choice(number, further) => write!(f, "choice {number}: {further} places further"),
        }
    }
}

/// Returns a small job of `mode`: an acting and a standby master; two slots and a spare, two trainers; or
/// three agents.
pub fn small(mode: Mode) -> Plan {
    let latency = (Duration::from_millis(2), Duration::from_millis(2));
    let job = Workload::smallest(mode);
    let is_elastic = mode == Mode::Elastic;
    let count = |of_training, of_elastic| if is_elastic { of_elastic } else { of_training };
    Plan {
        seed: 1,
        job,
        shape: Shape {
            addresses: Addresses::ManyHosts,
            masters: 2,
            slots: u32::from(count(2, 0)),
            pservers: count(3, 0),
            trainers: count(2, 0),
            agents: count(0, 3),
            lease_ttl: Duration::from_secs(2),
            sync: latency,
            drift: 0.0,
        },
        network_model: NetworkModel::fair(latency),
        store_model: StoreModel::fair(latency),
        faults: Vec::new(),
        forbidden: None,
        deviations: Deviations::default(),
        turns_max: TURNS_MAX,
        has_instant_turns: false,
    }
}

/// Returns the plan with a longer job. The smallest one is over before spares follow its slots, or these change.
fn longer(mut plan: Plan) -> Plan {
    if let Workload::Training(job) = &mut plan.job {
        job.spec.passes = job.spec.passes.map(|passes| 16 * passes);
        job.spec.steps = job.spec.steps.map(|steps| 16 * steps);
    }
    plan
}

/// Returns a small job of `mode`, synchronous or asynchronous, in which spares follow both slots.
pub fn followed(mode: Mode) -> Plan {
    let mut plan = longer(small(mode));
    if let Workload::Training(job) = &mut plan.job {
        job.spec.warm_spares = plan.shape.slots;
    }
    plan.shape.pservers = 2 * plan.shape.slots as u16;
    plan
}

/// Turns from a change of the number of slots until all slots have their parts: more than it takes undisturbed.
const MOVE_TURNS: u64 = 500;

/// Returns a small job of `mode`, synchronous or asynchronous, whose number of slots changes from two to three and then
/// to one, while it trains; and the turns in which pservers read what others hand over, which those of an asynchronous
/// job never do.
pub fn moved(mode: Mode) -> (Plan, Option<Vec<u64>>) {
    let plan = longer(small(mode));
    let turns = run(&plan).turns;
    // The moves take turns as well, so the second change may come before the end of the first move.
    let changes = [(turns / 4, 3), (turns / 2, 1)];
    let strikes =
        changes.map(|(turn, slots)| Deviation::Strike(Moment::Turn(turn), Fault::Slots(slots)));
    let turns = changes.into_iter().flat_map(|(turn, _)| turn..turn + MOVE_TURNS).collect();
    (plan.with(&strikes), (mode == Mode::Sync).then_some(turns))
}

/// Turns between the loss of the messages of a pserver to the others and its death: enough for some steps.
const CUT_TURNS: u64 = 300;

/// Returns the deaths of each pserver before each of these turns, or before every one: every `stride`-th death, from
/// `first` on. What the pserver has sent arrives; or nothing that it has lately sent to other pservers; or neither that,
/// nor what it has sent to etcd.
pub fn deaths(
    plan: &Plan,
    turns: Option<Vec<u64>>,
    first: usize,
    stride: usize,
) -> Vec<Vec<Deviation>> {
    let pservers = members(plan).into_iter().filter(|it| it.role == Role::Pserver);
    let pservers: Vec<Member> = pservers.collect();
    let at = |turn, fault| Deviation::Strike(Moment::Turn(turn), fault);
    let (at, all) = (&at, &pservers);
    let of = |turn| {
        all.iter().flat_map(move |it| {
            let kill = |turn| at(turn, Fault::Kill(*it));
            let cut = |end| at(turn, Fault::OneWay(End::Member(*it), end, plan.shape.lease_ttl));
            let others = all.iter().filter(|other| *other != it).map(|it| End::Member(*it));
            let late: Vec<Deviation> = others.map(cut).chain([kill(turn + CUT_TURNS)]).collect();
            let without_etcd = [vec![cut(End::Etcd)], late.clone()].concat();
            [vec![kill(turn)], late, without_etcd]
        })
    };
    let turns = turns.unwrap_or_else(|| (0..run(plan).turns).collect());
    turns.into_iter().flat_map(of).skip(first).step_by(stride.max(1)).collect()
}

/// Returns pairs of faults between the transactions of `plan`, at the same or at different revisions:
/// every `stride`-th pair, from `first` on.
pub fn pairs(plan: &Plan, first: usize, stride: usize) -> Vec<Vec<Deviation>> {
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
        let strike = move |fault: &Fault| Deviation::Strike(Moment::Revision(at), fault.clone());
        faults.iter().map(strike)
    };
    let from = |at, one: Deviation| {
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
        .chain(of(Role::Agent, shape.agents))
        .collect()
}

/// Returns single deviations from the schedule of `plan`: every `stride`-th one, from `first` on.
pub fn singles(plan: &Plan, first: usize, stride: usize) -> Vec<Vec<Deviation>> {
    let base = run(plan);
    let all = strikes(plan, &base).into_iter().chain(calls(&base)).chain(choices(&base));
    all.skip(first).step_by(stride.max(1)).map(|it| vec![it]).collect()
}

/// Returns every deviation of a single call.
pub fn single_calls(plan: &Plan) -> Vec<Vec<Deviation>> {
    calls(&run(plan)).into_iter().map(|it| vec![it]).collect()
}

fn strikes(plan: &Plan, base: &Outcome) -> Vec<Deviation> {
    let (members, longer) = (members(plan), plan.shape.lease_ttl * 2);
    let mut all = Vec::new();
    for turn in (0..base.turns).map(Moment::Turn) {
        for member in &members {
            all.push(Deviation::Strike(turn, Fault::Kill(*member)));
            all.push(Deviation::Strike(turn, Fault::Stop(*member, longer)));
        }
        all.push(Deviation::Strike(turn, Fault::EtcdKill(Duration::from_millis(300))));
        all.push(Deviation::Strike(turn, Fault::EtcdStop(longer)));
    }
    all
}

fn calls(base: &Outcome) -> Vec<Deviation> {
    let late = [5, 10, 20, 30, 40, 60, 100, 3000].map(Duration::from_millis);
    let delayed_duplicates = late.map(CallOutcome::DelayedDuplicate);
    let outcomes = [CallOutcome::BrokenBefore, CallOutcome::CutOff(500), CallOutcome::AnswerLost];
    let outcomes = outcomes.into_iter().chain(delayed_duplicates);
    let outcomes: Vec<CallOutcome> = outcomes.collect();
    let of = |call| outcomes.iter().map(move |outcome| Deviation::Call(call, *outcome));
    (1..=base.calls).flat_map(of).collect()
}

fn choices(base: &Outcome) -> Vec<Deviation> {
    let of = |choice| [1, 2].map(|further| Deviation::Choice(choice, further));
    (1..=base.choices).flat_map(of).collect()
}
