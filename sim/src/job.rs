//! Small jobs that show how often each record was applied.
//!
//! The model has one parameter for each record, and the gradient of a record is 1 there. Under plain
//! gradient descent such a parameter counts how often its record was applied. In addition there is a
//! linear model, whose bits depend on the order of all additions. Some jobs have the same in two tables: a count
//! for each record, and a term of the linear model.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use steadfast_common::ids::TaskId;
use steadfast_common::job::columns::{ColumnType, Element};
use steadfast_common::job::dataset::Manifest;
use steadfast_common::job::job_file;
use steadfast_common::job::spec::{
    DataFormat, DatasetSpec, JobSpec, LostPserver, Mode, OptimizerSpec,
};
use steadfast_common::tensor::layout::ParamSpec;
use steadfast_common::tensor::table::Initial;
use steadfast_data::{DataError, IfThere, Target, convert};
use steadfast_trainer::ndarray::ArrayView1;
use steadfast_trainer::record_search::{Outcome, RecordName, TrialStandIn};
use steadfast_trainer::{
    Batch, Evaluation, Metric, MicroBatch, Model, ModelError, Parameters, Random, Registry,
};

use crate::rng::Rng;

/// Jobs in the catalog of each mode.
pub const JOBS: u64 = 48;

/// Steps of a pass of a job for many trainers.
pub const LARGE_STEPS: usize = 4;

/// URL of the simulated store.
pub const STORE: &str = "simulated://store/";

/// Object name of the dataset.
const DATA: &str = "data.csv";

/// Beginning of the names of converted files.
const CONVERTED: &str = "converted";

/// Features of a record besides its number.
const WIDTH: usize = 3;

/// A job of the catalog. Equal numbers are equal jobs.
#[derive(Clone, Debug)]
pub struct Job {
    pub number: u64,
    pub spec: JobSpec,
    /// The job file, without the number of kept checkpoints.
    text: String,
    pub records: usize,
    /// Amount that one application of a record adds to its parameter (asynchronous mode).
    pub one: f32,
    /// Whether no task is ever given up.
    pub is_patient: bool,
    /// Records with an invalid number, because of which their tasks are given up.
    pub bad: Vec<usize>,
    /// Whether its parameters overflow before the end.
    pub diverges: bool,
    /// Whether its files appear while it is trained on, and it is drained when all are there.
    pub is_stream: bool,
    /// The format into which its CSV file is converted before the job begins.
    pub converted_to: Option<DataFormat>,
    /// The record on which its model crashes.
    pub crashes: Option<CrashingRecord>,
}

/// A record on which the model ends its process.
#[derive(Clone, Copy, Debug)]
pub struct CrashingRecord {
    pub number: usize,
    pub name: RecordName,
    /// Number of records of each other push, in an asynchronous job that trains on it.
    pub per_push: Option<u32>,
}

/// Tells how the processes of a job with such a record end.
pub struct Crashes {
    pub record: CrashingRecord,
    pub crash: Arc<dyn Fn() + Send + Sync>,
    /// Stands in for processes that compute on trial.
    pub trial: TrialStandIn,
}

/// Added to the number of a job that has such a record.
const CRASHING: u64 = 1000;

fn with_kept(text: &str, keep: u64) -> String {
    format!("{text}keep = {keep}\n")
}

/// Files of a stream, and the time between them.
const FILES: usize = 3;
pub const FILE_EVERY: Duration = Duration::from_secs(3);

impl Job {
    /// Returns whether the model has embedding tables.
    pub fn has_tables(&self) -> bool {
        self.spec.model.options.contains_key("tables")
    }

    /// Returns the job file with another number of kept checkpoints.
    pub fn file_with_kept(&self, keep: u32) -> String {
        with_kept(&self.text, keep.into())
    }

    /// Returns the job with this number.
    ///
    /// # Panics
    /// If the catalog contains an invalid job file.
    pub fn numbered(mode: Mode, number: u64) -> Self {
        let mut rng = Rng::new(number ^ 0x6a6f_6273);
        let (tasks, per_task) = (rng.between(3, 7), *rng.one_of(&[4, 8]));
        let records = (tasks * per_task) as usize;
        let held_out = if rng.happens(0.4) { 0.25 } else { 0.0 };
        let passes = rng.between(1, 3);
        let keep = rng.between(1, 3);
        // Chosen by the number and not drawn, to leave all other properties of a job unchanged. The
        // fourth task is the first that may be held out.
        let (of_first, of_fourth) = (1, 3 * per_task as usize);
        let bad = match number % 6 {
            4 => vec![of_first, of_fourth],
            5 => vec![of_fourth],
            _ => Vec::new(),
        };
        let bad: Vec<usize> = bad.into_iter().filter(|record| *record < records).collect();
        // The same.
        let is_stream = number % 8 == 3 && bad.is_empty();
        let is_patient = rng.happens(0.8) && bad.is_empty() || is_stream;
        // The same. Tables do not keep the best parameters.
        let (course, passes_more) = match number % 6 {
            0 => ("reduce_on_plateau = { factor = 0.5, patience = 1, min_delta = 1000 }\n", 1),
            1 => ("patience = 1\nmin_delta = 0.01\n", 2),
            2 => ("patience = 1\nkeep = \"best\"\n", 2),
            _ => ("", 0),
        };
        // There must be a fourth task to hold out.
        let decides = mode == Mode::Sync && !course.is_empty() && !is_stream && 4 <= tasks;
        let (course, passes) = if decides { (course, passes + passes_more) } else { ("", passes) };
        let by_steps =
            if mode == Mode::Sync && 6 <= number % 12 { "every_steps = 3\n" } else { "" };
        let held_out = match (is_stream, decides) {
            (true, _) => 0.0,
            (false, true) => 0.25,
            (false, false) => held_out,
        };
        let limits = match (is_patient, mode) {
            // Longer than the timeout of a run: a lost task must not be hidden by its deadline.
            (true, _) => "deadline = \"1h\"\nfailures_max = 1000\n",
            (false, Mode::Sync) => "deadline = \"1h\"\nfailures_max = 2\n",
            (false, Mode::Async) => "deadline = \"4s\"\nfailures_max = 3\n",
        };
        let every = match mode {
            Mode::Sync => *rng.one_of(&[
                "every = \"700ms\"\n",
                "every_steps = 4\n",
                "every_steps = 7\nevery = \"2s\"\n",
            ]),
            Mode::Async => *rng.one_of(&["every = \"300ms\"\n", "every = \"1s\"\n"]),
        };
        let (rhythm, optimizer) = match mode {
            Mode::Sync => (synchronous(&mut rng), optimizer(&mut rng)),
            Mode::Async => (asynchronous(&mut rng, per_task), "kind = \"sgd\"\n".to_owned()),
        };
        let mode_name = match mode {
            Mode::Sync => "sync",
            Mode::Async => "async",
        };
        // Chosen by the number and not drawn, for the same reason.
        let compression = match (mode, number % 4) {
            (Mode::Sync, 1) => "bf16",
            (Mode::Sync, 2) => "int8",
            // The counts of asynchronous jobs must be exact.
            (Mode::Sync | Mode::Async, _) => "none",
        };
        // The same.
        let tables = match number % 6 {
            1 => "tables = true\n[tables]\nterms = { admit_after = 2, expire_after = 1 }\n",
            4 => "tables = true\n",
            _ => "",
        };
        // The same.
        let spares = if number.is_multiple_of(2) { "warm_spares = 3\n" } else { "" };
        let (end, files) = match is_stream {
            false => (format!("passes = {passes}\n{spares}[dataset]\n"), DATA),
            true => (format!("{spares}[dataset]\nfollow = true\n"), "data-*.csv"),
        };
        let text = format!(
            "name = \"trial\"\nseed = {number}\nmode = \"{mode_name}\"\n{end}\
             source = [\"{STORE}{files}\"]\nformat = \"csv\"\nfeatures = [\"n\", \"x_*\"]\n\
             label = \"y\"\nrecords_per_task = {per_task}\n\
             [model]\nkind = \"counting\"\n[model.options]\nrecords = {records}\n{tables}\
             [optimizer]\n{optimizer}[learning_rate]\nbase = 0.25\n{rhythm}\
             [gradients]\ncompression = \"{compression}\"\n[tasks]\n{limits}\
             [evaluation]\nfraction = {held_out}\n{course}{by_steps}[checkpoint]\n{every}"
        );
        let file = with_kept(&text, keep);
        let spec = job_file::parse(&file).unwrap_or_else(|error| panic!("{file}\n{error}"));
        let rhythm = &spec.asynchronous;
        let one = 0.25 / (rhythm.batch * rhythm.push_every) as f32;
        let (diverges, converted_to) = (false, None);
        Self {
            number,
            spec,
            text,
            records,
            one,
            is_patient,
            bad,
            diverges,
            is_stream,
            converted_to,
            crashes: None,
        }
    }

    /// Returns a job whose parameters overflow while its gradients stay finite.
    pub fn diverging(mode: Mode) -> Self {
        let mut job = Self::smallest(mode);
        (job.number, job.diverges) = (JOBS, true);
        job.spec.passes = Some(3);
        job.spec.optimizer = OptimizerSpec::default();
        job.spec.learning_rate.base = 1e36;
        job.spec.model.options.insert("slope".to_owned(), 1e3.into());
        job
    }

    /// Returns a job for many trainers: a task for each of them in each pass, with one record for each of
    /// [`LARGE_STEPS`] steps.
    ///
    /// # Panics
    /// If the job file is invalid.
    pub fn large(mode: Mode, trainers: u16, passes: u32) -> Self {
        let records = usize::from(trainers) * LARGE_STEPS;
        let (mode_name, rhythm) = match mode {
            Mode::Sync => ("sync", format!("[sync]\nlanes = {trainers}\nmicro_batch = 1\n")),
            Mode::Async => ("async", format!("[async]\nbatch = {LARGE_STEPS}\n")),
        };
        let text = format!(
            "name = \"large\"\nseed = 1\nmode = \"{mode_name}\"\npasses = {passes}\n\
             [dataset]\nsource = [\"{STORE}{DATA}\"]\nformat = \"csv\"\nfeatures = [\"n\", \"x_*\"]\n\
             label = \"y\"\nrecords_per_task = {LARGE_STEPS}\n\
             [model]\nkind = \"counting\"\n[model.options]\nrecords = {records}\n\
             [learning_rate]\nbase = 0.25\n{rhythm}[tasks]\ndeadline = \"1h\"\n"
        );
        let spec = job_file::parse(&text).unwrap_or_else(|error| panic!("{text}\n{error}"));
        let (number, one) = (JOBS + 1, 0.25 / LARGE_STEPS as f32);
        let bad = Vec::new();
        let (is_patient, diverges, is_stream, converted_to) = (true, false, false, None);
        Self {
            number,
            spec,
            text,
            records,
            one,
            is_patient,
            bad,
            diverges,
            is_stream,
            converted_to,
            crashes: None,
        }
    }

    /// Returns the job with a record on which its model crashes; `None` for a job whose tasks have other reasons to be
    /// given up, or whose files are not those of the catalog.
    #[must_use]
    pub fn with_crashes(mut self) -> Option<Self> {
        let per_task = self.spec.dataset.records_per_task.unwrap_or(1) as usize;
        let is_plain = self.bad.is_empty() && self.is_patient && !self.is_stream && !self.diverges;
        // Training might end before the step with the record.
        let evaluation = &self.spec.evaluation;
        let is_plain = is_plain && !(evaluation.decides() && evaluation.every_steps.is_some());
        // The fourth task is the first that may be held out.
        let has_held_out = 0.0 < evaluation.fraction && 4 * per_task <= self.records;
        let held_out = has_held_out && (self.number / 2).is_multiple_of(2);
        if !is_plain || self.records < 2 * per_task {
            return None;
        }
        let (task, record) = (TaskId(if held_out { 3 } else { 1 }), 1);
        let number = task.0 as usize * per_task + record as usize;
        let settings = &self.spec.asynchronous;
        let per_push = match self.spec.mode {
            Mode::Sync => None,
            Mode::Async if held_out => None,
            // The counts of a push of several mini-batches could not be told apart from those of one without the record.
            Mode::Async if settings.push_every != 1 => return None,
            Mode::Async => Some(settings.batch),
        };
        let name = RecordName { task, record };
        self.crashes = Some(CrashingRecord { number, name, per_push });
        self.number += CRASHING;
        Some(self)
    }

    /// Returns the job of the catalog with the fewest steps among those in which no task is given up.
    pub fn smallest(mode: Mode) -> Self {
        let all = (0..JOBS).map(|number| Self::numbered(mode, number));
        let is_plain =
            |job: &Self| !job.goes_on() && !job.is_stream && !job.spec.evaluation.decides();
        let patient = all.filter(|job| job.is_patient && is_plain(job));
        let size = |job: &Self| job.records as u32 * job.spec.passes.unwrap_or(1);
        patient.min_by_key(size).expect("the catalog is not empty")
    }

    /// Returns the job with its records in another format.
    #[must_use]
    pub fn in_format(mut self, format: DataFormat) -> Self {
        self.spec.dataset.format = format;
        self.spec.dataset.source = vec![format!("{STORE}{CONVERTED}-*")];
        self.converted_to = Some(format);
        self
    }

    /// Converts the files of the dataset, if the job wants them in another format.
    ///
    /// # Errors
    /// If they cannot be read or written.
    pub async fn convert_data(&self) -> Result<(), DataError> {
        let Some(format) = self.converted_to else { return Ok(()) };
        // As a job reads them: not all formats hold numbers of 64 bits.
        let number = ColumnType::one(Element::Float32);
        let types = ["x_0", "x_1", "x_2", "y"].map(|name| (name.to_owned(), number));
        let spec = DatasetSpec {
            source: vec![format!("{STORE}{DATA}")],
            format: DataFormat::Csv,
            features: Vec::new(),
            label: String::new(),
            classes: Vec::new(),
            weight: None,
            columns: vec!["*".to_owned()],
            types: types.into(),
            ..self.spec.dataset.clone()
        };
        let directory = steadfast_store::open(STORE)?;
        let (prefix, if_there) = (CONVERTED.to_owned(), IfThere::Fail);
        let target = Target { directory, format, shards: 2, prefix, if_there };
        convert(&spec, &target).await.map(drop)
    }

    /// Returns the names and the contents of the files of the dataset, as CSV.
    pub fn data(&self) -> Vec<(String, Bytes)> {
        const HEADER: &str = "n,x_0,x_1,x_2,y\n";
        let mut rng = Rng::new(self.number ^ 0x6461_7461);
        let mut files = Vec::new();
        let mut text = HEADER.to_owned();
        // Whole tasks: all pushes have the same number of records.
        let per_task = self.spec.dataset.records_per_task.unwrap_or(1) as usize;
        let per_file = (self.records / per_task).div_ceil(FILES) * per_task;
        for record in 0..self.records {
            let mut value = || rng.share() * 2.0 - 1.0;
            let (a, b, c, y) = (value(), value(), value(), value());
            let y = if self.bad.contains(&record) { "none".to_owned() } else { format!("{y:.5}") };
            text += &format!("{record},{a:.5},{b:.5},{c:.5},{y}\n");
            if self.is_stream && (record + 1).is_multiple_of(per_file) {
                let file = std::mem::replace(&mut text, HEADER.to_owned());
                files.push((format!("data-{}.csv", files.len()), file.into()));
            }
        }
        if HEADER.len() < text.len() {
            let name =
                if self.is_stream { format!("data-{}.csv", files.len()) } else { DATA.to_owned() };
            files.push((name, text.into()));
        }
        files
    }

    /// Returns the tasks with a bad record.
    pub fn bad_tasks(&self, manifest: &Manifest) -> BTreeSet<TaskId> {
        let is_bad = |task: &TaskId| {
            manifest.chunks_of(*task).iter().any(|chunk| {
                let first = chunk.first_record as usize;
                self.bad
                    .iter()
                    .any(|record| (first..first + chunk.records as usize).contains(record))
            })
        };
        (0..manifest.task_count()).map(TaskId).filter(is_bad).collect()
    }

    /// Returns whether the other slots continue when one is lost.
    pub fn goes_on(&self) -> bool {
        self.spec.mode == Mode::Async
            && self.spec.asynchronous.lost_pserver == LostPserver::Continue
    }
}

fn synchronous(rng: &mut Rng) -> String {
    let (lanes, micro_batch) = (rng.between(1, 4), rng.between(1, 3));
    format!("[sync]\nlanes = {lanes}\nmicro_batch = {micro_batch}\n")
}

fn optimizer(rng: &mut Rng) -> String {
    let kinds = [
        "kind = \"sgd\"\n",
        "kind = \"momentum\"\nmomentum = 0.9\n",
        "kind = \"adam\"\n",
        "kind = \"adam\"\nclip_norm = 0.5\n",
        "kind = \"sgd\"\nclip_norm = 0.125\n",
        "kind = \"adagrad\"\n",
    ];
    rng.one_of(&kinds).to_string()
}

/// Draws the asynchronous settings of a job file. All pushes have the same number of records, so each record adds the
/// same amount to its count.
fn asynchronous(rng: &mut Rng, per_task: u64) -> String {
    let batch = *rng.one_of(&[2, 4]);
    let push_every = if batch == 2 && rng.happens(0.4) { 2 } else { 1 };
    let push_every = if per_task < batch * push_every { 1 } else { push_every };
    let pull_every = rng.between(1, 2);
    let lost = *rng.one_of(&["rewind", "rewind", "continue"]);
    let bound = match rng.between(0, 2) {
        0 => String::new(),
        bound => format!("max_staleness = {bound}\n"),
    };
    format!(
        "[async]\nbatch = {batch}\npush_every = {push_every}\npull_every = {pull_every}\n\
         lost_pserver = \"{lost}\"\n{bound}"
    )
}

/// Returns the registry of models of simulated trainers, which may crash.
pub fn registry(crashes: Option<Crashes>) -> Registry {
    let mut models = Registry::built_in();
    let (trial, crash): (TrialStandIn, _) = match crashes {
        Some(Crashes { record, crash, trial }) => (trial, Some((record, crash))),
        None => (Arc::new(|_| Outcome::Survived), None),
    };
    models.register("counting", move |spec, inputs| {
        let features = inputs.features;
        let records = spec.options.get("records").and_then(|it| it.as_integer()).unwrap_or(0);
        let slope = spec.options.get("slope").and_then(|it| it.as_float());
        let has_tables = spec.options.contains_key("tables");
        let (records, crash) = (records as usize, crash.clone());
        Ok(Box::new(Counting { records, features, slope, has_tables, crash }))
    });
    models.trial = Some(trial);
    models
}

/// Index of the parameter that holds the counts.
const COUNTS: usize = 1;

struct Counting {
    records: usize,
    features: usize,
    /// The gradient of a count, for a model that consists of counts only.
    slope: Option<f64>,
    has_tables: bool,
    /// The record that ends the process, and what does.
    crash: Option<(CrashingRecord, Arc<dyn Fn() + Send + Sync>)>,
}

/// Index of the table that holds counts, and of that with terms of the linear model.
pub const COUNTED_ROWS: usize = 0;
const TERMS: usize = 1;

impl Counting {
    /// Ends the process if this is the record that does so.
    fn crash_on(&self, number: usize) {
        if let Some((record, crash)) = &self.crash
            && record.number == number
        {
            crash();
        }
    }

    /// Returns the term of the record at an index of a batch.
    fn term(&self, parameters: &Parameters, index: usize) -> f32 {
        if self.has_tables { parameters.table(TERMS).at(index)[0] } else { 0.0 }
    }
}

impl Model for Counting {
    fn parameters(&self) -> Vec<ParamSpec> {
        let mut all = vec![
            ParamSpec::new("weight", &[WIDTH]),
            ParamSpec::new("count", &[self.records]),
            ParamSpec::new("bias", &[1]),
            ParamSpec::new("count_again", &[self.records]),
        ];
        if self.has_tables {
            all.push(ParamSpec::table("counted_rows", 1, Initial::Zeros));
            all.push(ParamSpec::table("terms", 2, Initial::Normal(0.5)));
        }
        all
    }

    fn ids(
        &self,
        batch: &Batch<'_>,
        key: Option<&MicroBatch>,
    ) -> Result<Vec<Vec<u64>>, ModelError> {
        let number = |record: ArrayView1<'_, f32>| record[0] as u64;
        let counted: Vec<u64> = batch.features.rows().into_iter().map(number).collect();
        // A term is not used in all passes: with one or two between, so that some expire only just.
        let pass = key.map_or(0, |key| u64::from(key.pass.0));
        let terms = counted.iter().map(|id| id + pass % 3 % 2 * self.records as u64).collect();
        Ok(vec![counted, terms])
    }

    fn initialize(&self, seed: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
        let mut random = Random::of_parameter(seed, 0);
        parameters.vector_mut(0).mapv_inplace(|_| 0.5 * random.normal());
        Ok(())
    }

    fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch<'_>,
        _: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        let mut loss_sum = 0.0;
        // A push applies the mean, so without a record each other one would count more.
        let per_push = self.crash.as_ref().and_then(|(record, _)| record.per_push);
        let one = per_push.map_or(1.0, |per_push| batch.len() as f32 / per_push as f32);
        let records = batch.features.rows().into_iter().zip(batch.labels).enumerate();
        for (index, (record, label)) in records {
            let number = record[0] as usize;
            self.crash_on(number);
            let x = record.slice(steadfast_trainer::ndarray::s![1..]);
            if let Some(slope) = self.slope {
                gradient.vector_mut(COUNTS)[number] += slope as f32;
                continue;
            }
            let term = self.term(parameters, index);
            let error = x.dot(&parameters.vector(0)) + parameters.vector(2)[0] + term - label;
            loss_sum += f64::from(error * error) / 2.0;
            if self.has_tables {
                gradient.table_mut(COUNTED_ROWS).at_mut(index)[0] += one;
                gradient.table_mut(TERMS).at_mut(index)[0] += error;
            }
            gradient.vector_mut(0).scaled_add(error, &x);
            gradient.vector_mut(2)[0] += error;
            gradient.vector_mut(COUNTS)[number] += one;
            gradient.vector_mut(COUNTS + 2)[number] += one;
        }
        Ok(loss_sum)
    }

    fn evaluate(
        &self,
        parameters: &Parameters,
        batch: &Batch<'_>,
    ) -> Result<Evaluation, ModelError> {
        let mut sums = Evaluation { records: batch.len() as u64, ..Evaluation::default() };
        let records = batch.features.rows().into_iter().zip(batch.labels).enumerate();
        for (index, (record, label)) in records {
            self.crash_on(record[0] as usize);
            let x = record.slice(steadfast_trainer::ndarray::s![1..]);
            let term = self.term(parameters, index);
            let error = x.dot(&parameters.vector(0)) + parameters.vector(2)[0] + term - label;
            sums.loss_sum += f64::from(error * error) / 2.0;
            sums.metric_sum += f64::from(error.abs());
        }
        Ok(sums)
    }

    fn check(&self, batch: &Batch<'_>) -> Result<(), ModelError> {
        batch.check(self.features)
    }

    fn metric(&self) -> Metric {
        Metric::mean("absolute_error")
    }
}
