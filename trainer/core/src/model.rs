//! The interface of models: parameters, a gradient, an evaluation.

use std::fmt;
use std::sync::Arc;

use steadfast_common::records::code::Modules;
use steadfast_common::tensor::layout::ParamSpec;

use crate::batch::{Batch, MicroBatch};
use crate::error::ModelError;
use crate::fingerprint::fingerprint;
use crate::lanes::LaneBatches;
use crate::parameters::Parameters;
use crate::ranking::Ranking;

/// A differentiable model with a loss.
///
/// The same inputs must give the same bits, on any machine with the job's numerics fingerprint: take
/// transcendental functions from `libm` and random numbers from [`crate::Random`], add in a fixed order,
/// and keep no state between calls.
pub trait Model: Send + Sync {
    /// Returns names and shapes of the parameters, in order; the same in every call.
    fn parameters(&self) -> Vec<ParamSpec>;

    /// Returns, for each table, the ids of the rows that the model reads for a batch: in any order, and as often
    /// as they occur. Parameters and gradient of the batch have these rows, see [`TableRows`]. `key` is that of the
    /// gradient; without one, the batch is evaluated.
    ///
    /// [`TableRows`]: crate::TableRows
    fn ids(&self, _batch: &Batch, _key: Option<&MicroBatch>) -> Result<Vec<Vec<u64>>, ModelError> {
        Ok(Vec::new())
    }

    /// Sets the initial values of the parameters, which have the layout of [`Model::parameters`]; those of rows
    /// are set elsewhere.
    fn initialize(&self, seed: u64, parameters: &mut Parameters) -> Result<(), ModelError>;

    /// Adds the gradient of the *sum* of the records' losses to `gradient` and returns that sum. `key`
    /// determines the random numbers. After an error the content of `gradient` is unspecified.
    fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError>;

    /// Sets `gradient`, whose content is arbitrary, to the gradient that [`Model::gradient`] adds, and returns the same
    /// sum. The default clears `gradient` first; a model that writes every value anyway saves this pass over memory.
    fn fresh_gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError> {
        gradient.clear();
        self.gradient(parameters, batch, key, gradient)
    }

    /// Sets `gradient` to the sum of the lanes' gradients, added along their tree as [`Codec::Plain`] adds, and
    /// returns the sum of their losses along the same tree; all bits must be those that
    /// [`Model::fresh_gradient`] of each lane gives. `None`, as the default: the lanes must be computed one by
    /// one. A model whose passes over the parameters are expensive can share them between lanes.
    ///
    /// [`Codec::Plain`]: steadfast_common::tensor::compression::Codec::Plain
    fn gradient_of_lanes(
        &self,
        _parameters: &Parameters,
        _batches: &LaneBatches<'_>,
        _gradient: &mut Parameters,
    ) -> Result<Option<f64>, ModelError> {
        Ok(None)
    }

    /// Returns the fewest records of which the model computes a gradient: more than one, if it normalizes over the
    /// records of a micro-batch.
    fn min_records(&self) -> u32 {
        1
    }

    /// Returns whether the model prepares batches ahead, see [`Model::prepare`].
    fn prepares(&self) -> bool {
        false
    }

    /// Begins what a gradient of this batch needs before it is computed, such as to decode it. The gradient follows
    /// soon, or never. Called from time to time for a batch that is begun.
    ///
    /// # Errors
    /// If the model cannot begin; the gradient would have the same error.
    fn prepare(&self, _batch: &Batch, _key: &MicroBatch) -> Result<(), ModelError> {
        Ok(())
    }

    /// Sums loss and metric over the records, without random numbers.
    fn evaluate(&self, parameters: &Parameters, batch: &Batch) -> Result<Evaluation, ModelError>;

    /// Checks that the model accepts every record. Whole tasks are checked before any of their records is
    /// trained on; a task with a bad record can then be discarded without having had any effect.
    fn check(&self, batch: &Batch) -> Result<(), ModelError>;

    /// Returns the metric that [`Evaluation::metric_sum`] sums up.
    fn metric(&self) -> Metric;

    /// Returns the further metrics, those that [`Evaluation::further`] sums up. Their names differ.
    fn further_metrics(&self) -> Vec<Metric> {
        Vec::new()
    }

    /// Returns the numerics fingerprint: the same text on all machines on which this model computes the
    /// same bits. A model that computes with other libraries names these.
    fn numerics(&self) -> String {
        fingerprint()
    }

    /// Returns the sources of a model that is a program of its own. A trainer whose sources differ from those with
    /// which the parameters were trained is refused, unless `--accept-code-change` is given. A model without sources,
    /// which is the default, is not checked.
    fn modules(&self) -> Modules {
        Modules::new()
    }

    /// Returns the tensors that the model has beside its parameters, and that training does not change, as a safetensors
    /// file: they become a part of each file of the model. The entry `aliases` of its metadata, a JSON object, gives
    /// parameters and tensors further names. The bytes are the same in all trainers. The default is none.
    ///
    /// # Errors
    /// If the model cannot tell.
    fn fixed(&self) -> Result<Option<Vec<u8>>, ModelError> {
        Ok(None)
    }

    /// Notes that the trainer joins a generation; the argument tells whether gradients still count in it. For models
    /// that pass this on: the trainer itself drops gradients that do not count.
    fn begin_generation(&self, _validity: Validity) {}
}

/// Whether gradients of a generation still count: no other generation has begun, and the trainer's lease is
/// valid.
#[derive(Clone)]
pub struct Validity(Arc<dyn Fn() -> bool + Send + Sync>);

impl Validity {
    /// Creates a validity that calls `holds` for each answer.
    pub fn new(holds: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(holds))
    }

    /// Returns whether gradients of the generation still count.
    pub fn holds(&self) -> bool {
        (self.0)()
    }
}

impl fmt::Debug for Validity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Validity").field(&self.holds()).finish()
    }
}

/// Sums over evaluated records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evaluation {
    pub records: u64,
    pub loss_sum: f64,
    pub metric_sum: f64,
    /// What the sums of loss and metric are divided by, if that is not the number of records.
    pub weights: Option<Weights>,
    /// The sums of the further metrics, in the order of [`Model::further_metrics`].
    pub further: Vec<FurtherSum>,
}

/// What is summed up of a further metric.
#[derive(Clone, Debug, PartialEq)]
pub enum FurtherSum {
    Weighted(WeightedSum),
    /// The metric is the area under the ROC curve.
    Ranking(Ranking),
}

/// The weights of the records that the sums of loss and metric are over.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Weights {
    pub loss: f64,
    pub metric: f64,
}

/// A sum, and the weight of what it is over.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WeightedSum {
    pub sum: f64,
    pub weight: f64,
}

impl WeightedSum {
    /// Returns the value of `metric`; `None` if nothing counts.
    pub fn value(self, metric: &Metric) -> Option<f64> {
        let mean = (self.weight != 0.0).then_some(self.sum / self.weight)?;
        Some(match metric.finish {
            Finish::Mean => mean,
            Finish::RootOfMean => mean.sqrt(),
        })
    }
}

impl FurtherSum {
    /// Returns the value of `metric`; `None` if nothing counts.
    pub fn value(&self, metric: &Metric) -> Option<f64> {
        match self {
            Self::Weighted(sum) => sum.value(metric),
            Self::Ranking(ranking) => ranking.area(),
        }
    }

    fn merge(&mut self, other: &Self) {
        match (&mut *self, other) {
            (Self::Weighted(own), Self::Weighted(other)) => {
                own.sum += other.sum;
                own.weight += other.weight;
            }
            (Self::Ranking(own), Self::Ranking(other)) => own.merge(other),
            // A sum of no record does not say how its metric is summed up.
            (Self::Weighted(_), Self::Ranking(_)) => *self = other.clone(),
            (Self::Ranking(_), Self::Weighted(_)) => {}
        }
    }
}

impl Evaluation {
    /// Adds the sums of other records. Floating-point addition depends on its order: merge in a fixed one.
    pub fn merge(&mut self, other: &Evaluation) {
        if self.weights.is_some() || other.weights.is_some() {
            let (own, others) = (self.weights(), other.weights());
            let (loss, metric) = (own.loss + others.loss, own.metric + others.metric);
            self.weights = Some(Weights { loss, metric });
        }
        self.records += other.records;
        self.loss_sum += other.loss_sum;
        self.metric_sum += other.metric_sum;
        self.further.iter_mut().zip(&other.further).for_each(|(own, other)| own.merge(other));
        // Sums of no record may have no further ones.
        self.further.extend(other.further.iter().skip(self.further.len()).cloned());
    }

    /// Returns the sum of the losses, and says in the gradient what its records count.
    pub(crate) fn into_loss_of(self, gradient: &mut Parameters) -> f64 {
        if let Some(weights) = self.weights {
            gradient.set_weight(weights.loss);
        }
        self.loss_sum
    }

    /// Returns what the sums of loss and metric are divided by.
    pub fn weights(&self) -> Weights {
        let records = self.records as f64;
        self.weights.unwrap_or(Weights { loss: records, metric: records })
    }

    /// Returns the mean loss of what counts; `None` if nothing does.
    pub fn mean_loss(&self) -> Option<f64> {
        let weight = self.weights().loss;
        (weight != 0.0).then(|| self.loss_sum / weight)
    }

    /// Returns the value of `metric` over all records; `None` if none counts.
    pub fn metric(&self, metric: &Metric) -> Option<f64> {
        WeightedSum { sum: self.metric_sum, weight: self.weights().metric }.value(metric)
    }
}

/// A measure of the quality of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Shown in status and logs: `accuracy`, `rmse`.
    pub name: &'static str,
    pub finish: Finish,
}

impl Metric {
    /// Creates a metric that is the mean of the records' values.
    pub const fn mean(name: &'static str) -> Self {
        Self { name, finish: Finish::Mean }
    }

    /// Creates a metric that is the square root of the mean of the records' values.
    pub const fn root_of_mean(name: &'static str) -> Self {
        Self { name, finish: Finish::RootOfMean }
    }
}

/// The function that turns a mean over records into a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    Mean,
    RootOfMean,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_evaluations_count_every_record() {
        let sums = |records, loss_sum, metric_sum| Evaluation {
            records,
            loss_sum,
            metric_sum,
            ..Evaluation::default()
        };
        let mut all = sums(1, 2.0, 9.0);
        all.merge(&sums(3, 4.0, 27.0));
        assert_eq!(all.mean_loss(), Some(1.5));
        assert_eq!(all.metric(&Metric::mean("error")), Some(9.0));
        assert_eq!(all.metric(&Metric::root_of_mean("rmse")), Some(3.0));
    }

    /// The mean of parts of different weight is not the mean of their means.
    #[test]
    fn a_mean_is_over_what_counts_however_records_are_divided() {
        let part = |records, loss_sum, loss, further: &[(f64, f64)]| Evaluation {
            records,
            loss_sum,
            weights: Some(Weights { loss, metric: records as f64 }),
            further: further
                .iter()
                .map(|&(sum, weight)| FurtherSum::Weighted(WeightedSum { sum, weight }))
                .collect(),
            ..Evaluation::default()
        };
        let mut all = Evaluation::default();
        all.merge(&part(2, 6.0, 1.5, &[(1.0, 1.0)]));
        all.merge(&part(1, 0.0, 0.0, &[(0.0, 0.0)]));
        all.merge(&part(1, 2.0, 0.5, &[(2.0, 3.0)]));
        assert_eq!(all.mean_loss(), Some(4.0));
        assert_eq!(all.further[0].value(&Metric::mean("token_accuracy")), Some(0.75));
        assert_eq!(part(1, 0.0, 0.0, &[]).mean_loss(), None);
        // Records without weights of their own count once each.
        all.merge(&Evaluation { records: 2, loss_sum: 0.0, ..Evaluation::default() });
        assert_eq!(all.mean_loss(), Some(2.0));
    }

    #[test]
    fn nothing_is_said_about_no_record() {
        assert_eq!(Evaluation::default().mean_loss(), None);
        assert_eq!(Evaluation::default().metric(&Metric::mean("accuracy")), None);
    }
}
