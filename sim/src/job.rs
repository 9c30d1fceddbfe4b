//! Small jobs that show what happened to every record.
//!
//! The model has one parameter for each record, and the gradient of a record is 1 there. Under plain
//! gradient descent such a parameter is a count: how often its record was applied. Beside the counts
//! there is a linear model, whose bits depend on the order of every addition.

use bytes::Bytes;
use steadfast_common::job_file;
use steadfast_common::layout::ParamSpec;
use steadfast_common::spec::{JobSpec, LostPserver, Mode, OptimizerSpec};
use steadfast_trainer::{
    Batch, Evaluation, Metric, MicroBatch, Model, ModelError, Parameters, Random, Registry,
};

use crate::dice::Dice;

/// Jobs in the catalogue of each mode.
pub const JOBS: u64 = 48;

/// Where the store is, in the simulated world.
pub const STORE: &str = "simulated://store/";

/// Where the dataset lies.
const DATA: &str = "data.csv";

/// Features of a record beside its number.
const WIDTH: usize = 3;

/// A job, by its number in the catalogue. Equal numbers are equal jobs.
#[derive(Clone, Debug)]
pub struct Job {
    pub number: u64,
    pub spec: JobSpec,
    pub records: usize,
    /// What one application of a record adds to its parameter (asynchronous mode).
    pub one: f32,
    /// Whether no task is ever given up.
    pub is_patient: bool,
    /// Whether its parameters come to overflow before it is over.
    pub diverges: bool,
}

impl Job {
    /// Draws the job with a number.
    ///
    /// # Panics
    /// If the catalogue holds a job file that is none.
    pub fn numbered(mode: Mode, number: u64) -> Self {
        let mut dice = Dice::new(number ^ 0x6a6f_6273);
        let (tasks, per_task) = (dice.between(3, 7), *dice.one_of(&[4, 8]));
        let records = (tasks * per_task) as usize;
        let held_out = if dice.happens(0.4) { 0.25 } else { 0.0 };
        let passes = dice.between(1, 3);
        let keep = dice.between(1, 3);
        let is_patient = dice.happens(0.8);
        let patience = match is_patient {
            // Longer than anybody waits for the end: no task may be forgotten.
            true => "deadline = \"1h\"\nfailures_max = 1000\n",
            false => "deadline = \"4s\"\nfailures_max = 3\n",
        };
        let every = match mode {
            Mode::Sync => *dice.one_of(&[
                "every = \"700ms\"\n",
                "every_steps = 4\n",
                "every_steps = 7\nevery = \"2s\"\n",
            ]),
            Mode::Async => *dice.one_of(&["every = \"300ms\"\n", "every = \"1s\"\n"]),
        };
        let (rhythm, optimizer) = match mode {
            Mode::Sync => (synchronous(&mut dice), optimizer(&mut dice)),
            Mode::Async => (asynchronous(&mut dice, per_task), "kind = \"sgd\"\n".to_owned()),
        };
        let mode_name = match mode {
            Mode::Sync => "sync",
            Mode::Async => "async",
        };
        // By the number, so that all else about a job stays as it is.
        let compression = match (mode, number % 4) {
            (Mode::Sync, 1) => "bf16",
            (Mode::Sync, 2) => "int8",
            // Asynchronous jobs are counted by their parameters, which have to be exact.
            (Mode::Sync | Mode::Async, _) => "none",
        };
        let text = format!(
            "name = \"trial\"\nseed = {number}\nmode = \"{mode_name}\"\npasses = {passes}\n\
             [dataset]\nsource = [\"{STORE}{DATA}\"]\nformat = \"csv\"\nfeatures = [\"n\", \"x_*\"]\n\
             label = \"y\"\nrecords_per_task = {per_task}\n\
             [model]\nkind = \"counting\"\n[model.options]\nrecords = {records}\n\
             [optimizer]\n{optimizer}[learning_rate]\nbase = 0.25\n{rhythm}\
             [gradients]\ncompression = \"{compression}\"\n[tasks]\n{patience}\
             [evaluation]\nfraction = {held_out}\n[checkpoint]\nkeep = {keep}\n{every}"
        );
        let spec = job_file::parse(&text).unwrap_or_else(|error| panic!("{text}\n{error}"));
        let rhythm = &spec.asynchronous;
        let one = 0.25 / (rhythm.batch * rhythm.push_every) as f32;
        Self { number, spec, records, one, is_patient, diverges: false }
    }

    /// A job whose counts overflow, which no gradient shows.
    pub fn diverging(mode: Mode) -> Self {
        let mut job = Self::smallest(mode);
        (job.number, job.diverges) = (JOBS, true);
        job.spec.passes = Some(3);
        job.spec.optimizer = OptimizerSpec::default();
        job.spec.learning_rate.base = 1e36;
        job.spec.model.options.insert("slope".to_owned(), 1e3.into());
        job
    }

    /// The job of the catalogue that takes the fewest steps, of those in which no task is given up.
    pub fn smallest(mode: Mode) -> Self {
        let all = (0..JOBS).map(|number| Self::numbered(mode, number));
        let patient = all.filter(|job| job.is_patient && !job.goes_on());
        let size = |job: &Self| job.records as u32 * job.spec.passes.unwrap_or(1);
        patient.min_by_key(size).expect("the catalogue is not empty")
    }

    /// The dataset, as CSV.
    pub fn data(&self) -> (&'static str, Bytes) {
        let mut dice = Dice::new(self.number ^ 0x6461_7461);
        let mut text = "n,x_0,x_1,x_2,y\n".to_owned();
        for record in 0..self.records {
            let mut value = || dice.share() * 2.0 - 1.0;
            let (a, b, c, y) = (value(), value(), value(), value());
            text += &format!("{record},{a:.5},{b:.5},{c:.5},{y:.5}\n");
        }
        (DATA, text.into())
    }

    /// What becomes of the other slots when one is lost.
    pub fn goes_on(&self) -> bool {
        self.spec.mode == Mode::Async
            && self.spec.asynchronous.lost_pserver == LostPserver::Continue
    }
}

fn synchronous(dice: &mut Dice) -> String {
    let (lanes, micro_batch) = (dice.between(1, 4), dice.between(1, 3));
    format!("[sync]\nlanes = {lanes}\nmicro_batch = {micro_batch}\n")
}

fn optimizer(dice: &mut Dice) -> String {
    let kinds = [
        "kind = \"sgd\"\n",
        "kind = \"momentum\"\nmomentum = 0.9\n",
        "kind = \"adam\"\n",
        "kind = \"adam\"\nclip_norm = 0.5\n",
        "kind = \"sgd\"\nclip_norm = 0.125\n",
        "kind = \"adagrad\"\n",
    ];
    dice.one_of(&kinds).to_string()
}

/// Every push is of equally many records, so that each adds the same to the counts.
fn asynchronous(dice: &mut Dice, per_task: u64) -> String {
    let batch = *dice.one_of(&[2, 4]);
    let push_every = if batch == 2 && dice.happens(0.4) { 2 } else { 1 };
    let push_every = if per_task < batch * push_every { 1 } else { push_every };
    let pull_every = dice.between(1, 2);
    let lost = *dice.one_of(&["rewind", "rewind", "continue"]);
    let bound = match dice.between(0, 2) {
        0 => String::new(),
        bound => format!("max_staleness = {bound}\n"),
    };
    format!(
        "[async]\nbatch = {batch}\npush_every = {push_every}\npull_every = {pull_every}\n\
         lost_pserver = \"{lost}\"\n{bound}"
    )
}

/// The models that simulated trainers know.
pub fn registry() -> Registry {
    let mut models = Registry::built_in();
    models.register("counting", |spec, features| {
        let records = spec.options.get("records").and_then(|it| it.as_integer()).unwrap_or(0);
        let slope = spec.options.get("slope").and_then(|it| it.as_float());
        Ok(Box::new(Counting { records: records as usize, features, slope }))
    });
    models
}

/// Index of the parameter that holds the counts.
const COUNTS: usize = 1;

struct Counting {
    records: usize,
    features: usize,
    /// The gradient of a count, of a model that holds nothing but counts.
    slope: Option<f64>,
}

impl Model for Counting {
    fn parameters(&self) -> Vec<ParamSpec> {
        vec![
            ParamSpec::new("weight", &[WIDTH]),
            ParamSpec::new("count", &[self.records]),
            ParamSpec::new("bias", &[1]),
            ParamSpec::new("count_again", &[self.records]),
        ]
    }

    fn initialize(&self, seed: u64, parameters: &mut Parameters) {
        let mut random = Random::of_parameter(seed, 0);
        parameters.vector_mut(0).mapv_inplace(|_| 0.5 * random.normal());
    }

    fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch<'_>,
        _: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        let mut loss_sum = 0.0;
        for (record, label) in batch.features.rows().into_iter().zip(batch.labels) {
            let number = record[0] as usize;
            let x = record.slice(steadfast_trainer::ndarray::s![1..]);
            if let Some(slope) = self.slope {
                gradient.vector_mut(COUNTS)[number] += slope as f32;
                continue;
            }
            let error = x.dot(&parameters.vector(0)) + parameters.vector(2)[0] - label;
            loss_sum += f64::from(error * error) / 2.0;
            gradient.vector_mut(0).scaled_add(error, &x);
            gradient.vector_mut(2)[0] += error;
            gradient.vector_mut(COUNTS)[number] += 1.0;
            gradient.vector_mut(COUNTS + 2)[number] += 1.0;
        }
        Ok(loss_sum)
    }

    fn evaluate(
        &self,
        parameters: &Parameters,
        batch: &Batch<'_>,
    ) -> Result<Evaluation, ModelError> {
        let mut sums = Evaluation { records: batch.len() as u64, ..Evaluation::default() };
        for (record, label) in batch.features.rows().into_iter().zip(batch.labels) {
            let x = record.slice(steadfast_trainer::ndarray::s![1..]);
            let error = x.dot(&parameters.vector(0)) + parameters.vector(2)[0] - label;
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
