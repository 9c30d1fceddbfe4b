//! Small models, explored over every interleaving up to some depth: the staleness gate, the election of
//! the initializer, and the assignment of lanes. (`ledger.rs` explores the queues.)

use std::collections::BTreeSet;
use std::fmt::Debug;

use steadfast_common::ids::{Generation, Lane, TrainerId};
use steadfast_common::records::InitRecord;
use steadfast_master_core::election::{InitReply, elect, finish};
use steadfast_master_core::lanes::Lanes;
use steadfast_master_core::staleness::Staleness;
use uuid::Uuid;

fn trainer(number: u128) -> TrainerId {
    TrainerId(Uuid::from_u128(number))
}

/// Applies every move in every state that can be reached in `depth` moves; returns the number of
/// states. `apply` returns `None` for a move that is not possible.
fn explore<S: Clone + Debug, M: Copy>(
    start: S,
    moves: &[M],
    depth: usize,
    apply: impl Fn(&S, M) -> Option<S>,
) -> usize {
    let mut seen = BTreeSet::from([format!("{start:?}")]);
    let mut frontier = vec![start];
    for _ in 0..depth {
        let mut next = Vec::new();
        for state in &frontier {
            for after in moves.iter().filter_map(|it| apply(state, *it)) {
                if seen.insert(format!("{after:?}")) {
                    next.push(after);
                }
            }
        }
        frontier = next;
    }
    seen.len()
}

/// Trainers at the staleness gate.
#[derive(Clone, Debug)]
struct Gate {
    staleness: Staleness,
    active: BTreeSet<TrainerId>,
    /// Admitted pushes of each trainer.
    pushed: [u64; 3],
}

#[derive(Clone, Copy, Debug)]
enum AtGate {
    Comes(usize),
    Goes(usize),
    Asks(usize),
    /// A delayed request of a trainer, active or not.
    Late(usize),
}

/// I8, I12: no trainer is admitted too far ahead of the slowest active one, and the slowest is admitted,
/// whatever delayed requests of others arrive.
#[test]
fn every_interleaving_at_the_gate_keeps_the_bound_and_lets_the_slowest_go() {
    const BOUND: u32 = 1;
    let moves: Vec<AtGate> = (0..3)
        .flat_map(|it| [AtGate::Comes(it), AtGate::Goes(it), AtGate::Asks(it), AtGate::Late(it)])
        .collect();
    let start = Gate { staleness: Staleness::default(), active: BTreeSet::new(), pushed: [0; 3] };
    let id = |it: usize| trainer(it as u128 + 1);
    let states = explore(start, &moves, 9, |gate, step| {
        let mut gate = gate.clone();
        match step {
            AtGate::Comes(it) => drop(gate.active.insert(id(it)).then_some(())?),
            AtGate::Goes(it) => drop(gate.active.remove(&id(it)).then_some(())?),
            AtGate::Asks(it) => {
                gate.active.contains(&id(it)).then_some(())?;
                gate.staleness.advance(id(it), gate.pushed[it] + 1);
                if gate.staleness.admit(id(it), BOUND) {
                    assert!(gate.staleness.lead(id(it)) <= u64::from(BOUND), "{gate:?}");
                    gate.pushed[it] += 1;
                }
            }
            AtGate::Late(it) => drop(gate.staleness.advance(id(it), gate.pushed[it])),
        }
        gate.staleness.set_active(&gate.active);
        let mut asks = gate.staleness.clone();
        let goes = |it: &TrainerId| asks.admit(*it, BOUND);
        let is_open = gate.active.is_empty() || gate.active.iter().any(goes);
        assert!(is_open, "no trainer may proceed: {gate:?}");
        Some(gate)
    });
    assert!(3_000 < states, "explored only {states} states");
}

/// Candidates for the initializer.
#[derive(Clone, Debug)]
struct Election {
    stored: Option<InitRecord>,
    live: BTreeSet<TrainerId>,
    /// The attempt that each trainer believes it was elected for.
    believes: [Option<u64>; 3],
    generation: u64,
}

#[derive(Clone, Copy, Debug)]
enum InElection {
    Offers(usize),
    Finishes(usize),
    Dies(usize),
    Comes(usize),
    Another,
}

/// D12: attempt numbers only increase, the finished attempt is the last, and only the trainer elected for
/// it can finish it.
#[test]
fn every_interleaving_of_an_election_ends_with_one_attempt() {
    let of = |it| {
        [
            InElection::Offers(it),
            InElection::Finishes(it),
            InElection::Dies(it),
            InElection::Comes(it),
        ]
    };
    let mut moves: Vec<InElection> = (0..3).flat_map(of).collect();
    moves.push(InElection::Another);
    let id = |it: usize| trainer(it as u128 + 1);
    let start = Election {
        stored: None,
        live: (0..3).map(id).collect(),
        believes: [None; 3],
        generation: 1,
    };
    let states = explore(start, &moves, 9, |before, step| {
        let mut after = before.clone();
        let generation = Generation(before.generation);
        match step {
            InElection::Offers(it) => {
                before.live.contains(&id(it)).then_some(())?;
                match elect(before.stored.as_ref(), generation, id(it), &before.live) {
                    InitReply::Elected { record } => {
                        after.believes[it] = Some(record.attempt);
                        after.stored = Some(record);
                    }
                    InitReply::Wait => assert!(!before.stored.as_ref()?.done, "{before:?}"),
                    InitReply::Done => assert!(before.stored.as_ref()?.done, "{before:?}"),
                }
            }
            // Also for a trainer that has died since: its report may still be in flight.
            InElection::Finishes(it) => {
                let attempt = before.believes[it]?;
                after.stored =
                    finish(before.stored.as_ref(), generation, id(it), attempt).or(after.stored);
            }
            InElection::Dies(it) => drop(after.live.remove(&id(it)).then_some(())?),
            InElection::Comes(it) => drop(after.live.insert(id(it)).then_some(())?),
            InElection::Another => {
                after.generation = (before.generation < 2).then_some(2)?;
            }
        }
        if let (Some(was), Some(is)) = (&before.stored, &after.stored)
            && was.generation == is.generation
        {
            assert!(was.attempt <= is.attempt && (!was.done || was == is), "{before:?} {after:?}");
        }
        Some(after)
    });
    assert!(1_000 < states, "explored only {states} states");
}

#[derive(Clone, Copy, Debug)]
enum InLanes {
    Comes(u128),
    Goes(u128),
    MovesOn(u32),
    NextPass,
}

/// I7, I12: while a trainer lives, every lane has exactly one owner, and the owner lives.
#[test]
fn every_interleaving_leaves_each_lane_with_one_live_owner() {
    const LANES: u32 = 4;
    let comes_and_goes = (1..=3).flat_map(|it| [InLanes::Comes(it), InLanes::Goes(it)]);
    let passes = (0..LANES).map(InLanes::MovesOn);
    let moves: Vec<InLanes> = comes_and_goes.chain(passes).chain([InLanes::NextPass]).collect();
    let start = (Lanes::new(LANES, 0), BTreeSet::<TrainerId>::new());
    let states = explore(start, &moves, 9, |(lanes, live), step| {
        let (mut lanes, mut live) = (lanes.clone(), live.clone());
        match step {
            InLanes::Comes(it) => drop(live.insert(trainer(it)).then_some(())?),
            InLanes::Goes(it) => drop(live.remove(&trainer(it)).then_some(())?),
            InLanes::MovesOn(lane) => {
                let owner = *live.iter().find(|it| lanes.of(**it).contains(&Lane(lane)))?;
                lanes.move_to_next(Lane(lane), owner, &live);
            }
            InLanes::NextPass => lanes.rebalance(&live),
        }
        if matches!(step, InLanes::Comes(_) | InLanes::Goes(_)) {
            lanes.rebalance(&live);
        }
        let mut owned: Vec<Lane> = live.iter().flat_map(|it| lanes.of(*it)).collect();
        owned.sort();
        let all: Vec<Lane> = (0..LANES).map(Lane).collect();
        assert!(live.is_empty() || owned == all, "{lanes:?} {live:?}");
        Some((lanes, live))
    });
    assert!(500 < states, "explored only {states} states");
}
