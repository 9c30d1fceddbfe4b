//! Steps of an embedding table: the rows of a batch are read, and their gradients applied; compared with a plain
//! hash map that does the same.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;

use steadfast_common::ids::{Lane, Slot};
use steadfast_common::job::job_file;
use steadfast_common::random::{Purpose, Random};
use steadfast_common::records::contribution::{LaneEnd, LaneShare};
use steadfast_common::tensor::layout::{Layout, ParamSpec};
use steadfast_common::tensor::placement::{Placement, PlacementRecord};
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::{Initial, Rows};
use steadfast_pserver_core::block_store::ShardSnapshot;
use steadfast_pserver_core::contribution::Contribution;
use steadfast_pserver_core::rules::Rules;
use steadfast_pserver_core::sync_shard::SyncShard;
use steadfast_pserver_storage::{MemoryStores, RowStores, TieredStores, local_disks};

use crate::sample::Sample;
use crate::watch::Watch;

/// Values of a row.
pub const WIDTH: usize = 16;

/// Ids of a batch: 4 096 records of 26 categories.
const BATCH_IDS: usize = 4_096 * 26;

/// Ids are drawn by a power law with this exponent.
const POWER: f64 = 1.05;
const IDS: f64 = 1e7;

const STEPS: usize = 30;

pub const RATE: f32 = 0.05;

/// Distinct ids of each step, ascending.
pub fn steps() -> Vec<Vec<u64>> {
    let mut random = Random::keyed(1, Purpose::Gradient, 0, 0, 0);
    // The inverse of the distribution function of a continuous power law.
    let tail = 1.0 - IDS.powf(1.0 - POWER);
    let mut draw = || {
        let place = (1.0 - f64::from(random.uniform()) * tail).powf(1.0 / (1.0 - POWER));
        id_of(place as u64)
    };
    (0..STEPS).map(|_| distinct((0..BATCH_IDS).map(|_| draw()).collect())).collect()
}

pub fn amount(steps: &[Vec<u64>]) -> f64 {
    steps.iter().map(|ids| ids.len() as f64).sum()
}

/// Reads and updates rows in a slot of a synchronous job with Adagrad.
pub fn shard() -> Sample {
    train(Arc::new(MemoryStores), None, steps())
}

/// The same with memory for a quarter of all rows, of which a tenth takes nine tenths of all accesses.
pub fn tiered() -> Sample {
    let directory = tempfile::tempdir().expect("there is space");
    let bytes = KNOWN as usize * (2 * WIDTH * size_of::<f32>() + 27) / 4;
    let disks = local_disks(directory.path().to_owned(), bytes / 3).expect("it is built with it");
    train(Arc::new(TieredStores::new(bytes, disks)), Some(KNOWN), hot_steps())
}

/// The same with all rows in memory.
pub fn untiered() -> Sample {
    train(Arc::new(MemoryStores), Some(KNOWN), hot_steps())
}

/// Rows that exist before.
const KNOWN: u64 = 2_000_000;

/// Rows are in no order.
fn id_of(place: u64) -> u64 {
    place.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Distinct ids of each step, ascending: of ten, nine are of a tenth of all rows.
fn hot_steps() -> Vec<Vec<u64>> {
    let mut random = Random::keyed(2, Purpose::Gradient, 0, 0, 0);
    let mut draw = |below: u64| (f64::from(random.uniform()) * below as f64) as u64;
    let mut id = || if draw(10) == 0 { id_of(draw(KNOWN)) } else { id_of(draw(KNOWN / 10)) };
    (0..STEPS).map(|_| distinct((0..BATCH_IDS).map(|_| id()).collect())).collect()
}

fn distinct(mut ids: Vec<u64>) -> Vec<u64> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// Trains for steps of these ids, after one of each of the rows that exist before.
fn train(stores: Arc<dyn RowStores>, known: Option<u64>, steps: Vec<Vec<u64>>) -> Sample {
    let text = format!(
        "name = \"x\"\npasses = 1\n[dataset]\nsource = [\"x\"]\nformat = \"csv\"\nfeatures = [\"x\"]\n\
         label = \"y\"\n[model]\nkind = \"x\"\n[optimizer]\nkind = \"adagrad\"\n[learning_rate]\nbase = {RATE}\n\
         [sync]\nlanes = 1\n"
    );
    let spec = job_file::parse(&text).expect("the job file is valid");
    let rules = Rules { stores, ..Rules::new(&spec) };
    let layout = Layout::new(vec![ParamSpec::table("rows", WIDTH, Initial::Uniform(0.1))]);
    let placement = Placement::of(&layout, &PlacementRecord::LargestFirst { slots: 1 });
    let first = ShardSnapshot::initial(&layout, &placement, Slot(0), Vec::new(), &rules);
    let (snapshot, tables) = first.expect("there is space");
    let mut shard = SyncShard::restore(Arc::new(layout), snapshot, tables, rules);
    let share = [LaneShare { records: 1, checksum: 1, end: LaneEnd::MoreToCome, weight: None }];
    let mut step = |ids: &[u64], rows: Rows| {
        let version = shard.blocks().position().version;
        black_box(shard.rows_at(version, vec![RowIds::new(ids.to_vec())]))
            .expect("rows can be read");
        let (blocks, rows) = (Vec::new(), vec![rows]);
        let given =
            Contribution { records: 1, loss_sum: 0.5, checksum: 1, blocks, rows, weight: None };
        shard.contribute(version, Lane(0), &share, given).expect("it fits");
        shard.finish_step(None).expect("rows can be written");
    };
    let gradient = |ids: &Vec<u64>| Rows::of(WIDTH, ids.clone(), vec![0.01; ids.len() * WIDTH]);
    let places: Vec<u64> = (0..known.unwrap_or(0)).collect();
    for places in places.chunks(BATCH_IDS) {
        let ids = distinct(places.iter().map(|place| id_of(*place)).collect());
        step(&ids, gradient(&ids));
    }
    let gradients: Vec<Rows> = steps.iter().map(gradient).collect();
    let watch = Watch::start(Vec::new());
    for (ids, rows) in steps.iter().zip(gradients) {
        step(ids, rows);
    }
    watch.stop(amount(&steps))
}

/// Rows in a hash map of the standard library.
#[derive(Default)]
pub struct HashMapRows(HashMap<u64, [f32; 2 * WIDTH]>);

impl HashMapRows {
    /// Returns the values of rows.
    pub fn read(&self, ids: &[u64]) -> Vec<f32> {
        let mut read = Vec::with_capacity(ids.len() * WIDTH);
        for id in ids {
            match self.0.get(id) {
                Some(row) => read.extend_from_slice(&row[..WIDTH]),
                None => read.extend_from_slice(&[0.1; WIDTH]),
            }
        }
        read
    }

    /// Updates rows with Adagrad.
    pub fn update<'a>(&mut self, gradients: impl Iterator<Item = (u64, &'a [f32])>) {
        for (id, gradient) in gradients {
            let row = self.0.entry(id).or_insert([0.0; 2 * WIDTH]);
            let (values, squares) = row.split_at_mut(WIDTH);
            for ((value, square), slope) in values.iter_mut().zip(squares).zip(gradient) {
                *square += slope * slope;
                *value -= RATE * slope / (square.sqrt() + 1e-10);
            }
        }
    }
}

/// The same with a hash map of the standard library.
pub fn hash_map() -> Sample {
    let steps = steps();
    let gradient = [0.01; WIDTH];
    let mut map = HashMapRows::default();
    let watch = Watch::start(Vec::new());
    for ids in &steps {
        black_box(map.read(ids));
        map.update(ids.iter().map(|id| (*id, &gradient[..])));
    }
    watch.stop(amount(&steps))
}
