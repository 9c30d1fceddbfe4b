//! Runs seeded fault schedules one after another, until the time is over or a run fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use steadfast_common::spec::Mode;
use steadfast_tests::faults::{FaultTarget, Kind, Outcome, Schedule, Shape};
use steadfast_tests::{Run, Scene};

/// Metric that an asynchronous job must reach under any schedule.
const METRIC_MIN: f64 = 0.94;

#[derive(Debug, Parser)]
#[command(name = "chaos", about = "Runs jobs under seeded fault schedules")]
struct Args {
    /// Seed of the first schedule; the seed increases by one with each run.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Start new runs for this many minutes.
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
    /// Run only this schedule, once.
    #[arg(long)]
    schedule: Option<Schedule>,
    #[arg(long, default_value = "sync")]
    mode: ModeArg,
    /// Number of faults in a random schedule.
    #[arg(long, default_value_t = 12)]
    count: usize,
    /// Kinds of faults in random schedules, by name [default: all].
    #[arg(long, value_delimiter = ',', value_parser = kind)]
    kinds: Vec<Kind>,
    /// Number of etcd members.
    #[arg(long, default_value_t = 3)]
    etcd: u32,
    #[arg(long, default_value_t = 2)]
    masters: u32,
    /// Number of slots.
    #[arg(long, default_value_t = 2)]
    pservers: u32,
    /// Number of spare pservers.
    #[arg(long, default_value_t = 1)]
    spares: u32,
    #[arg(long, default_value_t = 3)]
    trainers: u32,
    /// Lease TTL in seconds.
    #[arg(long, default_value_t = 2)]
    lease_ttl: u32,
    /// Print the event log of successful runs, too.
    #[arg(long)]
    trace: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeArg {
    Sync,
    Async,
}

fn kind(text: &str) -> Result<Kind, String> {
    let found = Kind::ALL.into_iter().find(|it| it.name() == text);
    found.ok_or_else(|| format!("use one of {}", Kind::ALL.map(Kind::name).join(", ")))
}

fn main() -> ExitCode {
    let args = Args::parse();
    let shape = Shape {
        mode: match args.mode {
            ModeArg::Sync => Mode::Sync,
            ModeArg::Async => Mode::Async,
        },
        etcd: args.etcd,
        masters: args.masters,
        pservers: args.pservers,
        spares: args.spares,
        trainers: args.trainers,
        lease_ttl_s: args.lease_ttl,
    };
    let expected = match shape.mode {
        Mode::Sync => Some(undisturbed(&shape)),
        Mode::Async => None,
    };
    let kinds = if args.kinds.is_empty() { Kind::ALL.to_vec() } else { args.kinds.clone() };
    let limit = Duration::from_secs_f64(60.0 * args.minutes);
    let started = Instant::now();
    for seed in args.seed.. {
        let random = || Schedule::random(seed, args.count, &kinds, &shape);
        let schedule = args.schedule.clone().unwrap_or_else(random);
        let run = AssertUnwindSafe(|| run(&shape, seed, &schedule, expected.as_deref()));
        match catch_unwind(run) {
            Ok((faults, outcome)) => {
                if args.trace {
                    println!("{}", outcome.trace.join("\n"));
                }
                println!("{}", line(seed, faults, &outcome));
            }
            Err(_) => {
                println!("seed {seed}: FAILED: {}", shape.command(Some(seed), &schedule));
                return ExitCode::FAILURE;
            }
        }
        if args.schedule.is_some() || limit <= started.elapsed() {
            break;
        }
    }
    ExitCode::SUCCESS
}

/// Returns the SHA-256 of the parameters after an undisturbed run.
fn undisturbed(shape: &Shape) -> String {
    let scene = Scene::new();
    let summary = Run::to_end(&scene, &shape.job(), "data", &[]);
    summary["parameters_sha256"].as_str().unwrap_or_default().to_owned()
}

fn run(shape: &Shape, seed: u64, schedule: &Schedule, expected: Option<&str>) -> (usize, Outcome) {
    let scene = Scene::new();
    let mut world = FaultTarget::start(&scene, shape.clone());
    let faults = world.run(Some(seed), schedule);
    let outcome = world.finish_as(|outcome| match expected {
        Some(expected) => assert_eq!(outcome.sha, expected, "the parameters differ"),
        None => {
            let metric = outcome.result["metric"].as_f64().unwrap_or_default();
            assert!(METRIC_MIN <= metric, "{}", outcome.result);
        }
    });
    (faults, outcome)
}

fn line(seed: u64, faults: usize, outcome: &Outcome) -> String {
    let history = &outcome.audit["history"];
    format!(
        "seed {seed}: survived {faults} faults in {:.1} s: {} terms, {} generations, {} checkpoints; ends: {:?}",
        outcome.wall.as_secs_f64(),
        history["terms"],
        history["generations"],
        history["checkpoints"],
        outcome.ends,
    )
}
