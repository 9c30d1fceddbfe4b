//! A checkpoint, beside a plain write of as much; going back to it, beside a plain read; and steps
//! meanwhile.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::sync::Arc;
use std::thread;

use bytes::Bytes;
use sha2::{Digest, Sha256};
use steadfast_tests::Scene;
use tokio_util::sync::CancellationToken;

use crate::expense::{cpu_of, peak_of};
use crate::sample::Sample;
use crate::watch::Watch;
use crate::wire::{SLOTS, large, steps_alone};

/// Values of the model: 1 GiB.
pub const VALUES: usize = 256 << 20;

/// Bytes of one read: they are hashed while they are in cache.
const PIECE: usize = 4 << 20;

/// One checkpoint of a model that nobody trains, by `steadfast checkpoint now`.
pub async fn take() -> Sample {
    let rig = large(VALUES).await;
    let watch = Watch::start(rig.pids());
    rig.take_checkpoint();
    watch.stop((VALUES * size_of::<f32>()) as f64)
}

/// From the start of pservers in place of dead ones until they have the values of the checkpoint.
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
    assert!(values.iter().all(|value| *value == 0.0), "these are not the checkpoint's");
    Sample { cpu_seconds, peak_bytes, ..sample }
}

/// As many files read from the disk into memory, with hashes.
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
                for piece in bytes.chunks_mut(PIECE) {
                    file.read_exact(piece).expect("it is all there");
                    hash.update(&piece);
                }
                std::hint::black_box((bytes, hash.finalize()));
            });
        }
    });
    watch.stop((VALUES * size_of::<f32>()) as f64)
}

/// Values of the model that is trained while checkpoints of it are taken: 256 MiB.
const TRAINED: usize = 64 << 20;

/// Steps of one sample.
const STEPS: u64 = 12;

/// Whether checkpoints are taken one after the other, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meanwhile {
    Checkpoints,
    Nothing,
}

/// Synchronous steps of one trainer.
pub async fn steps(meanwhile: Meanwhile) -> Sample {
    let rig = Arc::new(large(TRAINED).await);
    let stop = CancellationToken::new();
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
    // The last one may wait for a version that does not come any more.
    if let Some(taking) = taking {
        assert!(0 < taking.await.expect("they are asked for"), "none was taken");
    }
    sample
}

/// As many files, with hashes, onto the disk.
pub fn write() -> Sample {
    let scene = Scene::new();
    let share = Bytes::from(vec![0; VALUES / SLOTS * size_of::<f32>()]);
    let watch = Watch::start(Vec::new());
    thread::scope(|threads| {
        for slot in 0..SLOTS {
            let (share, path) = (share.clone(), scene.path(&slot.to_string()));
            threads.spawn(move || {
                std::hint::black_box(Sha256::digest(&share));
                let mut file = File::create(path).expect("the folder can be written to");
                file.write_all(&share).expect("there is room");
                file.sync_all().expect("there is a disk");
            });
        }
    });
    watch.stop((VALUES * size_of::<f32>()) as f64)
}
