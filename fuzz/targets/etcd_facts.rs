//! The log of the embedded etcd: invalid facts are rejected, and a store with valid ones works.

#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;
use steadfast_etcd::Simulated;
use steadfast_fuzz::{seeds, within};

/// A change of two bytes has a key, versions and a history entry in memory.
const TIMES_MAX: usize = 1024;

fuzz_target!(init: seeds("etcd_facts", well_formed()), |log: &[u8]| {
    within(TIMES_MAX * log.len() + (1 << 20), || follow(log));
});

fn follow(log: &[u8]) {
    let start = |log| Simulated::start(log, ([127, 0, 0, 1], 1).into());
    let Ok(store) = start(log) else { return };
    let revision = store.revision();
    for key in store.keys(b"") {
        assert!(store.get(&key).is_some_and(|it| it.key == key));
    }
    let changes = store.changes_after(0);
    assert!(changes.iter().all(|(at, _)| (2..=revision).contains(at)));

    store.put(b"key", b"value");
    assert_eq!(store.revision(), revision + 1);
    assert_eq!(store.get(b"key").and_then(|it| it.value), Some(b"value".to_vec()));
    store.compact(revision + 1);
    assert_eq!(store.changes_after(revision).len(), 1);
    assert!(store.get(b"key").is_some());
}

/// A key in the format of the log.
#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(bytes, tag = "1")]
    key: Vec<u8>,
    #[prost(int64, tag = "2")]
    create_revision: i64,
    #[prost(int64, tag = "3")]
    mod_revision: i64,
    #[prost(int64, tag = "4")]
    version: i64,
    #[prost(bytes, tag = "5")]
    value: Vec<u8>,
    #[prost(int64, tag = "6")]
    lease: i64,
}

/// A length-delimited field.
fn field(tag: u8, body: &[u8]) -> Vec<u8> {
    [&[tag << 3 | 2, body.len() as u8], body].concat()
}

fn well_formed() -> Vec<Vec<u8>> {
    let put = |revision: i64, key: &str, lease| {
        let (key, value) = (key.as_bytes().to_vec(), vec![7; 3]);
        let (create_revision, mod_revision) = (revision, revision);
        let kv = KeyValue { key, value, create_revision, mod_revision, version: 1, lease };
        field(2, &field(1, &kv.encode_to_vec()))
    };
    let write = |revision: u8, changes: &[Vec<u8>]| [&[8, revision], &*changes.concat()].concat();
    let delete = |key: &[u8]| field(2, &field(2, key));
    let grant = field(1, &field(2, &[8, 5, 16, 60]));
    let put_two = field(1, &field(1, &write(2, &[put(2, "a", 5), put(2, "b", 0)])));
    let put_one = field(1, &field(1, &write(3, &[put(3, "b", 0)])));
    let end = field(1, &field(3, &[&[8, 5][..], &field(2, &write(4, &[delete(b"a")]))].concat()));
    let compact = field(1, &[32, 3]);
    let log = [grant, put_two, put_one, end, compact].concat();
    assert!(Simulated::start(&log, ([127, 0, 0, 1], 1).into()).is_ok());
    vec![log]
}
