//! A slot that keeps its state for the slots of the next generation.

use std::time::Duration;

use steadfast_common::records::CheckpointRecord;
use steadfast_host::time::timeout;

use super::*;
use crate::event::Handed;

async fn hand_over(event_loop: &EventLoopHandle) {
    let (generation, keeper) = (GENERATION, Keeper::Slot);
    let taken = |reply| Event::Snapshot { generation, version: None, keeper, reply };
    assert!(matches!(event_loop.call(taken).await, Ok(SnapshotAnswer::Snapshot { .. })));
}

/// Waits until the slot shows that it keeps a state for others, or that it does not.
async fn shows(event_loop: &EventLoopHandle, hands_over: bool) {
    let mut published = event_loop.published();
    let shown = published.wait_for(|it| it.hands_over == hands_over);
    timeout(Duration::from_secs(20), shown).await.unwrap().unwrap();
}

async fn read(event_loop: &EventLoopHandle, version: u64) -> Result<Vec<f32>, EventError> {
    let version = Version(version);
    let handed = event_loop.call(|reply| Event::ReadHandover { version, reply }).await?;
    let Handed { of, snapshot } = handed;
    assert_eq!(of, GENERATION);
    Ok(snapshot.shard.blocks.iter().map(|block| block.values[0]).collect())
}

/// Begins the next generation, of two slots, with the state of a version of this one or with nothing.
async fn begin(event_loop: &EventLoopHandle, version: Option<u64>) -> Begun {
    let handover = version.map(|version| {
        let position = Position { version: Version(version), ..Position::default() };
        Box::new(CheckpointRecord {
            generation: GENERATION,
            position,
            ..CheckpointRecord::default()
        })
    });
    let record = GenerationRecord {
        generation: Generation(2),
        slots: vec![event_loop.incarnation, Incarnation(8)],
        placement: PlacementRecord::LargestFirst { slots: 2 },
        handover,
        ..GenerationRecord::default()
    };
    event_loop.call(|reply| Event::Generation { record, reply }).await.unwrap()
}

/// I7, F37: the state stays that of its version while training goes on, and in the generation that begins with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_is_handed_over_at_the_version_that_the_generation_names() {
    let event_loop = slot().await;
    hand_over(&event_loop).await;
    part(&event_loop, share(1), 1).await;
    rest(&event_loop, 0).await.unwrap();
    assert_eq!(read(&event_loop, 0).await, Ok(FIRST.to_vec()));
    let refused = EventError::NoHandover { found: Version(1) };
    assert_eq!(read(&event_loop, 1).await, Err(refused));
    assert_eq!(begin(&event_loop, Some(0)).await, Begun::Empty);
    assert_eq!(read(&event_loop, 0).await, Ok(FIRST.to_vec()));
}

/// I7: a generation that begins with something else needs no state of before.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_is_dropped_when_a_generation_begins_without_it() {
    for other in [None, Some(1)] {
        let event_loop = slot().await;
        hand_over(&event_loop).await;
        shows(&event_loop, true).await;
        begin(&event_loop, other).await;
        shows(&event_loop, false).await;
        let refused = EventError::NoHandover { found: Version(0) };
        assert_eq!(read(&event_loop, 0).await, Err(refused));
    }
}

/// I12: what was sent last may be lost and requested again, so the state stays for a while; then memory is freed.
#[tokio::test(flavor = "multi_thread")]
async fn a_state_is_dropped_some_time_after_all_slots_were_sent_theirs() {
    let event_loop = slot().await;
    hand_over(&event_loop).await;
    begin(&event_loop, Some(0)).await;
    for reader in [Slot(0), Slot(0), Slot(1)] {
        event_loop.send(Event::HandoverSent { reader, slots: 2 }).await;
        assert_eq!(read(&event_loop, 0).await, Ok(FIRST.to_vec()));
    }
    shows(&event_loop, false).await;
}
