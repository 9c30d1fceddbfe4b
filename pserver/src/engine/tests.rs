//! Steps applied block by block, as seen by pushes, pulls and snapshots.

use bytes::Bytes;
use steadfast_common::applied_records::RecordRange;
use steadfast_common::ids::{Lane, Pass, TaskId};
use steadfast_common::layout::ParamSpec;
use steadfast_common::spec::{LearningRateSpec, Mode, OptimizerKind, OptimizerSpec};
use steadfast_pserver_core::block_store::SnapshotBlock;
use steadfast_pserver_core::contribution::{LaneEnd, LaneShare, ValidatedBlock};
use steadfast_pserver_core::sync_shard::EarlyBlock;
use tokio::sync::mpsc::UnboundedReceiver;

use super::*;
use crate::event::{Pulled, VersionMatch, WaitMode};

const GENERATION: Generation = Generation(1);

/// The values of both blocks, before and after one step.
const FIRST: [f32; 2] = [8.0, 16.0];
const NEXT: [f32; 2] = [7.0, 14.0];

/// A slot of two blocks of one value each, at version 0, in a job of one lane.
async fn slot() -> Engine {
    let optimizer = OptimizerSpec { kind: OptimizerKind::Sgd, ..OptimizerSpec::default() };
    let learning_rate = LearningRateSpec { base: 1.0, ..LearningRateSpec::default() };
    let (mode, lanes, codec) = (Mode::Sync, 1, Codec::Plain);
    let rules = Rules { mode, lanes, optimizer, learning_rate, codec };
    let engine = Engine::start(Slot(0), Incarnation(3), rules);
    let record = GenerationRecord {
        generation: GENERATION,
        slots: vec![engine.incarnation],
        placement: PlacementRecord::LargestFirst { slots: 1 },
        ..GenerationRecord::default()
    };
    engine.call(|reply| Event::Generation { record, reply }).await.unwrap();
    let params = ["a", "b"].map(|name| ParamSpec::new(name, &[1])).to_vec();
    let values = FIRST.map(|value| vec![value]).to_vec();
    let first = InitialValues { layout: Arc::new(Layout::new(params)), values };
    let init = |reply| Event::Init { generation: GENERATION, attempt: 1, first, reply };
    engine.call(init).await.unwrap();
    engine
}

fn share(records: u64) -> LaneShare {
    LaneShare { records, checksum: 5, end: LaneEnd::MoreToCome }
}

fn lanes(share: LaneShare) -> LanesName {
    LanesName { version: Version(0), first: Lane(0), shares: [share].into() }
}

/// The gradient of a block is its number plus one.
fn block(engine: &Engine, number: u32) -> ValidatedBlock {
    let published = engine.published().borrow().clone();
    let memory = published.shard.as_ref().unwrap().buffers.lend(1);
    let bytes = Bytes::copy_from_slice(&(number as f32 + 1.0).to_le_bytes());
    ValidatedBlock::new(number, &bytes.into(), memory).unwrap()
}

async fn part(engine: &Engine, share: LaneShare, number: u32) {
    let (lanes, blocks) = (lanes(share), vec![block(engine, number)]);
    engine.send(Event::Part { generation: GENERATION, lanes, blocks }).await;
}

async fn rest(engine: &Engine, number: u32) -> Result<Pushed, EngineError> {
    let (name, blocks) = (PushName::Lanes(lanes(share(1))), vec![block(engine, number)]);
    let contribution = Contribution { records: 1, loss_sum: 0.5, checksum: 5, blocks };
    engine.call(|reply| Event::Push { generation: GENERATION, name, contribution, reply }).await
}

/// A pull that waits, and a channel of the blocks that it receives early.
fn pull(
    engine: &Engine,
    version: u64,
    which: VersionMatch,
) -> (impl Future<Output = Result<Pulled, EngineError>> + use<>, UnboundedReceiver<EarlyBlock>) {
    let (early, early_blocks) = mpsc::unbounded_channel();
    let engine = engine.clone();
    let reply = async move {
        let (version, wait_mode) = (Version(version), WaitMode::UntilReady);
        engine
            .call(|reply| Event::Pull {
                generation: GENERATION,
                version,
                which,
                wait_mode,
                early,
                reply,
            })
            .await
    };
    (reply, early_blocks)
}

fn values(pulled: Result<Pulled, EngineError>) -> (u64, Vec<f32>) {
    match pulled.unwrap() {
        Pulled::Parameters(it) => {
            (it.position.version.0, it.values.iter().map(|values| values[0]).collect())
        }
        Pulled::OtherVersion { present } => panic!("the slot is at {present}"),
    }
}

/// I7: a pull receives blocks of the next version while others still arrive, and the final reply once all
/// have arrived.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_are_sent_while_others_arrive() {
    let engine = slot().await;
    let (reply, mut early_blocks) = pull(&engine, 1, VersionMatch::Exactly);
    let reply = tokio::spawn(reply);
    part(&engine, share(1), 1).await;
    let (number, early) = early_blocks.recv().await.unwrap();
    assert_eq!((number, early[0]), (1, NEXT[1]));
    // A later pull receives them as well.
    let (late, mut late_blocks) = pull(&engine, 1, VersionMatch::Exactly);
    let late = tokio::spawn(late);
    assert_eq!(late_blocks.recv().await.unwrap().0, 1);
    assert!(!reply.is_finished() && !late.is_finished());
    assert_eq!(engine.published().borrow().shard.as_ref().unwrap().position.version, Version(0));

    assert_eq!(rest(&engine, 0).await.unwrap().version, Version(1));
    assert_eq!(values(reply.await.unwrap()), (1, NEXT.to_vec()));
    assert_eq!(values(late.await.unwrap()), (1, NEXT.to_vec()));
}

/// I7, I9: while a step is in progress, pulls return the previous version and snapshots are refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_reply_never_mixes_values_of_two_versions() {
    let engine = slot().await;
    part(&engine, share(1), 1).await;
    for which in [VersionMatch::Exactly, VersionMatch::AtLeast] {
        let (reply, mut early_blocks) = pull(&engine, 0, which);
        assert_eq!(values(reply.await), (0, FIRST.to_vec()));
        assert!(early_blocks.try_recv().is_err());
    }
    let snapshot = |version| {
        let version = Some(Version(version));
        engine.call(move |reply| Event::Snapshot { generation: GENERATION, version, reply })
    };
    let Ok(SnapshotAnswer::Past { present }) = snapshot(0).await else {
        panic!("a step is in progress")
    };
    assert_eq!(present, Version(0));
    let later = snapshot(1);
    rest(&engine, 0).await.unwrap();
    let Ok(SnapshotAnswer::Snapshot { snapshot, .. }) = later.await else {
        panic!("the version is reached")
    };
    let of = |block: &SnapshotBlock| block.values[0];
    assert_eq!(snapshot.blocks.iter().map(of).collect::<Vec<_>>(), NEXT);
}

/// I6: a slot that receives another share for a lane whose blocks it already has can never complete the
/// step: it discards the shard.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_with_conflicting_shares_discards_the_shard() {
    for is_whole in [false, true] {
        let engine = slot().await;
        part(&engine, share(2), 1).await;
        if is_whole {
            let refused = rest(&engine, 0).await;
            let other = Refusal::ConflictingShare { lane: Lane(0) };
            assert_eq!(refused.map(|it| it.version), Err(EngineError::Refused(other)));
        } else {
            part(&engine, share(1), 0).await;
        }
        let (reply, _early_blocks) = pull(&engine, 0, VersionMatch::Exactly);
        assert!(matches!(reply.await, Err(EngineError::ShuttingDown)));
    }
}

/// S004-37: a push of the other training mode is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_push_of_the_other_mode_is_refused() {
    let engine = slot().await;
    let range = RecordRange { pass: Pass(0), task: TaskId(7), from: 0, to: 1, last: false };
    let (name, blocks) = (PushName::Range(range), [0, 1].map(|it| block(&engine, it)).to_vec());
    let contribution = Contribution { records: 1, loss_sum: 0.5, checksum: 5, blocks };
    let push = |reply| Event::Push { generation: GENERATION, name, contribution, reply };
    let refused = engine.call(push).await.map(|it| it.version);
    assert_eq!(refused, Err(EngineError::Refused(Refusal::WrongMode("synchronous"))));
    let (reply, _early_blocks) = pull(&engine, 0, VersionMatch::Exactly);
    assert_eq!(values(reply.await), (0, FIRST.to_vec()));
}
