//! The folder that a world's job keeps its files in, which can be full or away for a while.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::Scene;

/// Room of a store that can be full: enough for the checkpoints of the jobs of these tests.
const ROOM: &str = "size=16m";
const FILLER: &str = "filler";

/// What the name of a folder that is away begins with.
const HIDDEN: &str = ".away-";

/// The store's folder.
#[derive(Debug)]
pub(super) struct StoreFolder {
    path: PathBuf,
    is_mounted: bool,
}

impl StoreFolder {
    /// Makes the folder, as a file system of its own where this process may mount one.
    pub fn new(scene: &Scene) -> Self {
        let path = scene.path("store");
        fs::create_dir(&path).expect("the test's folder can be written to");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", ROOM, "tmpfs"]).arg(&path);
        let is_mounted = mount.output().is_ok_and(|it| it.status.success());
        Self { path, is_mounted }
    }

    pub fn path(&self) -> &PathBuf {
        &self.path
    }

    /// Whether it has an end.
    pub fn can_be_full(&self) -> bool {
        self.is_mounted
    }

    /// Takes all space that is left.
    pub fn fill(&self) {
        assert!(self.is_mounted, "only a file system of its own can be filled");
        let zeros = vec![0; 64 << 20];
        // It fails when the space is used up, which is what it is for.
        let _ = fs::write(self.path.join(FILLER), zeros);
    }

    /// Puts the folders below it away, and a file in the place of each: whoever wants to write or
    /// read there fails, root as well.
    pub fn take_away(&self) {
        // Before the first checkpoint there is none; a file of that name is there if it is away.
        let _ = fs::create_dir(self.path.join("shards"));
        let entries = fs::read_dir(&self.path).expect("the store is a folder").flatten();
        for entry in entries.filter(|it| it.path().is_dir()) {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(HIDDEN) {
                continue;
            }
            let hidden = self.path.join(format!("{HIDDEN}{name}"));
            fs::rename(entry.path(), hidden).expect("the folder can be renamed");
            // No space is needed for a file without content.
            fs::write(entry.path(), "").expect("the folder was put away");
        }
    }

    /// Puts everything back, and takes out what fills it.
    pub fn heal(&self) {
        let _ = fs::remove_file(self.path.join(FILLER));
        for entry in fs::read_dir(&self.path).expect("the store is a folder").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let Some(shown) = name.strip_prefix(HIDDEN) else { continue };
            let shown = self.path.join(shown);
            let _ = fs::remove_file(&shown);
            fs::rename(entry.path(), shown).expect("the folder can be renamed");
        }
    }
}

impl Drop for StoreFolder {
    fn drop(&mut self) {
        if self.is_mounted {
            // Lazily, since a process that is about to be killed may still be in it.
            let _ = Command::new("umount").arg("--lazy").arg(&self.path).output();
        }
    }
}
