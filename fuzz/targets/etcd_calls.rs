//! Calls to the embedded etcd: each gets a response, and a server restarted from the log has the same
//! state.

#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use prost::Message;
use steadfast_etcd::Simulated;
use steadfast_fuzz::{seeds, within};
use tokio::runtime::{Builder, Runtime};
use tonic::body::Body;
use tower::ServiceExt;

/// A change of two bytes has a key, versions and a history entry in memory, and the server has services.
const TIMES_MAX: usize = 4096;

const METHODS: [&str; 15] = [
    "KV/Range",
    "KV/Put",
    "KV/DeleteRange",
    "KV/Txn",
    "KV/Compact",
    "Lease/LeaseGrant",
    "Lease/LeaseRevoke",
    "Lease/LeaseKeepAlive",
    "Lease/LeaseTimeToLive",
    "Lease/LeaseLeases",
    "Watch/Watch",
    "Maintenance/Status",
    "Maintenance/Snapshot",
    "Maintenance/Defragment",
    "Cluster/MemberList",
];

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    Builder::new_current_thread().enable_all().build().expect("the runtime starts")
});

fuzz_target!(init: seeds("etcd_calls", well_formed()), |data: &[u8]| {
    let runtime = &*RUNTIME;
    within(TIMES_MAX * data.len() + (1 << 20), || runtime.block_on(play(data)));
});

async fn play(mut data: &[u8]) {
    let store = start(&[]);
    let mut log = Vec::new();
    while let [method, len, rest @ ..] = data {
        let Some((body, rest)) = rest.split_at_checked(usize::from(*len)) else { break };
        call(&store, &mut log, METHODS[usize::from(*method) % METHODS.len()], body).await;
        data = rest;
    }
    let again = start(&log);
    assert_eq!(again.revision(), store.revision());
    assert_eq!(again.changes_after(0), store.changes_after(0));
    let keys = store.keys(b"");
    assert_eq!(again.keys(b""), keys);
    assert!(keys.iter().all(|key| again.get(key) == store.get(key)));
    store.end();
}

fn start(log: &[u8]) -> Simulated {
    Simulated::start(log, ([127, 0, 0, 1], 1).into()).expect("the log is valid")
}

async fn call(store: &Simulated, log: &mut Vec<u8>, method: &str, body: &[u8]) {
    let mut message = vec![0];
    message.extend((body.len() as u32).to_be_bytes());
    message.extend(body);
    let request = http::Request::post(format!("http://it/etcdserverpb.{method}"))
        .header("content-type", "application/grpc")
        .body(steadfast_proto::answer(Ok(vec![message.into()])).into_body());
    let request: http::Request<Body> = request.expect("the request is valid");
    let calling = store.routes().oneshot(request);
    let writing = async {
        loop {
            let unwritten = store.unwritten().await;
            log.extend_from_slice(unwritten.bytes());
            store.written(&unwritten, log.len() as u64);
        }
    };
    tokio::select! {
        biased;
        _ = writing => {}
        answered = calling => drop(answered),
    }
}

/// The used fields of a put request.
#[derive(Clone, PartialEq, Message)]
struct Put {
    #[prost(bytes, tag = "1")]
    key: Vec<u8>,
    #[prost(bytes, tag = "2")]
    value: Vec<u8>,
    #[prost(int64, tag = "3")]
    lease: i64,
}

fn well_formed() -> Vec<Vec<u8>> {
    let one = |method: u8, body: &[u8]| [&[method, body.len() as u8], body].concat();
    let put =
        |key: &str, lease| Put { key: key.into(), value: b"v".to_vec(), lease }.encode_to_vec();
    let field = |tag: u8, body: &[u8]| [&[tag << 3 | 2, body.len() as u8], body].concat();
    // If `a` is unchanged, puts `c` and reads all keys from `a` on; otherwise deletes `a`.
    let compare = field(1, &[&[8, 0, 16, 3], &field(3, b"a")[..], &field(7, b"v")].concat());
    let then = [field(2, &field(2, &put("c", 0))), field(2, &field(1, &field(1, b"a")))].concat();
    let otherwise = field(3, &field(3, &field(1, b"a")));
    let txn = [compare, then, otherwise].concat();
    let range = [field(1, b"a"), field(2, b"\0")].concat();
    let calls = [
        one(5, &[8, 60, 16, 7]),
        one(1, &put("a", 7)),
        one(1, &put("b", 0)),
        one(3, &txn),
        one(0, &range),
        one(10, &field(1, &range)),
        one(2, &field(1, b"b")),
        one(4, &[8, 3]),
        one(8, &[8, 7, 16, 1]),
        one(6, &[8, 7]),
        one(11, &[]),
    ];
    vec![calls.concat(), calls[..4].concat()]
}
