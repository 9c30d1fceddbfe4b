//! Update rules and the sum of lanes, compared with loops that only move the same bytes.

use std::hint::black_box;

use bytes::Bytes;
use steadfast_common::ids::Lane;
use steadfast_common::job::spec::{OptimizerKind, OptimizerSpec};
use steadfast_common::records::contribution::{LaneEnd, LaneShare};
use steadfast_common::tensor::byte_segments::ByteSegments;
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::widest::widest;
use steadfast_pserver_core::buffer_pool::BufferPool;
use steadfast_pserver_core::contribution::ValidatedBlock;
use steadfast_pserver_core::lane_sum::LaneSum;
use steadfast_pserver_core::optimizer::{Optimizer, State};

use crate::sample::Sample;
use crate::watch::Watch;

/// Values that fit into cache: one block.
pub const BLOCK: usize = 1 << 16;

/// Values that exceed the cache: 64 MiB.
pub const LARGE: usize = 16 << 20;

/// Approximate number of bytes moved per sample.
const SAMPLE_BYTES: usize = 3 << 30;

/// Number of lanes added up.
const LANES: u32 = 8;

/// Values per lane: 8 MiB.
const LANE: usize = 2 << 20;

/// Adam as a text of the job file.
const ADAM: &str = "
m = b1*m + (1 - b1)*g
v = b2*v + (1 - b2)*g**2
p -= lr/(1 - b1**t) * m / (sqrt(v/(1 - b2**t)) + 1e-8)
";

/// Returns a built-in rule.
pub fn built_in(kind: OptimizerKind) -> OptimizerSpec {
    OptimizerSpec { kind, momentum: Some(0.9), ..OptimizerSpec::default() }
}

/// Returns Adam as a text.
pub fn adam_as_text() -> OptimizerSpec {
    OptimizerSpec {
        kind: OptimizerKind::Rule,
        rule: Some(ADAM.to_owned()),
        states: vec!["m".to_owned(), "v".to_owned()],
        constants: [("b1".to_owned(), 0.9), ("b2".to_owned(), 0.999)].into(),
        ..OptimizerSpec::default()
    }
}

/// Applies a rule repeatedly to `values` values.
pub fn optimizer(spec: &OptimizerSpec, values: usize) -> Sample {
    let rule = Optimizer::new(spec);
    let mut params = vec![0.25_f32; values];
    let mut gradient = vec![0.5_f32; values];
    let mut state = rule.initial_state(&params);
    let bytes = moved(state.len(), values);
    let times = (SAMPLE_BYTES / bytes).max(1);
    let mut apply = |update| {
        let state = State::new(&mut state, 0..values);
        rule.apply(black_box(&mut params), &mut gradient, state, 1e-3, update);
    };
    apply(1);
    let watch = Watch::start(Vec::new());
    for time in 0..times {
        apply(time as u64 + 2);
    }
    watch.stop((times * bytes) as f64)
}

/// Moves the bytes of a rule: reads gradient, parameters and state, writes the latter two.
pub fn copy(kind: OptimizerKind, values: usize) -> Sample {
    let states = Optimizer::new(&built_in(kind)).states();
    let gradient = vec![0.5_f32; values];
    let mut written: Vec<Vec<f32>> = vec![vec![0.25; values]; 1 + states];
    let bytes = moved(states, values);
    let times = (SAMPLE_BYTES / bytes).max(1);
    let watch = Watch::start(Vec::new());
    for _ in 0..times {
        widest(|| move_through(black_box(&mut written), &gradient));
    }
    watch.stop((times * bytes) as f64)
}

/// Performs one addition per written value.
#[inline(always)]
fn move_through(written: &mut [Vec<f32>], gradient: &[f32]) {
    match written {
        [a] => a.iter_mut().zip(gradient).for_each(|(a, g)| *a += g),
        [a, b] => {
            for ((a, b), g) in a.iter_mut().zip(b).zip(gradient) {
                *a += g;
                *b += g;
            }
        }
        [a, b, c] => {
            for (((a, b), c), g) in a.iter_mut().zip(b).zip(c).zip(gradient) {
                *a += g;
                *b += g;
                *c += g;
            }
        }
        [a, b, c, d] => {
            for ((((a, b), c), d), g) in a.iter_mut().zip(b).zip(c).zip(d).zip(gradient) {
                *a += g;
                *b += g;
                *c += g;
                *d += g;
            }
        }
        _ => unreachable!("no rule keeps more than three vectors"),
    }
}

/// Returns the bytes moved: the gradient is read, the other vectors are read and written.
fn moved(states: usize, values: usize) -> usize {
    (1 + 2 * (1 + states)) * values * size_of::<f32>()
}

/// The share of a lane with one record that is not exhausted.
const MORE: LaneShare =
    LaneShare { records: 1, checksum: 1, end: LaneEnd::MoreToCome, weight: None };

/// Adds lanes along their tree; every second lane arrives before its left neighbor.
pub fn lanes() -> Sample {
    let lane = ByteSegments::from(Bytes::from(0.5_f32.to_le_bytes().repeat(LANE)));
    let order: Vec<u32> = (0..LANES).map(|it| it ^ 1).collect();
    let mut sum = LaneSum::new(LANES, Default::default(), Codec::Plain, 1);
    let memory = BufferPool::default();
    let step = |_| {
        let came = order.iter().map(|number| {
            let block = ValidatedBlock::new(0, &lane, memory.lend(LANE)).expect("they are finite");
            (*number, block)
        });
        let came: Vec<_> = came.collect();
        let watch = Watch::start(Vec::new());
        for (number, block) in came {
            let leaf = sum.tree().leaf(Lane(number));
            sum.add(leaf, &[MORE], vec![(0, block)]);
        }
        black_box(sum.take_ready());
        sum.begin_next();
        watch.stop((LANES as usize * lane.len()) as f64)
    };
    (0..lane_times()).map(step).sum()
}

/// Adds the same number of values and lanes, in arbitrary order.
pub fn unordered() -> Sample {
    let lanes = vec![vec![0.5_f32; LANE]; LANES as usize];
    let mut sum = vec![0.0_f32; LANE];
    let step = |_| {
        let watch = Watch::start(Vec::new());
        sum.fill(0.0);
        for lane in black_box(&lanes) {
            sum.iter_mut().zip(lane).for_each(|(sum, value)| *sum += value);
        }
        black_box(&sum);
        watch.stop((LANES as usize * size_of_val(&lanes[0][..])) as f64)
    };
    (0..lane_times()).map(step).sum()
}

fn lane_times() -> usize {
    SAMPLE_BYTES / (LANES as usize * LANE * size_of::<f32>())
}
