//! A table that is many times as large as the memory for its rows: whether memory stays flat, and how long the job
//! waits for a pserver that restores it. This takes from minutes to an hour, so it is no benchmark that is repeated.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;
use steadfast_common::status::JobStatus;
use steadfast_tests::{Job, Process, Scene, eventually, program};

use crate::expense::{cpu_of, peak_of, resident_of};

/// Categories of a record, and how many of them occur in no other record.
const COLUMNS: u64 = 30;
const NEW: u64 = 25;

/// Ids of the other columns.
const KNOWN: u64 = 1_000_000;

/// Values of a row: a weight and the factors.
const WIDTH: u64 = 16;

const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Lines of the output: one for each of this many looks.
const LOOKS_SHOWN: usize = 12;

/// How large a table is, and the memory for it.
#[derive(Clone, Debug, Args)]
pub struct LargeTable {
    /// Rows of the table.
    #[arg(long, default_value_t = 100_000_000)]
    rows: u64,
    /// Memory of the pserver for rows.
    #[arg(long, default_value = "2GiB")]
    memory: String,
    /// Time between two checkpoints.
    #[arg(long, default_value = "5m")]
    every: String,
}

/// Memory and CPU time of all pservers, one after another.
#[derive(Debug, Default)]
struct Expense {
    /// Resident memory at each look, in bytes.
    resident: Vec<u64>,
    peak: u64,
    /// CPU seconds of the present one, and of those before.
    cpu: f64,
    cpu_before: f64,
}

impl LargeTable {
    /// Trains on one pserver, which is killed after two thirds of the records, once there is a checkpoint.
    pub fn run(&self) -> Result<(), String> {
        let scene = Scene::new();
        let (records, data) = (self.rows.div_ceil(NEW), scene.path("clicks.tsv"));
        write(records, &data).map_err(|error| format!("{}: {error}", data.display()))?;
        let gigabytes = self.rows as f64 * (8 * WIDTH + 24) as f64 / 1e9;
        println!(
            "{} rows of {WIDTH} values with Adagrad: {gigabytes:.1} GB with ids and counts; {} of memory for rows",
            self.rows, self.memory
        );
        let started = Instant::now();
        let mut training = self.start(&scene, &data);
        let (mut pserver, mut is_killed) = (scene.one_of("pserver"), false);
        let (mut expense, mut waited) = (Expense::default(), 0.0);
        for look in 0.. {
            std::thread::sleep(LOOK_EVERY);
            if !training.is_running() {
                break;
            }
            let Some(status) = status(&scene) else { continue };
            expense.look(pserver.pid.as_raw());
            waited = status.recoveries.iter().map(|it| it.seconds).sum();
            if look % LOOKS_SHOWN == 0 {
                println!("{}", line(started.elapsed(), &status, &expense));
            }
            if !is_killed && 2 * records < 3 * status.examples && status.checkpoint.is_some() {
                println!("the pserver is killed");
                scene.kill(&pserver);
                expense.cpu_before += std::mem::take(&mut expense.cpu);
                pserver = eventually("another pserver runs", || {
                    let now = scene.one_of("pserver");
                    (now.pid != pserver.pid).then_some(now)
                });
                is_killed = true;
            }
        }
        let ended = training.end(LOOK_EVERY);
        if ended.code != Some(0) {
            return Err(ended.stderr);
        }
        let (seconds, cpu) = (started.elapsed().as_secs_f64(), expense.cpu_before + expense.cpu);
        println!("finished in {seconds:.0} s: {}", ended.summary()["parameters_sha256"]);
        println!(
            "memory of the pserver: at most {} MiB; medians of the quarters of the run: {:?} MiB",
            expense.peak >> 20,
            expense.quarters()
        );
        println!(
            "CPU time of the pserver: {:.1} s per 10⁶ rows of steps",
            cpu * 1e6 / (records * COLUMNS) as f64
        );
        println!("the job waited {waited:.0} s for the pserver that was killed");
        Ok(())
    }

    fn start(&self, scene: &Scene, data: &Path) -> Process {
        let columns: Vec<String> = (1..=COLUMNS).map(|column| format!("\"{column}\"")).collect();
        let text = format!(
            "name = \"large\"\nseed = 1\nmode = \"sync\"\npasses = 1\n\
             [dataset]\nsource = [\"{}\"]\nformat = \"tsv\"\nheader = \"absent\"\nlabel = \"0\"\n\
             categories = [{}]\nrecords_per_task = 20000\n\
             [model]\nkind = \"fm\"\nclasses = 2\nfactors = {}\n\
             [optimizer]\nkind = \"adagrad\"\n[learning_rate]\nbase = 0.05\n\
             [sync]\nlanes = 2\nmicro_batch = 2000\n\
             [checkpoint]\nevery = \"{}\"\nkeep = 1\n",
            data.display(),
            columns.join(", "),
            WIDTH - 1,
            self.every,
        );
        let job = Job { name: "large".to_owned(), text }.write(scene);
        let mut command = scene.command(&program("steadfast"));
        command.arg("local").arg(job).args(["--data-dir", "data", "--output", "json"]);
        command.args(["--trainers", "1", "--pservers", "1"]);
        command.env("STEADFAST_TABLE_MEMORY", &self.memory);
        command.env("STEADFAST_TABLE_DIRECTORY", scene.path("rows"));
        Process::start(scene.directory(), "local", &mut command)
    }
}

impl Expense {
    fn look(&mut self, pid: i32) {
        self.resident.push(resident_of(pid));
        self.peak = self.peak.max(peak_of(pid));
        self.cpu = self.cpu.max(cpu_of(pid));
    }

    /// Medians of the resident memory in each quarter of the run, in MiB.
    fn quarters(&self) -> Vec<u64> {
        let median = |part: &[u64]| {
            let mut sorted = part.to_vec();
            sorted.sort_unstable();
            sorted.get(sorted.len() / 2).copied().unwrap_or(0) >> 20
        };
        self.resident.chunks(self.resident.len().div_ceil(4).max(1)).map(median).collect()
    }
}

/// Returns the status of the job, if its master answers.
fn status(scene: &Scene) -> Option<JobStatus> {
    let mut command = Command::new(program("steadfast"));
    command.args(["status", "--output", "json", "--data-dir"]).arg(scene.path("data"));
    serde_json::from_slice(&command.output().ok()?.stdout).ok()
}

fn line(elapsed: Duration, status: &JobStatus, expense: &Expense) -> String {
    let tables = status.tables.first();
    format!(
        "{:5.0} s: {} records, {} rows, {} in memory; pserver {} MiB, files of rows {} MiB; checkpoint {}",
        elapsed.as_secs_f64(),
        status.examples,
        tables.map_or(0, |it| it.rows.values().sum::<u64>()),
        tables.map_or(0, |it| it.rows_in_memory),
        expense.resident.last().unwrap_or(&0) >> 20,
        tables.map_or(0, |it| it.disk_bytes) >> 20,
        status.checkpoint.as_deref().unwrap_or("none"),
    )
}

/// Writes records of a label and categories, most of which occur once.
fn write(records: u64, path: &Path) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    for record in 0..records {
        write!(file, "{}", record % 2)?;
        for column in 0..COLUMNS {
            let id = match column < NEW {
                true => record * NEW + column,
                false => (record * COLUMNS + column).wrapping_mul(0x9e37_79b9_7f4a_7c15) % KNOWN,
            };
            write!(file, "\t{id:x}")?;
        }
        writeln!(file)?;
    }
    file.flush()
}
