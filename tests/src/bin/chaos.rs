//! Runs seeded fault schedules one after another, until the time is over or a run fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use serde_json::Value;
use steadfast_common::job::spec::Mode;
use steadfast_common::records::commits::RecordOrder;
use steadfast_tests::faults::{
    ElasticOutcome, ElasticShape, ElasticTarget, FILE_RECORDS, FaultTarget, Feed, Kind, Outcome,
    Schedule, Shape, Soak, Usage, Workload,
};
use steadfast_tests::{Run, Scene, enter_router, within};

/// How long a stream may take without faults, with all its files there at the start.
const UNDISTURBED_MAX: Duration = Duration::from_secs(1200);

/// Faults of random schedules of an elastic job. Those that are listed several times are more frequent.
const ELASTIC_KINDS: [Kind; 12] = [
    Kind::Kill,
    Kind::Kill,
    Kind::Kill,
    Kind::Pause,
    Kind::Pause,
    Kind::Leave,
    Kind::Join,
    Kind::Cut,
    Kind::EtcdKillLeader,
    Kind::EtcdMoveLeader,
    Kind::Scale,
    Kind::Scale,
];

#[derive(Debug, Parser)]
#[command(name = "chaos", about = "Runs jobs under seeded fault schedules")]
struct Args {
    /// Seed of the first schedule; the seed increases by one with each run.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Start new runs for this many minutes; a stream is one run of this length.
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
    /// Run only this schedule, once.
    #[arg(long)]
    schedule: Option<Schedule>,
    #[arg(long, default_value = "sync")]
    mode: ModeArg,
    /// What is trained in synchronous and asynchronous mode.
    #[arg(long, default_value = "digits")]
    job: Workload,
    /// Number of faults in a random schedule.
    #[arg(long, default_value_t = 12)]
    count: usize,
    /// Kinds of faults in random schedules, by name [default: all; in elastic mode, those that take no longer than
    /// a lease].
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
    /// Number of spare pservers; in elastic mode, of nodes that are added by faults.
    #[arg(long, default_value_t = 1)]
    spares: u32,
    /// Number of slots that spares follow, which is at most that of spares.
    #[arg(long, default_value_t = 0)]
    warm_spares: u32,
    #[arg(long, default_value_t = 3)]
    trainers: u32,
    /// Number of nodes at the start (elastic mode).
    #[arg(long, default_value_t = 3)]
    agents: u32,
    /// Number of workers of each node (elastic mode).
    #[arg(long, default_value_t = 1)]
    workers: u32,
    /// Number of steps of the job (elastic mode).
    #[arg(long, default_value_t = 500)]
    steps: u64,
    /// A Python that has PyTorch and the package `steadfast` (elastic mode).
    #[arg(long, default_value = "target/python-tests/bin/python")]
    python: PathBuf,
    /// Lease TTL in seconds.
    #[arg(long, default_value_t = 2)]
    lease_ttl: u32,
    /// Give each process of a training job a network of its own, and drop packets of one direction as well; needs root.
    #[arg(long)]
    hosts: bool,
    /// Start new runs until there were this many faults, whatever --minutes says.
    #[arg(long)]
    faults: Option<usize>,
    /// Print the event log of successful runs, too.
    #[arg(long)]
    trace: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeArg {
    Sync,
    Async,
    Elastic,
}

fn kind(text: &str) -> Result<Kind, String> {
    let names = || {
        Kind::ALL
            .into_iter()
            .chain([Kind::Join, Kind::Scale, Kind::Mute])
            .map(Kind::name)
            .collect::<Vec<_>>()
    };
    Kind::named(text).ok_or_else(|| format!("use one of {}", names().join(", ")))
}

fn main() -> ExitCode {
    let args = Args::parse();
    let mode = match args.mode {
        ModeArg::Sync => Mode::Sync,
        ModeArg::Async => Mode::Async,
        ModeArg::Elastic => return elastic(&args),
    };
    let shape = Shape {
        workload: args.job,
        mode,
        etcd: args.etcd,
        masters: args.masters,
        pservers: args.pservers,
        spares: args.spares,
        warm_spares: args.warm_spares,
        trainers: args.trainers,
        lease_ttl_s: args.lease_ttl,
        hosts: args.hosts,
    };
    if args.hosts
        && let Err(reason) = enter_router()
    {
        eprintln!("chaos: error: --hosts needs networks of its own (run it as root): {reason}");
        return ExitCode::from(2);
    }
    let kinds = match (args.kinds.is_empty(), args.hosts) {
        (true, true) => Kind::ALL.into_iter().chain([Kind::Mute]).collect(),
        (true, false) => Kind::ALL.to_vec(),
        (false, _) => args.kinds.clone(),
    };
    if args.job == Workload::Stream {
        return stream(&args, &shape, &kinds);
    }
    let expected = match mode {
        // Spares must not change the result.
        Mode::Sync => Some(undisturbed(&Shape { warm_spares: 0, ..shape.clone() })),
        Mode::Async => None,
    };
    let random = |seed| Schedule::random(seed, args.count, &kinds, &shape);
    repeat(&args, random, |seed, schedule| {
        let run = AssertUnwindSafe(|| run(&shape, seed, schedule, expected.as_deref()));
        let (faults, outcome) =
            catch_unwind(run).map_err(|_| shape.command(Some(seed), schedule))?;
        Ok((outcome.trace.clone(), line(seed, faults, &outcome), faults))
    })
}

fn elastic(args: &Args) -> ExitCode {
    if args.hosts {
        eprintln!(
            "chaos: error: --hosts is for training jobs; leave it out, or choose another --mode"
        );
        return ExitCode::from(2);
    }
    let shape = ElasticShape {
        etcd: args.etcd,
        masters: args.masters,
        agents: args.agents,
        spares: args.spares,
        workers: args.workers,
        lease_ttl_s: args.lease_ttl,
        steps: args.steps,
        python: args.python.clone(),
    };
    if let Err(message) = check(&shape) {
        eprintln!("chaos: error: {message}");
        return ExitCode::from(2);
    }
    // Workers run in directories of their own.
    let python = std::path::absolute(&shape.python).unwrap_or(shape.python);
    let shape = ElasticShape { python, ..shape };
    let kinds = if args.kinds.is_empty() { ELASTIC_KINDS.to_vec() } else { args.kinds.clone() };
    let random = |seed| Schedule::random(seed, args.count, &kinds, &shape);
    repeat(args, random, |seed, schedule| {
        let run = AssertUnwindSafe(|| run_elastic(&shape, seed, schedule));
        let (faults, outcome) =
            catch_unwind(run).map_err(|_| shape.command(Some(seed), schedule))?;
        Ok((outcome.trace.clone(), elastic_line(seed, faults, &outcome), faults))
    })
}

/// Checks what an elastic job needs.
fn check(shape: &ElasticShape) -> Result<(), String> {
    for (flag, value) in
        [("agents", shape.agents), ("workers", shape.workers), ("masters", shape.masters)]
    {
        if value == 0 {
            return Err(format!("--{flag} is 0; use at least 1"));
        }
    }
    let python = shape.python.display();
    let remedy = "run `make test-python`, or name a Python that has both with --python";
    let imports = "import torch, steadfast.elastic";
    let output = Command::new(&shape.python).args(["-c", imports]).output();
    let output = output.map_err(|error| format!("cannot start {python}: {error}; {remedy}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        let reason = stderr.lines().last().unwrap_or("no reason");
        return Err(format!("{python} cannot import torch and steadfast: {reason}; {remedy}"));
    }
    Ok(())
}

/// Runs one schedule after another. A run returns its event log, its summary and its number of faults or, if it failed,
/// the command that repeats it.
fn repeat(
    args: &Args,
    random: impl Fn(u64) -> Schedule,
    run: impl Fn(u64, &Schedule) -> Result<(Vec<String>, String, usize), String>,
) -> ExitCode {
    let limit = Duration::from_secs_f64(60.0 * args.minutes);
    let (started, mut all) = (Instant::now(), 0);
    for seed in args.seed.. {
        let schedule = args.schedule.clone().unwrap_or_else(|| random(seed));
        match run(seed, &schedule) {
            Ok((trace, summary, faults)) => {
                all += faults;
                if args.trace {
                    println!("{}", trace.join("\n"));
                }
                println!("{summary}");
            }
            Err(command) => {
                println!("seed {seed}: FAILED: {command}");
                return ExitCode::FAILURE;
            }
        }
        let is_enough = match args.faults {
            Some(wanted) => wanted <= all,
            None => limit <= started.elapsed(),
        };
        if args.schedule.is_some() || is_enough {
            println!("{all} faults in {:.1} minutes", started.elapsed().as_secs_f64() / 60.0);
            break;
        }
    }
    ExitCode::SUCCESS
}

/// Returns the SHA-256 of the parameters after an undisturbed run.
fn undisturbed(shape: &Shape) -> String {
    let scene = Scene::new();
    sha(&Run::to_end(&scene, &shape.job(&scene), "data", &[]))
}

fn sha(result: &Value) -> String {
    result["parameters_sha256"].as_str().unwrap_or_default().to_owned()
}

/// Runs one stream under faults, and prints each minute what it takes.
fn stream(args: &Args, shape: &Shape, kinds: &[Kind]) -> ExitCode {
    if args.schedule.is_some() {
        eprintln!(
            "chaos: error: --schedule is given with --job stream, whose faults follow from --seed"
        );
        return ExitCode::from(2);
    }
    let length = Duration::from_secs_f64(60.0 * args.minutes);
    let scene = Scene::new();
    let run = AssertUnwindSafe(|| {
        let mut world = FaultTarget::start(&scene, shape.clone());
        let random = |seed| Schedule::random(seed, args.count, kinds, shape).events;
        let mut shown = None;
        let soak = Soak::run(&mut world, (args.seed..).flat_map(random), length, |usage| {
            let minute = usage.elapsed.as_secs() / 60;
            if shown.replace(minute) != Some(minute) {
                println!("{}", usage_line(minute, usage));
            }
        });
        let files = world.drain().expect("the job is a stream");
        let outcome = world.finish_as(|outcome| {
            assert_eq!(outcome.result["examples"], files * FILE_RECORDS, "not each record once");
        });
        if shape.mode == Mode::Sync {
            assert_eq!(
                outcome.sha,
                undisturbed_stream(&scene, shape, files * FILE_RECORDS),
                "the parameters differ"
            );
        }
        let grown = soak.grown();
        assert!(grown.is_empty(), "{}", grown.join("; "));
        println!("{files} files, {}", line(args.seed, soak.faults(), &outcome));
    });
    match catch_unwind(run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => {
            println!(
                "seed {}: FAILED: {}",
                args.seed,
                shape.command(Some(args.seed), &Schedule::default())
            );
            ExitCode::FAILURE
        }
    }
}

/// Returns the SHA-256 of the parameters after all files of a scene's stream, which have this many records, without
/// faults.
fn undisturbed_stream(scene: &Scene, shape: &Shape, records: usize) -> String {
    let run = Run::start(scene, &Feed::job_of_all(scene, shape.mode), &[]);
    within(UNDISTURBED_MAX, "all files are trained on", || {
        run.status().filter(|status| status["examples"] == records)
    });
    let data = scene.path("data").display().to_string();
    let _drain = scene.start("drain-undisturbed", "steadfast", &["drain", "--data-dir", &data]);
    sha(&run.finish())
}

fn usage_line(minute: u64, usage: &Usage) -> String {
    let memory = usage.memory_bytes.iter();
    let memory: Vec<String> =
        memory.map(|(role, bytes)| format!("{} {} MiB", role.name(), bytes >> 20)).collect();
    format!(
        "minute {minute}: {} faults; {} files, {} records trained on, {:.0} s behind; {}; etcd {} keys, {:.1} MiB",
        usage.faults,
        usage.files,
        usage.examples,
        usage.oldest_seconds,
        memory.join(", "),
        usage.etcd_keys,
        usage.etcd_bytes as f64 / f64::from(1 << 20),
    )
}

/// Returns the metric that an asynchronous job must reach under any schedule.
fn metric_min(workload: Workload) -> f64 {
    match workload {
        Workload::Digits | Workload::Stream => 0.94,
        Workload::Table => 0.7,
    }
}

fn run(shape: &Shape, seed: u64, schedule: &Schedule, expected: Option<&str>) -> (usize, Outcome) {
    let scene = Scene::new();
    let mut world = FaultTarget::start(&scene, shape.clone());
    let faults = world.run(Some(seed), schedule);
    assert!(0 < faults || schedule.events.is_empty(), "the job ended before the first fault");
    let outcome = world.finish_as(|outcome| match expected {
        Some(expected) => assert_eq!(outcome.sha, expected, "the parameters differ"),
        None => {
            let metric = outcome.result["metric"].as_f64().unwrap_or_default();
            assert!(metric_min(shape.workload) <= metric, "{}", outcome.result);
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

fn run_elastic(shape: &ElasticShape, seed: u64, schedule: &Schedule) -> (usize, ElasticOutcome) {
    let scene = Scene::new();
    let mut world = ElasticTarget::start(&scene, shape.clone(), order(seed));
    let faults = world.run(Some(seed), schedule);
    (faults, world.finish())
}

/// Returns how the records are dealt: every second seed as workers ask for them.
fn order(seed: u64) -> RecordOrder {
    if seed.is_multiple_of(2) { RecordOrder::Dynamic } else { RecordOrder::Fixed }
}

fn elastic_line(seed: u64, faults: usize, outcome: &ElasticOutcome) -> String {
    let (history, audit) = (&outcome.history, &outcome.audit);
    let loss = |at: Option<&f64>| at.copied().unwrap_or_default();
    format!(
        "seed {seed} ({}): survived {faults} faults in {:.1} s: {} rounds, {} steps in {} commits, {} steps done \
         again; loss {:.3} to {:.3}, accuracy {:.3}; etcd: {} revisions, {} rounds; ends: {:?}",
        order(seed),
        outcome.wall.as_secs_f64(),
        history.rounds,
        history.losses.len(),
        history.commits,
        history.steps_undone,
        loss(history.losses.first()),
        loss(history.losses.last()),
        history.accuracy,
        audit.revisions,
        audit.rounds,
        outcome.ends,
    )
}
