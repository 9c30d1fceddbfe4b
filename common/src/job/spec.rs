//! The job spec: a parsed job file, completed with defaults.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::job::average::AverageSpec;
use crate::job::columns::ColumnType;
use crate::job::durations::{self, optional};
use crate::tensor::compression::GradientsSpec;

/// Definition of a job. Two specs with the same [`JobSpec::digest`] train the same model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Name of the job; the prefix of its keys is `/jobs/<name>`. Letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Seed of every random choice of the job: order of data, initial parameters, dropout.
    #[serde(default)]
    pub seed: u64,
    #[serde(default)]
    pub mode: Mode,
    /// Passes over the training data. Either this or `steps`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passes: Option<u32>,
    /// Optimizer steps (synchronous mode only). Either this or `passes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Absent if the model's gradients come from [closures](ModelSpec::has_closures).
    #[serde(default)]
    pub dataset: DatasetSpec,
    pub model: ModelSpec,
    /// A file with initial values, in place of those of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<StartSpec>,
    #[serde(default)]
    pub optimizer: OptimizerSpec,
    #[serde(default)]
    pub learning_rate: LearningRateSpec,
    /// A moving average of the parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub average: Option<AverageSpec>,
    /// Settings of the model's embedding tables, by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tables: BTreeMap<String, TableSpec>,
    #[serde(default)]
    pub sync: SyncSpec,
    #[serde(default, rename = "async")]
    pub asynchronous: AsyncSpec,
    #[serde(default)]
    pub gradients: GradientsSpec,
    #[serde(default)]
    pub tasks: TaskSpec,
    #[serde(default)]
    pub evaluation: EvaluationSpec,
    #[serde(default)]
    pub checkpoint: CheckpointSpec,
    /// Number of pservers beyond one for each slot that follow a slot, so that it loses nothing with its pserver.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub warm_spares: u32,
}

impl JobSpec {
    /// Returns the directory of the job's shards in its store. Jobs may share a store, and each deletes only
    /// its own objects.
    pub fn shards_directory(&self) -> String {
        format!("shards/{}", self.name)
    }

    /// Lists the keys in which this spec differs from another one, for a message.
    pub fn difference(&self, other: &Self) -> String {
        let fields = |spec: &Self| match serde_json::to_value(spec) {
            Ok(serde_json::Value::Object(fields)) => fields,
            Ok(_) | Err(_) => serde_json::Map::new(),
        };
        let (new, old) = (fields(self), fields(other));
        let keys: BTreeSet<&String> = new.keys().chain(old.keys()).collect();
        let differing = keys.into_iter().filter(|key| new.get(*key) != old.get(*key));
        differing.map(|key| format!("`{key}` differs")).collect::<Vec<_>>().join(", ")
    }
}

/// How gradients are applied to the parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Every step sums a fixed set of lanes; the result does not depend on which trainer computed which.
    #[default]
    Sync,
    /// Every push is applied on arrival.
    Async,
}

/// Location of the records, and the columns to use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DatasetSpec {
    /// Paths, URLs or globs. Relative paths are resolved against the directory of the job file.
    pub source: Vec<String>,
    pub format: DataFormat,
    /// Feature columns by name; `*` matches any run of characters (`pixel_*`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub features: Vec<String>,
    /// The column to predict: a class index or a number.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub label: String,
    /// The values of the label that are the classes 0, 1, …, such as `cat` or `-1`; without them the label is the number
    /// itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<String>,
    /// The column with what each record counts; each counts once without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<String>,
    /// Columns whose values are categories, such as words or numbers of users, by name, with `*` as in `features`. They
    /// are used beside `features`, of which there may be none then.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub categories: Vec<String>,
    /// In place of `features` and `label`: columns of any type by name, with `*` as in `features`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<String>,
    /// Categories that combine others: the names of their columns, by the name of the new one.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub crosses: BTreeMap<String, Vec<String>>,
    /// Types of `columns` or `categories` by name, in place of those of the files.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub types: BTreeMap<String, ColumnType>,
    /// Value of an empty feature, in the units of the file; without it, such a record is invalid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<f32>,
    /// Function of every feature, before it is scaled.
    #[serde(default, skip_serializing_if = "Transform::is_default")]
    pub transform: Transform,
    /// Factor for every feature, to scale raw units.
    #[serde(default = "one")]
    pub feature_scale: f32,
    /// Records in one task; by default derived from the size of the dataset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records_per_task: Option<u32>,
    /// Whether the first line of a CSV or TSV file has the column names. Without it the names are `0`,
    /// `1`, ….
    #[serde(default)]
    pub header: Header,
    /// Whether the sources are a stream: new files are trained on as they appear, and the job ends when it is
    /// drained.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub follow: bool,
}

impl Default for DatasetSpec {
    /// Returns the dataset of a job whose gradients come from closures: a stream that never has a file.
    fn default() -> Self {
        Self {
            source: Vec::new(),
            format: DataFormat::Parquet,
            features: Vec::new(),
            label: String::new(),
            classes: Vec::new(),
            weight: None,
            categories: Vec::new(),
            columns: Vec::new(),
            crosses: BTreeMap::new(),
            types: BTreeMap::new(),
            missing: None,
            transform: Transform::None,
            feature_scale: 1.0,
            records_per_task: None,
            header: Header::Present,
            follow: true,
        }
    }
}

/// A function of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transform {
    /// The feature itself.
    #[default]
    None,
    /// sign(x) · ln(1 + |x|), for counts.
    Log1p,
}

impl Transform {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Applies the function to a value; the result has the same bits on all machines.
    pub fn apply(self, value: f64) -> f64 {
        match self {
            Self::None => value,
            Self::Log1p => libm::log1p(value.abs()).copysign(value),
        }
    }
}

/// Encoding of the dataset's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataFormat {
    Parquet,
    Csv,
    Tsv,
    /// One JSON object in each line.
    Jsonl,
    /// TFRecord files of `tf.train.Example` messages.
    Tfrecord,
    /// `label index:value …` lines.
    Libsvm,
    /// Tar archives; files with the same name up to its first dot are one record.
    Webdataset,
}

impl DataFormat {
    /// Returns the format that the name of a file, or a pattern of such names, tells by its end: `data/*.csv.gz`.
    pub fn of_name(name: &str) -> Option<Self> {
        let plain = [".gz", ".zst", ".bz2"].iter().find_map(|it| name.strip_suffix(it));
        match plain.unwrap_or(name).rsplit_once('.')?.1 {
            "parquet" => Some(Self::Parquet),
            "csv" => Some(Self::Csv),
            "tsv" => Some(Self::Tsv),
            "jsonl" => Some(Self::Jsonl),
            "tfrecord" => Some(Self::Tfrecord),
            "libsvm" => Some(Self::Libsvm),
            "webdataset" | "tar" => Some(Self::Webdataset),
            _ => None,
        }
    }
}

/// First line of a CSV or TSV file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Header {
    #[default]
    Present,
    Absent,
}

/// The initial values of parameters, from a model that was trained before.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StartSpec {
    /// Path or URL of a safetensors file. A relative path is resolved against the directory of the job file.
    #[serde(default)]
    pub file: String,
    /// Names in the file by names of parameters, where they differ. One `*` on both sides stands for the same text.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub names: BTreeMap<String, String>,
    /// Parameters that begin with the values of the model, by name, with `*` for any text. All others are in the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub new: Vec<String>,
    /// Path or URL of a file with the state of the optimizer; without it, the state begins anew.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub optimizer: String,
}

/// The model and its size. Keys that are unknown to the built-in models belong in `options`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// `linear`, `softmax`, `mlp`, `fm`, `deepfm`, `wide-deep`, `python`, or the name under which a trainer registered
    /// its own model. `closures`: a program with a coordinator declares the parameters, and its closures push the
    /// gradients.
    pub kind: String,
    /// Number of classes, for classifiers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<usize>,
    /// Models of categories: factors of each category.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub factors: Option<usize>,
    /// Built-in classifiers: what the records of each class count in the loss; all count the same when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub class_weights: Vec<f32>,
    /// Widths of hidden layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hidden: Vec<usize>,
    #[serde(default)]
    pub activation: Activation,
    /// Probability that a hidden unit is dropped in training.
    #[serde(default)]
    pub dropout: f32,
    /// Options that are passed to user-defined models unchanged.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, toml::Value>,
    /// `python`: the function that builds the model, as `module:function`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<String>,
    /// `python`: a program with its own loop; `closures`: the program with the coordinator, whose workers run its functions.
    /// Relative to the directory of the job file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub script: Option<String>,
    /// `python`: where PyTorch computes, such as `cuda`; a trainer may override it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// The fewest records of which the model computes a gradient; see [`ModelSpec::min_records`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_records: Option<u32>,
}

/// The kind of a model whose gradients come from the closures of a coordinator.
pub const CLOSURES: &str = "closures";

impl ModelSpec {
    /// Returns whether the gradients come from the closures of a coordinator. Such a job has no dataset; it ends when
    /// it is drained.
    pub fn has_closures(&self) -> bool {
        self.kind == CLOSURES
    }

    /// Returns the fewest records of which the model computes a gradient. A model that normalizes over the records
    /// of a micro-batch takes at least two.
    pub fn min_records(&self) -> u32 {
        self.min_records.unwrap_or(1)
    }
}

/// Non-linearity of hidden layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    #[default]
    Relu,
    Tanh,
    Sigmoid,
}

/// The update rule that pservers apply. A key that the chosen rule does not use is refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSpec {
    #[serde(default)]
    pub kind: OptimizerKind,
    /// `momentum`, `lars`, `rmsprop`: share of the velocity kept from step to step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub momentum: Option<f32>,
    /// `momentum`: Nesterov momentum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nesterov: Option<bool>,
    /// `adam`, `adamw`, `lamb`, `lion`, `nadam`, `radam`: decay of the first moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beta1: Option<f32>,
    /// `adam`, `adamw`, `lamb`, `nadam`, `radam`: decay of the second moment; `lion`: of the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beta2: Option<f32>,
    /// `adadelta`, `rmsprop`: decay of the running squares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rho: Option<f32>,
    /// Added to denominators for numerical stability.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epsilon: Option<f32>,
    /// `adagrad`, `ftrl`: initial value of the accumulated squares; `rule`: of the first state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_accumulator: Option<f32>,
    /// `ftrl`: exponent of the per-coordinate learning rate, negative (−0.5).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate_power: Option<f32>,
    /// `ftrl`: L1 strength.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l1: Option<f32>,
    /// `ftrl`: L2 strength.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l2: Option<f32>,
    /// L2 added to the gradient; decoupled from it for `adamw`.
    #[serde(default)]
    pub weight_decay: f32,
    /// Clips every component of the mean gradient to ± this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_value: Option<f32>,
    /// Scales the mean gradient down to this global L2 norm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f32>,
    /// `nadam`: how fast the momentum rises to `beta1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub momentum_decay: Option<f32>,
    /// Weight decay reduces the parameters themselves, and adds nothing to the gradient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoupled: Option<bool>,
    /// `lars`: the share of its norm by which a parameter moves at a learning rate of 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust_coefficient: Option<f32>,
    /// `rule`: the [update rule](crate::job::rule) as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// `rule`: names of the state vectors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub states: Vec<String>,
    /// `rule`: numbers by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub constants: BTreeMap<String, f64>,
    /// Parameters with settings of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupSpec>,
}

/// Settings of some parameters of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupSpec {
    /// Names of the parameters; `*` matches any run of characters (`*.bias`).
    pub parameters: Vec<String>,
    /// In place of [`OptimizerSpec::weight_decay`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f32>,
    /// Factor of the learning rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f32>,
    /// The parameters keep their values.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
    /// `lamb`, `lars`: whether the learning rate follows the norm of each parameter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trust_ratio: Option<bool>,
}

/// Update rules of an optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    #[default]
    Sgd,
    Momentum,
    Adagrad,
    Adadelta,
    Rmsprop,
    Adam,
    Adamw,
    Ftrl,
    Lion,
    Nadam,
    Radam,
    Lamb,
    Lars,
    /// A rule of the job file.
    Rule,
}

/// The learning rate as a function of the step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearningRateSpec {
    #[serde(default)]
    pub schedule: Schedule,
    /// Learning rate at the end of the warm-up.
    #[serde(default = "default_rate")]
    pub base: f32,
    /// Steps over which the learning rate rises linearly from 0.
    #[serde(default)]
    pub warmup_steps: u64,
    /// `step`, `exponential`: steps between (or per) multiplications by `gamma`; `inverse-sqrt`: steps after which the
    /// learning rate has fallen to 1/√2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// `step`, `exponential`: the factor by which the learning rate is multiplied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gamma: Option<f32>,
    /// `polynomial`, `linear`, `cosine`: steps after the warm-up until `end` is reached; `cosine-restarts`: steps of the
    /// first period; `one-cycle`: steps of the cycle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// `polynomial`, `linear`, `cosine`: the final learning rate; `cosine-restarts`: that at the end of each period.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<f32>,
    /// `polynomial`: the exponent of the decay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<f32>,
    /// `cosine-restarts`: each period is this many times as long as the one before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub period_factor: Option<u64>,
    /// `one-cycle`: the share of the cycle in which the learning rate rises.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pct_start: Option<f32>,
    /// `one-cycle`: `base` divided by the learning rate at the start of the cycle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub div_factor: Option<f32>,
    /// `one-cycle`: the learning rate at the start of the cycle divided by that at its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub final_div_factor: Option<f32>,
    /// `table`: steps, ascending, and the learning rate from each on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<(u64, f32)>,
    /// `table`: the learning rate between two points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interpolation: Option<Interpolation>,
    /// Schedules with a `base` of 1 that the learning rate is multiplied by.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub factors: Vec<LearningRateSpec>,
}

/// The learning rate between two points of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Interpolation {
    /// The learning rate stays that of the point before.
    #[default]
    Hold,
    /// The learning rate moves on the straight line between them.
    Linear,
}

/// Learning rate schedules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    #[default]
    Constant,
    Step,
    Exponential,
    Polynomial,
    Cosine,
    Linear,
    #[serde(rename = "cosine-restarts")]
    CosineRestarts,
    #[serde(rename = "inverse-sqrt")]
    InverseSqrt,
    #[serde(rename = "one-cycle")]
    OneCycle,
    Table,
}

/// Settings of one embedding table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// The update rule of the table's rows; that of the job when absent. Only the rows of a step's ids are updated:
    /// momentum and moments of other rows stay as they are, and weight decay does not reach them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerSpec>,
    /// The learning rate of the table's rows; that of the job when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<LearningRateSpec>,
    /// The update that creates a row; those before it (steps, or pushes in asynchronous mode, in which the id
    /// occurs) are only counted.
    #[serde(default = "one_u32")]
    pub admit_after: u32,
    /// Passes without an update after which a row begins again from its initial values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expire_after: Option<u32>,
}

impl Default for TableSpec {
    fn default() -> Self {
        Self { optimizer: None, learning_rate: None, admit_after: 1, expire_after: None }
    }
}

/// Maximum number of lanes of a job.
pub const LANES_MAX: u32 = 4096;

/// The fixed global batch of a synchronous job: `lanes` × `micro_batch` records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncSpec {
    #[serde(default = "default_lanes")]
    pub lanes: u32,
    #[serde(default = "default_micro_batch")]
    pub micro_batch: u32,
    /// Whether a pass ends before the steps that are smaller, whose records are left out then.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub drop_last: bool,
}

/// Settings of asynchronous mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AsyncSpec {
    /// Records in a mini-batch.
    #[serde(default = "default_batch")]
    pub batch: u32,
    /// Mini-batches between pushes of the accumulated gradient.
    #[serde(default = "one_u32")]
    pub push_every: u32,
    /// Mini-batches between pulls of the parameters.
    #[serde(default = "one_u32")]
    pub pull_every: u32,
    /// Pushes that a trainer may be ahead of the slowest active one; unbounded when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_staleness: Option<u32>,
    /// How the job recovers when a pserver loses its shard.
    #[serde(default)]
    pub lost_pserver: LostPserver,
}

/// Recovery of the other slots when a pserver loses its shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LostPserver {
    /// All slots and the task queues roll back to the latest checkpoint: no record is skipped.
    #[default]
    Rewind,
    /// The other slots keep their shards. The lost slot is restored from the latest checkpoint, without
    /// the gradients of tasks that were finished since then.
    Continue,
}

/// Limits on tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskSpec {
    /// Limits how long a trainer may hold a task of an asynchronous job, and how long a model may compute a gradient: a
    /// trainer whose model takes longer ends.
    #[serde(default = "default_deadline", with = "durations")]
    pub deadline: Duration,
    /// Failures and timeouts of a task that are tolerated; one more discards it for the rest of the pass.
    #[serde(default = "default_failures_max")]
    pub failures_max: u32,
}

/// The held-out part of the dataset.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EvaluationSpec {
    /// Share of the tasks that are held out, spread evenly over the dataset; 0 … 0.9.
    #[serde(default)]
    pub fraction: f64,
    /// In place of a share: files whose records are all held out, as in [`DatasetSpec::source`], with the same columns.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub source: Vec<String>,
    /// Passes between evaluations; the model is always evaluated after the last pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_passes: Option<u32>,
    /// In place of passes: steps between evaluations. Synchronous mode only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// Evaluations without an improvement after which training ends; never when absent. Synchronous mode only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patience: Option<u32>,
    /// An improvement is a change by more than this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_delta: Option<f64>,
    /// The number that is to improve.
    #[serde(default, skip_serializing_if = "Monitor::is_default")]
    pub monitor: Monitor,
    /// The direction in which the metric improves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goal: Option<Goal>,
    /// The parameters that are the result. Synchronous mode only for `best`.
    #[serde(default, skip_serializing_if = "Keep::is_default")]
    pub keep: Keep,
    /// Reductions of the learning rate after evaluations without an improvement. Synchronous mode only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reduce_on_plateau: Option<PlateauSpec>,
}

/// When the learning rate is reduced because evaluations do not improve, and by how much.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlateauSpec {
    /// The learning rate is multiplied by this.
    #[serde(default = "default_factor")]
    pub factor: f32,
    /// Evaluations without an improvement after which it is.
    #[serde(default = "default_patience")]
    pub patience: u32,
    /// An improvement is a change by more than this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_delta: Option<f64>,
    /// Says what `min_delta` is a part of.
    #[serde(default, skip_serializing_if = "DeltaMode::is_default")]
    pub min_delta_mode: DeltaMode,
    /// Evaluations after a reduction that are not counted as ones without an improvement.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cooldown: u32,
    /// Reductions do not take the learning rate below this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_rate: Option<f32>,
}

/// Meanings of the least change that is an improvement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeltaMode {
    /// The change itself.
    #[default]
    Absolute,
    /// The change as a share of the number that it is a change of.
    Relative,
}

impl DeltaMode {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl EvaluationSpec {
    /// Returns whether evaluations decide about the course of the job, so that training goes on only after each.
    pub fn decides(&self) -> bool {
        self.patience.is_some() || self.keep == Keep::Best || self.reduce_on_plateau.is_some()
    }

    /// Returns whether records are held out.
    pub fn has_records(&self) -> bool {
        0.0 < self.fraction || !self.source.is_empty()
    }
}

/// The number of an evaluation that is to improve.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Monitor {
    #[default]
    Loss,
    /// The metric of the model; of several, the first one.
    Metric,
    /// The metric with this name.
    Named(String),
}

impl From<String> for Monitor {
    fn from(name: String) -> Self {
        match name.as_str() {
            "loss" => Self::Loss,
            "metric" => Self::Metric,
            _ => Self::Named(name),
        }
    }
}

impl From<Monitor> for String {
    fn from(monitor: Monitor) -> Self {
        match monitor {
            Monitor::Loss => "loss".to_owned(),
            Monitor::Metric => "metric".to_owned(),
            Monitor::Named(name) => name,
        }
    }
}

impl Monitor {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The direction in which a number improves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Goal {
    Max,
    Min,
}

/// The parameters that are the result of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// The result is the parameters after the last step.
    #[default]
    Last,
    /// The result is the parameters with the best evaluation.
    Best,
}

impl Keep {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// When checkpoints are taken and how many are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointSpec {
    /// Time between checkpoints.
    #[serde(default = "default_every", with = "optional", skip_serializing_if = "Option::is_none")]
    pub every: Option<Duration>,
    /// Steps between checkpoints; none by steps when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// Number of checkpoints to keep; older ones are deleted after a newer one is committed.
    #[serde(default = "default_keep")]
    pub keep: u32,
}

fn one() -> f32 {
    1.0
}
fn default_factor() -> f32 {
    0.1
}
fn default_patience() -> u32 {
    10
}
fn is_zero(value: &u32) -> bool {
    *value == 0
}
fn one_u32() -> u32 {
    1
}
fn default_rate() -> f32 {
    0.01
}
fn default_lanes() -> u32 {
    8
}
fn default_micro_batch() -> u32 {
    16
}
fn default_batch() -> u32 {
    32
}
fn default_deadline() -> Duration {
    Duration::from_secs(600)
}
fn default_failures_max() -> u32 {
    3
}
fn default_every() -> Option<Duration> {
    Some(Duration::from_secs(600))
}
fn default_keep() -> u32 {
    2
}

impl Default for LearningRateSpec {
    fn default() -> Self {
        Self {
            schedule: Schedule::default(),
            base: default_rate(),
            warmup_steps: 0,
            every_steps: None,
            gamma: None,
            decay_steps: None,
            end: None,
            power: None,
            period_factor: None,
            pct_start: None,
            div_factor: None,
            final_div_factor: None,
            points: Vec::new(),
            interpolation: None,
            factors: Vec::new(),
        }
    }
}

impl Default for SyncSpec {
    fn default() -> Self {
        Self { lanes: default_lanes(), micro_batch: default_micro_batch(), drop_last: false }
    }
}

impl Default for AsyncSpec {
    fn default() -> Self {
        Self {
            batch: default_batch(),
            push_every: 1,
            pull_every: 1,
            max_staleness: None,
            lost_pserver: LostPserver::Rewind,
        }
    }
}

impl Default for TaskSpec {
    fn default() -> Self {
        Self { deadline: default_deadline(), failures_max: default_failures_max() }
    }
}

impl Default for CheckpointSpec {
    fn default() -> Self {
        Self { every: default_every(), every_steps: None, keep: default_keep() }
    }
}
