//! The data directory of the embedded etcd: a damaged log or snapshot is rejected, or repaired durably.

#![no_main]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use steadfast_etcd::{Config, Server};
use steadfast_fuzz::{seeds, within};
use tokio::runtime::{Builder, Runtime};

const MAGIC: &[u8] = b"SFETCD1\n";
/// A change of two bytes has a key, versions and a history entry in memory.
const TIMES_MAX: usize = 1024;

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    Builder::new_current_thread().enable_all().build().expect("the runtime starts")
});

/// In memory if possible, because it is written thousands of times.
static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    parent.join(format!("steadfast-fuzz-{}", std::process::id()))
});

fuzz_target!(init: seeds("etcd_files", well_formed()), |data: &[u8]| {
    let Some((form, data)) = data.split_first() else { return };
    fs::create_dir_all(&*DIRECTORY).expect("the disk has space");
    let write = |name: &str, bytes: &[u8]| fs::write(DIRECTORY.join(name), bytes).expect("the disk has space");
    match form % 4 {
        0 => write("log-0", data),
        1 => write("log-0", &framed(data)),
        2 => write("snapshot-1", &framed(data)),
        _ => {
            let (snapshot, log) = data.split_at(data.len() / 2);
            write("snapshot-1", &framed(snapshot));
            write("log-1", &framed(log));
        }
    }
    within(TIMES_MAX * data.len() + (4 << 20), || {
        if open().is_ok() {
            open().expect("a directory that was opened can be opened again");
        }
    });
    fs::remove_dir_all(&*DIRECTORY).expect("the directory can be removed");
});

fn open() -> Result<(), steadfast_etcd::Error> {
    let config = Config::new(([127, 0, 0, 1], 0).into(), &*DIRECTORY);
    RUNTIME.block_on(Server::bind(config)).map(drop)
}

/// Frames payloads, each preceded by its length in `data`, with correct checksums; appends the rest
/// unchanged.
fn framed(mut data: &[u8]) -> Vec<u8> {
    let mut file = MAGIC.to_vec();
    while let Some((len, rest)) = data.split_first() {
        let Some((payload, rest)) = rest.split_at_checked(usize::from(*len)) else { break };
        let mut header = (payload.len() as u64).to_le_bytes().to_vec();
        header.extend(crc32fast::hash(payload).to_le_bytes());
        header.extend(crc32fast::hash(&header).to_le_bytes());
        file.extend([&header, payload].concat());
        data = rest;
    }
    [&file, data].concat()
}

fn well_formed() -> Vec<Vec<u8>> {
    // Facts: a lease grant, and a put at revision 2.
    let log = [&[8][..], &[0x0a, 6, 0x12, 4, 8, 5, 16, 60], &[19]].concat();
    let put =
        [0x0a, 17, 0x0a, 15, 8, 2, 0x12, 11, 0x0a, 9, 0x0a, 1, b'a', 0x10, 2, 0x18, 2, 0x20, 1];
    let log = [&log[..], &put].concat();
    // A snapshot of revision 5, compacted to 3, with a key and a lease.
    let kv = [0x0a, 9, 0x0a, 1, b'a', 0x10, 2, 0x18, 2, 0x20, 1];
    let snapshot = [&kv[..], &[0x1a, 4, 8, 5, 16, 60], &[0x22, 4, 8, 5, 16, 3]].concat();
    let snapshot = [&[snapshot.len() as u8][..], &snapshot].concat();
    let with = |form: u8, bytes: &[u8]| [&[form], bytes].concat();
    vec![with(0, &framed(&log)), with(1, &log), with(2, &snapshot)]
}
