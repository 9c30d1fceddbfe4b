//! The values of a job's keys in etcd: decoded records can be encoded and decoded again, and a valid
//! checkpoint manifest causes no larger allocations than the size of its objects.

#![no_main]

use std::fmt::Debug;

use libfuzzer_sys::fuzz_target;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use steadfast_common::ids::Slot;
use steadfast_common::job::elastic::{AnyJobRecord, ElasticJobRecord};
use steadfast_common::records::closures::{ClosureRecord, PushesRecord, WorkerRecord};
use steadfast_common::records::code::CodeRecord;
use steadfast_common::records::commits::{CommitRecord, DealtRecord, Progress};
use steadfast_common::records::given_up::GivenUpRecord;
use steadfast_common::records::launch::{HostRecord, LauncherRecord};
use steadfast_common::records::rendezvous::{
    AgentRecord, NodeRecord, ReleaseRecord, RoundRecord, SharedRecord,
};
use steadfast_common::records::scale::ScaleRecord;
use steadfast_common::records::stream::{StreamPassRecord, StreamRecord};
use steadfast_common::records::*;
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::placement::Placement;
use steadfast_fuzz::{seeds, within};

/// The shortest elements in JSON are `{}` in a list and a key of a map.
const TIMES_MAX: usize = 256;
/// The largest checkpoint whose layout is created.
const CHECKPOINT_BYTES_MAX: u64 = 1 << 24;

fuzz_target!(init: seeds("records", well_formed()), |data: &[u8]| {
    let Some((kind, json)) = data.split_first() else { return };
    CHECKS[usize::from(*kind) % CHECKS.len()](json);
});

const CHECKS: &[fn(&[u8])] = &[
    |json| {
        check::<JobRecord>(json);
    },
    |json| {
        check::<LockRecord>(json);
    },
    |json| {
        check::<MasterRecord>(json);
    },
    |json| {
        check::<PserverRecord>(json);
        check::<FollowerRecord>(json);
    },
    |json| {
        check::<TrainerRecord>(json);
    },
    |json| {
        check::<GenerationRecord>(json);
    },
    |json| {
        check::<InitRecord>(json);
    },
    |json| {
        check::<QueueRecord>(json);
    },
    |json| {
        check::<TaskRecord>(json);
    },
    |json| {
        check::<ReplyRecord>(json);
    },
    |json| {
        check::<EvaluationRecord>(json);
    },
    |json| {
        check::<ResultRecord>(json);
    },
    checkpoint,
    |json| {
        check::<AnyJobRecord>(json);
    },
    |json| {
        check::<ElasticJobRecord>(json);
    },
    |json| {
        check::<AgentRecord>(json);
    },
    |json| {
        check::<NodeRecord>(json);
    },
    |json| {
        check::<RoundRecord>(json);
    },
    |json| {
        check::<ReleaseRecord>(json);
    },
    |json| {
        check::<SharedRecord>(json);
    },
    |json| {
        check::<LauncherRecord>(json);
    },
    |json| {
        check::<HostRecord>(json);
    },
    |json| {
        check::<WaitsRecord>(json);
    },
    |json| {
        check::<CodeRecord>(json);
    },
    |json| {
        check::<FixedRecord>(json);
    },
    |json| {
        check::<GivenUpRecord>(json);
    },
    |json| {
        check::<StreamRecord>(json);
    },
    |json| {
        check::<StreamPassRecord>(json);
    },
    |json| {
        check::<CommitRecord>(json);
    },
    |json| {
        check::<DealtRecord>(json);
    },
    |json| {
        check::<Progress>(json);
    },
    |json| {
        check::<ScaleRecord>(json);
    },
    |json| {
        check::<ClosureRecord>(json);
        check::<PushesRecord>(json);
        check::<WorkerRecord>(json);
    },
];

fn check<T: DeserializeOwned + Serialize + PartialEq + Debug>(json: &[u8]) -> Option<T> {
    let bytes_max = TIMES_MAX * json.len() + (64 << 10);
    let record: T = within(bytes_max, || serde_json::from_slice(json)).ok()?;
    let written = serde_json::to_vec(&record).expect("a record is plain data");
    let again: T = serde_json::from_slice(&written).expect("it was just written");
    assert_eq!(again, record);
    Some(record)
}

fn checkpoint(json: &[u8]) {
    let Some(record) = check::<CheckpointRecord>(json) else { return };
    let bytes = record.shards.iter().fold(0, |sum: u64, it| sum.saturating_add(it.size_bytes));
    if record.invalid_reason().is_some() || CHECKPOINT_BYTES_MAX < bytes {
        return;
    }
    let layout = within(bytes as usize + TIMES_MAX * json.len() + (64 << 10), || {
        Layout::new(record.params.clone())
    });
    assert!(layout.len() as u64 <= bytes / 4);
    let placement = Placement::of(&layout, &record.placement);
    let slots = record.placement.slots().min(layout.blocks().len() as u32);
    let placed: usize = (0..slots).map(|slot| placement.blocks_of(Slot(slot)).len()).sum();
    assert_eq!(placed, if slots == 0 { 0 } else { layout.blocks().len() });
}

fn well_formed() -> Vec<Vec<u8>> {
    let id = "6ba7b810-9dad-11d1-80b4-00c04fd430c8";
    let address = "127.0.0.1:1";
    let shard = json!({
        "slot": 0, "incarnation": 7, "object": "a/0.safetensors", "sha256": "0a".repeat(32),
        "size_bytes": 200, "version": 3,
    });
    let params = json!([{ "name": "w", "shape": [3, 4] }, { "name": "b", "shape": [] }]);
    let placement = json!({ "rule": "largest_first", "slots": 2 });
    let position = json!({ "version": 3, "pass": 1, "pass_start": 2, "examples": 5, "loss": 0.5 });
    let spec = json!({
        "name": "digits", "passes": 3, "model": { "kind": "mlp", "hidden": [32], "classes": 10 },
        "dataset": {
            "source": ["d.csv"], "format": "csv", "features": ["x*"], "label": "y",
        },
        "tasks": { "deadline": "30s" }, "evaluation": { "fraction": 0.1 },
    });
    let elastic = json!({
        "format": 1, "kind": "elastic", "digest": "d", "spec": {
            "name": "ddp", "nodes": { "min": 1, "max": 4, "last_call": "500ms" },
        },
    });
    let member = json!({
        "node": id, "incarnation": 9, "address": "a:1", "slots": 8, "first_rank": 0,
    });
    let records = [
        json!({ "format": 1, "spec": spec, "digest": "d", "store": "memory:///", "manifest": "m" }),
        json!({ "holder": id }),
        json!({ "id": id, "address": address, "admin": address }),
        json!({ "id": id, "address": address, "unix": "u", "admin": address, "memory_of": 4 }),
        json!({ "admin": address, "numerics": "n" }),
        json!({
            "generation": 2, "slots": [5, 6], "placement": placement, "checkpoint": "c", "kept": [1],
            "reason": "r",
        }),
        json!({ "generation": 2, "attempt": 1, "trainer": id, "done": true }),
        json!({ "round": 1, "pass": 0, "cursor": 3, "next_attempt": 9 }),
        json!({ "state": "pending", "failures": 1, "attempt": 4, "trainer": id }),
        json!({
            "request": id, "counted": true, "task": { "task": 1, "attempt": 2, "pass": 3 },
        }),
        json!({
            "pass": 1, "version": 2, "records": 3, "loss": 0.1, "metric": 0.25, "metric_name": "a",
        }),
        json!({
            "state": "finished", "passes": 1, "steps": 2, "examples": 3, "loss": 0.1,
            "discarded": [],
        }),
        json!({
            "generation": 1, "params": params, "placement": placement, "position": position,
            "exhausted": [1], "shards": [shard],
            "queue": { "pass": 0, "cursor": 2, "open": { "1": 1 }, "discarded": { "0": "r" } },
        }),
        elastic.clone(),
        elastic,
        json!({ "address": "a:1", "slots": 8, "admin": address, "launched_on": "a" }),
        json!({ "incarnation": 9, "address": "a:1", "slots": 8, "state": "asked", "after": 4 }),
        json!({
            "round": 1, "world_size": 8, "members": [member],
            "data": { "records": 9, "commit": { "round": 3, "phase": 7 } },
        }),
        json!({ "phase": 3 }),
        json!({ "token": 2, "state": "AQI=" }),
        json!({
            "launches": 3, "resets": 1, "settled": true,
            "outcome": { "result": "too_few_slots", "waited_ms": 5, "shortage": "s" },
        }),
        json!({
            "failures": 1, "cooldown_ms": 7, "agent": {
                "launch": 3, "place": 1, "slots": 4, "phase": "stopping", "reason": "surplus",
            },
        }),
    ];
    let fixed =
        json!({ "object": "fixed-digits-5a.safetensors", "size_bytes": 80, "sha256": "5a" });
    let commit = json!({ "round": 3, "phase": 7, "pass": 1, "used": 5, "seen": 15 });
    let dealt = json!({ "total": 9, "ranges": [[3, 5], [8, 9]] });
    let state = json!({ "state": { "number": 7, "commit": commit } });
    let used = json!({ "used": [[3, 5], [8, 9]] });
    let closure = json!({ "function": "loop:step", "digest": "5a", "result": "AQI=" });
    let others = [(24, fixed), (28, commit), (29, dealt), (30, state), (30, used), (32, closure)];
    let numbered = (0..).zip(records).chain(others);
    numbered.map(|(kind, it): (u8, _)| [&[kind], it.to_string().as_bytes()].concat()).collect()
}
