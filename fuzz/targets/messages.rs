//! Requests and responses of one message: the result does not depend on the split into segments, and
//! decoded messages can be encoded and decoded again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use prost::Message;
use steadfast_fuzz::{at_once, seeds, split, within};
use steadfast_proto::v1;
use steadfast_proto::{answer, framed, read_one};

/// An empty message in a list takes a hundred bytes in memory for two on the wire.
const TIMES_MAX: usize = 512;

fuzz_target!(init: seeds("messages", well_formed()), |data: &[u8]| {
    let [kind, how, bytes @ ..] = data else { return };
    let read = READERS[usize::from(*kind) % READERS.len()];
    let whole = read(bytes, 0);
    assert_eq!(read(bytes, *how), whole);
    if let Ok(message) = whole {
        assert_eq!(read(&message, 0), Ok(message.clone()));
    }
});

/// Decodes a message and encodes it again, or returns the error.
fn read<M: Message + Default>(bytes: &[u8], how: u8) -> Result<Vec<u8>, String> {
    let mut body = answer(Ok(split(bytes, how))).into_body();
    within(TIMES_MAX * bytes.len() + (64 << 10), || {
        let message = at_once(read_one::<M>(&mut body));
        message.map(|it| framed(&it).to_vec()).map_err(|status| status.to_string())
    })
}

type Reader = fn(&[u8], u8) -> Result<Vec<u8>, String>;

macro_rules! readers {
    ($($message:ident)*) => {
        &[$(read::<v1::$message>),*]
    };
}

/// One for each message that a process receives.
const READERS: &[Reader] = readers! {
    PullRequest PushReply InitHeader InitReply NormsRequest NormsReply SnapshotRequest SnapshotReply
    PullHeader BeginInitRequest BeginInitReply FinishInitRequest FinishInitReply FollowRequest
    FollowReply NextTaskRequest NextTaskReply FailTaskRequest FailTaskReply AdvanceRequest
    AdvanceReply ReportEvaluationRequest ReportEvaluationReply BeginSaveRequest BeginSaveReply
    FinishSaveRequest FinishSaveReply TakeCheckpointRequest TakeCheckpointReply
    RestoreCheckpointRequest RestoreCheckpointReply ReportDamageRequest ReportDamageReply
    ReportDivergenceRequest ReportDivergenceReply StatusRequest StatusReply
};

fn well_formed() -> Vec<Vec<u8>> {
    let target = Some(v1::Target { generation: 1, slot: 2, incarnation: 3 });
    let pull = v1::PullRequest { target, version: 9, wait_ms: 1000, exact: true };
    let norms = v1::NormsReply { ready: true, blocks: vec![1, 2, 300], squares: vec![0.5, 1.0] };
    let params =
        vec![v1::Param { name: "w".to_owned(), shape: vec![3, 4], ..v1::Param::default() }];
    let init = v1::InitHeader { target, attempt: 1, params };
    [(0, framed(&pull)), (2, framed(&init)), (5, framed(&norms))]
        .map(|(kind, message)| [&[kind, 0], &message[..]].concat())
        .to_vec()
}
