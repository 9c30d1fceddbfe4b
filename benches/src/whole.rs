//! Whole jobs, from the command to its exit, and processes that wait.

use std::time::Duration;

use steadfast_tests::{Job, Run, Scene};

use crate::expense::{cpu_of, peak_of};
use crate::sample::Sample;
use crate::watch::Watch;
use crate::wire;

/// How long waiting processes are watched.
const IDLE: Duration = Duration::from_secs(10);

/// One pass over the digits, twelve steps, with `steadfast local`: little more than start and end.
pub fn start_and_end() -> Sample {
    let scene = Scene::new();
    let job = Job::small()
        .with("passes = 30", "passes = 1")
        .with("decay_steps = 340", "decay_steps = 12");
    let watch = Watch::start(Vec::new());
    Run::start(&scene, &job, &[]).finish();
    watch.stop(1.0)
}

/// The one that costs most of a master, a pserver, and a pserver in reserve, while no trainer works:
/// its CPU time against the time that passed, and its memory.
pub async fn idle() -> Sample {
    let rig = wire::waiting().await;
    let pids = rig.pids();
    let before: Vec<f64> = pids.iter().map(|pid| cpu_of(*pid)).collect();
    tokio::time::sleep(IDLE).await;
    let costs = pids.iter().zip(before).map(|(pid, before)| cpu_of(*pid) - before);
    Sample {
        amount: IDLE.as_secs_f64(),
        // Below one tick of the system's clock there is nothing to see.
        seconds: costs.fold(0.01, f64::max),
        peak_bytes: pids.iter().map(|pid| peak_of(*pid)).max().unwrap_or(0),
        ..Sample::default()
    }
}
