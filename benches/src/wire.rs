//! Gradients to real pservers, and parameters from them.

use std::sync::Arc;

use steadfast_client::{Gradient, Name};
use steadfast_common::ids::{Lane, Pass, TaskId, Version};
use steadfast_common::tally::TaskPiece;
use steadfast_tests::Job;

use crate::rig::Rig;
use crate::sample::Sample;
use crate::watch::Watch;

/// Values of the model: 64 MiB.
pub const VALUES: usize = 16 << 20;

/// Pservers that share it.
pub const SLOTS: usize = 2;

/// Gradients of one sample.
pub const ROUNDS: usize = 24;

/// Values of the small model: 64 KiB.
pub const SMALL: usize = 16 << 10;

/// Steps of one sample of the small model.
pub const SMALL_STEPS: u64 = 2000;

fn asynchronous() -> Job {
    Job::example("linear")
        .with("mode = \"sync\"", "mode = \"async\"")
        .with("[sync]\nlanes = 4\nmicro_batch = 25", "[async]\nbatch = 1")
        .with("fraction = 0.2", "fraction = 0.0")
}

fn synchronous() -> Job {
    Job::example("linear").with("lanes = 4", "lanes = 1").with("passes = 30", "passes = 1000000")
}

fn gradient(values: Vec<f32>) -> Gradient {
    Gradient { records: 1, loss_sum: 0.5, checksum: 1, values: Arc::new(values) }
}

/// One record after the other, so that no push repeats another.
fn piece(number: usize) -> Name {
    let from = number as u32;
    let piece = TaskPiece { pass: Pass(0), task: TaskId(0), from, to: from + 1, last: false };
    Name::Piece { piece, version: Version(0) }
}

/// Gradients of [`VALUES`] to [`SLOTS`] pservers that apply them by SGD.
pub async fn push() -> Sample {
    let rig = Rig::start(&asynchronous(), SLOTS as u32, VALUES).await;
    let gradient = gradient(vec![0.5; VALUES]);
    rig.pservers.push(piece(0), gradient.clone()).await.expect("pservers take it");
    let watch = Watch::start(rig.pids());
    for number in 1..=ROUNDS {
        rig.pservers.push(piece(number), gradient.clone()).await.expect("pservers take it");
    }
    watch.stop((ROUNDS * VALUES * size_of::<f32>()) as f64)
}

/// Parameters of [`VALUES`] from [`SLOTS`] pservers.
pub async fn pull() -> Sample {
    let rig = Rig::start(&asynchronous(), SLOTS as u32, VALUES).await;
    let mut values = vec![0.0; VALUES];
    rig.pservers.pull(&mut values).await.expect("pservers give them");
    let watch = Watch::start(rig.pids());
    for _ in 0..ROUNDS {
        rig.pservers.pull(&mut values).await.expect("pservers give them");
    }
    watch.stop((ROUNDS * VALUES * size_of::<f32>()) as f64)
}

/// Synchronous steps of a small model: one lane, one pserver.
pub async fn small_steps() -> Sample {
    let rig = Rig::start(&synchronous(), 1, SMALL).await;
    let gradient = gradient(vec![0.5; SMALL]);
    let mut values = vec![0.0; SMALL];
    let step = async |version: u64, values: &mut [f32]| {
        let name = Name::Lane { version: Version(version), lane: Lane(0), last: false };
        let pushed = rig.pservers.push(name, gradient.clone());
        let pulled = rig.pservers.pull_step(Version(version + 1), values);
        let (pushed, pulled) = tokio::join!(pushed, pulled);
        pushed.expect("the pserver takes it");
        pulled.expect("the pserver gives it");
    };
    step(0, &mut values).await;
    let watch = Watch::start(rig.pids());
    for version in 1..=SMALL_STEPS {
        step(version, &mut values).await;
    }
    watch.stop(SMALL_STEPS as f64)
}
