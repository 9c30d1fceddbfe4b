//! The store directory of a world, which can be full or unavailable for a while.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::Scene;

/// Size of a store that can be full: enough for the checkpoints of these tests.
const ROOM: &str = "size=16m";
const FILLER: &str = "filler";

/// Prefix of the names of directories that are moved away.
const HIDDEN: &str = ".away-";

/// The store directory.
#[derive(Debug)]
pub(super) struct StoreDirectory {
    path: PathBuf,
    is_mounted: bool,
}

impl StoreDirectory {
    /// Creates the directory, as a separate file system if this process may mount one.
    pub fn new(scene: &Scene) -> Self {
        let path = scene.path("store");
        fs::create_dir(&path).expect("the directory of the test is writable");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", ROOM, "tmpfs"]).arg(&path);
        let is_mounted = mount.output().is_ok_and(|it| it.status.success());
        Self { path, is_mounted }
    }

    pub fn path(&self) -> &PathBuf {
        &self.path
    }

    /// Returns whether the store has a size limit.
    pub fn can_be_full(&self) -> bool {
        self.is_mounted
    }

    /// Fills the remaining space.
    pub fn fill(&self) {
        assert!(self.is_mounted, "only a separate file system can be filled");
        let zeros = vec![0; 64 << 20];
        // The write is expected to fail when the space is used up.
        let _ = fs::write(self.path.join(FILLER), zeros);
    }

    /// Moves the subdirectories away and puts a file in place of each: reads and writes fail, for root as
    /// well.
    pub fn take_away(&self) {
        // The directory does not exist before the first checkpoint. If it is moved away, this fails on the
        // file.
        let _ = fs::create_dir(self.path.join("shards"));
        let entries = fs::read_dir(&self.path).expect("the store is a directory").flatten();
        for entry in entries.filter(|it| it.path().is_dir()) {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(HIDDEN) {
                continue;
            }
            let hidden = self.path.join(format!("{HIDDEN}{name}"));
            fs::rename(entry.path(), hidden).expect("the directory can be renamed");
            // An empty file needs no space.
            fs::write(entry.path(), "").expect("the directory was moved away");
        }
    }

    /// Moves the subdirectories back and removes the filler.
    pub fn heal(&self) {
        let _ = fs::remove_file(self.path.join(FILLER));
        for entry in fs::read_dir(&self.path).expect("the store is a directory").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(shown) = name.strip_prefix(HIDDEN) else { continue };
            let shown = self.path.join(shown);
            let _ = fs::remove_file(&shown);
            fs::rename(entry.path(), shown).expect("the directory can be renamed");
        }
    }
}

impl Drop for StoreDirectory {
    fn drop(&mut self) {
        if self.is_mounted {
            // Lazy, because a process that is about to be killed may still use it.
            let _ = Command::new("umount").arg("--lazy").arg(&self.path).output();
        }
    }
}
