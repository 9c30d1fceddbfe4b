//! Steps applied block by block, as seen by pushes, pulls and snapshots.

use bytes::Bytes;
use steadfast_common::ids::{Lane, Pass, TaskId};
use steadfast_common::job::spec::{LearningRateSpec, Mode, OptimizerKind, OptimizerSpec};
use steadfast_common::records::applied_records::RecordRange;
use steadfast_common::records::contribution::{LaneEnd, LaneShare, LanesName};
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_proto::{PullAnswer, PullValues, VersionMatch};
use steadfast_pserver_core::block_store::{InitialStates, Parameters, SnapshotBlock};
use steadfast_pserver_core::contribution::ValidatedBlock;
use steadfast_pserver_core::sync_shard::EarlyBlock;
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;
use crate::event::WaitMode;

mod followers;
mod handovers;

const GENERATION: Generation = Generation(1);

/// The values of both blocks, before and after one step.
const FIRST: [f32; 2] = [8.0, 16.0];
const NEXT: [f32; 2] = [7.0, 14.0];

/// Starts a slot of two blocks of one value each, at version 0, in a job of one lane.
async fn slot() -> EventLoopHandle {
    slot_with(Mode::Sync, OptimizerSpec { kind: OptimizerKind::Sgd, ..OptimizerSpec::default() })
        .await
}

async fn slot_with(mode: Mode, optimizer: OptimizerSpec) -> EventLoopHandle {
    let learning_rate = LearningRateSpec { base: 1.0, ..LearningRateSpec::default() };
    let rules = Rules { mode, optimizer, learning_rate, ..Rules::default() };
    let event_loop = EventLoopHandle::start(Slot(0), Incarnation(3), rules);
    let record = GenerationRecord {
        generation: GENERATION,
        slots: vec![event_loop.incarnation],
        placement: PlacementRecord::LargestFirst { slots: 1 },
        ..GenerationRecord::default()
    };
    event_loop.call(|reply| Event::Generation { record, reply }).await.unwrap();
    let params = ["a", "b"].map(|name| ParamSpec::new(name, &[1])).to_vec();
    let values = FIRST.map(|value| vec![value]).to_vec();
    let states = InitialStates::default();
    let first = InitialValues { layout: Arc::new(Layout::new(params)), values, states };
    let init = |reply| Event::Init { generation: GENERATION, attempt: 1, first, reply };
    event_loop.call(init).await.unwrap();
    event_loop
}

fn share(records: u32) -> LaneShare {
    LaneShare { records, checksum: 5, end: LaneEnd::MoreToCome, weight: None }
}

fn lanes(share: LaneShare) -> LanesName {
    LanesName { version: Version(0), first: Lane(0), shares: [share].into(), reductions: 0 }
}

/// Returns the gradient of a block, which is its number plus one.
fn block(event_loop: &EventLoopHandle, number: u32) -> ValidatedBlock {
    let published = event_loop.published().borrow().clone();
    let memory = published.shard.as_ref().unwrap().buffers.lend(1);
    let bytes = Bytes::copy_from_slice(&(number as f32 + 1.0).to_le_bytes());
    ValidatedBlock::new(number, &bytes.into(), memory).unwrap()
}

/// Returns a contribution of one record.
fn of_one_record(blocks: Vec<ValidatedBlock>) -> Contribution {
    Contribution { records: 1, loss_sum: 0.5, checksum: 5, blocks, rows: Vec::new(), weight: None }
}

async fn part(event_loop: &EventLoopHandle, share: LaneShare, number: u32) {
    let (lanes, blocks) = (lanes(share), vec![block(event_loop, number)]);
    event_loop.send(Event::Part { generation: GENERATION, lanes, blocks }).await;
}

async fn rest(event_loop: &EventLoopHandle, number: u32) -> Result<Pushed, EventError> {
    let (name, blocks) =
        (ContributionName::Lanes(lanes(share(1))), vec![block(event_loop, number)]);
    let contribution = of_one_record(blocks);
    event_loop.call(|reply| Event::Push { generation: GENERATION, name, contribution, reply }).await
}

type Pulled = Result<PullAnswer<Parameters>, EventError>;

/// Returns a pull that waits, and a channel of the blocks that it receives early.
fn pull(
    event_loop: &EventLoopHandle,
    versions: VersionMatch,
) -> (impl Future<Output = Pulled> + use<>, UnboundedReceiver<EarlyBlock>) {
    let (early, early_blocks) = mpsc::unbounded_channel();
    let event_loop = event_loop.clone();
    let reply = async move {
        let (generation, wait_mode) = (GENERATION, WaitMode::UntilReady);
        let values = PullValues::Parameters;
        event_loop
            .call(|reply| Event::Pull { generation, versions, values, wait_mode, early, reply })
            .await
    };
    (reply, early_blocks)
}

fn values(pulled: Pulled) -> (u64, Vec<f32>) {
    match pulled.unwrap() {
        PullAnswer::Ready(it) => {
            (it.position.version.0, it.values.iter().map(|values| values[0]).collect())
        }
        PullAnswer::NotYet { present } | PullAnswer::Past { present } => {
            panic!("the slot is at {present}")
        }
    }
}

/// I7: a pull receives blocks of the next version while others still arrive, and the final reply once all
/// have arrived.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_are_sent_while_others_arrive() {
    let event_loop = slot().await;
    let (reply, mut early_blocks) = pull(&event_loop, VersionMatch::Exactly(Version(1)));
    let reply = tokio::spawn(reply);
    part(&event_loop, share(1), 1).await;
    let (number, early) = early_blocks.recv().await.unwrap();
    assert_eq!((number, early[0]), (1, NEXT[1]));
    // A later pull receives them as well.
    let (late, mut late_blocks) = pull(&event_loop, VersionMatch::Exactly(Version(1)));
    let late = tokio::spawn(late);
    assert_eq!(late_blocks.recv().await.unwrap().0, 1);
    assert!(!reply.is_finished() && !late.is_finished());
    assert_eq!(
        event_loop.published().borrow().shard.as_ref().unwrap().position.version,
        Version(0)
    );

    assert_eq!(rest(&event_loop, 0).await.unwrap().version, Version(1));
    assert_eq!(values(reply.await.unwrap()), (1, NEXT.to_vec()));
    assert_eq!(values(late.await.unwrap()), (1, NEXT.to_vec()));
}

/// I7, I9: while a step is in progress, pulls return the previous version and snapshots are refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_reply_never_mixes_values_of_two_versions() {
    let event_loop = slot().await;
    part(&event_loop, share(1), 1).await;
    for versions in [VersionMatch::Exactly, VersionMatch::AtLeast] {
        let (reply, mut early_blocks) = pull(&event_loop, versions(Version(0)));
        assert_eq!(values(reply.await), (0, FIRST.to_vec()));
        assert!(early_blocks.try_recv().is_err());
    }
    let snapshot = |version| {
        let version = Some(Version(version));
        let (generation, keeper) = (GENERATION, Keeper::Caller);
        event_loop.call(move |reply| Event::Snapshot { generation, version, keeper, reply })
    };
    let Ok(SnapshotAnswer::Past { present }) = snapshot(0).await else {
        panic!("a step is in progress")
    };
    assert_eq!(present, Version(0));
    let later = snapshot(1);
    rest(&event_loop, 0).await.unwrap();
    let Ok(SnapshotAnswer::Snapshot { snapshot, .. }) = later.await else {
        panic!("the version is reached")
    };
    let of = |block: &SnapshotBlock| block.values[0];
    assert_eq!(snapshot.shard.blocks.iter().map(of).collect::<Vec<_>>(), NEXT);
}

/// I6: a slot that receives another share for a lane whose blocks it already has can never complete the
/// step: it discards the shard.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_with_conflicting_shares_discards_the_shard() {
    for is_whole in [false, true] {
        let event_loop = slot().await;
        part(&event_loop, share(2), 1).await;
        if is_whole {
            let refused = rest(&event_loop, 0).await;
            let other = Refusal::ConflictingShare { lane: Lane(0) };
            assert_eq!(refused.map(|it| it.version), Err(EventError::Refused(other)));
        } else {
            part(&event_loop, share(1), 0).await;
        }
        let (reply, _early_blocks) = pull(&event_loop, VersionMatch::Exactly(Version(0)));
        assert!(matches!(reply.await, Err(EventError::ShuttingDown)));
    }
}

/// S004-37: a push of the other training mode is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_push_of_the_other_mode_is_refused() {
    let event_loop = slot().await;
    let range = RecordRange { pass: Pass(0), task: TaskId(7), from: 0, to: 1, last: false };
    let name = ContributionName::Range { range, version: Version(0) };
    let blocks = [0, 1].map(|it| block(&event_loop, it)).to_vec();
    let contribution = of_one_record(blocks);
    let push = |reply| Event::Push { generation: GENERATION, name, contribution, reply };
    let refused = event_loop.call(push).await.map(|it| it.version);
    assert_eq!(refused, Err(EventError::Refused(Refusal::WrongMode("synchronous"))));
    let (reply, _early_blocks) = pull(&event_loop, VersionMatch::Exactly(Version(0)));
    assert_eq!(values(reply.await), (0, FIRST.to_vec()));
}
