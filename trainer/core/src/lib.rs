//! Models, their gradients, and random numbers that depend only on a key. Pure: the same parameters,
//! records and key give the same bits.
//!
//! # A model of your own
//!
//! Implement [`Model`], register it under a name, and set `model.kind` to that name in the job file. This
//! example predicts how often an event happens (Poisson regression): `λ = exp(x·w)`, with loss
//! `λ − y ln λ`; the gradient with respect to `w` is `(λ − y) x`.
//!
//! ```
//! use std::sync::Arc;
//! use steadfast_common::job::dataset::Records;
//! use steadfast_common::ids::{Lane, Pass};
//! use steadfast_common::tensor::layout::{Layout, ParamSpec};
//! use steadfast_trainer_core::{
//!     Batch, Evaluation, Inputs, Metric, MicroBatch, Model, ModelError, Parameters, Random,
//!     Registry,
//! };
//!
//! struct Poisson { features: usize }
//!
//! impl Model for Poisson {
//!     fn parameters(&self) -> Vec<ParamSpec> {
//!         vec![ParamSpec::new("weight", &[self.features])]
//!     }
//!
//!     fn initialize(&self, seed: u64, parameters: &mut Parameters) -> Result<(), ModelError> {
//!         let mut random = Random::of_parameter(seed, 0);
//!         parameters.vector_mut(0).mapv_inplace(|_| 0.01 * random.normal());
//!         Ok(())
//!     }
//!
//!     fn gradient(
//!         &self, parameters: &Parameters, batch: &Batch, _: &MicroBatch, gradient: &mut Parameters,
//!     ) -> Result<f64, ModelError> {
//!         batch.check(self.features)?;
//!         let mut loss_sum = 0.0;
//!         for (record, label) in batch.features.rows().into_iter().zip(batch.labels) {
//!             let logarithm = record.dot(&parameters.vector(0));
//!             let mean = libm::expf(logarithm);
//!             loss_sum += f64::from(mean - label * logarithm);
//!             gradient.vector_mut(0).scaled_add(mean - label, &record);
//!         }
//!         Ok(loss_sum)
//!     }
//!
//!     fn evaluate(&self, parameters: &Parameters, batch: &Batch) -> Result<Evaluation, ModelError> {
//!         batch.check(self.features)?;
//!         let mut sums = Evaluation { records: batch.len() as u64, ..Evaluation::default() };
//!         for (record, label) in batch.features.rows().into_iter().zip(batch.labels) {
//!             let logarithm = record.dot(&parameters.vector(0));
//!             let mean = libm::expf(logarithm);
//!             sums.loss_sum += f64::from(mean - label * logarithm);
//!             sums.metric_sum += f64::from((mean - label).abs());
//!         }
//!         Ok(sums)
//!     }
//!
//!     fn check(&self, batch: &Batch) -> Result<(), ModelError> {
//!         batch.check(self.features)
//!     }
//!
//!     fn metric(&self) -> Metric {
//!         Metric::mean("absolute_error")
//!     }
//! }
//!
//! let mut models = Registry::built_in();
//! models.register("poisson", |_spec, inputs| Ok(Box::new(Poisson { features: inputs.features })));
//!
//! # fn spec() -> steadfast_common::job::spec::ModelSpec {
//! #     steadfast_common::job::spec::ModelSpec {
//! #         kind: "poisson".into(), classes: None, factors: None, hidden: vec![],
//! #         activation: Default::default(), dropout: 0.0, options: Default::default(),
//! #         entry: None, script: None, device: None, min_records: None, class_weights: vec![],
//! #     }
//! # }
//! let model = models.build(&spec(), Inputs { features: 2, columns: 0 })?;
//! let layout = Arc::new(Layout::new(model.parameters()));
//! let mut parameters = Parameters::zeros(layout.clone());
//! model.initialize(7, &mut parameters)?;
//!
//! let (features, labels) = (vec![1.0, 0.0, 0.0, 1.0], vec![2.0, 0.0]);
//! let records = Records { width: 2, features, labels, ..Records::default() };
//! let key = MicroBatch { seed: 7, pass: Pass(0), step: 0, lane: Lane(0) };
//! let mut gradient = Parameters::zeros(layout);
//! let loss_sum = model.gradient(&parameters, &Batch::from(&records), &key, &mut gradient)?;
//! assert!(loss_sum.is_finite() && gradient.is_finite());
//! # Ok::<(), ModelError>(())
//! ```

mod batch;
mod categories;
mod deep;
mod deep_fm;
mod error;
mod factorization_machine;
mod fingerprint;
mod lanes;
mod loss;
mod model;
mod network;
mod parameters;
mod ranking;
pub mod record_search;
mod registry;
mod wide_and_deep;

pub use batch::{Batch, MicroBatch};
pub use error::ModelError;
pub use fingerprint::fingerprint;
pub use lanes::LaneBatches;
pub use model::{Evaluation, Finish, FurtherSum, Metric, Model, Validity, WeightedSum, Weights};
/// The array types of [`Batch`] and [`Parameters`], for models outside this workspace.
pub use ndarray;
pub use parameters::{BatchIds, Parameters, TableRows};
pub use ranking::Ranking;
pub use registry::{Inputs, ModelFactory, Registry};
pub use steadfast_common::job::categories::category_id;
pub use steadfast_common::random::{Purpose, Random};
pub use steadfast_common::tensor::layout::ParamSpec;
pub use steadfast_common::tensor::table::Initial;
