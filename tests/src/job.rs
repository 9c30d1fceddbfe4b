//! Job files for tests: small variants of the examples, with data at an absolute path.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Scene;

/// The folder of the examples.
pub fn examples() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    folder.canonicalize().expect("the examples are there")
}

/// The text of a job file.
#[derive(Clone, Debug)]
pub struct Job {
    pub name: String,
    pub text: String,
}

impl Job {
    /// An example as it is, but for the path of its data.
    pub fn example(name: &str) -> Self {
        let path = examples().join(format!("{name}.toml"));
        let text = fs::read_to_string(path).expect("the example is there");
        let data = examples().join("data");
        let text = text.replace("\"data/", &format!("\"{}/", data.display()));
        Self { name: name.to_owned(), text }
    }

    /// The synchronous digits with a small model: 360 steps, about a second.
    pub fn small() -> Self {
        Self::example("digits")
            .with("passes = 120", "passes = 30")
            .with("hidden = [128, 64]", "hidden = [16]")
            .with("decay_steps = 1400", "decay_steps = 340")
    }

    /// A longer one, with a checkpoint every 200 of its 3 600 steps.
    pub fn long() -> Self {
        Self::example("digits")
            .with("passes = 120", "passes = 300")
            .with("hidden = [128, 64]", "hidden = [32]")
            .with("decay_steps = 1400", "decay_steps = 3500")
            .with("every = \"10s\"", "every_steps = 200")
    }

    /// One that no test sees the end of.
    pub fn endless() -> Self {
        Self::long().with("passes = 300", "passes = 300000")
    }

    /// The asynchronous digits.
    pub fn asynchronous() -> Self {
        Self::example("digits-async")
    }

    /// Replaces a piece of the text that must be there.
    #[track_caller]
    pub fn with(mut self, old: &str, new: &str) -> Self {
        assert!(self.text.contains(old), "the job file has no `{old}`");
        self.text = self.text.replace(old, new);
        self
    }

    /// Writes it into a scene.
    pub fn write(&self, scene: &Scene) -> PathBuf {
        scene.write(&format!("{}.toml", self.name), &self.text)
    }
}
