//! Whole jobs, from the command to its exit, and idle processes.

use std::time::Duration;

use steadfast_common::status::TimeBreakdown;
use steadfast_tests::{Job, Run, Scene};

use crate::expense::{cpu_of, peak_of};
use crate::sample::Sample;
use crate::watch::Watch;
use crate::wire;

/// How long idle processes are measured.
const IDLE: Duration = Duration::from_secs(10);

/// Measures one pass over the digits, twelve steps, with `steadfast local`: mostly start and exit.
pub fn start_and_end() -> Sample {
    let scene = Scene::new();
    let job = Job::small()
        .with("passes = 30", "passes = 1")
        .with("decay_steps = 340", "decay_steps = 12");
    let watch = Watch::start(Vec::new());
    Run::start(&scene, &job, &[]).finish();
    watch.stop(1.0)
}

/// Passes over the digits, of one step each.
const PASSES: u32 = 150;

/// Measures the time of trainers in a job of 1.1 million parameters on two trainers and two pservers, per
/// second of computing gradients.
pub fn digits() -> Sample {
    let scene = Scene::new();
    let job = Job::example("digits")
        .with("hidden = [128, 64]", "hidden = [1024, 1024]")
        .with("passes = 120", &format!("passes = {PASSES}"))
        .with("micro_batch = 16 ", "micro_batch = 180")
        .with("decay_steps = 1400", &format!("decay_steps = {PASSES}"))
        .with("fraction = 0.2", &format!("fraction = 0.2\nevery_passes = {PASSES}"));
    let watch = Watch::start(Vec::new());
    let summary = Run::start(&scene, &job, &[]).finish();
    let time_breakdown: TimeBreakdown =
        serde_json::from_value(summary["time_breakdown"].clone()).expect("it was measured");
    Sample { amount: time_breakdown.compute, seconds: time_breakdown.total(), ..watch.stop(1.0) }
}

/// Measures the most expensive of a master, a pserver and a spare while no trainer works: CPU time per
/// elapsed time, and memory.
pub async fn idle() -> Sample {
    let rig = wire::waiting().await;
    let pids = rig.pids();
    let before: Vec<f64> = pids.iter().map(|pid| cpu_of(*pid)).collect();
    tokio::time::sleep(IDLE).await;
    let costs = pids.iter().zip(before).map(|(pid, before)| cpu_of(*pid) - before);
    Sample {
        amount: IDLE.as_secs_f64(),
        // CPU time below one tick of the kernel's clock is not measurable.
        seconds: costs.fold(0.01, f64::max),
        peak_bytes: pids.iter().map(|pid| peak_of(*pid)).max().unwrap_or(0),
        ..Sample::default()
    }
}
