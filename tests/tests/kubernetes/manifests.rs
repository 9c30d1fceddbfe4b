//! Rendered overlays and their objects.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;
use steadfast_tests::program;
use tempfile::TempDir;

use crate::tools::{from_yaml, kubectl};

/// A rendered overlay.
#[derive(Clone)]
pub struct Overlay {
    pub name: &'static str,
    pub objects: Vec<Value>,
    /// Secrets created outside of the overlay, with the content of their files.
    pub outside: Vec<Value>,
}

/// A Deployment or a StatefulSet.
#[derive(Clone, Copy)]
pub struct Workload<'a> {
    pub object: &'a Value,
}

/// Secrets that `own-etcd` expects to exist; tests use those of `example`.
const OUTSIDE: [&str; 4] = [
    "steadfast-master-tls",
    "steadfast-pserver-tls",
    "steadfast-trainer-tls",
    "steadfast-admin-token",
];

/// Returns all overlays, the complete one first; `None`, with a message, if the tools are missing.
pub fn overlays() -> Option<&'static [Overlay]> {
    static ALL: OnceLock<Option<Vec<Overlay>>> = OnceLock::new();
    ALL.get_or_init(render_all).as_deref()
}

fn render_all() -> Option<Vec<Overlay>> {
    let kubectl = kubectl()?;
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes");
    copy(&source, directory.path());
    make_secrets(&directory);
    let example = render(&kubectl, &directory, "example")?;
    let mut own_etcd = render(&kubectl, &directory, "own-etcd")?;
    for name in OUTSIDE {
        let mut secret = example.found("Secret", name).expect("the example makes it").clone();
        secret["metadata"]["name"] = name.into();
        own_etcd.outside.push(secret);
    }
    let python = render(&kubectl, &directory, "python")?;
    let clicks = render(&kubectl, &directory, "clicks")?;
    Some(vec![example, own_etcd, python, clicks])
}

/// Creates the Secrets as documented for the example.
fn make_secrets(directory: &TempDir) {
    let example = directory.path().join("overlays/example");
    let made = Command::new(program("steadfast"))
        .args(["certs", "init", "--dir"])
        .arg(example.join("tls"))
        .args(["--etcd-host", "etcd-0.etcd", "--etcd-host", "etcd-1.etcd"])
        .args(["--etcd-host", "etcd-2.etcd"])
        .output()
        .expect("the program starts");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let write = |name: &str, text: &str| {
        fs::write(example.join(name), text).expect("the directory is writable");
    };
    write("admin-token", "0123456789abcdef0123456789abcdef");
    fs::create_dir_all(example.join("store-keys")).expect("the directory is writable");
    write("store-keys/access-key-id", "id");
    write("store-keys/secret-access-key", "key");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory can be made");
    for entry in fs::read_dir(from).expect("the directory exists") {
        let entry = entry.expect("the directory is readable");
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        // Do not use real secrets in tests.
        let is_secret = ["tls", "store-keys", "admin-token"].iter().any(|it| path.ends_with(it));
        if is_secret {
            continue;
        }
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs::copy(&path, &target).expect("a file can be copied");
        }
    }
}

fn render(kubectl: &Path, directory: &TempDir, name: &'static str) -> Option<Overlay> {
    let overlay = directory.path().join("overlays").join(name);
    let output = Command::new(kubectl)
        .arg("kustomize")
        .arg(overlay)
        .stdin(Stdio::null())
        .output()
        .expect("kubectl starts");
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    Some(Overlay { name, objects: from_yaml(&output.stdout)?, outside: Vec::new() })
}

/// Returns the string at a JSON pointer, empty if it is missing.
pub fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

/// Returns the list at a JSON pointer, empty if it is missing.
pub fn list<'a>(value: &'a Value, pointer: &str) -> &'a [Value] {
    value.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Returns whether a selector (`matchLabels`, `matchExpressions` with `In`) matches these labels.
pub fn selects(selector: &Value, labels: &Value) -> bool {
    let empty = serde_json::Map::new();
    let wanted = selector["matchLabels"].as_object().unwrap_or(&empty);
    wanted.iter().all(|(key, value)| labels[key] == *value)
        && list(selector, "/matchExpressions").iter().all(|it| {
            assert_eq!(it["operator"], "In", "this test supports only the operator In");
            list(it, "/values").contains(&labels[text(it, "/key")])
        })
}

impl Overlay {
    /// Returns all objects of a kind.
    pub fn of_kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.objects.iter().filter(move |it| it["kind"] == kind)
    }

    /// Returns the object with this name, with or without a hash suffix.
    pub fn found(&self, kind: &str, name: &str) -> Option<&Value> {
        let all = self.objects.iter().chain(&self.outside).filter(|it| it["kind"] == kind);
        all.into_iter().find(|it| is_named(it, name))
    }

    /// Returns the object with exactly this name.
    pub fn exactly(&self, kind: &str, name: &str) -> Option<&Value> {
        let all = self.objects.iter().chain(&self.outside);
        all.into_iter().find(|it| it["kind"] == kind && text(it, "/metadata/name") == name)
    }

    /// Returns all Deployments and StatefulSets.
    pub fn workloads(&self) -> Vec<Workload<'_>> {
        let all = self.of_kind("Deployment").chain(self.of_kind("StatefulSet"));
        all.map(|object| Workload { object }).collect()
    }

    /// Returns the workload of a component, if the overlay has it.
    pub fn component(&self, name: &str) -> Option<Workload<'_>> {
        self.workloads().into_iter().find(|it| it.component() == name)
    }

    /// Returns the overlay with one value changed, or removed if it is null.
    pub fn with(&self, (kind, name): (&str, &str), pointer: &str, value: Value) -> Self {
        let mut changed = self.clone();
        let objects = &mut changed.objects;
        let object = objects.iter_mut().find(|it| it["kind"] == kind && is_named(it, name));
        let object = object.unwrap_or_else(|| panic!("{kind} {name} is missing"));
        let (parent, key) = pointer.rsplit_once('/').expect("a pointer has a slash");
        let parent = object.pointer_mut(parent).unwrap_or_else(|| panic!("no {pointer}"));
        let key = key.replace("~1", "/");
        match (parent, key.parse::<usize>()) {
            (Value::Array(items), Ok(index)) => items[index] = value,
            (Value::Object(map), _) if value.is_null() => {
                map.remove(&key).unwrap_or_else(|| panic!("no {pointer}"));
            }
            (parent, _) => parent[key] = value,
        }
        changed
    }

    /// Returns the files of a ConfigMap or a Secret.
    pub fn files(&self, kind: &str, name: &str) -> Option<Vec<(String, Vec<u8>)>> {
        let object = self.exactly(kind, name)?;
        let data = object["data"].as_object()?;
        let decode = |value: &Value| {
            let text = value.as_str().expect("data are text");
            match kind {
                // Long values are wrapped.
                "Secret" => {
                    let whole: String = text.split_whitespace().collect();
                    BASE64_STANDARD.decode(whole).expect("secrets are in base64")
                }
                _ => text.as_bytes().to_vec(),
            }
        };
        Some(data.iter().map(|(key, value)| (key.clone(), decode(value))).collect())
    }

    /// Returns the value of a setting in a ConfigMap.
    pub fn setting(&self, map: &str, name: &str) -> String {
        let map = self.found("ConfigMap", map).expect("it exists");
        text(map, &format!("/data/{name}")).to_owned()
    }

    /// Returns the initial number of slots.
    pub fn slots(&self) -> u64 {
        let number = self.setting("steadfast-master-settings", "STEADFAST_PSERVERS");
        number.parse().expect("the number of slots is a number")
    }
}

fn is_named(object: &Value, name: &str) -> bool {
    let full = text(object, "/metadata/name");
    // kustomize appends a hash of ten letters and digits to generated names.
    let is_hash =
        |rest: &str| rest.len() == 11 && rest.starts_with('-') && !rest[1..].contains('-');
    full.strip_prefix(name).is_some_and(|rest| rest.is_empty() || is_hash(rest))
}

impl<'a> Workload<'a> {
    pub fn name(&self) -> &'a str {
        text(self.object, "/metadata/name")
    }

    pub fn kind(&self) -> &'a str {
        text(self.object, "/kind")
    }

    pub fn component(&self) -> &'a str {
        self.labels()["app.kubernetes.io/component"].as_str().unwrap_or_default()
    }

    /// Returns the labels of the pods.
    pub fn labels(&self) -> &'a Value {
        self.object.pointer("/spec/template/metadata/labels").unwrap_or(&Value::Null)
    }

    /// Returns the pod spec.
    pub fn pod(&self) -> &'a Value {
        self.object.pointer("/spec/template/spec").expect("a workload has a pod")
    }

    /// Returns the only container.
    pub fn container(&self) -> &'a Value {
        match list(self.pod(), "/containers") {
            [only] => only,
            other => panic!("{} has {} containers", self.name(), other.len()),
        }
    }

    /// Returns the program and its arguments.
    pub fn command(&self) -> Vec<&'a str> {
        let container = self.container();
        let words = list(container, "/command").iter().chain(list(container, "/args"));
        words.filter_map(Value::as_str).collect()
    }

    /// Returns the port numbers, by name.
    pub fn ports(&self) -> Vec<(&'a str, u64)> {
        let all = list(self.container(), "/ports").iter();
        all.map(|it| (text(it, "/name"), it["containerPort"].as_u64().expect("a number"))).collect()
    }

    /// Resolves a port given by name or by number.
    pub fn port(&self, port: &Value) -> Option<u64> {
        let all = self.ports();
        let found = all.iter().find(|(name, number)| port == name || port == number);
        found.map(|(_, number)| *number)
    }
}

/// Creates a directory with the files of all volumes of a pod at their mount paths.
pub fn mounted(overlay: &Overlay, workload: Workload) -> (TempDir, Vec<String>) {
    let root = tempfile::tempdir().expect("a temporary directory can be made");
    let mut mounts = Vec::new();
    for mount in list(workload.container(), "/volumeMounts") {
        let path = text(mount, "/mountPath");
        mounts.push(path.to_owned());
        let directory: PathBuf = root.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(&directory).expect("a directory can be made");
        let volumes = list(workload.pod(), "/volumes");
        let volume = volumes.iter().find(|it| it["name"] == mount["name"]);
        let Some(volume) = volume else { continue };
        let secret = text(volume, "/secret/secretName");
        let map = text(volume, "/configMap/name");
        let files = overlay.files("Secret", secret).or_else(|| overlay.files("ConfigMap", map));
        for (name, content) in files.into_iter().flatten() {
            fs::write(directory.join(name), content).expect("a file can be written");
        }
    }
    (root, mounts)
}
