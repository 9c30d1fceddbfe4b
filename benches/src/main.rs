//! Benchmarks Steadfast against the limits of the machine: both sides alternate within one run.

mod catalog;
mod checkpoint;
mod counter;
mod expense;
mod kernels;
mod large_table;
mod model;
mod ping;
mod raw;
mod rendezvous;
mod rig;
mod rows;
mod sample;
mod served_rows;
mod table;
mod tasks;
mod unary;
mod watch;
mod whole;
mod wire;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::{Parser, Subcommand};

use crate::catalog::{Bench, Side, benches};
use steadfast_process::keep_freed_memory;

use crate::large_table::LargeTable;
use crate::sample::{Pairs, Sample};

/// Benchmarks Steadfast against the limits of this machine.
#[derive(Debug, Parser)]
#[command(name = "steadfast-bench", version)]
struct Args {
    /// Prefixes of benchmark names; default: all benchmarks.
    names: Vec<String>,
    /// Number of samples per side.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Also writes all samples to this file.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Path of another build of this program, next to its other binaries, to compare with instead of the
    /// reference.
    #[arg(long)]
    base: Option<PathBuf>,
    #[command(subcommand)]
    part: Option<Part>,
}

/// Other runs, and internal commands of measurement processes.
#[derive(Debug, Subcommand)]
enum Part {
    /// Takes one sample and prints it.
    #[command(hide = true)]
    Sample { name: String, side: Side },
    /// Trains a table that is larger than memory, and kills its pserver once.
    LargeTable(LargeTable),
    #[command(hide = true)]
    ServeRaw,
    #[command(hide = true)]
    ServeEcho,
    #[command(hide = true)]
    ServeRows,
    #[command(hide = true)]
    ServeCounter { etcd: String },
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.part {
        None => measure(&args),
        Some(part) => act(part),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("steadfast-bench: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn act(part: &Part) -> Result<(), String> {
    // All our processes do this.
    keep_freed_memory();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    match part {
        Part::Sample { name, side } => {
            let bench = benches().into_iter().find(|it| it.name == *name);
            let bench = bench.ok_or_else(|| format!("unknown benchmark `{name}`"))?;
            let sample = runtime.block_on(bench.sample(*side));
            println!("{}", serde_json::to_string(&sample).expect("it is plain data"));
            Ok(())
        }
        Part::LargeTable(large) => large.run(),
        Part::ServeRaw => runtime.block_on(raw::serve()).map_err(|error| error.to_string()),
        Part::ServeCounter { etcd } => {
            runtime.block_on(counter::serve(etcd)).map_err(|error| error.to_string())
        }
        Part::ServeRows => {
            runtime.block_on(served_rows::serve()).map_err(|error| error.to_string())
        }
        Part::ServeEcho => runtime.block_on(ping::serve()).map_err(|error| error.to_string()),
    }
}

fn measure(args: &Args) -> Result<(), String> {
    let is_wanted = |bench: &Bench| {
        args.names.is_empty() || args.names.iter().any(|name| bench.name.starts_with(name.as_str()))
    };
    let wanted: Vec<Bench> = benches().into_iter().filter(is_wanted).collect();
    if wanted.is_empty() {
        let names: Vec<String> = benches().into_iter().map(|it| it.name).collect();
        return Err(format!("no benchmark matches; available: {}", names.join(", ")));
    }
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut rows = Vec::new();
    for bench in &wanted {
        eprintln!("{}", table::legend(bench));
    }
    println!("{}", table::head(args.base.is_some()));
    for bench in wanted {
        let mut pairs = Pairs::default();
        for round in 0..args.rounds {
            // Alternates the order: the second side may find the machine warmer.
            let ours =
                |pairs: &mut Pairs| sample(&own, &bench, Side::Ours).map(|it| pairs.ours.push(it));
            let reference = |pairs: &mut Pairs| {
                let it = match &args.base {
                    None => sample(&own, &bench, Side::Reference),
                    Some(base) => sample(base, &bench, Side::Ours),
                };
                it.map(|it| pairs.limit.push(it))
            };
            if round % 2 == 0 {
                ours(&mut pairs)?;
                reference(&mut pairs)?;
            } else {
                reference(&mut pairs)?;
                ours(&mut pairs)?;
            }
        }
        println!("{}", table::row(&bench, &pairs, args.base.is_some()));
        rows.push(
            serde_json::json!({ "name": bench.name, "target": bench.target, "samples": pairs }),
        );
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&rows).expect("it is plain data");
        std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// Takes a sample in a separate process, with its own memory and caches.
fn sample(program: &Path, bench: &Bench, side: Side) -> Result<Sample, String> {
    let side = match side {
        Side::Ours => "ours",
        Side::Reference => "reference",
    };
    let mut command = Command::new(program);
    command.args(["sample", &bench.name, side]);
    if let Some(directory) = program.parent() {
        command.env("SUITE_PROGRAMS", directory);
    }
    let output = command.output().map_err(|error| format!("{}: {error}", program.display()))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{} ({side}): {reason}", bench.name));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("{}: {error}", bench.name))
}
