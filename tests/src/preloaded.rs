//! Faults of the machine that a library brings into processes: it is loaded before the C library.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::Scene;

/// The library, and the files that say what fails.
#[derive(Debug)]
pub struct Preloaded {
    library: PathBuf,
    failing_syncs: PathBuf,
    clock_shift: PathBuf,
}

impl Preloaded {
    /// Builds the library; returns `None` without a C compiler.
    pub fn build(scene: &Scene) -> Option<Self> {
        let source = scene.write("preloaded.c", include_str!("preloaded.c"));
        let library = scene.path("preloaded.so");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(source).arg("-ldl");
        let is_built = compiler.output().is_ok_and(|it| it.status.success());
        let (failing_syncs, clock_shift) = (scene.path("syncs-fail"), scene.path("clock-shift"));
        is_built.then_some(Self { library, failing_syncs, clock_shift })
    }

    /// Returns the variables of processes with these faults.
    pub fn environment(&self) -> [(&'static str, &PathBuf); 3] {
        [
            ("LD_PRELOAD", &self.library),
            ("FAILING_SYNCS", &self.failing_syncs),
            ("CLOCK_SHIFT", &self.clock_shift),
        ]
    }

    /// Lets syncs of files fail from here on, or succeed.
    pub fn fail_syncs(&self, fail: bool) {
        // The file is absent if they did not fail.
        let _ = match fail {
            true => fs::write(&self.failing_syncs, ""),
            false => fs::remove_file(&self.failing_syncs),
        };
    }

    /// Moves the calendar time of the processes by so many seconds against that of this machine.
    pub fn shift_clock(&self, seconds: i64) {
        let text = seconds.to_string();
        // In one piece: it may be read at any moment.
        let new = self.clock_shift.with_extension("new");
        let put = fs::write(&new, text).and_then(|()| fs::rename(&new, &self.clock_shift));
        put.expect("the directory of the test is writable");
    }
}
