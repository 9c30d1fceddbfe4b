//! Job files for tests: small variants of the examples, with data at an absolute path.

use std::fs;
use std::path::{Path, PathBuf};

use steadfast_common::job::spec::Mode;

use crate::Scene;

pub fn examples() -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    directory.canonicalize().expect("the examples exist")
}

/// A job file.
#[derive(Clone, Debug)]
pub struct Job {
    pub name: String,
    pub text: String,
}

impl Job {
    /// Returns an example with an absolute path to its data.
    pub fn example(name: &str) -> Self {
        let path = examples().join(format!("{name}.toml"));
        let text = fs::read_to_string(path).expect("the example exists");
        let data = examples().join("data");
        let text = text.replace("\"data/", &format!("\"{}/", data.display()));
        Self { name: name.to_owned(), text }
    }

    /// Returns the synchronous digits job with a small model: 360 steps, about a second.
    pub fn small() -> Self {
        Self::example("digits")
            .with("passes = 120", "passes = 30")
            .with("hidden = [128, 64]", "hidden = [16]")
            .with("decay_steps = 1400", "decay_steps = 340")
    }

    /// Returns a longer job of 3 600 steps, with a checkpoint every 200.
    pub fn long() -> Self {
        Self::example("digits")
            .with("passes = 120", "passes = 300")
            .with("hidden = [128, 64]", "hidden = [32]")
            .with("decay_steps = 1400", "decay_steps = 3500")
            .with("every = \"10s\"", "every_steps = 200")
    }

    /// Returns a job that runs longer than any test.
    pub fn endless() -> Self {
        Self::long().with("passes = 300", "passes = 300000")
    }

    /// Returns the asynchronous digits job.
    pub fn asynchronous() -> Self {
        Self::example("digits-async")
    }

    /// Returns the digits job that follows the files in a directory.
    pub fn stream(directory: &Path, mode: Mode) -> Self {
        let example = examples().join("data/digits.csv").display().to_string();
        let job = Self::asynchronous()
            .with("digits-async", "stream")
            .with("passes = 30\n", "")
            .with("[dataset]", "[dataset]\nfollow = true")
            .with(&example, &directory.join("*.csv").display().to_string())
            .with("records_per_task = 60", "records_per_task = 20")
            .with("[evaluation]\nfraction = 0.2\n", "");
        let asynchronous = "[async]\nbatch = 15\npush_every = 2\npull_every = 4\nmax_staleness = 8";
        match mode {
            Mode::Sync => job
                .with("mode = \"async\"", "mode = \"sync\"")
                .with(asynchronous, "[sync]\nlanes = 4\nmicro_batch = 8")
                .with("every = \"10s\"", "every_steps = 20"),
            Mode::Async => job
                .with(asynchronous, "[async]\nbatch = 10")
                .with("every = \"10s\"", "every = \"1s\""),
        }
    }

    /// Replaces a text that must occur in the job file.
    #[track_caller]
    pub fn with(mut self, old: &str, new: &str) -> Self {
        assert!(self.text.contains(old), "the job file has no `{old}`");
        self.text = self.text.replace(old, new);
        self
    }

    /// Writes the job file to a scene.
    pub fn write(&self, scene: &Scene) -> PathBuf {
        scene.write(&format!("{}.toml", self.name), &self.text)
    }
}
