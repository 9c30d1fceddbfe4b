//! Recovery of a data directory after crashes, and its errors after corruption.

use super::*;
use crate::core::{Change, Fact, HistoryImage, Write};
use etcd_client::proto::PbKeyValue;
use std::sync::Arc;
use tempfile::TempDir;

const LOG_BYTES_MAX: u64 = 1 << 20;

fn open(dir: &TempDir) -> Result<(Disk, Core), Error> {
    Disk::open(dir.path(), LOG_BYTES_MAX)
}

/// Returns a batch with one put, as the log thread would write it.
fn batch(revision: i64) -> Vec<u8> {
    let kv = PbKeyValue {
        key: format!("k{revision}").into(),
        value: vec![b'v'; 20],
        create_revision: revision,
        mod_revision: revision,
        version: 1,
        lease: 0,
    };
    let write = Write { revision, changes: vec![Change::Put(Arc::new(kv))] };
    let mut batch = Vec::new();
    append_fact(&mut batch, &Fact::Written(write));
    batch
}

/// Creates a directory with a log of three puts; also returns the end of each frame.
fn directory_with_three_puts() -> (TempDir, Vec<usize>) {
    let dir = tempfile::tempdir().unwrap();
    let (mut disk, _) = open(&dir).unwrap();
    let mut ends = Vec::new();
    for revision in 2..=4 {
        disk.append(&batch(revision)).unwrap();
        ends.push(usize::try_from(disk.bytes()).unwrap());
    }
    (dir, ends)
}

fn log_file(dir: &TempDir) -> PathBuf {
    log_path(dir.path(), 0)
}

/// A crash at any point of a write keeps the writes acknowledged before, and the log can be continued.
#[test]
fn a_torn_tail_is_cut_off_and_the_rest_survives() {
    let (dir, ends) = directory_with_three_puts();
    let whole = fs::read(log_file(&dir)).unwrap();
    for length in 0..whole.len() {
        fs::write(log_file(&dir), &whole[..length]).unwrap();
        let frames = ends.iter().filter(|end| **end <= length).count();
        let revision = 1 + i64::try_from(frames).unwrap();
        let (mut disk, core) = open(&dir).unwrap();
        assert_eq!(core.revision(), revision, "cut to {length}");
        disk.append(&batch(revision + 1)).unwrap();
        drop(disk);
        let (_, core) = open(&dir).unwrap();
        assert_eq!(core.revision(), revision + 1, "cut to {length} and continued");
    }
}

/// A crash may also leave a file of the right length with wrong bytes.
#[test]
fn a_tail_of_zeros_is_cut_off() {
    let (dir, ends) = directory_with_three_puts();
    let mut bytes = fs::read(log_file(&dir)).unwrap();
    bytes[ends[1] + 3..].fill(0);
    bytes.extend([0; 4_096]);
    fs::write(log_file(&dir), &bytes).unwrap();
    let (disk, core) = open(&dir).unwrap();
    assert_eq!(core.revision(), 3);
    assert_eq!(disk.bytes(), ends[1] as u64);
}

/// If any bit of an acknowledged record is lost, the server does not start and the log is not truncated:
/// the error names the file and the offset.
#[test]
fn corruption_in_the_middle_is_an_error_that_names_file_and_offset() {
    let (dir, ends) = directory_with_three_puts();
    let whole = fs::read(log_file(&dir)).unwrap();
    for at in ends[0]..ends[1] {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        fs::write(log_file(&dir), &bytes).unwrap();
        let error = open(&dir).err().unwrap();
        let Error::Corrupt { path, offset, .. } = &error else { panic!("{error}") };
        assert_eq!((path, *offset), (&log_file(&dir), ends[0] as u64), "byte {at}");
        assert!(error.to_string().contains("restore the data directory from a backup"));
        assert_eq!(fs::read(log_file(&dir)).unwrap(), bytes, "the file is unchanged");
    }
}

/// A file in a foreign format, or of a later version, does not count as torn.
#[test]
fn a_foreign_log_is_rejected() {
    let (dir, _) = directory_with_three_puts();
    fs::write(log_file(&dir), b"SFETCD9\nsomething").unwrap();
    assert!(matches!(open(&dir), Err(Error::Corrupt { offset: 0, .. })));
}

/// One server at a time can open a directory.
#[test]
fn a_second_holder_is_rejected_until_the_first_releases_the_directory() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(&dir).unwrap();
    assert!(matches!(open(&dir), Err(Error::InUse { .. })));
    drop(first);
    open(&dir).unwrap();
}

/// A snapshot replaces the log, with the same contents.
#[test]
fn a_snapshot_replaces_the_log() {
    let (dir, _) = directory_with_three_puts();
    let (mut disk, mut core) = open(&dir).unwrap();
    core.evolve(Fact::LeaseGranted { id: 7, ttl_s: 30 }, 0);
    core.evolve(Fact::Compacted { revision: 3 }, 0);
    disk.replace(&core.image()).unwrap();
    assert!(!log_file(&dir).exists());
    disk.append(&batch(5)).unwrap();
    drop(disk);
    let (_, reopened) = open(&dir).unwrap();
    assert_eq!(reopened.revision(), 5);
    assert_eq!(reopened.history().compacted(), 3);
    assert_eq!(reopened.image().leases, [(7, 30)]);
}

/// A crash between any two steps of installing a snapshot loses nothing.
#[test]
fn a_crash_while_a_snapshot_replaces_the_log_loses_nothing() {
    let (dir, _) = directory_with_three_puts();
    let old_log = fs::read(log_file(&dir)).unwrap();
    let (mut disk, core) = open(&dir).unwrap();
    disk.replace(&core.image()).unwrap();
    drop(disk);
    let (snapshot, new_log) = (snapshot_path(dir.path(), 1), log_path(dir.path(), 1));
    let snapshot_bytes = fs::read(&snapshot).unwrap();

    // The old log still exists.
    fs::write(log_file(&dir), &old_log).unwrap();
    assert_eq!(open(&dir).unwrap().1.revision(), 4);
    assert!(!log_file(&dir).exists());

    // The new log does not exist yet.
    fs::remove_file(&new_log).unwrap();
    fs::write(log_file(&dir), &old_log).unwrap();
    assert_eq!(open(&dir).unwrap().1.revision(), 4);

    // The snapshot is not renamed into place yet.
    fs::remove_file(&snapshot).unwrap();
    fs::remove_file(&new_log).unwrap();
    fs::write(log_file(&dir), &old_log).unwrap();
    fs::write(snapshot.with_extension("tmp"), &snapshot_bytes[..20]).unwrap();
    assert_eq!(open(&dir).unwrap().1.revision(), 4);
    assert!(!snapshot.with_extension("tmp").exists());
}

/// A snapshot was complete when it was renamed into place, so an incomplete one is corruption.
#[test]
fn a_damaged_snapshot_is_an_error() {
    let (dir, _) = directory_with_three_puts();
    let (mut disk, core) = open(&dir).unwrap();
    disk.replace(&core.image()).unwrap();
    drop(disk);
    let path = snapshot_path(dir.path(), 1);
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        assert!(matches!(open(&dir), Err(Error::Corrupt { .. })), "cut to {length}");
    }
    fs::remove_file(&path).unwrap();
    assert!(matches!(open(&dir), Err(Error::Corrupt { .. })), "missing");
}

/// A valid checksum does not prove valid contents: a snapshot must not let revisions overflow, or omit
/// revisions that a watcher may request.
#[test]
fn a_snapshot_of_an_impossible_history_is_an_error() {
    let (dir, _) = directory_with_three_puts();
    let (mut disk, mut core) = open(&dir).unwrap();
    core.evolve(Fact::Compacted { revision: 3 }, 0);
    let damages: [fn(&mut HistoryImage); 6] = [
        |it| it.revision = i64::MAX,
        |it| it.revision = 0,
        |it| it.compacted = i64::MIN,
        |it| it.compacted = 5,
        |it| drop(it.writes.remove(0)),
        |it| it.kept.push(Arc::new(PbKeyValue { mod_revision: 3, ..PbKeyValue::default() })),
    ];
    for (number, damage) in damages.into_iter().enumerate() {
        let mut image = core.image();
        damage(&mut image.history);
        disk.replace(&image).unwrap();
        drop(disk);
        assert!(matches!(open(&dir), Err(Error::Corrupt { .. })), "{number}");
        let generation = newest_generation(dir.path()).unwrap();
        fs::remove_file(snapshot_path(dir.path(), generation)).unwrap();
        fs::remove_file(log_path(dir.path(), generation)).unwrap();
        disk = open(&dir).unwrap().0;
    }
    disk.replace(&core.image()).unwrap();
    drop(disk);
    assert_eq!(open(&dir).unwrap().1.image(), core.image());
}
