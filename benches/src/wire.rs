//! Pushes to and pulls from real pservers.

use std::sync::Arc;

use futures::future::join_all;
use steadfast_common::ids::{Lane, Pass, TaskId, Version};
use steadfast_common::records::applied_records::RecordRange;
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_tests::{EtcdServer, Job, Scene};
use steadfast_training_client::{ContributionName, Gradient, LaneEnd, LaneShare, LanesName};

use crate::rig::{Rig, Via};
use crate::sample::Sample;
use crate::watch::Watch;

/// Values of the model: 64 MiB.
pub const VALUES: usize = 16 << 20;

/// Number of pservers.
pub const SLOTS: usize = 2;

/// Values of the small model: 64 KiB.
pub const SMALL: usize = 16 << 10;

/// Steps of the small model per sample.
pub const SMALL_STEPS: u64 = 2000;

fn asynchronous() -> Job {
    Job::example("linear")
        .with("mode = \"sync\"", "mode = \"async\"")
        .with("[sync]\nlanes = 4\nmicro_batch = 25", "[async]\nbatch = 1")
        .with("fraction = 0.2", "fraction = 0.0")
}

pub fn synchronous() -> Job {
    Job::example("linear").with("lanes = 4", "lanes = 1").with("passes = 30", "passes = 1000000")
}

async fn rig(job: &Job, slots: u32, values: usize, via: Via) -> Rig {
    let scene = Scene::new();
    let etcd = EtcdServer::embedded(&scene);
    let parameters = vec![ParamSpec::new("w", &[values])];
    Rig::start(scene, etcd, job, slots, parameters, via).await
}

fn gradient(values: Vec<f32>) -> Gradient {
    let (values, rows) = (Arc::new(values), Vec::new());
    Gradient { records: 1, loss_sum: 0.5, checksum: 1, values, rows, weight: None }
}

/// The sum of one lane with one record that is not exhausted.
pub fn lane(version: u64, first: Lane) -> ContributionName {
    let shares =
        [LaneShare { records: 1, checksum: 1, end: LaneEnd::MoreToCome, weight: None }].into();
    ContributionName::Lanes(LanesName { version: Version(version), first, shares, reductions: 0 })
}

/// The first record of a task.
fn first_record() -> RecordRange {
    RecordRange { pass: Pass(0), task: TaskId(0), from: 0, to: 1, last: false }
}

/// Consecutive records, so that no push repeats another.
fn range(number: usize) -> ContributionName {
    let from = number as u32;
    let range = RecordRange { from, to: from + 1, ..first_record() };
    ContributionName::Range { range, version: Version(0) }
}

/// Measures gradients of [`VALUES`] to [`SLOTS`] pservers, each a synchronous SGD step without a pull;
/// counts the uncompressed bytes.
pub async fn push(via: Via, compression: &str) -> Sample {
    let form = format!("[gradients]\ncompression = \"{compression}\"\n[sync]\n");
    let job = synchronous().with("[sync]\n", &form);
    push_all(&job, via, |number| lane(number as u64, Lane(0))).await
}

/// Measures asynchronous pushes, each applied as a whole or not at all.
pub async fn push_asynchronously() -> Sample {
    push_all(&asynchronous(), Via::Tcp, range).await
}

async fn push_all(job: &Job, via: Via, name: fn(usize) -> ContributionName) -> Sample {
    let rig = rig(job, SLOTS as u32, VALUES, via).await;
    let gradient = gradient(vec![0.5; VALUES]);
    rig.pservers.push(name(0), gradient.clone()).await.expect("pservers take it");
    let watch = Watch::start(rig.pids());
    for number in 1..=via.rounds() {
        rig.pservers.push(name(number), gradient.clone()).await.expect("pservers take it");
    }
    watch.stop((via.rounds() * VALUES * size_of::<f32>()) as f64)
}

/// Measures parameters of [`VALUES`] from [`SLOTS`] pservers.
pub async fn pull(via: Via) -> Sample {
    let rig = rig(&asynchronous(), SLOTS as u32, VALUES, via).await;
    let mut values = vec![0.0; VALUES];
    rig.pservers.pull(&mut values).await.expect("pservers give them");
    let watch = Watch::start(rig.pids());
    for _ in 0..via.rounds() {
        rig.pservers.pull(&mut values).await.expect("pservers give them");
    }
    watch.stop((via.rounds() * VALUES * size_of::<f32>()) as f64)
}

/// Measures synchronous steps of a small model: one lane, one pserver.
pub async fn small_steps() -> Sample {
    let rig = rig(&synchronous(), 1, SMALL, Via::Tcp).await;
    steps_alone(&rig, SMALL, SMALL_STEPS).await
}

/// Steps per sample over slow links.
pub const SLOW_STEPS: u64 = 3;

/// Measures synchronous steps of one trainer over slow links to two pservers.
pub async fn slow_steps() -> Sample {
    let rig = rig(&synchronous(), SLOTS as u32, VALUES, Via::SlowTcp).await;
    steps_alone(&rig, VALUES, SLOW_STEPS).await
}

/// Measures steps of a job of one lane and `values` parameters, after one warm-up step.
pub async fn steps_alone(rig: &Rig, values: usize, steps: u64) -> Sample {
    let gradient = gradient(vec![0.5; values]);
    let mut values = vec![0.0; values];
    step(rig, 0, &gradient, &mut values).await;
    let watch = Watch::start(rig.pids());
    for version in 1..=steps {
        step(rig, version, &gradient, &mut values).await;
    }
    watch.stop(steps as f64)
}

async fn step(rig: &Rig, version: u64, gradient: &Gradient, values: &mut [f32]) {
    let pushed = rig.pservers.push(lane(version, Lane(0)), gradient.clone());
    let pulled = rig.pservers.pull_step(Version(version + 1), values);
    let (pushed, pulled) = tokio::join!(pushed, pulled);
    pushed.expect("the pserver takes it");
    pulled.expect("the pserver gives it");
}

/// Number of trainers of the whole step.
pub const TRAINERS: usize = 2;

/// Values of the model of the whole step: 100 MiB.
pub const STEP_VALUES: usize = 25 << 20;

/// Whole steps per sample.
pub const STEPS: u64 = 5;

/// Measures synchronous steps of two trainers, one lane each, on two pservers.
pub async fn steps() -> Sample {
    let job = synchronous().with("lanes = 1", "lanes = 2");
    let rig = rig(&job, SLOTS as u32, STEP_VALUES, Via::Tcp).await;
    let gradient = gradient(vec![0.5; STEP_VALUES]);
    let mut trainers = Vec::new();
    for _ in 0..TRAINERS {
        trainers.push((rig.other_pservers().await, vec![0.0; STEP_VALUES]));
    }
    let mut step = async |version: u64| {
        let each = trainers.iter_mut().enumerate().map(|(lane_number, (pservers, values))| {
            let lane_number = Lane(lane_number as u32);
            let name = lane(version, lane_number);
            let gradient = gradient.clone();
            async move {
                let pushed = pservers.push(name, gradient);
                let pulled = pservers.pull_step(Version(version + 1), values);
                let (pushed, pulled) = tokio::join!(pushed, pulled);
                pushed.expect("pservers take it");
                pulled.expect("pservers give it");
            }
        });
        join_all(each).await;
    };
    step(0).await;
    let watch = Watch::start(rig.pids());
    for version in 1..=STEPS {
        step(version).await;
    }
    watch.stop(STEPS as f64 * step_bytes())
}

/// Returns the bytes moved by a whole step.
pub fn step_bytes() -> f64 {
    (2 * TRAINERS * STEP_VALUES * size_of::<f32>()) as f64
}

/// Starts a job with a model of `values` values on [`SLOTS`] pservers.
pub async fn large(values: usize) -> Rig {
    rig(&synchronous(), SLOTS as u32, values, Via::Tcp).await
}

/// Starts a job with a model of `values` values on [`SLOTS`] pservers, whose slots spares may follow.
pub async fn large_to_follow(values: usize) -> Rig {
    let job = synchronous().with("seed = ", &format!("warm_spares = {SLOTS}\nseed = "));
    rig(&job, SLOTS as u32, values, Via::Tcp).await
}

/// Starts the same job, and spares, each of which follows a slot.
pub async fn large_followed(values: usize, spares: usize) -> Rig {
    let mut rig = large_to_follow(values).await;
    rig.follow_slots(spares);
    rig
}

/// Measures from the SIGKILL of a pserver whose slot is followed to the end of the next step.
pub async fn promote() -> Sample {
    let mut rig = large_followed(SMALL, SLOTS).await;
    let gradient = gradient(vec![0.5; SMALL]);
    let mut values = vec![0.0; SMALL];
    for version in 0..SMALL_STEPS {
        step(&rig, version, &gradient, &mut values).await;
    }
    let watch = Watch::start(Vec::new());
    rig.kill_pserver();
    rig.pull(&mut values).await;
    step(&rig, SMALL_STEPS, &gradient, &mut values).await;
    watch.stop(1.0)
}

/// Starts a job without trainers, with a spare pserver.
pub async fn waiting() -> Rig {
    let mut rig = rig(&synchronous(), 1, SMALL, Via::Tcp).await;
    rig.start_spare();
    rig
}

#[cfg(test)]
mod tests {
    use futures::future::try_join_all;

    use super::*;
    use crate::expense::peak_of;

    /// Number of trainers that push at once.
    const CROWD: usize = 24;

    /// F48: the memory of a pserver for concurrent gradients is bounded; other pushes wait at their senders,
    /// and all of them are applied.
    #[tokio::test(flavor = "multi_thread")]
    async fn simultaneous_gradients_take_bounded_memory() {
        let rig = rig(&asynchronous(), 1, VALUES, Via::Tcp).await;
        let gradient = gradient(vec![0.5; VALUES]);
        let mut crowd = Vec::new();
        for _ in 0..CROWD {
            crowd.push(rig.other_pservers().await);
        }
        let pushes = crowd.iter().enumerate().map(|(task, pservers)| {
            let range = RecordRange { task: TaskId(task as u32), ..first_record() };
            pservers.push(ContributionName::Range { range, version: Version(0) }, gradient.clone())
        });
        try_join_all(pushes).await.expect("the pserver takes all of them");
        let pserver = *rig.pids().last().expect("it is there");
        let (peak, one) = (peak_of(pserver), (VALUES * size_of::<f32>()) as u64);
        let all = CROWD as u64 * one;
        // The limit, the values twice, and the receive windows of the connections.
        let bound = (512 << 20) + 5 * one;
        assert!(peak < bound && bound < all, "{} MiB", peak >> 20);
    }
}
