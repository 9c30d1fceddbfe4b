//! Finds the record whose gradient, or whose evaluation, ends the process that computes it: a crash of native code, or a
//! lack of memory.
//!
//! A lane that loses one trainer after another at the same step is suspected. Its next trainer first lets processes of
//! their own compute what the lane needs: the same command line, with [`TRIAL`] in the environment, which is where the
//! parameters and the names of the records are. Such a process joins no job; it computes, and says that it survived. If
//! it does not come so far, the records are halved until one is left, and that one has to end a second process. What a
//! process may suffer from others, such as a SIGKILL, is no finding: random kills must not change a result.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use steadfast_common::ids::{Lane, Pass, TaskId};
use steadfast_common::job::dataset::{Manifest, ReadOptions, Records};
use steadfast_common::records::JobRecord;
use steadfast_common::tensor::byte_segments::shared_bytes;
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::table::{RANGES, Rows};
use steadfast_host::task::in_place;
use steadfast_host::time::timeout;
use steadfast_process::{Failure, exit_at_once};
use steadfast_trainer_core::record_search::{Outcome, RecordName, RecordSearch, TrialStandIn};
use steadfast_trainer_core::{
    Batch, BatchIds, Inputs, MicroBatch, ModelError, Parameters, Registry,
};
use tempfile::TempDir;
use tokio::process::Command;
use tracing::{info, warn};

use crate::hang_watch::HangWatch;

/// The environment variable that names the directory of a trial.
const TRIAL: &str = "STEADFAST_TRIAL";

/// A trial finds nothing if it takes longer than this, and than its gradients may.
const TRIAL_MAX: Duration = Duration::from_secs(600);

/// Files in the directory of a trial.
const INPUT: &str = "trial.json";
const VALUES: &str = "values";
const BEGUN: &str = "begun";
const SURVIVED: &str = "survived";
const HUNG: &str = "hung";

/// The records of one gradient, or of the evaluation of a held-out task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TrialBatch {
    pub pass: Pass,
    pub step: u64,
    pub lane: Lane,
    pub records: Vec<RecordName>,
    /// Whether the records are evaluated, after `pass` passes. Step and lane mean nothing then.
    pub held_out: bool,
}

/// Tells a process what to compute or to evaluate.
#[derive(Serialize, Deserialize)]
struct TrialInput {
    job: JobRecord,
    manifest: Manifest,
    batches: Vec<TrialBatch>,
    /// Whether only the ids of rows are asked for.
    only_ids: bool,
}

/// The processes that compute the gradients of some batches. Their directory is deleted when this is dropped.
pub(crate) struct Trials {
    place: Place,
    input: TrialInput,
}

/// Where gradients are computed.
enum Place {
    Processes(TempDir),
    StandIn(TrialStandIn),
}

impl Trials {
    /// Prepares trials with these parameters, and the rows of each table; without rows, the model only names the ids of
    /// rows. None of them runs a process if there is a `stand_in`.
    ///
    /// # Errors
    /// If the files cannot be written.
    pub fn new(
        stand_in: Option<&TrialStandIn>,
        job: &JobRecord,
        manifest: &Manifest,
        parameters: &Parameters,
        rows: Option<&[Rows]>,
    ) -> io::Result<Self> {
        let (job, manifest) = (job.clone(), manifest.clone());
        let input = TrialInput { job, manifest, batches: Vec::new(), only_ids: rows.is_none() };
        if let Some(stand_in) = stand_in {
            return Ok(Self { place: Place::StandIn(stand_in.clone()), input });
        }
        let directory = tempfile::Builder::new().prefix("steadfast-trial-").tempdir()?;
        let Some(rows) = rows else {
            return Ok(Self { place: Place::Processes(directory), input });
        };
        let values = shared_bytes(Arc::new(parameters.values().to_vec()));
        fs::write(directory.path().join(VALUES), values)?;
        for (table, rows) in rows.iter().enumerate() {
            let bytes = rows.encode(0..rows.ids().len());
            fs::write(directory.path().join(rows_file(table)), bytes)?;
        }
        Ok(Self { place: Place::Processes(directory), input })
    }

    /// Finds the record that ends the processes which compute `batches`; returns its name, and how they ended.
    ///
    /// # Errors
    /// The reason why there is none.
    pub async fn find(mut self, batches: &[TrialBatch]) -> Result<(RecordName, String), String> {
        let mut lanes = RecordSearch::new(batches.len(), 1);
        let batch = loop {
            let chosen = lanes.next().into_iter().map(|it| batches[it].clone()).collect();
            if let Some(found) = lanes.note(self.run(chosen).await) {
                break &batches[found?.0];
            }
        };
        let (records, held_out) = (batch.records.len(), batch.held_out);
        info!(lane = %batch.lane, held_out, records, "one of these records ends its process");
        let min = self.input.job.spec.model.min_records() as usize;
        let mut records = RecordSearch::new(batch.records.len(), min);
        loop {
            let chosen = records.next().into_iter().map(|it| batch.records[it]).collect();
            let part = TrialBatch { records: chosen, ..batch.clone() };
            if let Some(found) = records.note(self.run(vec![part]).await) {
                return found.map(|(record, how)| (batch.records[record], how));
            }
        }
    }

    async fn run(&mut self, batches: Vec<TrialBatch>) -> Outcome {
        let directory = match &self.place {
            Place::Processes(directory) => directory.path(),
            Place::StandIn(compute) => {
                let names: Vec<RecordName> =
                    batches.into_iter().flat_map(|it| it.records).collect();
                return compute(&names);
            }
        };
        self.input.batches = batches;
        match self.start(directory).await {
            Ok(outcome) => outcome,
            Err(error) => Outcome::Unknown(format!("a process cannot be started: {error}")),
        }
    }

    async fn start(&self, directory: &Path) -> io::Result<Outcome> {
        let path = |name| directory.join(name);
        fs::write(path(INPUT), serde_json::to_vec(&self.input)?)?;
        for old in [BEGUN, SURVIVED, HUNG] {
            if path(old).exists() {
                fs::remove_file(path(old))?;
            }
        }
        let kills = out_of_memory_kills();
        // The kernel's name of the program: its file may have been replaced.
        let mut command = Command::new("/proc/self/exe");
        let mut arguments = own_arguments()?.into_iter();
        command.arg0(arguments.next().unwrap_or_default());
        command.args(arguments).env(TRIAL, directory);
        // It ends when its input does, so with this process.
        let mut process = command.stdin(Stdio::piped()).kill_on_drop(true).spawn()?;
        let _input = process.stdin.take();
        let limit = self.input.job.spec.tasks.deadline;
        let max = TRIAL_MAX + limit * self.input.batches.len() as u32;
        let Ok(status) = timeout(max, process.wait()).await else {
            let why = format!("a process did not end within {max:?}");
            return Ok(Outcome::Unknown(why));
        };
        let status = status?;
        if path(SURVIVED).exists() {
            return Ok(Outcome::Survived);
        }
        if path(HUNG).exists() {
            let why = format!("the process took longer than {limit:?}, the deadline of tasks,");
            return Ok(Outcome::Died(why));
        }
        if !path(BEGUN).exists() {
            return Ok(Outcome::Unknown(format!("a process ended before it computed: {status}")));
        }
        Ok(judge(status, kills < out_of_memory_kills()))
    }
}

/// Judges the end of a process that did not survive its computation. `lacked_memory` says whether the kernel has killed
/// processes for that meanwhile.
fn judge(status: ExitStatus, lacked_memory: bool) -> Outcome {
    const INT: i32 = 2;
    const HUP: i32 = 1;
    const QUIT: i32 = 3;
    const KILL: i32 = 9;
    const TERM: i32 = 15;
    match status.signal() {
        Some(KILL) if lacked_memory => {
            Outcome::Died("the process was killed for lack of memory".to_owned())
        }
        // Others send these.
        Some(KILL | TERM | INT | HUP | QUIT) => {
            Outcome::Unknown(format!("a process was ended by others: {status}"))
        }
        // An error that nothing has caught, such as one in a loop of one's own in Python.
        None if status.code() == Some(1) => {
            Outcome::Unknown(format!("a process reported an error: {status}"))
        }
        Some(_) | None => Outcome::Died(format!("the process ended with {status}")),
    }
}

/// Returns the directory of the trial that this process is.
pub(crate) fn directory() -> Option<PathBuf> {
    std::env::var_os(TRIAL).map(PathBuf::from)
}

/// Computes the gradients of a trial, and ends the process.
///
/// # Errors
/// If it cannot begin.
pub(crate) async fn compute(directory: &Path, registry: &Registry) -> Result<(), Failure> {
    std::thread::spawn(|| {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        exit_at_once(1);
    });
    let read = |name: &str| {
        let path = directory.join(name);
        fs::read(&path)
            .map_err(|error| Failure::io(format!("cannot read {}", path.display()), &error))
    };
    let input: TrialInput = serde_json::from_slice(&read(INPUT)?)
        .map_err(|error| Failure::invalid(format!("cannot read {INPUT}: {error}")))?;
    let invalid = |error: &dyn std::fmt::Display| Failure::invalid(error.to_string());
    let TrialInput { job, manifest, batches, only_ids } = input;
    let inputs = Inputs { features: manifest.features.len(), columns: manifest.columns.len() };
    let model = registry.build(&job.spec.model, inputs).map_err(|error| invalid(&error))?;
    let layout = Arc::new(Layout::new(model.parameters()));
    let computed = if only_ids { None } else { Some(read_parameters(&layout, read)?) };
    let options = ReadOptions::new(&job.spec.dataset, &manifest);
    let tasks = read_tasks(&manifest, &options, &batches).await?;
    File::create(directory.join(BEGUN))
        .map_err(|error| Failure::io("cannot write to the directory of the trial", &error))?;
    let names = [BEGUN, HUNG].map(|name| directory.join(name));
    let hang_watch = HangWatch::start(job.spec.tasks.deadline, move || {
        // If that fails, it is no finding: the process ends as with an error.
        let _ = fs::rename(&names[0], &names[1]);
        exit_at_once(1)
    });
    for TrialBatch { pass, step, lane, records, held_out } in &batches {
        let key = MicroBatch { seed: job.spec.seed, pass: *pass, step: *step, lane: *lane };
        let key = Some(key).filter(|_| !held_out);
        let mut batch = Records::default();
        records.iter().for_each(|it| batch.extend(&tasks[&it.task].select(&[it.record])));
        let batch = Batch::from(&batch);
        let compute = || -> Result<(), ModelError> {
            let ids = match layout.tables().is_empty() {
                true => Vec::new(),
                false => model.ids(&batch, key.as_ref())?,
            };
            let Some((parameters, rows)) = &computed else { return Ok(()) };
            let ids: Vec<BatchIds> = ids.iter().map(|ids| BatchIds::new(ids)).collect();
            let own = ids.iter().zip(rows).map(|(ids, rows)| ids.rows_of(rows)).collect();
            let parameters = parameters.clone().with_tables(own);
            let Some(key) = &key else { return model.evaluate(&parameters, &batch).map(drop) };
            let zeros = ids.iter().zip(rows).map(|(ids, rows)| ids.zeros(rows.width())).collect();
            let mut gradient = Parameters::zeros(layout.clone()).with_tables(zeros);
            model.fresh_gradient(&parameters, &batch, key, &mut gradient).map(drop)
        };
        let survived = in_place(|| hang_watch.computes(compute));
        if let Err(error) = survived {
            // The trainer gets the same error, and reports it.
            warn!(%error, %lane, "the model reports an error");
        }
    }
    // It takes no space on a disk that is full by now.
    fs::rename(directory.join(BEGUN), directory.join(SURVIVED))
        .map_err(|error| Failure::io("cannot write to the directory of the trial", &error))?;
    // The program around the model is not to go on as if training had ended.
    exit_at_once(0)
}

/// Reads the parameters of a trial, and the rows of each table.
fn read_parameters(
    layout: &Arc<Layout>,
    read: impl Fn(&str) -> Result<Vec<u8>, Failure>,
) -> Result<(Parameters, Vec<Rows>), Failure> {
    let bytes = read(VALUES)?;
    let values = bytes.as_chunks::<4>().0.iter().map(|it| f32::from_le_bytes(*it)).collect();
    let rows = layout.tables().iter().enumerate().map(|(table, it)| {
        Rows::decode_any(it.width, &(0..RANGES), &read(&rows_file(table))?)
            .map_err(|error| Failure::invalid(error.to_string()))
    });
    Ok((Parameters::new(layout.clone(), values), rows.collect::<Result<Vec<_>, Failure>>()?))
}

/// Reads the tasks of some batches, in the order of the files.
async fn read_tasks(
    manifest: &Manifest,
    options: &ReadOptions,
    batches: &[TrialBatch],
) -> Result<BTreeMap<TaskId, Records>, Failure> {
    let mut tasks = BTreeMap::new();
    for record in batches.iter().flat_map(|it| &it.records) {
        if let Entry::Vacant(place) = tasks.entry(record.task) {
            let chunks = manifest.chunks_of(record.task);
            let records = steadfast_data::read(manifest, options, chunks).await;
            place.insert(records.map_err(|error| Failure::unavailable(error.to_string()))?);
        }
    }
    Ok(tasks)
}

fn rows_file(table: usize) -> String {
    format!("rows-{table}")
}

/// Returns the command line of this process, as it was started.
fn own_arguments() -> io::Result<Vec<std::ffi::OsString>> {
    let mut line = fs::read("/proc/self/cmdline")?;
    line.pop_if(|last| *last == 0);
    let arguments = line.split(|byte| *byte == 0);
    Ok(arguments.map(|it| std::ffi::OsString::from_vec(it.to_vec())).collect())
}

/// Returns how many processes the kernel of this machine has killed for lack of memory, in containers and outside.
fn out_of_memory_kills() -> u64 {
    let counters = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let count = counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok());
    count.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// F9, I7: signals of others decide nothing.
    #[test]
    fn a_crash_is_told_from_a_signal_of_others() {
        for signal in [1, 2, 3, 15] {
            assert!(matches!(judge(ExitStatus::from_raw(signal), true), Outcome::Unknown(_)));
        }
        assert!(matches!(judge(ExitStatus::from_raw(9), false), Outcome::Unknown(_)));
        assert!(matches!(judge(ExitStatus::from_raw(9), true), Outcome::Died(_)));
        for (signal, name) in [(6, "SIGABRT"), (11, "SIGSEGV")] {
            let Outcome::Died(how) = judge(ExitStatus::from_raw(signal), false) else {
                panic!("{name} is a crash")
            };
            assert!(how.contains(name), "{how}");
        }
        assert!(matches!(judge(ExitStatus::from_raw(1 << 8), false), Outcome::Unknown(_)));
        assert!(matches!(judge(ExitStatus::from_raw(3 << 8), false), Outcome::Died(_)));
    }
}
