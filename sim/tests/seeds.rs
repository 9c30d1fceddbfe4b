//! Seeds that every build has to survive: those that found something once, and fresh ones.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use steadfast_sim::explore::{Detour, pairs, single_calls, singles, small};
use steadfast_sim::{Mode, Plan, run, shrink};

const MODES: [Mode; 2] = [Mode::Sync, Mode::Async];

/// How long fresh seeds are tried; `SIM_MINUTES` says otherwise.
const MINUTES: f64 = 2.0;

/// Seeds that show a fault that there was, when it is put back in (`sim/mutations.toml`), and which
/// one. What a seed stands for changes whenever a message more or less is sent; that each fault is
/// still found is what `make mutants` shows.
const FOUND: &[(Mode, u64, &str)] = &[
    (Mode::Sync, 12, "whoever saved the model waited for a version of an earlier generation"),
    (Mode::Sync, 291, "a manifest whose upload was cut short kept a job from ever starting"),
    (Mode::Async, 5, "a trainer that was gone held the others up at the staleness gate"),
    (Mode::Async, 117, "a late request kept a task until its deadline"),
    (Mode::Sync, 1_795_313_661_163, "a job could go on from a future that it had left twice"),
    (Mode::Async, 1_795_314_710_990, "a late request took a second slot, which nobody served"),
];

fn see_it(plan: &Plan) -> String {
    let (seed, mode) = (plan.seed, plan.mode_name());
    format!("cargo run --release -p steadfast-sim -- --seed {seed} --mode {mode} --story")
}

/// I1 … I10, I12
#[test]
fn seeds_that_found_something_once_find_nothing() {
    for (mode, seed, what) in FOUND {
        let plan = Plan::of_seed(*mode, *seed);
        let outcome = run(&plan);
        assert!(outcome.broken.is_empty(), "{what}\n{}\n{plan}{outcome}", see_it(&plan));
    }
}

/// I1 … I10, I12, F42
#[test]
fn fresh_seeds_find_nothing() {
    let minutes = std::env::var("SIM_MINUTES").ok().and_then(|it| it.parse().ok());
    let limit = Duration::from_secs_f64(60.0 * minutes.unwrap_or(MINUTES));
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("a calendar after 1970");
    let (started, next) = (Instant::now(), AtomicU64::new(since.as_millis() as u64));
    let (jobs, failed) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while started.elapsed() < limit && failed.lock().expect("no panic").is_empty() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    for mode in MODES {
                        let plan = Plan::of_seed(mode, seed);
                        let outcome = run(&plan);
                        jobs.fetch_add(1, Ordering::Relaxed);
                        if !outcome.broken.is_empty() {
                            failed.lock().expect("no panic").push((plan, outcome));
                        }
                    }
                }
            });
        }
    });
    println!("{} jobs were simulated", jobs.into_inner());
    if let Some((plan, outcome)) = failed.into_inner().expect("no panic").first() {
        let smaller = shrink(plan, outcome);
        panic!("{}\n{plan}{outcome}with less:\n{}", see_it(plan), smaller.plan);
    }
}

/// Whatever decided what happens besides the seed would be a hole in every replay.
#[test]
fn a_seed_gives_the_same_run_each_time() {
    for seed in 1..=60 {
        for mode in MODES {
            let plan = Plan::of_seed(mode, seed);
            let (first, second) = (run(&plan), run(&plan));
            assert_eq!(first, second, "{}", see_it(&plan));
        }
    }
}

#[test]
fn seeds_differ_in_their_runs() {
    let digest = |seed| run(&Plan::of_seed(Mode::Async, seed)).digest;
    assert_ne!(digest(1), digest(2));
}

/// Takes each way, with its detours, on all threads.
fn all_hold(plan: &Plan, routes: &[Vec<Detour>]) {
    let (next, failed) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(route) = routes.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
                    let outcome = run(&plan.clone().with(route));
                    if !outcome.broken.is_empty() {
                        failed.lock().expect("no panic").push(format!("{route:?}\n{outcome}"));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().expect("no panic");
    assert!(failed.is_empty(), "{} small job\n{}", plan.mode_name(), failed.join("\n"));
}

/// F25, F26: whatever becomes of whichever call. A first value that came twice, the second time late,
/// once made a pserver forget its first step.
#[test]
fn no_single_call_that_breaks_or_comes_late_changes_anything() {
    for mode in MODES {
        let plan = small(mode);
        all_hold(&plan, &single_calls(&plan));
    }
}

/// A crash, a pause, another order of tasks: one in some hundred of all places where each can be in a
/// small job. `steadfast-sim --explore` tries every one.
#[test]
fn single_detours_of_a_small_job_change_nothing() {
    for mode in MODES {
        let plan = small(mode);
        all_hold(&plan, &singles(&plan, 11, 149));
    }
}

/// Two faults between the transactions that lock, slots and generations are made of: one in some
/// hundred of all pairs. `steadfast-sim --explore --pairs` tries every one.
///
/// I1, I5, I9, I12
#[test]
fn two_faults_between_transactions_change_nothing() {
    for mode in MODES {
        let plan = small(mode);
        all_hold(&plan, &pairs(&plan, 5, 397));
    }
}
