//! Python virtual environments that are shared between tests.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Returns a Python with these packages, in the environment `name`, which is created once. Returns
/// `None`, with a message, if Python or the package index is missing; fails in continuous integration.
pub fn python(name: &str, packages: &[&str]) -> Option<PathBuf> {
    let skip = |why: String| -> Option<PathBuf> {
        assert!(std::env::var_os("CI").is_none(), "{why}");
        eprintln!("skipped: {why}");
        None
    };
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target");
    if let Err(error) = Command::new("python3").arg("--version").output() {
        return skip(format!("cannot start python3: {error}"));
    }
    let _lock = lock(&target.join(format!("python-{name}.lock")));
    let directory = target.join(format!("python-{name}"));
    let (ready, python) = (directory.join("ready"), directory.join("bin/python"));
    if ready.is_file() && python.exists() {
        return Some(python);
    }
    // Remove an incomplete environment.
    let _ = fs::remove_dir_all(&directory);
    let made = run(Command::new("python3").args(["-m", "venv"]).arg(&directory));
    assert!(
        made.status.success(),
        "cannot create a virtual environment; run scripts/setup: {made:?}"
    );
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    let installed = run(pip.args(["--retries", "2", "--timeout", "20"]).args(packages));
    if !installed.status.success() {
        let stderr = String::from_utf8_lossy(&installed.stderr).into_owned();
        return skip(format!("cannot install the Python packages: {stderr}"));
    }
    fs::write(ready, "").expect("the build directory is writable");
    Some(python)
}

fn lock(path: &Path) -> File {
    let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    let file = opened.expect("the build directory is writable");
    file.lock().expect("files can be locked");
    file
}

fn run(command: &mut Command) -> Output {
    command.output().expect("the program starts")
}
