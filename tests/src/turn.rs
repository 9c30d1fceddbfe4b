//! Lets few clusters run at the same time, also from several test programs: each takes seconds of
//! all cores, and leases are judged by time.

use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

const CLUSTERS_MAX: u32 = 2;

/// The right to run a cluster, until it is dropped.
#[derive(Debug)]
pub struct Turn {
    /// Locked; the kernel lets go of it when the process ends, however it ends.
    _lock: File,
}

impl Turn {
    /// Waits for a turn. The tests before it are bounded in time, so this is as well.
    pub fn take() -> Self {
        loop {
            for number in 0..CLUSTERS_MAX {
                let mut options = OpenOptions::new();
                let opened = options.write(true).create(true).truncate(false).open(path(number));
                let file = opened.expect("the folder of the build can be written to");
                if file.try_lock().is_ok() {
                    return Self { _lock: file };
                }
            }
            sleep(Duration::from_millis(50));
        }
    }
}

fn path(number: u32) -> PathBuf {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target"));
    folder.join(format!("cluster-turn-{number}"))
}
