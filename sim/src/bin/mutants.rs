//! Mutation test of the simulator: applies each mutation of `sim/mutations.toml` to a copy of the
//! sources, builds the simulator with it, and reports the first seed that detects it.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use clap::Parser;
use steadfast_sim::mutations::{Mutation, mutations};

/// Builds the simulator with each mutation and reports the first seed that detects it.
#[derive(Debug, Parser)]
#[command(name = "steadfast-mutants", version)]
struct Args {
    /// Run only mutations whose name contains this text, or those of this mode.
    only: Option<String>,
    /// Number of seeds to run for each mode.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let tree = root.join("target/mutants/tree");
    let (mut holes, mut rows) = (0, Vec::new());
    copy_sources(&root, &tree);
    for mutation in mutations() {
        let is_meant = |only: &String| mutation.name.contains(only) || mutation.mode == *only;
        if !args.only.as_ref().is_none_or(is_meant) {
            continue;
        }
        let started = Instant::now();
        let found = try_out(&root, &tree, &mutation, args.seeds);
        holes += u32::from(found.is_err());
        let found = found.unwrap_or_else(|reason| format!("NOT FOUND: {reason}"));
        let row = format!("| {} | {} | {found} |", mutation.name, mutation.what);
        println!("{row}  ({:.0} s)", started.elapsed().as_secs_f64());
        rows.push(row);
    }
    println!("\n| mutation | what | first found |\n|---|---|---|\n{}", rows.join("\n"));
    ExitCode::from(u8::from(0 < holes))
}

/// Copies all files that git tracks.
fn copy_sources(root: &Path, tree: &Path) {
    let listed = Command::new("git").arg("ls-files").current_dir(root).output();
    let listed =
        String::from_utf8(listed.expect("git is installed").stdout).expect("names are UTF-8");
    for name in listed.lines() {
        let (from, to) = (root.join(name), tree.join(name));
        let directory = to.parent().expect("a file has a directory");
        std::fs::create_dir_all(directory).expect("the target directory is writable");
        // cargo detects changes by modification time, so unchanged files are not copied.
        let is_same = std::fs::read(&from).ok() == std::fs::read(&to).ok();
        if !is_same && from.exists() {
            std::fs::copy(&from, &to).expect("the target directory is writable");
        }
    }
}

fn try_out(root: &Path, tree: &Path, mutation: &Mutation, seeds: u64) -> Result<String, String> {
    let mut before = Vec::new();
    let found = mutate(tree, mutation, &mut before)
        .and_then(|()| build(root, tree))
        .and_then(|()| first_found(root, &mutation.mode, seeds));
    for (path, text) in before.into_iter().rev() {
        std::fs::write(path, text).map_err(|error| error.to_string())?;
    }
    found
}

/// Applies all edits of a mutation; appends the previous content of each file to `before`.
fn mutate(
    tree: &Path,
    mutation: &Mutation,
    before: &mut Vec<(PathBuf, String)>,
) -> Result<(), String> {
    for edit in &mutation.edits {
        let path = tree.join(&edit.file);
        let text = std::fs::read_to_string(&path).map_err(|error| error.to_string())?;
        let changed = edit.apply(&text)?;
        std::fs::write(&path, changed).map_err(|error| error.to_string())?;
        before.push((path, text));
    }
    Ok(())
}

fn target(root: &Path) -> PathBuf {
    root.join("target/mutants/target")
}

fn build(root: &Path, tree: &Path) -> Result<(), String> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--profile", "mutants", "--package", "steadfast-sim"])
        .args(["--bin", "steadfast-sim"])
        .current_dir(tree)
        .env("CARGO_TARGET_DIR", target(root))
        .output()
        .map_err(|error| error.to_string())?;
    match built.status.success() {
        true => Ok(()),
        false => Err(format!("the build failed\n{}", String::from_utf8_lossy(&built.stderr))),
    }
}

fn first_found(root: &Path, mode: &str, seeds: u64) -> Result<String, String> {
    let seeds = seeds.to_string();
    for (how, mode) in [
        (&["--seed", "1", "--seeds", &seeds, "--first"][..], mode),
        (&["--explore", "--calls", "--first"], mode),
        (&["--explore", "31", "--deaths", "--first"], mode),
        // Only in a few turns of a synchronous job, slots hand their states over.
        (&["--explore", "3", "--moves", "--first"], "sync"),
        (&["--explore", "31", "--moves", "--first"], "async"),
    ] {
        let ran = Command::new(target(root).join("mutants/steadfast-sim"))
            .args(how)
            .args(["--mode", mode])
            .stderr(Stdio::null())
            .output()
            .map_err(|error| error.to_string())?;
        let stdout = String::from_utf8_lossy(&ran.stdout);
        if let Some(found) = stdout.lines().find_map(|line| line.strip_prefix("found: ")) {
            return Ok(found.to_owned());
        }
    }
    Err(format!(
        "no failure in {seeds} seeds of each mode, nor in any deviation of a single call, nor in every 31st death of a pserver"
    ))
}
