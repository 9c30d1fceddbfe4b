//! A checkpoint, beside a plain write of as much.

use std::fs::File;
use std::io::Write;
use std::thread;

use bytes::Bytes;
use sha2::{Digest, Sha256};
use steadfast_tests::Scene;

use crate::sample::Sample;
use crate::watch::Watch;
use crate::wire::{SLOTS, large};

/// Values of the model: 512 MiB.
pub const VALUES: usize = 128 << 20;

/// One checkpoint of a model that nobody trains, by `steadfast checkpoint now`.
pub async fn take() -> Sample {
    let rig = large(VALUES).await;
    let watch = Watch::start(rig.pids());
    rig.take_checkpoint();
    watch.stop((VALUES * size_of::<f32>()) as f64)
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
