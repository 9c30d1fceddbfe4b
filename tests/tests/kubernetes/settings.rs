//! Checks settings with the programs that read them.

use std::collections::BTreeMap;
use std::process::{Command, Output};

use serde_json::Value;
use steadfast_common::job::job_file;
use steadfast_tests::program;

use crate::manifests::{Overlay, Workload, list, mounted, text};

/// Prefixes of variables that are not settings of the programs: of stores, and those used in arguments.
const FOREIGN: [&str; 5] = ["AWS_", "GOOGLE_", "AZURE_", "POD_", "ETCDCTL_"];

/// The command of a trainer in Python, which has the settings of `steadfast-trainer`.
const PYTHON: [&str; 3] = ["python", "-m", "steadfast.trainer"];

/// Variables that Python itself reads.
const PYTHON_ONLY: [&str; 1] = ["STEADFAST_JOB_FILE"];

/// The command of a pod, with its volumes in a directory.
struct Started {
    program: String,
    args: Vec<String>,
    variables: BTreeMap<String, String>,
    _root: tempfile::TempDir,
}

impl Started {
    fn new(overlay: &Overlay, workload: Workload) -> Self {
        let (root, mounts) = mounted(overlay, workload);
        let mut variables = BTreeMap::new();
        for from in list(workload.container(), "/envFrom") {
            let map = overlay.exactly("ConfigMap", text(from, "/configMapRef/name"));
            for (key, value) in map.and_then(|it| it["data"].as_object()).into_iter().flatten() {
                variables.insert(key.clone(), value.as_str().unwrap_or_default().to_owned());
            }
        }
        for variable in list(workload.container(), "/env") {
            let value = match text(variable, "/valueFrom/fieldRef/fieldPath") {
                "status.podIP" => "10.1.2.3".to_owned(),
                "metadata.name" => format!("{}-0", workload.name()),
                "" => expanded(text(variable, "/value"), &variables),
                other => panic!("this test does not support {other}"),
            };
            variables.insert(text(variable, "/name").to_owned(), value);
        }
        let here = |text: &str| match mounts.iter().find(|it| text.contains(it.as_str())) {
            Some(mount) => text.replace(mount, &format!("{}{mount}", root.path().display())),
            None => text.to_owned(),
        };
        let mut words: Vec<String> =
            workload.command().iter().map(|it| here(&expanded(it, &variables))).collect();
        if words.starts_with(&PYTHON.map(str::to_owned)) {
            words.splice(..PYTHON.len(), ["steadfast-trainer".to_owned()]);
            variables.retain(|name, _| !PYTHON_ONLY.contains(&name.as_str()));
        }
        let program = words.remove(0);
        let variables = variables.into_iter().map(|(key, value)| (key, here(&value))).collect();
        Self { program, args: words, variables, _root: root }
    }

    /// Runs the program with these settings and one more argument.
    fn run(&self, more: &str) -> Output {
        let mut command = Command::new(program(&self.program));
        command.env_clear().envs(&self.variables).args(&self.args).arg(more);
        command.output().expect("the program starts")
    }

    /// Returns the output of `--check-config`.
    fn checked(&self) -> Result<String, String> {
        let output = self.run("--check-config");
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Expands `$(NAME)` as Kubernetes does.
fn expanded(text: &str, variables: &BTreeMap<String, String>) -> String {
    let replace =
        |text: String, (key, value): (&String, &String)| text.replace(&format!("$({key})"), value);
    variables.iter().fold(text.to_owned(), replace)
}

/// Every program accepts its arguments, and every variable is a setting of its program.
pub fn accepted(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
    let trainer = help("steadfast-trainer", &[]);
    for workload in overlay.workloads() {
        let started = Started::new(overlay, workload);
        let found = match started.program.as_str() {
            "etcd" => by_etcd(&started),
            // The tools pod, in which operators run commands. It has the variables of the servers.
            "sleep" => unknown_variables(&started, &(help("steadfast", &["status"]) + &trainer)),
            name => by_ourselves(&started, &help(name, &[])),
        };
        errors.extend(found.iter().map(|it| format!("{}: {it}", workload.name())));
    }
    errors
}

fn help(name: &str, command: &[&str]) -> String {
    let output = Command::new(program(name)).args(command).arg("--help").output();
    String::from_utf8_lossy(&output.expect("the program starts").stdout).into_owned()
}

/// Checks the arguments of etcd, which parses them before it prints its version.
fn by_etcd(started: &Started) -> Vec<String> {
    let output = Command::new("etcd").args(&started.args).arg("--version").output();
    let output = output.expect("etcd is installed; run scripts/setup");
    if output.status.success() {
        return Vec::new();
    }
    vec![String::from_utf8_lossy(&output.stderr).into_owned()]
}

fn by_ourselves(started: &Started, help: &str) -> Vec<String> {
    let mut errors = unknown_variables(started, help);
    let listing = match started.checked() {
        Ok(listing) => listing,
        Err(error) => return vec![error],
    };
    // A setting must be in effect, with the source given in the manifest; switches are not listed.
    for (name, value) in started.variables.iter().filter(|(name, _)| is_ours(name)) {
        let is_switch = ["true", "false"].contains(&value.as_str());
        if !is_switch && !listing.contains(&format!("# {name}\n")) {
            errors.push(format!("{name} is not in effect"));
        }
    }
    errors
}

fn is_ours(name: &str) -> bool {
    name.starts_with("STEADFAST_")
}

fn unknown_variables(started: &Started, help: &str) -> Vec<String> {
    let mut errors = Vec::new();
    for name in started.variables.keys() {
        let flag = name.trim_start_matches("STEADFAST_").to_lowercase().replace('_', "-");
        let is_known =
            help.split_whitespace().any(|it| it.trim_end_matches(',') == format!("--{flag}"));
        let is_foreign = FOREIGN.iter().any(|it| name.starts_with(it));
        if is_ours(name) && !is_known {
            errors.push(format!("{name} is not a setting of its program"));
        } else if !is_ours(name) && !is_foreign {
            errors.push(format!("unknown variable {name}"));
        }
    }
    errors
}

/// The programs listen on the ports of the manifest.
pub fn ports_are_those_of_the_manifest(overlay: &Overlay) -> Vec<String> {
    let mut errors = Vec::new();
    for workload in overlay.workloads() {
        let started = Started::new(overlay, workload);
        if !started.program.starts_with("steadfast-") {
            continue;
        }
        let listing = started.checked().unwrap_or_default();
        let bound = |key: &str| {
            let line = listing.lines().find(|it| it.starts_with(&format!("{key} = ")))?;
            let (address, _) = line.split_once('"')?.1.split_once('"')?;
            Some(address.to_owned())
        };
        for (name, number) in workload.ports() {
            let key = if name == "grpc" { "listen" } else { "admin_listen" };
            let address = bound(key).unwrap_or_default();
            if address != format!("0.0.0.0:{number}") {
                let own = workload.name();
                errors.push(format!("{own}: port {name} is {number}, its program binds {address}"));
            }
        }
    }
    errors
}

/// The job file is valid, all processes use the name of its job, and its slots have pservers.
pub fn job(overlay: &Overlay) -> Vec<String> {
    let map = overlay.found("ConfigMap", "steadfast-job").unwrap_or(&Value::Null);
    let spec = match job_file::parse(text(map, "/data/job.toml")) {
        Ok(spec) => spec,
        Err(error) => return vec![format!("job.toml: {error}")],
    };
    let mut errors = Vec::new();
    let used = overlay.setting("steadfast-settings", "STEADFAST_JOB");
    if spec.name != used {
        errors.push(format!("the name of the job is {}, the processes use {used}", spec.name));
    }
    let pservers =
        overlay.component("pserver").and_then(|it| it.object["spec"]["replicas"].as_u64());
    if pservers.is_none_or(|it| it < overlay.slots()) {
        errors.push(format!("{} slots, and {pservers:?} pservers", overlay.slots()));
    }
    errors
}
