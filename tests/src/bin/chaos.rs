//! Runs seeded schedules of faults one after another, until the time is over or one run fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use steadfast_common::spec::Mode;
use steadfast_tests::faults::{Kind, Outcome, Schedule, Shape, World};
use steadfast_tests::{Run, Scene};

/// What an asynchronous job reaches whatever happens to it.
const METRIC_MIN: f64 = 0.94;

#[derive(Debug, Parser)]
#[command(name = "chaos", about = "Runs jobs under seeded schedules of faults")]
struct Args {
    /// Seed of the first schedule; the next ones have the seeds after it.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long to begin new runs.
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
    /// Run this schedule, once, and no other.
    #[arg(long)]
    schedule: Option<Schedule>,
    #[arg(long, default_value = "sync")]
    mode: ModeArg,
    /// Faults in a random schedule.
    #[arg(long, default_value_t = 12)]
    count: usize,
    /// Kinds of faults in a random schedule, by name [default: all].
    #[arg(long, value_delimiter = ',', value_parser = kind)]
    kinds: Vec<Kind>,
    /// Members of etcd.
    #[arg(long, default_value_t = 3)]
    etcd: u32,
    #[arg(long, default_value_t = 2)]
    masters: u32,
    /// Slots.
    #[arg(long, default_value_t = 2)]
    pservers: u32,
    /// Pservers beyond the slots.
    #[arg(long, default_value_t = 1)]
    spares: u32,
    #[arg(long, default_value_t = 3)]
    trainers: u32,
    /// Seconds.
    #[arg(long, default_value_t = 2)]
    lease_ttl: u32,
    /// Tell what happened also where nothing failed.
    #[arg(long)]
    story: bool,
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
    let patience = Duration::from_secs_f64(60.0 * args.minutes);
    let started = Instant::now();
    for seed in args.seed.. {
        let random = || Schedule::random(seed, args.count, &kinds, &shape);
        let schedule = args.schedule.clone().unwrap_or_else(random);
        let run = AssertUnwindSafe(|| run(&shape, seed, &schedule, expected.as_deref()));
        match catch_unwind(run) {
            Ok((faults, outcome)) => {
                if args.story {
                    println!("{}", outcome.story.join("\n"));
                }
                println!("{}", line(seed, faults, &outcome));
            }
            Err(_) => {
                println!("seed {seed}: FAILED: {}", shape.command(Some(seed), &schedule));
                return ExitCode::FAILURE;
            }
        }
        if args.schedule.is_some() || patience <= started.elapsed() {
            break;
        }
    }
    ExitCode::SUCCESS
}

/// The parameters of the job if nothing disturbs it.
fn undisturbed(shape: &Shape) -> String {
    let scene = Scene::new();
    let summary = Run::to_end(&scene, &shape.job(), "data", &[]);
    summary["parameters_sha256"].as_str().unwrap_or_default().to_owned()
}

fn run(shape: &Shape, seed: u64, schedule: &Schedule, expected: Option<&str>) -> (usize, Outcome) {
    let scene = Scene::new();
    let mut world = World::start(&scene, shape.clone());
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
        "seed {seed}: survived {faults} faults in {:.1} s: {} reigns, {} generations, {} checkpoints; ends: {:?}",
        outcome.wall.as_secs_f64(),
        history["reigns"],
        history["generations"],
        history["checkpoints"],
        outcome.ends,
    )
}
