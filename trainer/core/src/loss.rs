//! Losses of one record, and their derivatives with respect to the model's outputs.

use std::sync::Arc;

use ndarray::ArrayViewMut2;
use steadfast_common::job::spec::ModelSpec;

use crate::batch::Batch;
use crate::error::ModelError;
use crate::model::{Evaluation, FurtherSum, Metric, Weights};
use crate::ranking::Ranking;

/// A loss function, and what the records of each class count.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Loss {
    kind: Kind,
    /// By class; empty if all count the same.
    class_weights: Arc<[f32]>,
}

/// The loss of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
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
    /// Returns the loss of a model with one output for each class: cross-entropy, and squared without classes.
    pub(crate) fn of_classes(spec: &ModelSpec) -> Self {
        let kind = spec.classes.map_or(Kind::Squared, |classes| Kind::CrossEntropy { classes });
        Self { kind, class_weights: spec.class_weights.as_slice().into() }
    }

    /// Returns the loss of a model with one output: logistic for two classes, and squared without classes.
    pub(crate) fn of_one_output(spec: &ModelSpec) -> Self {
        let kind = spec.classes.map_or(Kind::Squared, |_| Kind::Logistic);
        Self { kind, class_weights: spec.class_weights.as_slice().into() }
    }

    /// Returns the number of outputs of a model with this loss.
    pub(crate) fn outputs(&self) -> usize {
        match self.kind {
            Kind::Squared | Kind::Logistic => 1,
            Kind::CrossEntropy { classes } => classes,
        }
    }

    pub(crate) fn metric(&self) -> Metric {
        match self.kind {
            Kind::Squared => Metric::root_of_mean("rmse"),
            Kind::CrossEntropy { .. } | Kind::Logistic => Metric::mean("accuracy"),
        }
    }

    /// Returns the further metrics: the area under the ROC curve, `auc`, of a model of two classes.
    pub(crate) fn further_metrics(&self) -> Vec<Metric> {
        match self.kind {
            Kind::Logistic | Kind::CrossEntropy { classes: 2 } => vec![Metric::mean("auc")],
            Kind::Squared | Kind::CrossEntropy { .. } => Vec::new(),
        }
    }

    /// Returns whether records of a batch count differently.
    pub(crate) fn weights(&self, batch: &Batch) -> bool {
        !self.class_weights.is_empty() || !batch.weights.is_empty()
    }

    /// Checks that the loss is defined for every label.
    pub(crate) fn check(&self, labels: &[f32]) -> Result<(), ModelError> {
        for (record, &label) in labels.iter().enumerate() {
            match self.kind {
                Kind::Squared => finite(label, record).map(|_| ())?,
                Kind::CrossEntropy { classes } => class(label, record, classes).map(|_| ())?,
                Kind::Logistic => class(label, record, 2).map(|_| ())?,
            }
        }
        Ok(())
    }

    /// Sums loss and metrics, and overwrites `outputs` as [`Loss::sum`] does.
    pub(crate) fn evaluate(
        &self,
        outputs: ArrayViewMut2<'_, f32>,
        batch: &Batch,
    ) -> Result<Evaluation, ModelError> {
        let mut ranking = Ranking::default();
        let is_ranked = !self.further_metrics().is_empty();
        for (record, (row, label)) in outputs.rows().into_iter().zip(batch.labels).enumerate() {
            let weight = batch.weights.get(record).copied().unwrap_or(1.0);
            // The logarithm of the odds of the second class; of one output, that is the output.
            let score = row[row.len() - 1] - if row.len() == 2 { row[0] } else { 0.0 };
            if is_ranked {
                ranking.add(score, *label == 1.0, f64::from(weight));
            }
        }
        let further = if is_ranked { vec![FurtherSum::Ranking(ranking)] } else { Vec::new() };
        Ok(Evaluation { further, ..self.sum(outputs, batch)? })
    }

    /// Sums loss and metric, record by record in order, and replaces `outputs` (records × outputs, row-major)
    /// by the derivative of the loss with respect to each output. Each record counts by its weight, in the loss also by
    /// that of its class.
    pub(crate) fn sum(
        &self,
        mut outputs: ArrayViewMut2<'_, f32>,
        batch: &Batch,
    ) -> Result<Evaluation, ModelError> {
        let mut sums = Evaluation { records: batch.labels.len() as u64, ..Evaluation::default() };
        let mut weights = Weights::default();
        let rows = outputs.rows_mut().into_iter().zip(batch.labels).enumerate();
        for (record, (mut row, &label)) in rows {
            let row = row.as_slice_mut().expect("outputs are row-major");
            let (mut loss, mut metric) = match self.kind {
                Kind::Squared => squared(row, finite(label, record)?),
                Kind::CrossEntropy { .. } => cross_entropy(row, class(label, record, row.len())?),
                Kind::Logistic => logistic(row, class(label, record, 2)?),
            };
            if self.weights(batch) {
                let own = batch.weights.get(record).copied().unwrap_or(1.0);
                // The label is a class: it was checked.
                let weight = own * self.class_weights.get(label as usize).copied().unwrap_or(1.0);
                row.iter_mut().for_each(|slope| *slope *= weight);
                loss *= f64::from(weight);
                metric *= f64::from(own);
                weights.loss += f64::from(weight);
                weights.metric += f64::from(own);
            }
            sums.loss_sum += loss;
            sums.metric_sum += metric;
        }
        sums.weights = self.weights(batch).then_some(weights);
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

    const CLASSES: Kind = Kind::CrossEntropy { classes: 3 };

    fn sum(kind: Kind, outputs: &[f32], label: f32) -> Result<(Evaluation, Vec<f32>), ModelError> {
        let loss = Loss { kind, class_weights: Arc::new([]) };
        weighted(&loss, outputs, &[label], &[])
    }

    fn weighted(
        loss: &Loss,
        outputs: &[f32],
        labels: &[f32],
        weights: &[f32],
    ) -> Result<(Evaluation, Vec<f32>), ModelError> {
        let shape = (labels.len(), outputs.len() / labels.len());
        let mut outputs = Array2::from_shape_vec(shape, outputs.to_vec()).unwrap();
        let features = Array2::zeros((labels.len(), 0));
        let batch = Batch { features: features.view(), labels, columns: &[], weights };
        let sums = loss.sum(outputs.view_mut(), &batch)?;
        Ok((sums, outputs.into_iter().collect()))
    }

    /// A record of weight 2 counts as two records, and one of weight 0 not at all.
    #[test]
    fn a_record_counts_by_its_weight() {
        for (kind, label) in [(CLASSES, 2.0), (Kind::Logistic, 1.0), (Kind::Squared, 4.0)] {
            let loss = Loss { kind, class_weights: Arc::new([]) };
            let outputs: Vec<f32> = (0..3 * loss.outputs()).map(|it| it as f32 - 2.0).collect();
            let labels = [label, 0.0, 1.0];
            let (sums, slopes) = weighted(&loss, &outputs, &labels, &[2.0, 0.0, 1.0]).unwrap();
            let width = loss.outputs();
            let twice = [&outputs[..width], &outputs[..width], &outputs[2 * width..]].concat();
            let (plain, each) = weighted(&loss, &twice, &[label, label, 1.0], &[]).unwrap();
            assert_eq!((sums.loss_sum, sums.metric_sum), (plain.loss_sum, plain.metric_sum));
            assert_eq!((sums.mean_loss(), plain.weights), (plain.mean_loss(), None));
            let weight = Weights { loss: 3.0, metric: 3.0 };
            assert_eq!((sums.weights, sums.records), (Some(weight), 3));
            assert_eq!(slopes[0], 2.0 * each[0]);
            assert!(slopes[width..2 * width].iter().all(|it| *it == 0.0));
        }
    }

    #[test]
    fn models_of_two_classes_rank_records_by_their_odds() {
        let evaluate = |kind: Kind, outputs: &[f32], labels: &[f32], weights: &[f32]| {
            let loss = Loss { kind, class_weights: Arc::new([1.0, 3.0]) };
            let shape = (labels.len(), outputs.len() / labels.len());
            let mut outputs = Array2::from_shape_vec(shape, outputs.to_vec()).unwrap();
            let features = Array2::zeros((labels.len(), 0));
            let batch = Batch { features: features.view(), labels, columns: &[], weights };
            let found = loss.evaluate(outputs.view_mut(), &batch).unwrap();
            let values = found.further.iter().zip(loss.further_metrics());
            values.map(|(sum, metric)| (metric.name, sum.value(&metric))).collect::<Vec<_>>()
        };
        // Of six pairs three are in order, and one is a tie.
        let (scores, labels) = ([2.0, 0.5, -1.0, 0.5, 3.0], [1.0, 1.0, 0.0, 0.0, 0.0]);
        let area = |weights: &[f32]| evaluate(Kind::Logistic, &scores, &labels, weights)[0];
        assert_eq!(area(&[]), ("auc", Some(3.5 / 6.0)));
        assert_eq!(area(&[1.0, 1.0, 1.0, 1.0, 0.0]), ("auc", Some(3.5 / 4.0)));
        let of_classes: Vec<f32> = scores.iter().flat_map(|it| [1.5, 1.5 + it]).collect();
        let two = Kind::CrossEntropy { classes: 2 };
        assert_eq!(evaluate(two, &of_classes, &labels, &[]), [("auc", Some(3.5 / 6.0))]);
        assert_eq!(evaluate(Kind::Squared, &scores, &labels, &[]), []);
    }

    /// As a mean with class weights is in PyTorch: by the sum of the weights. A metric does not know them.
    #[test]
    fn a_class_counts_by_its_weight_in_the_loss() {
        let loss = Loss { kind: Kind::Logistic, class_weights: Arc::new([1.0, 3.0]) };
        let (sums, slopes) = weighted(&loss, &[0.0, 0.0], &[0.0, 1.0], &[]).unwrap();
        assert!((sums.mean_loss().unwrap() - std::f64::consts::LN_2).abs() < 1e-7);
        assert_eq!(sums.weights, Some(Weights { loss: 4.0, metric: 2.0 }));
        assert_eq!((sums.metric_sum, slopes), (1.0, vec![0.5, -1.5]));
        let (both, _) = weighted(&loss, &[0.0, 0.0], &[0.0, 1.0], &[2.0, 0.5]).unwrap();
        assert_eq!(both.weights, Some(Weights { loss: 3.5, metric: 2.5 }));
    }

    #[test]
    fn the_logistic_loss_is_that_of_two_classes() {
        for (output, label) in [(0.3, 0.0), (-1.7, 1.0), (40.0, 1.0), (-300.0, 1.0), (0.0, 1.0)] {
            let (one, slope) = sum(Kind::Logistic, &[output], label).unwrap();
            let classes = Kind::CrossEntropy { classes: 2 };
            let (two, slopes) = sum(classes, &[0.0, output], label).unwrap();
            assert!((one.loss_sum - two.loss_sum).abs() < 1e-6, "{output} {label}");
            assert!((slope[0] - slopes[1]).abs() < 1e-6, "{output} {label}");
        }
        assert!(sum(Kind::Logistic, &[f32::NAN], 1.0).is_err());
        assert!(sum(Kind::Logistic, &[0.0], 2.0).is_err());
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
        let (sums, derivative) = sum(Kind::Squared, &[5.0], 2.0).unwrap();
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
        assert!(
            message.starts_with("label NaN of record 0 is not a class from 0 to 2; "),
            "{message}"
        );
    }

    #[test]
    fn a_number_to_predict_is_finite() {
        let bad = ModelError::LabelNotFinite { record: 0, value: f32::INFINITY };
        assert_eq!(sum(Kind::Squared, &[0.0], f32::INFINITY), Err(bad));
    }

    #[test]
    fn divergence_is_an_error() {
        for outputs in [[f32::NAN, 0.0, 0.0], [0.0, f32::NAN, 0.0], [f32::INFINITY, 0.0, 0.0]] {
            assert_eq!(sum(CLASSES, &outputs, 1.0), Err(ModelError::NotFinite));
        }
        assert_eq!(sum(Kind::Squared, &[f32::NAN], 1.0), Err(ModelError::NotFinite));
    }
}
