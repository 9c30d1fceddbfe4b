//! Runs seeds, replays a seed with its trace, and shrinks failures.

use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use steadfast_common::job::spec;
use steadfast_sim::explore::{deaths, followed, moved, pairs, single_calls, singles, small};
use steadfast_sim::{
    Job, LARGE_STEPS, Mode, Outcome, Plan, closures, measure_masters, run, shrink,
};
use tracing_subscriber::filter::Targets;

/// Runs whole jobs in deterministic simulation: one seed determines the whole run.
#[derive(Debug, Parser)]
#[command(name = "steadfast-sim", version)]
struct Args {
    /// First seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of seeds.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Stop after this many minutes, even if seeds are left.
    #[arg(long)]
    minutes: Option<f64>,
    #[arg(long, default_value = "both")]
    mode: Modes,
    /// Stop at the first seed that fails.
    #[arg(long)]
    first: bool,
    /// Print the log of all processes; takes a log filter, such as `info,net=trace`.
    #[arg(long, num_args = 0..=1, default_missing_value = "info")]
    trace: Option<Targets>,
    /// Inject only these faults of the seed, by number.
    #[arg(long, value_delimiter = ',', num_args = 0..)]
    only: Option<Vec<usize>>,
    /// Disable failures of single calls and requests.
    #[arg(long)]
    no_network_faults: bool,
    /// Instead of seeds, run every STRIDE-th single deviation of a small job.
    #[arg(long, value_name = "STRIDE", num_args = 0..=1, default_missing_value = "1")]
    explore: Option<usize>,
    /// With --explore: only deviations of a single call.
    #[arg(long, requires = "explore")]
    calls: bool,
    /// With --explore: pairs of faults between transactions instead of single deviations.
    #[arg(long, requires = "explore", conflicts_with = "calls")]
    pairs: bool,
    /// With --explore: the death of each pserver, and each deviation of a call, of a small job whose number of slots
    /// changes.
    #[arg(long, requires = "explore", conflicts_with_all = ["calls", "pairs", "deaths"])]
    moves: bool,
    /// With --explore: the death of each pserver of a small job whose slots are followed.
    #[arg(long, requires = "explore", conflicts_with_all = ["calls", "pairs"])]
    deaths: bool,
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Instead of seeds, measure the master of jobs with so many trainers, and a tenth as many pservers.
    #[arg(long, value_name = "TRAINERS", value_delimiter = ',')]
    masters: Vec<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Modes {
    Sync,
    Async,
    Elastic,
    /// Synchronous and asynchronous training of models that crash on a record.
    Crashes,
    /// Programs with a coordinator, and their workers.
    Closures,
    /// The same, with closures that push to parameter servers.
    Pushes,
    /// Synchronous and asynchronous training.
    Both,
}

impl Modes {
    fn all(self) -> &'static [Mode] {
        match self {
            Self::Sync => &[Mode::Sync],
            Self::Async => &[Mode::Async],
            Self::Elastic => &[Mode::Elastic],
            // They are no jobs.
            Self::Closures | Self::Pushes => &[],
            Self::Crashes | Self::Both => &[Mode::Sync, Mode::Async],
        }
    }

    /// Returns the word for the mode on the command line.
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map(|it| it.get_name().to_owned()).unwrap_or_default()
    }
}

/// A seed that failed.
struct Failed {
    seed: u64,
    plan: Plan,
    outcome: Outcome,
}

/// Totals over all seeds.
#[derive(Default)]
struct Totals {
    jobs: AtomicU64,
    faults: AtomicU64,
    revisions: AtomicU64,
    pulls: AtomicU64,
    failed: Mutex<Vec<Failed>>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(filter) = &args.trace {
        steadfast_sim::print_to_stdout(filter);
    }
    if let Some(stride) = args.explore {
        return explore(&args, stride);
    }
    if args.mode == Modes::Pushes {
        return run_closures(&args, closures::run_with_parameters);
    }
    if args.mode == Modes::Closures {
        return run_closures(&args, closures::run);
    }
    if !args.masters.is_empty() {
        return measure(&args);
    }
    let (started, next, totals) = (Instant::now(), AtomicU64::new(args.seed), Totals::default());
    std::thread::scope(|scope| {
        for _ in 0..args.threads {
            scope.spawn(|| work(&args, started, &next, &totals));
        }
    });
    let (jobs, seconds) = (totals.jobs.into_inner(), started.elapsed().as_secs_f64());
    let failed = totals.failed.into_inner().expect("no holder panics");
    if let Some(first) = failed.iter().min_by_key(|it| it.seed).filter(|_| args.first) {
        println!("found: seed {} ({}): {}", first.seed, first.plan.mode_name(), brief(first));
    }
    println!(
        "{jobs} jobs in {seconds:.1} s ({:.0} a minute): {} faults, {} revisions, {} pulls \
         checked; {} failed",
        60.0 * jobs as f64 / seconds,
        totals.faults.into_inner(),
        totals.revisions.into_inner(),
        totals.pulls.into_inner(),
        failed.len()
    );
    ExitCode::from(u8::from(!failed.is_empty()))
}

/// Runs seeds of programs with a coordinator, one after the other.
fn run_closures(args: &Args, run: fn(u64) -> closures::Ledger) -> ExitCode {
    let started = Instant::now();
    let limit = args.minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes));
    let (mut count, mut failed) = (0, 0);
    for seed in args.seed..args.seed.saturating_add(args.seeds) {
        if limit.is_some_and(|limit| limit < started.elapsed()) {
            break;
        }
        let ledger = run(seed);
        count += 1;
        let Some(broken) = ledger.broken.first() else { continue };
        failed += 1;
        if args.first {
            println!("found: seed {seed} ({}): {broken}", args.mode.name());
            break;
        }
        println!("{} seed {seed} failed:\n  {}", args.mode.name(), ledger.broken.join("\n  "));
    }
    println!("{count} runs in {:.1} s, {failed} failed", started.elapsed().as_secs_f64());
    ExitCode::from(u8::from(0 < failed))
}

/// Prints how long the code of the master takes for each step of a synchronous job, and for each task of an
/// asynchronous one: the difference between a job of three passes and one of a single pass.
fn measure(args: &Args) -> ExitCode {
    println!("| mode | trainers | pservers | master, per step and trainer, or per task |");
    println!("|---|---|---|---|");
    let modes = args.mode.all().iter().filter_map(|mode| match mode {
        Mode::Sync => Some(spec::Mode::Sync),
        Mode::Async => Some(spec::Mode::Async),
        Mode::Elastic => None,
    });
    let each = modes.flat_map(|mode| args.masters.iter().map(move |trainers| (mode, *trainers)));
    for (mode, trainers) in each {
        let pservers = trainers.div_ceil(10);
        let took = [1, 3].map(|passes| {
            let plan = Plan::large(&Job::large(mode, trainers, passes), trainers, pservers);
            measure_masters(&plan)
        });
        if let Some(broken) = took.iter().find_map(|(outcome, _)| outcome.broken.first()) {
            println!("{trainers} trainers: {broken}");
            return ExitCode::FAILURE;
        }
        let (name, steps) = match mode {
            spec::Mode::Sync => ("sync", LARGE_STEPS),
            spec::Mode::Async => ("async", 1),
        };
        let times = 2.0 * f64::from(trainers) * steps as f64;
        let micros = (took[1].1.as_secs_f64() - took[0].1.as_secs_f64()) / times * 1e6;
        println!("| {name} | {trainers} | {pservers} | {micros:.1} µs |");
    }
    ExitCode::SUCCESS
}

/// Runs every deviation, on all threads.
fn explore(args: &Args, stride: usize) -> ExitCode {
    let mut failed = 0;
    let has_slots = args.deaths || args.moves;
    let modes = args.mode.all().iter().filter(|mode| !has_slots || **mode != Mode::Elastic);
    for mode in modes {
        let started = Instant::now();
        let (plan, turns) = match (args.deaths, args.moves) {
            (true, _) => (followed(*mode), None),
            (_, true) => moved(*mode),
            (false, false) => (small(*mode), None),
        };
        let first = args.seed as usize % stride.max(1);
        let routes = match (args.calls, args.pairs, args.deaths, args.moves) {
            (true, ..) => single_calls(&plan),
            (_, true, ..) => pairs(&plan, first, stride),
            (_, _, true, _) => deaths(&plan, turns, first, stride),
            (.., true) => {
                let calls = single_calls(&plan).into_iter().skip(first).step_by(stride);
                deaths(&plan, turns, first, stride).into_iter().chain(calls).collect()
            }
            (false, false, false, false) => singles(&plan, first, stride),
        };
        let (next, broken) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for _ in 0..args.threads {
                scope.spawn(|| {
                    while let Some(route) =
                        routes.get(next.fetch_add(1, Ordering::Relaxed) as usize)
                    {
                        let outcome = run(&plan.clone().with(route));
                        if outcome.broken.is_empty() {
                            continue;
                        }
                        let deviations: Vec<String> =
                            route.iter().map(ToString::to_string).collect();
                        let deviations = deviations.join(", ");
                        if args.first {
                            println!("found: {deviations} of a small job ({})", plan.mode_name());
                            next.store(u64::MAX / 2, Ordering::Relaxed);
                        }
                        println!("{deviations}\n{outcome}");
                        broken.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        let broken = broken.into_inner();
        let (count, seconds) = (routes.len(), started.elapsed().as_secs_f64());
        println!("{}: {count} runs in {seconds:.1} s, {broken} failed", plan.mode_name());
        failed += broken;
    }
    ExitCode::from(u8::from(0 < failed))
}

fn brief(failed: &Failed) -> String {
    let first = failed.outcome.broken.first().map_or("", |it| it.lines().next().unwrap_or(""));
    first.chars().take(100).collect()
}

fn work(args: &Args, started: Instant, next: &AtomicU64, totals: &Totals) {
    let limit = args.minutes.map(|minutes| Duration::from_secs_f64(60.0 * minutes));
    loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        let is_late = limit.is_some_and(|limit| limit < started.elapsed());
        if args.seed.saturating_add(args.seeds) <= seed || is_late {
            return;
        }
        for mode in args.mode.all() {
            let Some(plan) = plan(args, *mode, seed) else { continue };
            let outcome = run(&plan);
            totals.jobs.fetch_add(1, Ordering::Relaxed);
            totals.faults.fetch_add(outcome.faults as u64, Ordering::Relaxed);
            totals.revisions.fetch_add(outcome.revisions, Ordering::Relaxed);
            totals.pulls.fetch_add(outcome.pulls, Ordering::Relaxed);
            if args.seeds == 1 {
                println!("{plan}{outcome}");
            }
            if outcome.broken.is_empty() {
                continue;
            }
            if args.first {
                next.store(u64::MAX / 2, Ordering::Relaxed);
            } else {
                report(args, &plan, &outcome);
            }
            let failed = Failed { seed, plan, outcome };
            totals.failed.lock().expect("no holder panics").push(failed);
        }
    }
}

/// Returns the plan of a seed; `None` if no model may crash in it, but one has to.
fn plan(args: &Args, mode: Mode, seed: u64) -> Option<Plan> {
    let mut plan = Plan::of_seed(mode, seed);
    if args.mode == Modes::Crashes {
        plan = plan.with_crashes()?;
    }
    if let Some(only) = &args.only {
        plan = plan.with_only(only);
    }
    Some(if args.no_network_faults { plan.without_network_faults() } else { plan })
}

/// Prints a failure and the commands that replay it, in full and shrunk.
fn report(args: &Args, plan: &Plan, outcome: &Outcome) {
    let (seed, mode) = (plan.seed, plan.mode_name());
    let mode = if args.mode == Modes::Crashes { "crashes" } else { mode };
    let replay = format!("cargo run --release -p steadfast-sim -- --seed {seed} --mode {mode}");
    let broken = outcome.broken.join("\n  ");
    if args.trace.is_some() || args.only.is_some() {
        return println!("{mode} seed {seed} failed:\n  {broken}");
    }
    let smaller = shrink(plan, outcome);
    let only: Vec<String> = smaller.only.iter().map(ToString::to_string).collect();
    let fair = if smaller.is_fair { " --no-network-faults" } else { "" };
    println!(
        "{mode} seed {seed} failed:\n  {broken}\n  replay: {replay} --trace\n  shrunk: \
         {replay}{fair} --trace --only={}\n{}",
        only.join(","),
        smaller.plan
    );
}
