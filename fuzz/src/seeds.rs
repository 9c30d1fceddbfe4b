//! Inputs to begin with. They are made by our own encoders when a target starts, so that they are always
//! of the present form, and lie beside those that the target finds.

use std::fs;
use std::path::Path;

/// Puts `inputs` into the corpus of `target`.
///
/// # Panics
/// If they cannot be written.
pub fn seeds(target: &str, inputs: impl IntoIterator<Item = Vec<u8>>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    fs::create_dir_all(&folder).expect("the corpus has a folder");
    for (number, input) in inputs.into_iter().enumerate() {
        let path = folder.join(format!("seed-{number}"));
        fs::write(path, input).expect("a seed can be written");
    }
}
