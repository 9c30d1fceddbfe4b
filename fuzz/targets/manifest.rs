//! Dataset manifests: only the one with the right digest is accepted, and no content of chunks and tasks
//! causes a panic.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use sha2::{Digest, Sha256};
use steadfast_common::ids::TaskId;
use steadfast_common::job::columns::{ColumnSpec, ColumnType, Element};
use steadfast_common::job::dataset::{Chunk, DataFile, Manifest, hex};
use steadfast_fuzz::{seeds, within};

/// The shortest elements are a file `{"url":"","size_bytes":0}`, a chunk `[0,0,0,0,0]` and a name `""`.
const TIMES_MAX: usize = 64;

fuzz_target!(init: seeds("manifest", well_formed()), |json: &[u8]| {
    let digest = hex(&Sha256::digest(json));
    let bytes_max = TIMES_MAX * json.len() + (128 << 10);
    let Ok(manifest) = within(bytes_max, || parse(json, &digest)) else { return };
    assert!(parse(&[json, b" "].concat(), &digest).is_err());
    let written = serde_json::to_vec(&manifest).expect("a manifest is plain data");
    assert_eq!(parse(&written, &manifest.digest()), Ok(manifest.clone()));

    let tasks = (0..=manifest.task_count()).map(TaskId);
    for task in tasks {
        assert!(manifest.chunks_of(task).len() <= manifest.chunks.len());
        assert_eq!(manifest.records_named(task).len(), manifest.chunks_of(task).len());
    }
    assert!(manifest.training_tasks().len() <= manifest.task_ends.len());
    let _ = manifest.training_records();
});

/// Parses a manifest from segments.
fn parse(json: &[u8], digest: &str) -> Result<Manifest, String> {
    Manifest::parse(json.chunks(7).map(Bytes::copy_from_slice).collect(), digest)
}

fn well_formed() -> Vec<Vec<u8>> {
    let chunk = |file, start, end| Chunk { file, start, end, first_record: start, records: 5 };
    let file = |url: &str| DataFile { url: url.to_owned(), size_bytes: 100, modified_unix_s: None };
    let mut manifest = Manifest {
        files: vec![file("file:///a.csv"), file("s3://b/c.parquet")],
        chunks: vec![chunk(0, 0, 50), chunk(0, 50, 100), chunk(1, 0, 5)],
        task_ends: vec![1, 2, 3],
        features: vec!["x".to_owned(), "ä".to_owned()],
        columns: vec![ColumnSpec { name: "y".to_owned(), kind: ColumnType::list(Element::Int64) }],
        held_out: Vec::new(),
    };
    manifest.hold_out(0.4);
    [manifest, Manifest::default()]
        .map(|it| serde_json::to_vec(&it).expect("a manifest is plain data"))
        .to_vec()
}
