//! Seed inputs. Each target generates them at its start with the product's encoders, so that they have the
//! current format, and adds them to its corpus.

use std::fs;
use std::path::Path;

/// Writes `inputs` to the corpus of `target`.
///
/// # Panics
/// If they cannot be written.
pub fn seeds(target: &str, inputs: impl IntoIterator<Item = Vec<u8>>) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    fs::create_dir_all(&directory).expect("the directory of the corpus can be created");
    for (number, input) in inputs.into_iter().enumerate() {
        let path = directory.join(format!("seed-{number}"));
        fs::write(path, input).expect("a seed can be written");
    }
}
