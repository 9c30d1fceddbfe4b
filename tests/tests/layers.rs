//! Who may import whom, and the rules of the code's style that a machine can check.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const FILE_LINES_MAX: usize = 500;
const FN_LINES_MAX: usize = 70;

/// Who may import whom: each package may name those of lower layers only, and of these just the
/// ones listed. A package that is missing here fails the test, so a new one starts with a decision
/// about its place.
const LAYERS: &[&[(&str, &[&str])]] = &[
    // Vocabulary, and the machine below every process.
    &[("steadfast-common", &[]), ("steadfast-host", &[])],
    // Wire and cores; the embedded etcd stands alone.
    &[
        ("steadfast-proto", &["steadfast-common"]),
        ("steadfast-audit", &["steadfast-common"]),
        ("steadfast-master-core", &["steadfast-common"]),
        ("steadfast-pserver-core", &["steadfast-common"]),
        ("steadfast-trainer-core", &["steadfast-common"]),
        ("steadfast-etcd", &["steadfast-host"]),
    ],
    // Adapters, the lower ones first.
    &[
        ("steadfast-coord", &["steadfast-common", "steadfast-host"]),
        ("steadfast-store", &["steadfast-host"]),
    ],
    &[
        ("steadfast-checkpoint", &["steadfast-common", "steadfast-host", "steadfast-store"]),
        ("steadfast-data", &["steadfast-common", "steadfast-host", "steadfast-store"]),
        (
            "steadfast-process",
            &["steadfast-common", "steadfast-host", "steadfast-coord", "steadfast-proto"],
        ),
    ],
    // The client library.
    &[(
        "steadfast-client",
        &["steadfast-common", "steadfast-host", "steadfast-coord", "steadfast-proto"],
    )],
    // Processes. They never import each other.
    &[
        (
            "steadfast-master",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-proto",
                "steadfast-master-core",
                "steadfast-coord",
                "steadfast-store",
                "steadfast-data",
                "steadfast-process",
            ],
        ),
        (
            "steadfast-pserver",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-proto",
                "steadfast-pserver-core",
                "steadfast-coord",
                "steadfast-store",
                "steadfast-checkpoint",
                "steadfast-process",
            ],
        ),
        (
            "steadfast-trainer",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-proto",
                "steadfast-trainer-core",
                "steadfast-coord",
                "steadfast-store",
                "steadfast-checkpoint",
                "steadfast-data",
                "steadfast-process",
                "steadfast-client",
            ],
        ),
    ],
    // Tools, and an example of a user's own trainer.
    &[
        (
            "steadfast-cli",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-audit",
                "steadfast-proto",
                "steadfast-coord",
                "steadfast-store",
                "steadfast-checkpoint",
                "steadfast-etcd",
                "steadfast-process",
            ],
        ),
        ("own-model", &["steadfast-trainer"]),
        (
            "steadfast-sim",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-audit",
                "steadfast-proto",
                "steadfast-store",
                "steadfast-data",
                "steadfast-etcd",
                "steadfast-process",
                "steadfast-master",
                "steadfast-pserver",
                "steadfast-trainer",
            ],
        ),
    ],
    // Tests.
    &[(
        "steadfast-tests",
        &[
            "steadfast-common",
            "steadfast-audit",
            "steadfast-coord",
            "steadfast-etcd",
            "steadfast-proto",
        ],
    )],
    &[(
        "steadfast-benches",
        &[
            "steadfast-common",
            "steadfast-host",
            "steadfast-process",
            "steadfast-trainer-core",
            "steadfast-proto",
            "steadfast-coord",
            "steadfast-client",
            "steadfast-pserver-core",
            "steadfast-tests",
        ],
    )],
];

/// Packages that may not wait, read a clock, roll dice or touch the outside.
const PURE: &[&str] = &[
    "steadfast-common",
    "steadfast-audit",
    "steadfast-master-core",
    "steadfast-pserver-core",
    "steadfast-trainer-core",
];

/// What they may use from elsewhere: plain data, parsing, arithmetic.
const PURE_CRATES: &[&str] = &[
    "base64",
    "bytemuck", // Values as bytes.
    "bytes",
    "half",      // Values of 16 bits.
    "humantime", // Parses durations.
    "libm",
    "ndarray",
    "rand_chacha", // Generators that are given their seed.
    "serde",
    "serde_ignored",
    "serde_json",
    "sha2",
    "strsim",
    "thiserror",
    "toml",
    "uuid", // Its type; making one takes chance.
];

const PURE_BANNED: &[&str] = &[
    "async ",
    ".await",
    "Instant::now",
    "SystemTime",
    "std::env",
    "std::fs",
    "std::net",
    "std::thread",
    "new_v4",
    "HashMap", // Iterates in a random order; use BTreeMap.
    "HashSet", // The same; use BTreeSet.
];

/// Packages that run in simulation as well: what they ask of the machine they ask of
/// `steadfast-host`.
const HOSTED: &[&str] = &[
    "steadfast-coord",
    "steadfast-store",
    "steadfast-checkpoint",
    "steadfast-client",
    "steadfast-master",
    "steadfast-pserver",
    "steadfast-trainer",
];

const HOSTED_BANNED: &[&str] = &[
    "tokio::spawn",
    "tokio::time",
    "tokio::task",
    "tokio::net",
    "JoinSet",
    "std::time::Instant",
    "SystemTime::now",
    "new_v4",
    "HashMap::new", // Iterates in a random order; use BTreeMap.
    "HashSet::new",
];

/// Crates of others that only some of our packages may name.
const RESERVED: &[(&str, &[&str])] = &[
    ("etcd-client", &["steadfast-coord", "steadfast-etcd"]),
    ("object_store", &["steadfast-store", "steadfast-sim"]),
];

#[test]
fn packages_import_only_downwards() {
    let mut errors = Vec::new();
    for package in packages() {
        let Some((_, allowed)) =
            LAYERS.iter().flat_map(|layer| layer.iter()).find(|(name, _)| *name == package.name)
        else {
            errors.push(format!("{} has no place in LAYERS", package.name));
            continue;
        };
        for import in package.local.iter().filter(|it| !allowed.contains(&it.as_str())) {
            errors.push(format!("{} must not import {import}", package.name));
        }
    }
    report(&errors);
}

#[test]
fn the_table_of_layers_is_itself_in_order() {
    let mut errors = Vec::new();
    let mut below = BTreeSet::new();
    for layer in LAYERS {
        for (name, allowed) in *layer {
            for import in allowed.iter().filter(|it| !below.contains(**it)) {
                errors.push(format!("{name}: {import} is not in a lower layer"));
            }
        }
        below.extend(layer.iter().map(|(name, _)| *name));
    }
    let known: BTreeSet<String> = packages().into_iter().map(|package| package.name).collect();
    for name in below.iter().filter(|name| !known.contains(**name)) {
        errors.push(format!("{name} is in LAYERS and not in the workspace"));
    }
    report(&errors);
}

#[test]
fn pure_packages_use_only_pure_crates() {
    let mut errors = Vec::new();
    for package in packages().iter().filter(|it| PURE.contains(&it.name.as_str())) {
        for import in package.external.iter().filter(|it| !PURE_CRATES.contains(&it.as_str())) {
            errors.push(format!("{} is pure and must not use {import}", package.name));
        }
    }
    report(&errors);
}

#[test]
fn one_package_names_each_library_of_the_outside() {
    let mut errors = Vec::new();
    for package in packages() {
        for (library, allowed) in RESERVED {
            let names_it = package.external.contains(*library) || package.dev.contains(*library);
            if names_it && !allowed.contains(&package.name.as_str()) {
                errors.push(format!("{} must not use {library}", package.name));
            }
        }
    }
    report(&errors);
}

#[test]
fn sources_are_tidy() {
    let mut errors = Vec::new();
    for package in packages() {
        let name = package.name.as_str();
        let banned = match (PURE.contains(&name), HOSTED.contains(&name)) {
            (true, _) => PURE_BANNED,
            (false, true) => HOSTED_BANNED,
            (false, false) => &[],
        };
        for path in sources(&package.dir.join("src")) {
            let text = fs::read_to_string(&path).expect("a source file is readable");
            check_source(&path, &text, banned, &mut errors);
        }
    }
    report(&errors);
}

/// Programs and libraries without tests are not built as tests; those that have some are.
#[test]
fn no_test_is_left_out() {
    let mut errors = Vec::new();
    for package in packages() {
        for path in package.untested.iter().flat_map(|it| sources(it)) {
            let text = fs::read_to_string(&path).expect("a source file is readable");
            if text.contains("#[test]") || text.contains("#[tokio::test") {
                let manifest = package.dir.join("Cargo.toml");
                errors.push(format!(
                    "{}: `test = false` in {}",
                    path.display(),
                    manifest.display()
                ));
            }
        }
    }
    report(&errors);
}

/// A guarantee is worth what the test behind it is worth: each one that is named is there.
#[test]
fn every_test_that_the_guarantees_name_exists() {
    let guarantees = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guarantees.md");
    let text = fs::read_to_string(guarantees).expect("the page is there");
    let mut known = String::new();
    for path in packages().iter().flat_map(|it| sources(&it.dir)) {
        known += &fs::read_to_string(path).expect("a source file is readable");
    }
    let mut errors = Vec::new();
    let quoted = text.split('`').skip(1).step_by(2);
    for name in quoted.filter_map(|it| it.split(": ").last()) {
        let is_test = 3 <= name.matches('_').count()
            && name.bytes().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'_');
        if is_test && !known.contains(&format!("fn {name}(")) {
            errors.push(format!("no test has the name {name}"));
        }
    }
    report(&errors);
}

fn report(errors: &[String]) {
    assert!(errors.is_empty(), "\n{}", errors.join("\n"));
}

fn check_source(path: &Path, text: &str, banned: &[&str], errors: &mut Vec<String>) {
    let mut error = |line: usize, message: String| {
        errors.push(format!("{}:{line}: {message}", path.display()));
    };
    if !text.starts_with("//!") {
        error(1, "start with a `//!` line that says what this file is for".to_owned());
    }
    if is_test_module(path) {
        return;
    }
    let body = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    let lines: Vec<&str> = body.lines().collect();
    if FILE_LINES_MAX < lines.len() {
        error(1, format!("{} lines; split it at {FILE_LINES_MAX}", lines.len()));
    }
    for (index, line) in lines.iter().enumerate() {
        let code = line.split("//").next().unwrap_or(line);
        for word in banned.iter().filter(|it| code.contains(**it)) {
            error(index + 1, format!("`{}` has no place in this package", word.trim()));
        }
        // An unbiased one rolls dice that a simulation does not hold.
        let is_select = code.trim_end().ends_with("select! {") && banned == HOSTED_BANNED;
        if is_select && lines.get(index + 1).is_none_or(|next| next.trim() != "biased;") {
            error(index + 1, "`select!` without `biased;`".to_owned());
        }
        if code.contains(".unwrap()") {
            error(index + 1, "`unwrap` outside tests; say with `expect` why it holds".to_owned());
        }
        if let Some(length) = fn_length(&lines[index..]).filter(|it| FN_LINES_MAX < *it) {
            error(index + 1, format!("a function of {length} lines; the limit is {FN_LINES_MAX}"));
        }
    }
}

/// Whether a whole file is a test: `tests.rs`, or one in a folder `tests`.
fn is_test_module(path: &Path) -> bool {
    path.file_stem().is_some_and(|it| it == "tests" || it == "sample")
        || path.parent().is_some_and(|it| it.ends_with("tests"))
}

/// The length of the function that starts at the first of `lines`, if one does. Trusts rustfmt:
/// the closing brace stands below the first letter.
fn fn_length(lines: &[&str]) -> Option<usize> {
    let head = lines.first()?;
    let code = head.trim_start();
    let is_fn = code.starts_with("fn ") || code.contains(" fn ");
    if !is_fn || code.starts_with("//") || code.ends_with(';') {
        return None;
    }
    let indent = head.len() - code.len();
    let close = format!("{}}}", " ".repeat(indent));
    lines.iter().position(|line| *line == close).map(|index| index + 1)
}

struct Package {
    name: String,
    dir: PathBuf,
    /// Names of packages of this workspace that it imports, outside tests.
    local: BTreeSet<String>,
    /// Names of other packages that it imports, outside tests.
    external: BTreeSet<String>,
    /// Names of packages that only its tests import.
    dev: BTreeSet<String>,
    /// Sources of targets whose tests are not run: a program's file, a library's folder.
    untested: Vec<PathBuf>,
}

fn packages() -> Vec<Package> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo metadata runs");
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");
    let packages = metadata["packages"].as_array().expect("packages is a list");
    packages.iter().map(package).collect()
}

fn package(value: &serde_json::Value) -> Package {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let (mut local, mut external, mut dev) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
    for dependency in value["dependencies"].as_array().expect("dependencies is a list") {
        let names = match (dependency["kind"] == "dev", dependency["path"].is_string()) {
            (true, _) => &mut dev,
            (false, true) => &mut local,
            (false, false) => &mut external,
        };
        names.insert(text(&dependency["name"]));
    }
    let manifest = PathBuf::from(text(&value["manifest_path"]));
    let dir = manifest.parent().expect("a manifest has a folder").to_owned();
    let targets = value["targets"].as_array().expect("targets is a list");
    let untested = targets.iter().filter(|it| it["test"] == false).map(|target| {
        let path = PathBuf::from(text(&target["src_path"]));
        let is_library = path.ends_with("lib.rs");
        if is_library { path.parent().map_or(path.clone(), Path::to_owned) } else { path }
    });
    let untested = untested.collect();
    Package { name: text(&value["name"]), dir, local, external, dev, untested }
}

/// The sources in a folder, or the one that is named.
fn sources(place: &Path) -> Vec<PathBuf> {
    if place.is_file() {
        return vec![place.to_owned()];
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|it| it == "rs") {
            found.push(path);
        }
    }
    found
}
