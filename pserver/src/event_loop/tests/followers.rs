//! Tests what the follower of a slot gets, and which steps wait for it.

use std::time::Duration;

use steadfast_host::time::timeout;
use tokio::sync::mpsc::UnboundedReceiver;
use uuid::Uuid;

use super::*;
use crate::event::FollowerReport;
use crate::follower::{StepEnd, StepPart, StepRequest};

const FOLLOWER: Uuid = Uuid::from_u128(7);

fn applicant(id: Uuid) -> Applicant {
    Applicant { id, address: "a:1".to_owned(), admin: "a:2".to_owned(), lease: 5 }
}

async fn follow(event_loop: &EventLoopHandle, id: Uuid) -> Result<FollowStart, EventError> {
    let applicant = applicant(id);
    let follow = |reply| Event::Follow { generation: GENERATION, applicant, reply };
    event_loop.call(follow).await
}

/// Asks for the step from `version` on.
async fn ask(
    event_loop: &EventLoopHandle,
    version: u64,
) -> Result<UnboundedReceiver<StepPart>, EventError> {
    ask_as(event_loop, version, 0).await
}

/// Asks for the step from `version` on, and says which comparison is known.
async fn ask_as(
    event_loop: &EventLoopHandle,
    version: u64,
    comparison: u64,
) -> Result<UnboundedReceiver<StepPart>, EventError> {
    let (parts, received) = mpsc::unbounded_channel();
    let request = StepRequest { version: Version(version), comparison, parts };
    let ask = |reply| Event::FollowStep { follower: FOLLOWER, request, reply };
    event_loop.call(ask).await.map(|()| received)
}

/// Receives a whole step.
async fn step(mut parts: UnboundedReceiver<StepPart>) -> (Vec<ValidatedBlock>, Arc<StepEnd>) {
    let mut all = Vec::new();
    loop {
        match parts.recv().await.expect("the step is complete") {
            StepPart::Blocks(blocks) => all.extend(blocks),
            StepPart::End(end) => return (all, end),
            StepPart::Compare { .. } => panic!("no checkpoint is taken"),
        }
    }
}

/// Pushes the step from `version` on, whose gradient is the number of each block plus one.
async fn push(event_loop: &EventLoopHandle, version: u64) {
    let name = LanesName { version: Version(version), ..lanes(share(1)) };
    let blocks = [0, 1].map(|number| block(event_loop, number)).to_vec();
    let contribution = of_one_record(blocks);
    let name = ContributionName::Lanes(name);
    let push = |reply| Event::Push { generation: GENERATION, name, contribution, reply };
    event_loop.call(push).await.unwrap();
}

fn version(event_loop: &EventLoopHandle) -> u64 {
    event_loop.published().borrow().shard.as_ref().unwrap().position.version.0
}

/// Returns a slot at version 1 whose follower has caught up.
async fn followed_slot() -> EventLoopHandle {
    let event_loop = slot().await;
    let start = follow(&event_loop, FOLLOWER).await.unwrap();
    assert_eq!(start.snapshot.shard.position.version, Version(0));
    let parts = ask(&event_loop, 0).await.unwrap();
    push(&event_loop, 0).await;
    // It has not caught up, so the step does not wait for it.
    assert_eq!(version(&event_loop), 1);
    step(parts).await;
    event_loop
}

/// I7: what a trainer has seen is not lost with the pserver: the follower has it.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_is_shown_once_the_follower_has_it() {
    let event_loop = followed_slot().await;
    let parts = ask(&event_loop, 1).await.unwrap();
    let (reply, mut early_blocks) = pull(&event_loop, VersionMatch::Exactly(Version(2)));
    let reply = tokio::spawn(reply);
    push(&event_loop, 1).await;
    let (blocks, end) = step(parts).await;
    assert_eq!(blocks.iter().map(|it| it.values()[0]).sum::<f32>(), 3.0);
    assert_eq!((end.records, end.loss_sum), (1, 0.5));
    // Values may be on their way, but they count with the reply.
    early_blocks.recv().await.unwrap();
    assert!(!reply.is_finished() && version(&event_loop) == 1);

    ask(&event_loop, 2).await.unwrap();
    assert_eq!(values(reply.await.unwrap()), (2, [6.0, 12.0].to_vec()));
}

/// I7: the follower comes to the same bits with the sums of the steps, no matter which trainers contributed.
#[tokio::test(flavor = "multi_thread")]
async fn a_follower_applies_the_same_steps() {
    let event_loop = slot().await;
    let FollowStart { snapshot, .. } = follow(&event_loop, FOLLOWER).await.unwrap();
    let copy = slot().await;
    for version in 0..3 {
        let parts = ask(&event_loop, version).await.unwrap();
        push(&event_loop, version).await;
        let (blocks, end) = step(parts).await;
        let StepEnd { name, records, loss_sum, weight, checksum, rows, .. } = (*end).clone();
        let contribution = Contribution { records, loss_sum, weight, checksum, blocks, rows };
        let push = |reply| Event::Push { generation: GENERATION, name, contribution, reply };
        copy.call(push).await.unwrap();
    }
    ask(&event_loop, 3).await.unwrap();
    assert_eq!(snapshot.shard.position.version, Version(0));
    let (ours, _early) = pull(&event_loop, VersionMatch::Exactly(Version(3)));
    let (theirs, _early) = pull(&copy, VersionMatch::Exactly(Version(3)));
    assert_eq!(values(ours.await), values(theirs.await));
}

/// A follower that does not take a step holds it up for a bounded time, and until it can no longer take the slot over.
#[tokio::test(flavor = "multi_thread")]
async fn a_step_goes_on_without_a_silent_follower_once_that_is_not_recorded_any_more() {
    let event_loop = followed_slot().await;
    let _parts = ask(&event_loop, 1).await.unwrap();
    push(&event_loop, 1).await;
    let mut published = event_loop.published();
    let leaves = published.wait_for(|it| it.follower.as_ref().is_some_and(|it| it.is_leaving));
    timeout(Duration::from_secs(10), leaves).await.unwrap().unwrap();
    assert_eq!(version(&event_loop), 1);
    let late = ask(&event_loop, 2).await.map(drop);
    assert_eq!(late, Err(EventError::NotFollowed { found: FOLLOWER }));

    event_loop.send(Event::NotRecorded).await;
    let goes_on = |it: &Arc<Published>| {
        let version = it.shard.as_ref().map(|shard| shard.position.version);
        it.follower.is_none() && version == Some(Version(2))
    };
    timeout(Duration::from_secs(10), published.wait_for(goes_on)).await.unwrap().unwrap();
}

/// The time after which a follower saves its state in the tests.
const SAVE_AFTER: Duration = Duration::from_millis(7);

fn is_comparison(part: Option<StepPart>, wanted: u64) -> bool {
    matches!(part, Some(StepPart::Compare { number, save_after: Some(SAVE_AFTER) }) if number == wanted)
}

/// I7: at a checkpoint, the follower saves and reports its state at the same version, and then gets the step.
#[tokio::test(flavor = "multi_thread")]
async fn a_follower_is_asked_for_its_state_at_a_checkpoint() {
    let event_loop = followed_slot().await;
    let mut parts = ask(&event_loop, 1).await.unwrap();
    let first = checkpoint(&event_loop).await;
    assert!(is_comparison(parts.recv().await, 1));
    assert!(parts.recv().await.is_none());
    // Had the answer been lost, the next one says the same.
    let mut again = ask(&event_loop, 1).await.unwrap();
    assert!(is_comparison(again.recv().await, 1));

    // Another checkpoint of the same version is compared at once, although the follower has the first number.
    let mut parts = ask_as(&event_loop, 1, 1).await.unwrap();
    let second = checkpoint(&event_loop).await;
    assert!(is_comparison(parts.recv().await, 2));
    let parts = ask_as(&event_loop, 1, 2).await.unwrap();
    push(&event_loop, 1).await;
    step(parts).await;
    for (comparison, digest) in [(1, "of the first"), (2, "of the second"), (2, "again")] {
        let report = FollowerReport { digest: Some(digest.to_owned()), saved: None };
        event_loop.send(Event::Report { follower: FOLLOWER, comparison, report }).await;
    }
    assert!(first.report.await.is_err());
    assert_eq!(second.report.await.unwrap().digest.as_deref(), Some("of the second"));
}

/// Takes a snapshot for a checkpoint of the present version; returns who waits for the report of the follower.
async fn checkpoint(event_loop: &EventLoopHandle) -> OfFollower {
    let taken = |reply| {
        let (generation, keeper) = (GENERATION, Keeper::Checkpoint { upload_after: SAVE_AFTER });
        Event::Snapshot { generation, version: None, keeper, reply }
    };
    let taken = event_loop.call(taken).await.unwrap();
    let SnapshotAnswer::Snapshot { of_follower, .. } = taken else { panic!("{taken:?}") };
    of_follower.expect("the slot is followed")
}

/// I6: of an asynchronous job, a checkpoint has no push that the follower lacks: the job would go back behind it with the
/// slot.
#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_is_not_ahead_of_the_follower() {
    let sgd = OptimizerSpec { kind: OptimizerKind::Sgd, ..OptimizerSpec::default() };
    let event_loop = slot_with(Mode::Async, sgd).await;
    follow(&event_loop, FOLLOWER).await.unwrap();
    let push = |from: u32| {
        let range = RecordRange { pass: Pass(0), task: TaskId(7), from, to: from + 1, last: false };
        let name = ContributionName::Range { range, version: Version(from.into()) };
        let blocks = [0, 1].map(|number| block(&event_loop, number)).to_vec();
        let contribution = of_one_record(blocks);
        let event_loop = event_loop.clone();
        let push = move |reply| Event::Push { generation: GENERATION, name, contribution, reply };
        async move { event_loop.call(push).await.unwrap() }
    };
    ask(&event_loop, 0).await.unwrap();
    push(0).await;
    ask(&event_loop, 1).await.unwrap();
    let pushed = tokio::spawn(push(1));
    let of_shard = |it: &Published| it.shard.as_ref().map(|it| it.position.version);
    let mut published = event_loop.published();
    published.wait_for(|it| of_shard(it) == Some(Version(2))).await.unwrap();
    let saves = event_loop.clone();
    let checkpoint = tokio::spawn(async move { checkpoint(&saves).await });
    timeout(Duration::from_millis(100), async {
        while !checkpoint.is_finished() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap_err();
    assert!(!pushed.is_finished());
    ask(&event_loop, 2).await.unwrap();
    checkpoint.await.unwrap();
    pushed.await.unwrap();
}

/// I12: who waits for the report of a follower that left gets none.
#[tokio::test(flavor = "multi_thread")]
async fn a_follower_that_leaves_is_not_compared() {
    let event_loop = followed_slot().await;
    let _parts = ask(&event_loop, 1).await.unwrap();
    let of_follower = checkpoint(&event_loop).await;
    event_loop.send(Event::FollowerGone { follower: FOLLOWER }).await;
    assert!(of_follower.report.await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_has_one_follower_which_may_begin_again() {
    let event_loop = slot().await;
    follow(&event_loop, FOLLOWER).await.unwrap();
    let other = follow(&event_loop, Uuid::from_u128(8)).await;
    assert_eq!(other.map(drop), Err(EventError::Followed { by: FOLLOWER }));
    let again = follow(&event_loop, FOLLOWER).await.unwrap();
    assert_eq!(again.snapshot.shard.position.version, Version(0));
}

/// A follower must not claim steps that it was not given: another request would get others.
#[tokio::test(flavor = "multi_thread")]
async fn a_follower_cannot_have_steps_that_are_not_complete() {
    let event_loop = slot().await;
    follow(&event_loop, FOLLOWER).await.unwrap();
    assert!(ask(&event_loop, 1).await.is_err());
    part(&event_loop, share(1), 1).await;
    assert!(ask(&event_loop, 1).await.is_err());
    assert!(ask(&event_loop, 0).await.is_ok());
}

/// Returns the record of the next generation.
fn next_generation(event_loop: &EventLoopHandle, kept: Vec<Slot>) -> GenerationRecord {
    GenerationRecord {
        generation: Generation(2),
        slots: vec![event_loop.incarnation],
        placement: PlacementRecord::LargestFirst { slots: 1 },
        kept,
        ..GenerationRecord::default()
    }
}

/// I12: a step that waits for its norm goes on in a generation that keeps the slot, and peers get the squares of the
/// step before.
#[tokio::test(flavor = "multi_thread")]
async fn a_generation_that_keeps_the_slot_keeps_the_squares_of_its_step() {
    let kind = OptimizerKind::Sgd;
    let clips = OptimizerSpec { kind, clip_norm: Some(1e9), ..OptimizerSpec::default() };
    let event_loop = slot_with(Mode::Sync, clips).await;
    push(&event_loop, 0).await;
    let squares = || event_loop.published().borrow().squares.as_ref().map(|it| it.version.0);
    assert_eq!((squares(), version(&event_loop)), (Some(0), 0));
    let record = next_generation(&event_loop, vec![Slot(0)]);
    event_loop.call(|reply| Event::Generation { record, reply }).await.unwrap();
    assert_eq!(squares(), Some(0));

    let (generation, version) = (Generation(2), Version(0));
    event_loop.send(Event::Norm { generation, version, norm: 1.0 }).await;
    let mut published = event_loop.published();
    let applied = |it: &Arc<Published>| it.shard.as_ref().unwrap().position.version == Version(1);
    timeout(Duration::from_secs(10), published.wait_for(applied)).await.unwrap().unwrap();
    assert_eq!(squares(), Some(0));
}

/// In the next generation a slot that keeps its memory keeps its follower; one that is rolled back does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_follower_follows_into_a_generation_that_keeps_the_slot() {
    for (kept, stays) in [(vec![Slot(0)], true), (Vec::new(), false)] {
        let event_loop = followed_slot().await;
        let record = next_generation(&event_loop, kept);
        event_loop.call(|reply| Event::Generation { record, reply }).await.unwrap();
        assert_eq!(ask(&event_loop, 1).await.is_ok(), stays);
    }
}
