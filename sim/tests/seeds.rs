//! Seeds that must pass in every build: those that found a defect once, and fresh ones.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use steadfast_common::job::spec::DataFormat;
use steadfast_sim::explore::{
    Deviation, deaths, followed, moved, pairs, single_calls, singles, small,
};
use steadfast_sim::{Fault, Member, Mode, Plan, Role, Workload, record, run, shrink};

const MODES: [Mode; 3] = [Mode::Sync, Mode::Async, Mode::Elastic];

/// How long fresh seeds are run; overridden by `SIM_MINUTES`.
const MINUTES: f64 = 0.5;

/// Seeds that found a defect, with the defect. The run of a seed changes with every change in the number
/// of messages; `make mutants` verifies that each defect of `sim/mutations.toml` is still found.
const FOUND: &[(Mode, u64, &str)] = &[
    (Mode::Sync, 3, "the result named a checkpoint that had been deleted"),
    (Mode::Sync, 12, "the saver waited for a version of an earlier generation"),
    (Mode::Sync, 291, "a truncated manifest kept a job from starting"),
    (Mode::Async, 5, "a dead trainer blocked the others at the staleness gate"),
    (Mode::Async, 117, "a delayed duplicate of a request held a task until its deadline"),
    (
        Mode::Sync,
        1_795_313_661_163,
        "a job could continue from a generation that it had abandoned twice",
    ),
    (
        Mode::Async,
        1_795_314_710_990,
        "a delayed duplicate of a request claimed a second slot, which was not served",
    ),
    (
        Mode::Sync,
        1_795_738_360_466,
        "a master whose request for the lock had no reply waited for itself",
    ),
    (
        Mode::Elastic,
        1_795_750_700_582,
        "a job that faults left short of nodes for its join timeout was taken for a defect",
    ),
    (
        Mode::Elastic,
        1_795_908_265_618,
        "six workers that failed in each tenth step did not reach the next commit in time",
    ),
    (
        Mode::Sync,
        1_796_000_200_410,
        "a step that waited for its norm waited without end after a follower took over",
    ),
    (
        Mode::Sync,
        463,
        "the saver of the generation before kept that of the present one from its final checkpoint",
    ),
];

fn replay_command(plan: &Plan) -> String {
    let (seed, mode) = (plan.seed, plan.mode_name());
    format!("cargo run --release -p steadfast-sim -- --seed {seed} --mode {mode} --trace")
}

/// I1 … I10, I12
#[test]
fn seeds_that_once_failed_pass() {
    for (mode, seed, what) in FOUND {
        let plan = Plan::of_seed(*mode, *seed);
        let outcome = run(&plan);
        assert!(outcome.broken.is_empty(), "{what}\n{}\n{plan}{outcome}", replay_command(&plan));
    }
}

/// F9, I6, I7: a record on which the model crashes, as it is trained on or evaluated, is left out, in synchronous jobs with
/// the same bits, whatever else fails; and nothing else is.
#[test]
fn a_record_that_crashes_its_process_is_left_out_whatever_else_fails() {
    for mode in [Mode::Sync, Mode::Async] {
        let plans = (1..=80).filter_map(|seed| Plan::of_seed(mode, seed).with_crashes());
        let plans: Vec<Plan> = plans.collect();
        assert!(20 < plans.len(), "{}", plans.len());
        for plan in plans {
            let outcome = run(&plan);
            assert!(outcome.broken.is_empty(), "{}\n{plan}{outcome}", replay_command(&plan));
        }
    }
}

/// I1 … I10, I12: a job may have more slots than etcd takes conditions in a transaction, 128.
#[test]
fn a_job_of_more_slots_than_a_transaction_takes_survives_the_loss_of_one() {
    let mut plan = small(Mode::Sync);
    plan.shape.slots = 136;
    plan.shape.pservers = 136;
    let last = Member { role: Role::Pserver, number: 135 };
    plan.faults = [1, 2].map(|second| (Duration::from_secs(second), Fault::Kill(last))).to_vec();
    let outcome = run(&plan);
    assert!(outcome.broken.is_empty(), "{plan}{outcome}");
    assert!(2 <= outcome.generations, "{outcome}");
}

/// I10: evaluations reduce the learning rate of the same steps, whatever fails.
#[test]
fn a_learning_rate_that_evaluations_reduce_is_the_same_whatever_fails() {
    let reduces = |plan: &Plan| match &plan.job {
        Workload::Training(job) => job.spec.evaluation.reduce_on_plateau.is_some(),
        Workload::Elastic(_) => false,
    };
    for plan in (1..).map(|seed| Plan::of_seed(Mode::Sync, seed)).filter(reduces).take(20) {
        let (outcome, recording) = record(&plan);
        assert!(outcome.broken.is_empty(), "{plan}{outcome}");
        let changes = recording.revisions.iter().flat_map(|it| &it.changes);
        let mut values = changes.filter_map(|it| it.value.as_ref());
        assert!(values.any(|it| it.contains("\"reductions\":[")), "{plan}{outcome}");
    }
}

/// I1 … I10: formats that are decoded on threads, which fetch what they need meanwhile, are simulated as well.
#[test]
fn a_job_with_records_of_any_format_survives_the_loss_of_a_trainer() {
    for format in [DataFormat::Parquet, DataFormat::Jsonl, DataFormat::Tfrecord, DataFormat::Tsv] {
        let mut plan = small(Mode::Sync);
        if let Workload::Training(job) = &mut plan.job {
            **job = job.as_ref().clone().in_format(format);
        }
        let trainer = Member { role: Role::Trainer, number: 0 };
        plan.faults = vec![(Duration::from_secs(1), Fault::Kill(trainer))];
        let outcome = run(&plan);
        assert!(outcome.broken.is_empty(), "{format:?}\n{plan}{outcome}");
    }
}

/// F9: a task whose data cannot be reached is tried again without counting a failure, in both modes.
#[test]
fn a_store_that_fails_gives_no_task_up() {
    for mode in [Mode::Sync, Mode::Async] {
        for tenth in 0..20 {
            let mut plan = small(mode);
            if let Workload::Training(job) = &mut plan.job {
                job.spec.tasks.failures_max = 0;
            }
            let errors = Fault::StoreErrors(Duration::from_mins(2));
            plan.faults = vec![(Duration::from_millis(100 * tenth), errors)];
            let outcome = run(&plan);
            assert!(outcome.broken.is_empty(), "{plan}{outcome}");
        }
    }
}

/// I1 … I10, I12, F42
#[test]
fn fresh_seeds_pass() {
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
        panic!("{}\n{plan}{outcome}shrunk:\n{}", replay_command(plan), smaller.plan);
    }
}

/// Nothing but the seed may influence a run; otherwise it could not be replayed.
#[test]
fn a_seed_gives_the_same_run_each_time() {
    for seed in 1..=20 {
        for mode in MODES {
            let plan = Plan::of_seed(mode, seed);
            let (first, second) = (run(&plan), run(&plan));
            assert_eq!(first, second, "{}", replay_command(&plan));
        }
    }
}

#[test]
fn seeds_differ_in_their_runs() {
    let digest = |seed| run(&Plan::of_seed(Mode::Async, seed)).digest;
    assert_ne!(digest(1), digest(2));
}

/// Runs each list of deviations, on all threads.
fn all_hold(plan: &Plan, routes: &[Vec<Deviation>]) {
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

/// F25, F26: outcomes of single calls, every third of all. A delayed duplicate of an initial value once made a
/// pserver lose its first step. `steadfast-sim --explore --calls` runs all of them.
#[test]
fn no_single_broken_or_late_call_changes_anything() {
    for mode in MODES {
        let plan = small(mode);
        let third: Vec<_> = single_calls(&plan).into_iter().skip(1).step_by(3).collect();
        all_hold(&plan, &third);
    }
}

/// Crashes, pauses and other task orders, at every 149th of the possible places in a small job.
/// `steadfast-sim --explore` runs all of them.
#[test]
fn single_deviations_of_a_small_job_change_nothing() {
    for mode in MODES {
        let plan = small(mode);
        all_hold(&plan, &singles(&plan, 11, 149));
    }
}

/// The death of a pserver whose slot is followed, or that follows one, at every 997th of the possible places in a small job.
/// `steadfast-sim --explore --deaths` runs all of them.
///
/// I1, I5, I7, I12
#[test]
fn the_death_of_a_pserver_changes_nothing_while_slots_are_followed() {
    for mode in [Mode::Sync, Mode::Async] {
        let plan = followed(mode);
        all_hold(&plan, &deaths(&plan, None, 7, 997));
    }
}

/// The death of a pserver at some of the possible places in a small job whose number of slots changes, and every 101st of
/// the possible deviations of a call. `steadfast-sim --explore --moves` runs all of them.
///
/// I1, I5, I7, I12
#[test]
fn a_fault_changes_nothing_while_the_number_of_slots_changes() {
    for (mode, stride) in [(Mode::Sync, 101), (Mode::Async, 997)] {
        let (plan, turns) = moved(mode);
        assert!(1 < run(&plan).generations, "its slots change");
        all_hold(&plan, &deaths(&plan, turns, 7, stride));
        let calls: Vec<_> = single_calls(&plan).into_iter().skip(3).step_by(101).collect();
        all_hold(&plan, &calls);
    }
}

/// Pairs of faults between the transactions that implement the lock, the slots and the generations: every
/// 397th pair. `steadfast-sim --explore --pairs` runs all of them.
///
/// I1, I5, I9, I12
#[test]
fn two_faults_between_transactions_change_nothing() {
    for mode in MODES {
        let plan = small(mode);
        all_hold(&plan, &pairs(&plan, 5, 397));
    }
}
