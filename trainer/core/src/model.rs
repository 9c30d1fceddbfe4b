//! What a model is to the rest of Steadfast: parameters, a gradient, an evaluation.

use steadfast_common::layout::ParamSpec;

use crate::batch::{Batch, MicroBatch};
use crate::error::ModelError;
use crate::parameters::Parameters;

/// A differentiable model with a loss.
///
/// The same inputs must give the same bits, on any machine with the job's numerics fingerprint:
/// take transcendental functions from `libm`, chance from [`crate::Random`], add in a fixed order,
/// and keep no state between calls.
pub trait Model: Send + Sync {
    /// Names and shapes of the parameters, in order; the same at every call.
    fn parameters(&self) -> Vec<ParamSpec>;

    /// Sets the values that training starts from. `parameters` is laid out by
    /// [`Model::parameters`].
    fn initialize(&self, seed: u64, parameters: &mut Parameters);

    /// Adds the gradient of the *sum* of the records' losses to `gradient` and returns that sum.
    /// `key` names what chance there is. After an error `gradient` is of no use.
    fn gradient(
        &self,
        parameters: &Parameters,
        batch: &Batch,
        key: &MicroBatch,
        gradient: &mut Parameters,
    ) -> Result<f64, ModelError>;

    /// Sums up loss and metric over the records, without chance.
    fn evaluate(&self, parameters: &Parameters, batch: &Batch) -> Result<Evaluation, ModelError>;

    /// Says whether every record is fit for the model. Whole tasks are checked before any of their
    /// records is trained on, so that a task with a bad record can be given up without a trace.
    fn check(&self, batch: &Batch) -> Result<(), ModelError>;

    /// What [`Evaluation::metric_sum`] sums up.
    fn metric(&self) -> Metric;
}

/// Sums over evaluated records.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    pub records: u64,
    pub loss_sum: f64,
    pub metric_sum: f64,
}

impl Evaluation {
    /// Adds the sums of other records. Floating-point addition depends on its order, so merge in a
    /// fixed one.
    pub fn merge(&mut self, other: &Evaluation) {
        self.records += other.records;
        self.loss_sum += other.loss_sum;
        self.metric_sum += other.metric_sum;
    }

    /// Loss of the average record; none without a record.
    pub fn mean_loss(&self) -> Option<f64> {
        (self.records > 0).then(|| self.loss_sum / self.records as f64)
    }

    /// The value of `metric` over all records; none without a record.
    pub fn metric(&self, metric: &Metric) -> Option<f64> {
        let mean = (self.records > 0).then(|| self.metric_sum / self.records as f64)?;
        match metric.finish {
            Finish::Mean => Some(mean),
            Finish::RootOfMean => Some(mean.sqrt()),
        }
    }
}

/// A number that tells people how good a model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// Shown in status and logs: `accuracy`, `rmse`.
    pub name: &'static str,
    pub finish: Finish,
}

impl Metric {
    /// A metric that is the mean of what each record gives.
    pub const fn mean(name: &'static str) -> Self {
        Self { name, finish: Finish::Mean }
    }

    /// A metric that is the square root of the mean of what each record gives.
    pub const fn root_of_mean(name: &'static str) -> Self {
        Self { name, finish: Finish::RootOfMean }
    }
}

/// The last step from a sum over records to a metric.
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
        let mut all = Evaluation { records: 1, loss_sum: 2.0, metric_sum: 9.0 };
        all.merge(&Evaluation { records: 3, loss_sum: 4.0, metric_sum: 27.0 });
        assert_eq!(all.mean_loss(), Some(1.5));
        assert_eq!(all.metric(&Metric::mean("error")), Some(9.0));
        assert_eq!(all.metric(&Metric::root_of_mean("rmse")), Some(3.0));
    }

    #[test]
    fn nothing_is_said_about_no_record() {
        assert_eq!(Evaluation::default().mean_loss(), None);
        assert_eq!(Evaluation::default().metric(&Metric::mean("accuracy")), None);
    }
}
