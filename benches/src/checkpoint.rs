//! Checkpoints compared with plain writes, restores compared with plain reads, and training steps during
//! both.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use bytes::Bytes;
use rustix::process::setpriority_process;
use sha2::{Digest, Sha256};
use steadfast_tests::Scene;
use tokio_util::sync::CancellationToken;

use crate::expense::{cpu_of, peak_of};
use crate::rig::Rig;
use crate::sample::Sample;
use crate::watch::Watch;
use crate::wire::{SLOTS, large, large_followed, large_to_follow, steps_alone};

/// Values of the model: 1 GiB.
pub const VALUES: usize = 256 << 20;

/// Bytes per read; they are hashed while they are in cache.
const CHUNK_BYTES: usize = 4 << 20;

/// Takes one checkpoint of an idle model, with `steadfast checkpoint now`.
pub async fn take() -> Sample {
    let rig = large(VALUES).await;
    let watch = Watch::start(rig.pids());
    rig.take_checkpoint();
    watch.stop((VALUES * size_of::<f32>()) as f64)
}

/// Measures from the start of replacement pservers until they have the values of the checkpoint.
pub async fn restore() -> Sample {
    let mut rig = large(VALUES).await;
    rig.take_checkpoint();
    rig.kill_pservers();
    let watch = Watch::start(Vec::new());
    rig.replace_pservers(SLOTS);
    let sample = watch.stop((VALUES * size_of::<f32>()) as f64);
    let cpu_seconds = rig.pids().iter().skip(1).map(|pid| cpu_of(*pid)).sum::<f64>();
    let peak_bytes = rig.pids().iter().map(|pid| peak_of(*pid)).sum();
    let mut values = vec![1.0; VALUES];
    rig.pull(&mut values).await;
    assert!(values.iter().all(|value| *value == 0.0), "the values differ from the checkpoint");
    Sample { cpu_seconds, peak_bytes, ..sample }
}

/// Measures from the start of two more pservers until the slots, twice as many, have their values from those before.
pub async fn move_slots() -> Sample {
    let mut rig = large(VALUES).await;
    rig.scale(2 * SLOTS);
    let before = rig.pids();
    let watch = Watch::start(before.clone());
    rig.replace_pservers(SLOTS);
    let sample = watch.stop((VALUES * size_of::<f32>()) as f64);
    let more = rig.pids().iter().skip(before.len()).map(|pid| cpu_of(*pid)).sum::<f64>();
    let cpu_seconds = sample.cpu_seconds + more;
    let peak_bytes = rig.pids().iter().map(|pid| peak_of(*pid)).sum();
    Sample { cpu_seconds, peak_bytes, ..sample }
}

/// Measures from the start of two spares until they follow the slots.
pub async fn follow() -> Sample {
    let mut rig = large_to_follow(VALUES).await;
    let watch = Watch::start(rig.pids());
    rig.follow_slots(SLOTS);
    watch.stop((VALUES * size_of::<f32>()) as f64)
}

/// Reads files of the same size from disk into memory, with hashes.
pub fn read() -> Sample {
    let scene = Scene::new();
    let len = VALUES / SLOTS * size_of::<f32>();
    let paths = (0..SLOTS).map(|slot| scene.path(&slot.to_string()));
    let paths: Vec<_> =
        paths.inspect(|path| fs::write(path, vec![0; len]).expect("there is room")).collect();
    let watch = Watch::start(Vec::new());
    thread::scope(|threads| {
        for path in &paths {
            threads.spawn(move || {
                let mut file = File::open(path).expect("it was written");
                let (mut bytes, mut hash) = (vec![0; len], Sha256::new());
                for chunk in bytes.chunks_mut(CHUNK_BYTES) {
                    file.read_exact(chunk).expect("it is all there");
                    hash.update(&chunk);
                }
                std::hint::black_box((bytes, hash.finalize()));
            });
        }
    });
    watch.stop((VALUES * size_of::<f32>()) as f64)
}

/// Values of the model that is trained during checkpoints: 256 MiB.
const TRAINED: usize = 64 << 20;

/// Steps per sample.
const STEPS: u64 = 12;

/// The background load during steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meanwhile {
    Checkpoints,
    /// One thread per slot hashes the same bytes and writes them to a file, with the priority of pservers.
    Writes,
    Nothing,
}

/// Measures synchronous steps of one trainer.
pub async fn steps(meanwhile: Meanwhile) -> Sample {
    steps_of(large(TRAINED).await, meanwhile).await
}

/// Measures synchronous steps of one trainer, with so many spares that follow a slot each.
pub async fn steps_followed(spares: usize, meanwhile: Meanwhile) -> Sample {
    steps_of(large_followed(TRAINED, spares).await, meanwhile).await
}

async fn steps_of(rig: Rig, meanwhile: Meanwhile) -> Sample {
    let rig = Arc::new(rig);
    let stop = CancellationToken::new();
    let writing = (meanwhile == Meanwhile::Writes).then(|| Writing::start(stop.clone()));
    let taking = (meanwhile == Meanwhile::Checkpoints).then(|| {
        let (rig, stop) = (rig.clone(), stop.clone());
        tokio::task::spawn_blocking(move || {
            let mut taken = 0;
            while !stop.is_cancelled() {
                taken += u32::from(rig.ask_for_checkpoint().code == Some(0));
            }
            taken
        })
    });
    let sample = steps_alone(&rig, TRAINED, STEPS).await;
    stop.cancel();
    if let Some(writing) = writing {
        writing.end();
    }
    // The last checkpoint may wait for a version that is never reached.
    if let Some(taking) = taking {
        assert!(0 < taking.await.expect("the task does not panic"), "no checkpoint was taken");
    }
    sample
}

/// Priority of the checkpoint work of pservers, as an increment of `nice`.
const NICE: i32 = 10;

/// Threads that write files until stopped.
struct Writing {
    threads: Vec<JoinHandle<u32>>,
    _scene: Scene,
}

impl Writing {
    fn start(stop: CancellationToken) -> Self {
        let scene = Scene::new();
        let share = Bytes::from(vec![0; TRAINED / SLOTS * size_of::<f32>()]);
        let writer = |slot: usize| {
            let (stop, share, path) = (stop.clone(), share.clone(), scene.path(&slot.to_string()));
            thread::spawn(move || {
                // On Linux this affects only the calling thread.
                setpriority_process(None, NICE).expect("lowering the priority is allowed");
                let mut written = 0;
                while !stop.is_cancelled() {
                    write_one(&share, &path);
                    written += 1;
                }
                written
            })
        };
        Self { threads: (0..SLOTS).map(writer).collect(), _scene: scene }
    }

    fn end(self) {
        for thread in self.threads {
            assert!(0 < thread.join().expect("the writer does not panic"), "nothing was written");
        }
    }
}

/// Hashes a slot's bytes and writes them to a file on disk.
fn write_one(share: &[u8], path: &Path) {
    std::hint::black_box(Sha256::digest(share));
    let mut file = File::create(path).expect("the directory can be written to");
    file.write_all(share).expect("there is room");
    file.sync_all().expect("the disk works");
}

/// Writes files of the same size to disk, with hashes.
pub fn write() -> Sample {
    let scene = Scene::new();
    let share = Bytes::from(vec![0; VALUES / SLOTS * size_of::<f32>()]);
    let watch = Watch::start(Vec::new());
    thread::scope(|threads| {
        for slot in 0..SLOTS {
            let (share, path) = (share.clone(), scene.path(&slot.to_string()));
            threads.spawn(move || write_one(&share, &path));
        }
    });
    watch.stop((VALUES * size_of::<f32>()) as f64)
}
