//! Steps of an embedding table: the rows of a batch are read, and their gradients applied; compared with a plain
//! hash map that does the same.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;

use steadfast_common::ids::{Lane, Slot};
use steadfast_common::job_file;
use steadfast_common::layout::{Layout, ParamSpec};
use steadfast_common::placement::{Placement, PlacementRecord};
use steadfast_common::random::{Purpose, Random};
use steadfast_common::table::{Initial, Rows};
use steadfast_pserver_core::block_store::ShardSnapshot;
use steadfast_pserver_core::contribution::{Contribution, LaneEnd, LaneShare};
use steadfast_pserver_core::rules::Rules;
use steadfast_pserver_core::sync_shard::SyncShard;

use crate::sample::Sample;
use crate::watch::Watch;

/// Values of a row.
const WIDTH: usize = 16;

/// Ids of a batch: 4 096 records of 26 categories.
const BATCH_IDS: usize = 4_096 * 26;

/// Ids are drawn by a power law with this exponent.
const POWER: f64 = 1.05;
const IDS: f64 = 1e7;

const STEPS: usize = 30;

const RATE: f32 = 0.05;

/// Distinct ids of each step, ascending.
fn steps() -> Vec<Vec<u64>> {
    let mut random = Random::keyed(1, Purpose::Gradient, 0, 0, 0);
    // The inverse of the distribution function of a continuous power law.
    let tail = 1.0 - IDS.powf(1.0 - POWER);
    let mut draw = || {
        let place = (1.0 - f64::from(random.uniform()) * tail).powf(1.0 / (1.0 - POWER));
        // Ids are hashes, which are in no order.
        (place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    let step = |_| {
        let mut ids: Vec<u64> = (0..BATCH_IDS).map(|_| draw()).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    };
    (0..STEPS).map(step).collect()
}

fn amount(steps: &[Vec<u64>]) -> f64 {
    steps.iter().map(|ids| ids.len() as f64).sum()
}

/// Reads and updates rows in a slot of a synchronous job with Adagrad.
pub fn shard() -> Sample {
    let text = format!(
        "name = \"x\"\npasses = 1\n[dataset]\nsource = [\"x\"]\nformat = \"csv\"\nfeatures = [\"x\"]\n\
         label = \"y\"\n[model]\nkind = \"x\"\n[optimizer]\nkind = \"adagrad\"\n[learning_rate]\nbase = {RATE}\n\
         [sync]\nlanes = 1\n"
    );
    let rules = Rules::new(&job_file::parse(&text).expect("the job file is valid"));
    let layout = Layout::new(vec![ParamSpec::table("rows", WIDTH, Initial::Uniform(0.1))]);
    let placement = Placement::of(&layout, &PlacementRecord::LargestFirst { slots: 1 });
    let snapshot = ShardSnapshot::initial(&layout, &placement, Slot(0), Vec::new(), &rules);
    let mut shard = SyncShard::restore(Arc::new(layout), snapshot, rules).expect("there is memory");
    let steps = steps();
    let gradients: Vec<Rows> = steps
        .iter()
        .map(|ids| Rows::of(WIDTH, ids.clone(), vec![0.01; ids.len() * WIDTH]))
        .collect();
    let share = [LaneShare { records: 1, checksum: 1, end: LaneEnd::MoreToCome }];
    let watch = Watch::start(Vec::new());
    for (ids, rows) in steps.iter().zip(gradients) {
        let version = shard.blocks().position().version;
        black_box(shard.rows_at(version, vec![ids.clone()])).expect("memory can be read");
        let (blocks, rows) = (Vec::new(), vec![rows]);
        let given = Contribution { records: 1, loss_sum: 0.5, checksum: 1, blocks, rows };
        shard.contribute(version, Lane(0), &share, given).expect("it fits");
        shard.finish_step(None).expect("memory can be written");
    }
    watch.stop(amount(&steps))
}

/// The same with a hash map of the standard library.
pub fn hash_map() -> Sample {
    let steps = steps();
    let gradient = [0.01; WIDTH];
    let mut map: HashMap<u64, [f32; 2 * WIDTH]> = HashMap::new();
    let watch = Watch::start(Vec::new());
    for ids in &steps {
        let mut read = Vec::with_capacity(ids.len() * WIDTH);
        for id in ids {
            match map.get(id) {
                Some(row) => read.extend_from_slice(&row[..WIDTH]),
                None => read.extend_from_slice(&[0.1; WIDTH]),
            }
        }
        black_box(read);
        for id in ids {
            let row = map.entry(*id).or_insert([0.0; 2 * WIDTH]);
            let (values, squares) = row.split_at_mut(WIDTH);
            for ((value, square), slope) in values.iter_mut().zip(squares).zip(gradient) {
                *square += slope * slope;
                *value -= RATE * slope / (square.sqrt() + 1e-10);
            }
        }
    }
    watch.stop(amount(&steps))
}
