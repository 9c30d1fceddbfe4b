//! Checkpoint and model files, read by the safetensors package for Python.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde::Deserialize;
use serde_json::Value;
use steadfast_tests::{EtcdServer, Job, Run, Scene, program, python};

const PACKAGES: [&str; 2] = ["safetensors>=0.4,<1", "numpy>=1.24,<3"];

/// Prints the content of each file as JSON.
const READER: &str = r#"
import json, sys
from safetensors import safe_open
from safetensors.numpy import load_file

def read(path):
    with safe_open(path, framework="numpy") as file:
        metadata, names = file.metadata(), sorted(file.keys())
    tensors = load_file(path)
    assert sorted(tensors) == names
    def described(tensor):
        return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "bytes": tensor.tobytes().hex()}
    return {"metadata": metadata, "tensors": {name: described(tensors[name]) for name in names}}

print(json.dumps([read(path) for path in sys.argv[1:]]))
"#;

#[derive(Debug, PartialEq, Deserialize)]
struct Read {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Debug, PartialEq, Deserialize)]
struct Tensor {
    dtype: String,
    shape: Vec<usize>,
    /// In hexadecimal.
    bytes: String,
}

fn run(command: &mut Command) -> Output {
    command.output().expect("the program starts")
}

fn read(python: &Path, paths: &[PathBuf]) -> Vec<Read> {
    let output = run(Command::new(python).args(["-c", READER]).args(paths));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("the reader prints JSON")
}

/// Returns the values of a parameter, assembled from its blocks in the shards.
fn assemble(shards: &[Read], prefix: &str, name: &str) -> String {
    let mut blocks = BTreeMap::new();
    for (tensor, content) in shards.iter().flat_map(|shard| &shard.tensors) {
        let start = tensor.strip_prefix(prefix).and_then(|it| it.strip_prefix(name));
        if let Some(start) = start.and_then(|it| it.strip_prefix('@')) {
            let start: usize = start.parse().expect("a block's name ends with its start");
            assert!(blocks.insert(start, content).is_none(), "{tensor} exists twice");
        }
    }
    let mut bytes = String::new();
    for (start, content) in blocks {
        assert_eq!(start * 8, bytes.len(), "{name} has a gap before {start}");
        assert_eq!(content.dtype, "float32");
        assert_eq!(content.shape, [content.bytes.len() / 8]);
        bytes.push_str(&content.bytes);
    }
    bytes
}

/// S004-36, I10
#[test]
fn python_opens_shards_exports_and_models_and_finds_the_same_values() {
    let Some(python) = python("safetensors", &PACKAGES) else { return };
    let scene = Scene::new();
    let etcd = EtcdServer::embedded(&scene);
    // One parameter is large enough for two blocks.
    let job =
        Job::small().with("hidden = [16]", "hidden = [4500]").with("passes = 30", "passes = 2");
    let summary = Run::to_end(&scene, &job, "data", &["--etcd", &etcd.url(), "--pservers", "2"]);
    let exported = scene.path("exported.safetensors");
    let mut export = scene.command(&program("steadfast"));
    export.args(["checkpoint", "export", "--etcd-endpoints", &etcd.url(), "--to"]);
    let output = run(export.arg(&exported));
    assert!(output.status.success(), "{output:?}");

    let saved = PathBuf::from(summary["model"].as_str().expect("a finished job has a model"));
    let mut paths = vec![saved, exported];
    let shards = fs::read_dir(scene.path("data/store/shards/digits")).expect("shards exist");
    paths.extend(shards.map(|entry| entry.expect("the directory can be read").path()));
    let mut files = read(&python, &paths);
    let shards = files.split_off(2);
    let (saved, exported) = (&files[0], &files[1]);
    assert_eq!(saved, exported);
    assert_eq!(saved.metadata["job"], "digits");
    assert_eq!(saved.metadata["model"], "mlp");
    assert_eq!(
        saved.metadata["parameters_sha256"],
        *summary["parameters_sha256"].as_str().unwrap()
    );
    assert_eq!(saved.tensors["layers.0.weight"].shape, [4500, 64]);
    assert_eq!(saved.tensors["layers.1.bias"].shape, [10]);

    assert_eq!(shards.len(), 2);
    let names: Vec<&String> = shards.iter().flat_map(|shard| shard.tensors.keys()).collect();
    assert!(names.iter().any(|name| *name == "layers.0.weight@262144"), "{names:?}");
    for (name, tensor) in &saved.tensors {
        assert_eq!(tensor.dtype, "float32");
        assert!(assemble(&shards, "", name) == tensor.bytes, "{name} differs");
        for state in ["m/", "v/"] {
            assert_eq!(assemble(&shards, state, name).len(), tensor.bytes.len(), "{state}{name}");
        }
    }
    for shard in &shards {
        let meta: Value = serde_json::from_str(&shard.metadata["steadfast"]).expect("JSON");
        assert_eq!(meta["version"], summary["steps"]);
        assert_eq!(meta["updates"], summary["steps"]);
        assert_eq!(meta["examples"], summary["examples"]);
        assert_eq!(meta["counts"][0]["passes"].as_array().map(Vec::len), Some(2));
    }
}
