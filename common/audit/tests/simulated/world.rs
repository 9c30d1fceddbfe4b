//! What both kinds of simulated jobs share: chance by seed, a dataset, a model, and shards.

use std::sync::Arc;

use bytes::Bytes;
use steadfast_audit::{Cut, Group, SlotCounts};
use steadfast_common::dataset::{Chunk, Manifest};
use steadfast_common::ids::{Generation, Slot};
use steadfast_common::layout::{Layout, ParamSpec};
use steadfast_common::records::PositionRecord;
use steadfast_common::spec::{JobSpec, Mode};
use steadfast_pserver_core::contribution::{Contribution, Finite};
use steadfast_pserver_core::shard::{self, CutBlock, Rules, Shard};

/// Chance that a seed repeats (SplitMix64).
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// One of `0 .. sides`.
    pub fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((value ^ (value >> 31)) % sides.max(1) as u64) as usize
    }

    /// True in one of `times` cases.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.roll(times) == 0
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        let index = self.roll(items.len());
        items.get(index)
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.roll(end + 1));
        }
    }
}

/// Tasks of different sizes, some held out.
pub fn manifest(dice: &mut Dice, tasks: usize) -> Manifest {
    let chunk = |records| Chunk { file: 0, start: 0, end: 0, first_record: 0, records };
    let mut manifest = Manifest {
        chunks: (0..tasks).map(|_| chunk(1 + dice.roll(30) as u32)).collect(),
        task_ends: (1..=tasks as u32).collect(),
        ..Manifest::default()
    };
    manifest.hold_out(0.15);
    manifest
}

/// A job file's worth of settings.
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
    let mut spec = steadfast_common::job_file::parse(&text).expect("the job file is sound");
    spec.tasks.failures_max = 1;
    spec
}

/// Five parameters of one block each.
pub fn layout() -> Arc<Layout> {
    let params = (1..=5).map(|len| ParamSpec::new(format!("p{len}"), &[len]));
    Arc::new(Layout::new(params.collect()))
}

/// Shards with first values.
pub fn new_shards(spec: &JobSpec, slots: u32) -> Vec<Shard> {
    let layout = layout();
    let new = |slot| {
        let blocks = Shard::blocks_of(&layout, Slot(slot), slots);
        let values = blocks.iter().map(|(_, block)| vec![0.0; block.len]).collect();
        Shard::new(layout.clone(), blocks, values, Rules::new(spec))
    };
    (0..slots).map(new).collect()
}

/// Shards of a checkpoint's cuts, however many there were: as pservers load them.
pub fn load_shards(
    spec: &JobSpec,
    position: &PositionRecord,
    cuts: &[shard::Cut],
    slots: u32,
) -> Vec<Shard> {
    (0..slots).map(|slot| load_shard(spec, position, cuts, slot, slots)).collect()
}

pub fn load_shard(
    spec: &JobSpec,
    position: &PositionRecord,
    cuts: &[shard::Cut],
    slot: u32,
    slots: u32,
) -> Shard {
    let layout = layout();
    let blocks = Shard::blocks_of(&layout, Slot(slot), slots);
    let mut counts = Vec::new();
    let mut loaded = Vec::new();
    for (number, _) in &blocks {
        let of_block = cuts.iter().find_map(|cut| {
            let block = cut.blocks.iter().find(|block| block.number == *number)?;
            Some((block.clone(), cut.counts[block.count].clone()))
        });
        let (block, counted) = of_block.expect("every block is in the checkpoint");
        let count = counts.iter().position(|known| *known == counted).unwrap_or_else(|| {
            counts.push(counted);
            counts.len() - 1
        });
        loaded.push(CutBlock { count, ..block });
    }
    let cut = shard::Cut {
        position: shard::Position {
            version: position.version,
            pass: position.pass,
            pass_start: position.pass_start,
            examples: position.examples,
            loss: None,
        },
        updates: 0,
        ended: position.dry.iter().copied().collect(),
        counts,
        blocks: loaded,
    };
    Shard::restore(layout, blocks, cut, Rules::new(spec))
}

/// The shard as if what it remembers were changed by hand.
pub fn tamper(spec: &JobSpec, shard: &mut Shard, change: impl FnOnce(&mut shard::Cut)) {
    let mut cut = shard.cut();
    change(&mut cut);
    let (layout, blocks) = (shard.layout().clone(), shard.blocks().to_vec());
    *shard = Shard::restore(layout, blocks, cut, Rules::new(spec));
}

/// A gradient of nothing but zeros; a lane that has no record gives none.
pub fn contribution(shard: &Shard, records: u64, checksum: u64) -> Contribution {
    let zeros = |block: u32, len: usize| {
        let bytes = Bytes::from(vec![0; len * size_of::<f32>()]);
        Finite::new(block, &bytes.into(), shard.memory().lend(len)).expect("zero is finite")
    };
    let given = if records == 0 { &[] } else { shard.blocks().as_slice() };
    Contribution {
        records,
        loss_sum: 0.0,
        checksum,
        blocks: given.iter().map(|(number, block)| zeros(*number, block.len)).collect(),
    }
}

/// A checkpoint as it lies in etcd and in the store.
#[derive(Clone, Debug)]
pub struct Saved {
    pub id: String,
    pub generation: Generation,
    pub position: PositionRecord,
    pub cuts: Vec<shard::Cut>,
    pub queue: Option<steadfast_common::records::QueueSnapshot>,
}

impl Saved {
    pub fn evidence(&self) -> Cut {
        Cut {
            id: self.id.clone(),
            generation: self.generation,
            position: self.position.clone(),
            slots: self.cuts.iter().enumerate().map(|(slot, cut)| counts(slot, cut)).collect(),
            queue: self.queue.clone(),
            set_aside: None,
            parameters_sha256: None,
        }
    }
}

/// The position as a shard file tells it.
pub fn position_of(cut: &shard::Cut) -> PositionRecord {
    PositionRecord {
        version: cut.position.version,
        pass: cut.position.pass,
        pass_start: cut.position.pass_start,
        examples: cut.position.examples,
        dry: cut.ended.iter().copied().collect(),
    }
}

fn counts(slot: usize, cut: &shard::Cut) -> SlotCounts {
    let groups = cut.counts.iter().enumerate().map(|(at, counted)| Group {
        counted: counted.clone(),
        blocks: cut.blocks.iter().filter(|block| block.count == at).count(),
    });
    SlotCounts { slot: Slot(slot as u32), groups: groups.collect() }
}
