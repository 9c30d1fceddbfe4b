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
    let (_, check) = CHECKS[usize::from(*kind) % CHECKS.len()];
    check(bytes, *how);
});

fn check<M: Message + Default + PartialEq>(bytes: &[u8], how: u8) {
    let whole = read::<M>(bytes, 0);
    assert!(are_same(&read(bytes, how), &whole));
    if let Ok(message) = &whole {
        assert!(are_same(&read(&framed(message), 0), &whole));
    }
}

fn read<M: Message + Default>(bytes: &[u8], how: u8) -> Result<M, String> {
    let mut body = answer(Ok(split(bytes, how))).into_body();
    within(TIMES_MAX * bytes.len() + (64 << 10), || {
        at_once(read_one::<M>(&mut body)).map_err(|status| status.to_string())
    })
}

/// Compares values, since a map has no order, and bytes, since NaN does not equal itself.
fn are_same<M: Message + PartialEq>(one: &Result<M, String>, other: &Result<M, String>) -> bool {
    match (one, other) {
        (Ok(one), Ok(other)) => one == other || one.encode_to_vec() == other.encode_to_vec(),
        (Err(one), Err(other)) => one == other,
        (Ok(_), Err(_)) | (Err(_), Ok(_)) => false,
    }
}

type Check = fn(&[u8], u8);

macro_rules! checks {
    ($($message:ident)*) => {
        &[$((stringify!($message), check::<v1::$message>)),*]
    };
}

/// One for each message that a process receives.
const CHECKS: &[(&str, Check)] = checks! {
    PullRequest PushReply InitHeader InitReply NormsRequest NormsReply SnapshotRequest SnapshotReply
    FollowSlotRequest FollowStepRequest FollowStepHeader ReadHandoverRequest ReportDigestRequest ReportDigestReply
    TableUsageRequest TableUsageReply AppliedRequest AppliedReply
    PullHeader BeginInitRequest BeginInitReply FinishInitRequest FinishInitReply FollowRequest
    FollowReply NextTaskRequest NextTaskReply FailTaskRequest FailTaskReply AdvanceRequest
    AdvanceReply ReportEvaluationRequest ReportEvaluationReply BeginSaveRequest BeginSaveReply
    FinishSaveRequest FinishSaveReply TakeCheckpointRequest TakeCheckpointReply
    RestoreCheckpointRequest RestoreCheckpointReply AmendJobRequest AmendJobReply ReportDamageRequest ReportDamageReply
    ReportDivergenceRequest ReportDivergenceReply DiscardRecordRequest DiscardRecordReply DrainRequest DrainReply StatusRequest StatusReply
    GetClusterSpecRequest GetClusterSpecReply GetWaitingNodesRequest GetWaitingNodesReply
    BarrierRequest BarrierReply SynchronizeRequest SynchronizeReply ShutDownRequest ShutDownReply
    AnnounceRequest AnnounceReply JoinRequest JoinReply ElasticRound Entries WatchRequest WatchReply GiveUpRequest GiveUpReply EnterRequest EnterReply
    ShareStateRequest ShareStateReply ElasticStatusRequest ElasticStatusReply ChangesRequest ChangesReply
    NextRoundRequest NextRoundReply BeginCommitRequest BeginCommitReply EndCommitRequest EndCommitReply
    LastCommitRequest LastCommitReply DecideCommitRequest DecideCommitReply ProgressRequest ProgressReply
    DealRequest DealReply FetchRecordsRequest FetchRecordsReply
    AttendRequest WorkerState RunRequest RunReply CancelRequest CancelReply DropRequest DropReply Arguments Value
};

fn well_formed() -> Vec<Vec<u8>> {
    let target = Some(v1::Target { generation: 1, slot: 2, incarnation: 3 });
    let pull = v1::PullRequest { target, version: 9, wait_ms: 1000, exact: true, averages: true };
    let norms = v1::NormsReply { ready: true, blocks: vec![1, 2, 300], squares: vec![0.5, 1.0] };
    let params =
        vec![v1::Param { name: "w".to_owned(), shape: vec![3, 4], ..v1::Param::default() }];
    let states = vec!["m".to_owned()];
    let init = v1::InitHeader { target, attempt: 1, params, states };
    let data = [("a".to_owned(), vec![1, 2].into()), ("b:1".to_owned(), vec![].into())];
    let synchronized =
        v1::SynchronizeReply { success: true, data: data.into(), ..Default::default() };
    let member = v1::ElasticMember { node: "a".to_owned(), slots: 4, ..Default::default() };
    let commit = Some(v1::CommitId { round: 1, phase: 2 });
    let data = Some(v1::RoundData { records: 9, commit, is_dynamic: true });
    let members = vec![member.clone(), member];
    let round = v1::ElasticRound { round: 1, world_size: 8, members, data };
    let start = v1::join_reply::Next::Start(round.encode_to_vec().into());
    let join = v1::JoinReply { next: Some(start) };
    let entries = [("a".to_owned(), vec![1, 2].into())];
    let entries = v1::Entries { data: entries.into() };
    let node = Some(v1::Node { id: "a".to_owned(), incarnation: 7 });
    let report = Some(v1::NodeReport { restarts: 1, state: "x".to_owned(), ..Default::default() });
    let watch = v1::WatchRequest { node, round: 3, known_change: -1, report, ..Default::default() };
    let share = v1::ShareStateRequest { state: Some(vec![3].into()), token: 300 };
    let changes = vec![v1::MemberChange { revision: 9, removed: true, added: false }; 2];
    let changes = v1::ChangesReply { revision: 9, changes, round: 2 };
    let worker = v1::WorkerAssignment { round: 2, rank: 1, world_size: 2, ..Default::default() };
    let next = v1::NextRoundReply { next: Some(v1::next_round_reply::Next::Assignment(worker)) };
    vec![
        seed("PullRequest", &pull),
        seed("InitHeader", &init),
        seed("NormsReply", &norms),
        seed("SynchronizeReply", &synchronized),
        seed("JoinReply", &join),
        seed("ElasticRound", &round),
        seed("Entries", &entries),
        seed("WatchRequest", &watch),
        seed("ShareStateRequest", &share),
        seed("ChangesReply", &changes),
        seed("NextRoundReply", &next),
    ]
}

fn seed(name: &str, message: &impl Message) -> Vec<u8> {
    let kind = CHECKS.iter().position(|(it, _)| *it == name).expect("a message by its name");
    [&[kind as u8, 0], &framed(message)[..]].concat()
}
