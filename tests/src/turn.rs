//! Limits the number of concurrent clusters, also over several test programs: each uses all cores for
//! seconds, and leases depend on time.

use std::fs::{File, OpenOptions};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

const CLUSTERS_MAX: u32 = 2;

/// Permission to run a cluster, until it is dropped.
#[derive(Debug)]
pub struct Turn {
    /// The locked file; the kernel releases the lock when the process ends.
    _lock: File,
}

impl Turn {
    /// Waits for a turn. All tests have timeouts, so the wait is bounded.
    pub fn take() -> Self {
        loop {
            for number in 0..CLUSTERS_MAX {
                let mut options = OpenOptions::new();
                let opened = options.write(true).create(true).truncate(false).open(path(number));
                let file = opened.expect("the build directory is writable");
                if file.try_lock().is_ok() {
                    return Self { _lock: file };
                }
            }
            sleep(Duration::from_millis(50));
        }
    }
}

fn path(number: u32) -> PathBuf {
    let directory = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target"));
    directory.join(format!("cluster-turn-{number}"))
}
