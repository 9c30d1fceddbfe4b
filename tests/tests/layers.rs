//! Checks the layers of the crates, and the style rules that can be checked automatically.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Allowed imports: each package may import only the listed packages, all of lower layers. A package that
/// is missing here fails the test, so each new package must be assigned to a layer.
const LAYERS: &[&[(&str, &[&str])]] = &[
    // Vocabulary, and the host interface of every process.
    &[("steadfast-common", &[]), ("steadfast-host", &[])],
    &[("steadfast-auth", &["steadfast-common"])],
    &[
        ("steadfast-net", &["steadfast-common", "steadfast-host", "steadfast-auth"]),
        // Names no other crate: rows are ids and numbers.
        ("steadfast-pserver-storage", &[]),
    ],
    // Wire and cores; the embedded etcd is separate.
    &[
        ("steadfast-proto", &["steadfast-common"]),
        ("steadfast-audit", &["steadfast-common"]),
        ("steadfast-master-core", &["steadfast-common"]),
        ("steadfast-pserver-core", &["steadfast-common", "steadfast-pserver-storage"]),
        ("steadfast-trainer-core", &["steadfast-common"]),
        ("steadfast-agent-core", &["steadfast-common"]),
        ("steadfast-launcher-core", &["steadfast-common"]),
        ("steadfast-coordinator-core", &["steadfast-common"]),
        ("steadfast-etcd", &["steadfast-host"]),
    ],
    // Adapters, lower ones first.
    &[
        ("steadfast-coord", &["steadfast-common", "steadfast-host", "steadfast-net"]),
        ("steadfast-store", &["steadfast-host"]),
    ],
    &[
        ("steadfast-checkpoint", &["steadfast-common", "steadfast-host", "steadfast-store"]),
        ("steadfast-data", &["steadfast-common", "steadfast-host", "steadfast-store"]),
        (
            "steadfast-process",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-auth",
                "steadfast-net",
                "steadfast-coord",
                "steadfast-proto",
            ],
        ),
        ("steadfast-supervise", &["steadfast-common"]),
    ],
    // The client libraries, above what both need.
    &[(
        "steadfast-master-client",
        &[
            "steadfast-common",
            "steadfast-host",
            "steadfast-net",
            "steadfast-coord",
            "steadfast-proto",
        ],
    )],
    &[
        (
            "steadfast-training-client",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-net",
                "steadfast-coord",
                "steadfast-proto",
                "steadfast-master-client",
            ],
        ),
        (
            "steadfast-elastic-client",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-net",
                "steadfast-coord",
                "steadfast-proto",
                "steadfast-master-client",
            ],
        ),
    ],
    &[(
        "steadfast-coordinator",
        &[
            "steadfast-common",
            "steadfast-host",
            "steadfast-net",
            "steadfast-proto",
            "steadfast-coordinator-core",
            "steadfast-coord",
            "steadfast-process",
            "steadfast-training-client",
        ],
    )],
    // Processes. They do not import each other.
    &[
        (
            "steadfast-master",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-net",
                "steadfast-proto",
                "steadfast-master-core",
                "steadfast-coord",
                "steadfast-store",
                "steadfast-checkpoint",
                "steadfast-data",
                "steadfast-process",
            ],
        ),
        (
            "steadfast-pserver",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-net",
                "steadfast-proto",
                "steadfast-pserver-core",
                "steadfast-pserver-storage",
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
                "steadfast-net",
                "steadfast-trainer-core",
                "steadfast-coord",
                "steadfast-store",
                "steadfast-checkpoint",
                "steadfast-data",
                "steadfast-process",
                "steadfast-training-client",
            ],
        ),
    ],
    // Tools, the Python package, and an example of a custom trainer.
    &[(
        "steadfast-agent",
        &[
            "steadfast-common",
            "steadfast-host",
            "steadfast-net",
            "steadfast-proto",
            "steadfast-agent-core",
            "steadfast-coord",
            "steadfast-etcd",
            "steadfast-process",
            "steadfast-supervise",
            "steadfast-elastic-client",
            "steadfast-master",
        ],
    )],
    &[(
        "steadfast-launcher",
        &[
            "steadfast-common",
            "steadfast-host",
            "steadfast-launcher-core",
            "steadfast-coord",
            "steadfast-process",
            "steadfast-supervise",
            // The rendezvous, and the other end of the connection to an agent.
            "steadfast-agent",
        ],
    )],
    &[
        (
            "steadfast-cli",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-net",
                "steadfast-audit",
                "steadfast-proto",
                "steadfast-coord",
                "steadfast-store",
                "steadfast-checkpoint",
                "steadfast-data",
                "steadfast-etcd",
                "steadfast-process",
                "steadfast-supervise",
                "steadfast-agent",
                "steadfast-launcher",
                // The status of an elastic job, read from etcd without a master.
                "steadfast-master",
            ],
        ),
        ("own-model", &["steadfast-trainer"]),
        (
            "steadfast-python",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-net",
                "steadfast-proto",
                "steadfast-coord",
                "steadfast-coordinator",
                "steadfast-process",
                "steadfast-elastic-client",
                "steadfast-data",
                "steadfast-trainer",
            ],
        ),
        (
            "steadfast-sim",
            &[
                "steadfast-common",
                "steadfast-host",
                "steadfast-net",
                "steadfast-audit",
                "steadfast-proto",
                "steadfast-coord",
                "steadfast-store",
                "steadfast-checkpoint",
                "steadfast-data",
                "steadfast-etcd",
                "steadfast-process",
                "steadfast-master-client",
                "steadfast-master",
                "steadfast-pserver",
                "steadfast-pserver-storage",
                "steadfast-trainer",
                "steadfast-agent",
                "steadfast-coordinator",
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
            "steadfast-trainer",
        ],
    )],
    &[(
        "steadfast-benches",
        &[
            "steadfast-common",
            "steadfast-host",
            "steadfast-net",
            "steadfast-process",
            "steadfast-trainer-core",
            "steadfast-proto",
            "steadfast-coord",
            "steadfast-training-client",
            "steadfast-elastic-client",
            "steadfast-pserver-core",
            "steadfast-pserver-storage",
            "steadfast-tests",
        ],
    )],
];

/// Packages that must not wait, read a clock, draw random numbers or do I/O.
const PURE: &[&str] = &[
    "steadfast-common",
    "steadfast-audit",
    "steadfast-master-core",
    "steadfast-pserver-core",
    "steadfast-trainer-core",
    "steadfast-agent-core",
    "steadfast-launcher-core",
    "steadfast-coordinator-core",
];

/// External crates allowed in pure packages: plain data, parsing, arithmetic.
const PURE_CRATES: &[&str] = &[
    "base64",
    "bytemuck", // Values as bytes.
    "bytes",
    "fnv",
    "glob",      // Names with wildcards.
    "half",      // Values of 16 bits.
    "humantime", // Parses durations.
    "libm",
    "ndarray",
    "rand_chacha", // Seeded generators.
    "rangemap",
    "serde",
    "serde_json",
    "sha2",
    "strsim",
    "thiserror",
    "toml",
    "uuid",   // Only its type; v4 needs random numbers.
    "winnow", // Parses update rules.
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

/// Packages that also run in simulation: they access the machine only through `steadfast-host` and
/// `steadfast-net`.
const HOSTED: &[&str] = &[
    "steadfast-coord",
    "steadfast-store",
    "steadfast-checkpoint",
    "steadfast-data",
    "steadfast-master-client",
    "steadfast-training-client",
    "steadfast-elastic-client",
    "steadfast-master",
    "steadfast-pserver",
    "steadfast-trainer",
    "steadfast-agent",
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

/// External crates that only some packages may import.
const RESERVED: &[(&str, &[&str])] = &[
    ("etcd-client", &["steadfast-coord", "steadfast-etcd"]),
    ("rocksdb", &["steadfast-pserver-storage"]),
    ("object_store", &["steadfast-store", "steadfast-sim"]),
    ("pyo3", &["steadfast-python"]),
];

#[test]
fn packages_import_only_downwards() {
    let mut errors = Vec::new();
    for package in packages() {
        let Some((_, allowed)) =
            LAYERS.iter().flat_map(|layer| layer.iter()).find(|(name, _)| *name == package.name)
        else {
            errors.push(format!("{} is missing in LAYERS", package.name));
            continue;
        };
        for import in package.local.iter().filter(|it| !allowed.contains(&it.as_str())) {
            errors.push(format!("{} must not import {import}", package.name));
        }
    }
    report(&errors);
}

#[test]
fn the_table_of_layers_is_ordered() {
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
fn each_external_library_is_named_by_one_package() {
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
fn sources_follow_the_conventions() {
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

/// Targets with tests are built as tests; targets without tests are not.
#[test]
fn targets_that_cargo_does_not_test_have_no_tests() {
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

/// A library with other features would be compiled once more for the wheel, with all that depend on it.
#[test]
fn the_wheel_uses_the_libraries_that_the_programs_were_built_with() {
    // By package, kind of target, and whether it is for the build itself: the sets of features.
    let features = |selected: &[&str]| -> BTreeMap<String, BTreeSet<String>> {
        let output = Command::new(env!("CARGO"))
            .args(["build", "--release", "--offline", "--unit-graph", "-Zunstable-options"])
            .args(selected)
            .env("RUSTC_BOOTSTRAP", "1")
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let graph: serde_json::Value =
            serde_json::from_slice(&output.stdout).expect("a graph is JSON");
        let mut features: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for unit in graph["units"].as_array().expect("a graph has units") {
            let (kind, platform) = (&unit["target"]["kind"], &unit["platform"]);
            let name = format!("{} {kind} {} {platform}", unit["pkg_id"], unit["mode"]);
            features.entry(name).or_default().insert(unit["features"].to_string());
        }
        features
    };
    let all = features(&["--workspace", "--bins", "--features", "steadfast-pserver/rocksdb"]);
    let of_wheel = features(&["--package", "steadfast-python", "--lib"]);
    let errors = of_wheel.iter().filter_map(|(name, own)| {
        let other: Vec<&String> = own.difference(all.get(name)?).collect();
        (!other.is_empty()).then(|| format!("{name} has other features in the wheel: {other:?}"))
    });
    report(&errors.collect::<Vec<_>>());
}

/// Every package is listed in the code map, in the list of directories of the README, and in the list of
/// layers.
#[test]
fn every_package_is_in_the_code_map_the_readme_and_the_layers() {
    let architecture = page("docs/architecture.md");
    let map = section(&architecture, "Code map");
    let (readme, contributing) = (page("README.md"), page("CONTRIBUTING.md"));
    let (readme, layers) =
        (section(&readme, "Repository layout"), section(&contributing, "Layers"));
    let mut rows = map.lines().filter(|line| line.starts_with("| `")).collect::<BTreeSet<_>>();
    let mut errors = Vec::new();
    for package in packages() {
        let (name, directory) = (&package.name, package.dir.strip_prefix(root()));
        let directory = directory.expect("a package lies in the workspace").display().to_string();
        let start = format!("| `{name}` | `{directory}` |");
        let before = rows.len();
        rows.retain(|row| !row.starts_with(&start));
        if rows.len() + 1 != before {
            errors.push(format!("docs/architecture.md: not one row `{start}` in the code map"));
        }
        if !readme.contains(&format!("[`{directory}`]({directory})")) {
            errors.push(format!("README.md: no `{directory}` under \"Repository layout\""));
        }
        if !layers.contains(&format!("`{directory}`")) {
            errors.push(format!("CONTRIBUTING.md: no `{directory}` under \"Layers\""));
        }
    }
    errors.extend(rows.iter().map(|row| format!("docs/architecture.md: no such package: {row}")));
    report(&errors);
}

/// Every test that is named in the list of guarantees exists.
#[test]
fn every_test_that_the_guarantees_name_exists() {
    let text = page("docs/guarantees.md");
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
            errors.push(format!("test {name} does not exist"));
        }
    }
    report(&errors);
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests lie in the repository")
}

fn page(path: &str) -> String {
    fs::read_to_string(root().join(path)).expect("the page exists")
}

/// Returns the text below a heading of the second level.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let (_, rest) = page.split_once(&format!("\n## {heading}\n")).expect("the heading exists");
    rest.split("\n## ").next().unwrap_or(rest)
}

fn report(errors: &[String]) {
    assert!(errors.is_empty(), "\n{}", errors.join("\n"));
}

fn check_source(path: &Path, text: &str, banned: &[&str], errors: &mut Vec<String>) {
    let mut error = |line: usize, message: String| {
        errors.push(format!("{}:{line}: {message}", path.display()));
    };
    if !text.starts_with("//!") {
        error(1, "start with a `//!` line that states the purpose of the file".to_owned());
    }
    if is_test_module(path) {
        return;
    }
    let body = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
    for line in varying_log_messages(body) {
        error(line, "a log message is constant, and what varies stands in fields".to_owned());
    }
    let lines: Vec<&str> = body.lines().collect();
    for (index, line) in lines.iter().enumerate() {
        let code = line.split("//").next().unwrap_or(line);
        for word in banned.iter().filter(|it| code.contains(**it)) {
            error(index + 1, format!("`{}` is not allowed in this package", word.trim()));
        }
        // An unbiased `select!` draws random numbers outside of the seed of a simulation.
        let is_select = code.trim_end().ends_with("select! {") && banned == HOSTED_BANNED;
        if is_select && lines.get(index + 1).is_none_or(|next| next.trim() != "biased;") {
            error(index + 1, "`select!` without `biased;`".to_owned());
        }
    }
}

/// Returns the lines of log messages with values in them: lines of one kind could be neither found nor counted.
fn varying_log_messages(body: &str) -> Vec<usize> {
    let mut lines = Vec::new();
    for name in ["trace!(", "debug!(", "info!(", "warn!(", "error!("] {
        for (start, _) in body.match_indices(name) {
            let call = &body[start..];
            let end = [");", "),\n", ")\n"].iter().filter_map(|it| call.find(it)).min();
            let mut texts = call[..end.unwrap_or(call.len())].split('"').skip(1).step_by(2);
            if texts.any(|text| text.contains('{')) {
                lines.push(body[..start].lines().count());
            }
        }
    }
    lines
}

/// Returns whether the whole file is a test: `tests.rs`, or a file in a directory `tests`.
fn is_test_module(path: &Path) -> bool {
    path.file_stem().is_some_and(|it| it == "tests" || it == "sample")
        || path.parent().is_some_and(|it| it.ends_with("tests"))
}

struct Package {
    name: String,
    dir: PathBuf,
    /// Names of imported workspace packages, without dev-dependencies.
    local: BTreeSet<String>,
    /// Names of imported external packages, without dev-dependencies.
    external: BTreeSet<String>,
    /// Names of packages that only tests import.
    dev: BTreeSet<String>,
    /// Sources of targets with `test = false`: the file of a program, the directory of a library.
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
    let dir = manifest.parent().expect("a manifest has a directory").to_owned();
    let targets = value["targets"].as_array().expect("targets is a list");
    let untested = targets.iter().filter(|it| it["test"] == false).map(|target| {
        let path = PathBuf::from(text(&target["src_path"]));
        let is_library = path.ends_with("lib.rs");
        if is_library { path.parent().map_or(path.clone(), Path::to_owned) } else { path }
    });
    let untested = untested.collect();
    Package { name: text(&value["name"]), dir, local, external, dev, untested }
}

/// Returns the sources in a directory, or the given file.
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
