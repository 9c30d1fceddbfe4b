//! promtool, the checker of Prometheus, and its input.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// An installed promtool.
#[derive(Clone, Debug)]
pub struct Promtool {
    path: PathBuf,
}

impl Promtool {
    /// Finds promtool, or unpacks it from the Debian package. Returns `None`, with a message, if neither
    /// works; fails in continuous integration.
    pub fn find() -> Option<Self> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/promtool");
        let output = Command::new(script).output().expect("the script starts");
        if output.status.success() {
            let path = String::from_utf8_lossy(&output.stdout).trim().into();
            return Some(Self { path });
        }
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(std::env::var_os("CI").is_none(), "{why}");
        eprintln!("skipped: {why}");
        None
    }

    /// Runs promtool in `directory`.
    ///
    /// # Errors
    /// The output of promtool, if a check fails.
    pub fn check(&self, directory: &Path, args: &[&str], stdin: &str) -> Result<(), String> {
        let mut command = Command::new(&self.path);
        command.current_dir(directory).args(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("promtool starts");
        let mut pipe = child.stdin.take().expect("stdin is piped");
        // promtool may exit before it has read everything.
        let _ = pipe.write_all(stdin.as_bytes());
        drop(pipe);
        let output = child.wait_with_output().expect("a child can be waited for");
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        if output.status.success() { Ok(()) } else { Err(format!("{args:?}: {text}")) }
    }
}

/// Converts OpenMetrics text to the older Prometheus text format, which promtool checks: there a counter
/// family is named like its samples, and units have no line.
pub fn in_older_text(metrics: &str) -> String {
    let counters: BTreeSet<&str> = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .collect();
    let mut text = String::new();
    for line in metrics.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("UNIT" | "EOF"), _, _) => continue,
            (Some("#"), Some(what), Some(name), Some(rest)) if counters.contains(name) => {
                text.push_str(&format!("# {what} {name}_total {rest}\n"));
            }
            _ => text.push_str(&format!("{line}\n")),
        }
    }
    text
}

/// Adds a timestamp to each sample of OpenMetrics text, as promtool requires for imports.
pub fn with_times(metrics: &str) -> String {
    let timed = |line: &str| match line.starts_with('#') {
        true => format!("{line}\n"),
        false => format!("{line} 1700000000\n"),
    };
    metrics.lines().map(timed).collect()
}

/// Returns the names of all samples in a metrics text.
pub fn names_served(metrics: &str) -> BTreeSet<String> {
    let samples = metrics.lines().filter(|line| !line.starts_with('#'));
    samples.filter_map(|line| Some(line.split([' ', '{']).next()?.to_owned())).collect()
}

/// Returns all words in `text` with the prefix of Steadfast or etcd metrics.
pub fn names_used(text: &str) -> BTreeSet<String> {
    let words = text.split(|it: char| !it.is_ascii_alphanumeric() && it != '_');
    let is_metric = |it: &&str| {
        ["steadfast_", "etcd_", "grpc_server_"].iter().any(|prefix| it.starts_with(prefix))
    };
    words.filter(is_metric).map(str::to_owned).collect()
}
