//! Shared by both kinds of simulated jobs: a seeded random number generator, a dataset, a model, and
//! shards.

use std::sync::Arc;

use bytes::Bytes;
use steadfast_audit::{CheckpointEvidence, Group, SlotCounts};
use steadfast_common::dataset::{Chunk, Manifest};
use steadfast_common::ids::{Generation, Lane, Slot};
use steadfast_common::layout::{Layout, ParamSpec};
use steadfast_common::placement::{Placement, PlacementRecord};
use steadfast_common::position::Position;
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_pserver_core::block_store::{BlockStore, ShardSnapshot, SnapshotBlock};
use steadfast_pserver_core::contribution::{Contribution, ValidatedBlock};
use steadfast_pserver_core::rules::Rules;
use steadfast_pserver_core::shard::Shard;
use steadfast_pserver_core::tables::TableRows;

/// A seeded random number generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number in `0..bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((value ^ (value >> 31)) % bound.max(1) as u64) as usize
    }

    /// True with probability 1 in `times`.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        let index = self.below(items.len());
        items.get(index)
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }
}

/// A manifest with tasks of different sizes, some held out.
pub fn manifest(rng: &mut Rng, tasks: usize) -> Manifest {
    let chunk = |records| Chunk { file: 0, start: 0, end: 0, first_record: 0, records };
    let mut manifest = Manifest {
        chunks: (0..tasks).map(|_| chunk(1 + rng.below(30) as u32)).collect(),
        task_ends: (1..=tasks as u32).collect(),
        ..Manifest::default()
    };
    manifest.hold_out(0.15);
    manifest
}

/// The spec of a small job.
pub fn spec(mode: Mode, passes: u32) -> JobSpec {
    let mode = match mode {
        Mode::Sync => "sync",
        Mode::Async => "async",
    };
    let text = format!(
        "name = \"job\"\nseed = 5\nmode = \"{mode}\"\npasses = {passes}\n\
         [dataset]\nsource = [\"a.csv\"]\nformat = \"csv\"\nfeatures = [\"x\"]\nlabel = \"y\"\n\
         [model]\nkind = \"linear\"\n"
    );
    let mut spec = steadfast_common::job_file::parse(&text).expect("the job file is valid");
    spec.tasks.failures_max = 1;
    spec
}

/// Five parameters of one block each.
pub fn layout() -> Arc<Layout> {
    let params = (1..=5).map(|len| ParamSpec::new(format!("p{len}"), &[len]));
    Arc::new(Layout::new(params.collect()))
}

/// Newly initialized shards.
pub fn new_shards(spec: &JobSpec, slots: u32) -> Vec<Shard> {
    let (layout, rules) = (layout(), Rules::new(spec));
    let placement = Placement::of(&layout, &PlacementRecord::LargestFirst { slots });
    let new = |slot| {
        let numbers = placement.blocks_of(Slot(slot));
        let len = |number: &u32| layout.blocks()[*number as usize].len;
        let values = numbers.iter().map(|number| vec![0.0; len(number)]).collect();
        let first = ShardSnapshot::initial(&layout, &placement, Slot(slot), values, &rules);
        let (snapshot, tables) = first.expect("there is memory");
        Shard::restore(layout.clone(), snapshot, tables, rules.clone())
    };
    (0..slots).map(new).collect()
}

/// Loads shards from a checkpoint's shard snapshots, of any number, as pservers do.
pub fn load_shards(spec: &JobSpec, saved: &Saved, slots: u32) -> Vec<Shard> {
    (0..slots).map(|slot| load_shard(spec, saved, slot, slots)).collect()
}

pub fn load_shard(spec: &JobSpec, saved: &Saved, slot: u32, slots: u32) -> Shard {
    let layout = layout();
    let mut applied = Vec::new();
    let mut loaded = Vec::new();
    let placement = Placement::of(&layout, &PlacementRecord::LargestFirst { slots });
    for number in placement.blocks_of(Slot(slot)) {
        let of_block = saved.snapshots.iter().find_map(|snapshot| {
            let block = snapshot.blocks.iter().find(|block| block.number == *number)?;
            Some((block.clone(), snapshot.applied[block.applied].clone()))
        });
        let (block, counted) = of_block.expect("every block is in the checkpoint");
        let index = applied.iter().position(|known| *known == counted).unwrap_or_else(|| {
            applied.push(counted);
            applied.len() - 1
        });
        loaded.push(SnapshotBlock { applied: index, ..block });
    }
    let snapshot = ShardSnapshot {
        position: saved.position,
        updates: 0,
        exhausted: saved.exhausted.iter().copied().collect(),
        applied,
        blocks: loaded,
    };
    restore(spec, layout, snapshot)
}

/// Returns the state of a shard.
pub fn snapshot(shard: &mut Shard) -> ShardSnapshot {
    shard.snapshot().expect("memory can be read").0
}

/// Restores a shard; its model has no tables.
fn restore(spec: &JobSpec, layout: Arc<Layout>, snapshot: ShardSnapshot) -> Shard {
    let rules = Rules::new(spec);
    let tables = TableRows::new(&layout, 0..0, &rules).expect("there is memory");
    Shard::restore(layout, snapshot, tables, rules)
}

/// Modifies the state of a shard.
pub fn tamper(spec: &JobSpec, shard: &mut Shard, change: impl FnOnce(&mut ShardSnapshot)) {
    let mut snapshot = snapshot(shard);
    change(&mut snapshot);
    let layout = shard.blocks().layout().clone();
    *shard = restore(spec, layout, snapshot);
}

/// A gradient of zeros; without blocks if there are no records.
pub fn contribution(store: &BlockStore, records: u64, checksum: u64) -> Contribution {
    let zeros = |block: u32, len: usize| {
        let bytes = Bytes::from(vec![0; len * size_of::<f32>()]);
        ValidatedBlock::new(block, &bytes.into(), store.buffers().lend(len))
            .expect("zero is finite")
    };
    let given = if records == 0 { &[] } else { store.list().as_slice() };
    Contribution {
        records,
        loss_sum: 0.0,
        checksum,
        blocks: given.iter().map(|(number, block)| zeros(*number, block.len)).collect(),
        rows: Vec::new(),
    }
}

/// A checkpoint, as in etcd and in the store.
#[derive(Clone, Debug)]
pub struct Saved {
    pub id: String,
    pub generation: Generation,
    pub position: Position,
    pub exhausted: Vec<Lane>,
    pub snapshots: Vec<ShardSnapshot>,
    pub queue: Option<steadfast_common::records::QueueSnapshot>,
}

impl Saved {
    pub fn evidence(&self) -> CheckpointEvidence {
        CheckpointEvidence {
            id: self.id.clone(),
            generation: self.generation,
            position: self.position,
            exhausted: self.exhausted.clone(),
            slots: self
                .snapshots
                .iter()
                .enumerate()
                .map(|(slot, snapshot)| counts(slot, snapshot))
                .collect(),
            queue: self.queue.clone(),
            invalidated: None,
            parameters_sha256: None,
        }
    }
}

fn counts(slot: usize, snapshot: &ShardSnapshot) -> SlotCounts {
    let groups = snapshot.applied.iter().enumerate().map(|(at, counted)| Group {
        counted: counted.clone(),
        blocks: snapshot.blocks.iter().filter(|block| block.applied == at).count(),
    });
    SlotCounts { slot: Slot(slot as u32), groups: groups.collect() }
}
