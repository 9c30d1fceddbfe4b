//! Losses of one record, and their derivatives with respect to the model's outputs.

use ndarray::ArrayViewMut2;
use steadfast_common::job::spec::ModelSpec;

use crate::error::ModelError;
use crate::model::{Evaluation, Metric};

/// A loss function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// ½ (ŷ − y)² of the only output; the metric is the root of the mean squared error.
    Squared,
    /// −ln softmax(outputs)[label]; the metric is the share of records whose largest output is that of
    /// the label.
    CrossEntropy { classes: usize },
    /// −ln of the probability of the label, 0 or 1, given by the logistic function of the only output; the metric
    /// is the share of records whose label is the more probable one.
    Logistic,
}

impl Loss {
    /// Returns the loss of a model with one output: logistic for two classes, and squared without classes.
    pub(crate) fn of_one_output(spec: &ModelSpec) -> Self {
        match spec.classes {
            None => Self::Squared,
            Some(_) => Self::Logistic,
        }
    }

    /// Returns the number of outputs of a model with this loss.
    pub(crate) fn outputs(self) -> usize {
        match self {
            Self::Squared | Self::Logistic => 1,
            Self::CrossEntropy { classes } => classes,
        }
    }

    pub(crate) fn metric(self) -> Metric {
        match self {
            Self::Squared => Metric::root_of_mean("rmse"),
            Self::CrossEntropy { .. } | Self::Logistic => Metric::mean("accuracy"),
        }
    }

    /// Checks that the loss is defined for every label.
    pub(crate) fn check(self, labels: &[f32]) -> Result<(), ModelError> {
        for (record, &label) in labels.iter().enumerate() {
            match self {
                Self::Squared => finite(label, record).map(|_| ())?,
                Self::CrossEntropy { classes } => class(label, record, classes).map(|_| ())?,
                Self::Logistic => class(label, record, 2).map(|_| ())?,
            }
        }
        Ok(())
    }

    /// Sums loss and metric, record by record in order, and replaces `outputs` (records × outputs, row-major)
    /// by the derivative of the loss with respect to each output.
    pub(crate) fn sum(
        self,
        mut outputs: ArrayViewMut2<'_, f32>,
        labels: &[f32],
    ) -> Result<Evaluation, ModelError> {
        let mut sums = Evaluation { records: labels.len() as u64, ..Evaluation::default() };
        for (record, (mut row, &label)) in outputs.rows_mut().into_iter().zip(labels).enumerate() {
            let row = row.as_slice_mut().expect("outputs are row-major");
            let (loss, metric) = match self {
                Self::Squared => squared(row, finite(label, record)?),
                Self::CrossEntropy { .. } => cross_entropy(row, class(label, record, row.len())?),
                Self::Logistic => logistic(row, class(label, record, 2)?),
            };
            sums.loss_sum += loss;
            sums.metric_sum += metric;
        }
        if !sums.loss_sum.is_finite() {
            return Err(ModelError::NotFinite);
        }
        Ok(sums)
    }
}

fn squared(row: &mut [f32], label: f32) -> (f64, f64) {
    row[0] -= label;
    let square = f64::from(row[0]) * f64::from(row[0]);
    (0.5 * square, square)
}

/// Computes the logistic loss and its metric with the exponential of a negative number, which cannot overflow.
fn logistic(row: &mut [f32], label: usize) -> (f64, f64) {
    let output = row[0];
    let small = libm::expf(-output.abs());
    let of_one = if output < 0.0 { small / (1.0 + small) } else { 1.0 / (1.0 + small) };
    // ln(1 + e^z) − z y, with z = `output` and y = `label`.
    let (z, y) = (f64::from(output), label as f64);
    let loss = libm::log1p(f64::from(small)) + z.max(0.0) - z * y;
    row[0] = of_one - label as f32;
    (loss, if (0.0 < output) == (label == 1) { 1.0 } else { 0.0 })
}

/// Computes the cross-entropy and its metric with exponentials of differences to the largest output, which cannot
/// overflow.
fn cross_entropy(row: &mut [f32], label: usize) -> (f64, f64) {
    let mut largest = 0;
    for index in 1..row.len() {
        if row[index] > row[largest] {
            largest = index;
        }
    }
    let below = f64::from(row[largest]) - f64::from(row[label]);
    let shift = row[largest];
    let mut sum = 0.0_f32;
    for value in row.iter_mut() {
        *value = libm::expf(*value - shift);
        sum += *value;
    }
    row.iter_mut().for_each(|value| *value /= sum);
    row[label] -= 1.0;
    (libm::log(f64::from(sum)) + below, if largest == label { 1.0 } else { 0.0 })
}

fn finite(label: f32, record: usize) -> Result<f32, ModelError> {
    if label.is_finite() {
        Ok(label)
    } else {
        Err(ModelError::LabelNotFinite { record, value: label })
    }
}

fn class(label: f32, record: usize, classes: usize) -> Result<usize, ModelError> {
    let class = label as usize;
    if class < classes && class as f32 == label {
        Ok(class)
    } else {
        Err(ModelError::BadLabel { record, value: label, classes })
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;

    const CLASSES: Loss = Loss::CrossEntropy { classes: 3 };

    fn sum(loss: Loss, outputs: &[f32], label: f32) -> Result<(Evaluation, Vec<f32>), ModelError> {
        let mut outputs = Array2::from_shape_vec((1, outputs.len()), outputs.to_vec()).unwrap();
        let sums = loss.sum(outputs.view_mut(), &[label])?;
        Ok((sums, outputs.into_iter().collect()))
    }

    #[test]
    fn the_logistic_loss_is_that_of_two_classes() {
        for (output, label) in [(0.3, 0.0), (-1.7, 1.0), (40.0, 1.0), (-300.0, 1.0), (0.0, 1.0)] {
            let (one, slope) = sum(Loss::Logistic, &[output], label).unwrap();
            let classes = Loss::CrossEntropy { classes: 2 };
            let (two, slopes) = sum(classes, &[0.0, output], label).unwrap();
            assert!((one.loss_sum - two.loss_sum).abs() < 1e-6, "{output} {label}");
            assert!((slope[0] - slopes[1]).abs() < 1e-6, "{output} {label}");
        }
        assert!(sum(Loss::Logistic, &[f32::NAN], 1.0).is_err());
        assert!(sum(Loss::Logistic, &[0.0], 2.0).is_err());
    }

    #[test]
    fn large_outputs_neither_overflow_nor_vanish() {
        let (sums, derivative) = sum(CLASSES, &[3e38, -3e38, 3e38], 0.0).unwrap();
        assert!((sums.loss_sum - std::f64::consts::LN_2).abs() < 1e-7);
        assert_eq!(derivative, [-0.5, 0.0, 0.5]);
        let (sums, derivative) = sum(CLASSES, &[1000.0, 0.0, 0.0], 1.0).unwrap();
        assert_eq!((sums.loss_sum, sums.metric_sum), (1000.0, 0.0));
        assert_eq!(derivative, [1.0, -1.0, 0.0]);
    }

    #[test]
    fn equal_outputs_are_counted_for_the_lowest_class() {
        assert_eq!(sum(CLASSES, &[1.0, 1.0, 1.0], 0.0).unwrap().0.metric_sum, 1.0);
        assert_eq!(sum(CLASSES, &[1.0, 1.0, 1.0], 2.0).unwrap().0.metric_sum, 0.0);
    }

    #[test]
    fn the_squared_loss_is_half_of_what_the_metric_averages() {
        let (sums, derivative) = sum(Loss::Squared, &[5.0], 2.0).unwrap();
        assert_eq!((sums.loss_sum, sums.metric_sum), (4.5, 9.0));
        assert_eq!(derivative, [3.0]);
    }

    #[test]
    fn a_label_that_is_no_class_is_named() {
        for value in [-1.0, 0.5, 3.0, 1e20, f32::INFINITY, f32::NEG_INFINITY] {
            let bad = ModelError::BadLabel { record: 0, value, classes: 3 };
            assert_eq!(sum(CLASSES, &[0.0; 3], value), Err(bad));
        }
        let message = sum(CLASSES, &[0.0; 3], f32::NAN).unwrap_err().to_string();
        assert_eq!(message, "label NaN of record 0 is not a class from 0 to 2");
    }

    #[test]
    fn a_number_to_predict_is_finite() {
        let bad = ModelError::LabelNotFinite { record: 0, value: f32::INFINITY };
        assert_eq!(sum(Loss::Squared, &[0.0], f32::INFINITY), Err(bad));
    }

    #[test]
    fn divergence_is_an_error() {
        for outputs in [[f32::NAN, 0.0, 0.0], [0.0, f32::NAN, 0.0], [f32::INFINITY, 0.0, 0.0]] {
            assert_eq!(sum(CLASSES, &outputs, 1.0), Err(ModelError::NotFinite));
        }
        assert_eq!(sum(Loss::Squared, &[f32::NAN], 1.0), Err(ModelError::NotFinite));
    }
}
