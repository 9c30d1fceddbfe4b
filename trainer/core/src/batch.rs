//! The records of one gradient, and the key of its random numbers.

use ndarray::ArrayView2;
use steadfast_common::ids::{Lane, Pass};
use steadfast_common::job::columns::Column;
use steadfast_common::job::dataset::Records;
use steadfast_common::random::{Purpose, Random};

use crate::error::ModelError;
use crate::parameters::all_finite;

/// The input of a model.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Records × features.
    pub features: ArrayView2<'a, f32>,
    /// One label per record: a class index or a number.
    pub labels: &'a [f32],
    /// The columns of a dataset without features and label.
    pub columns: &'a [Column],
    /// What each record counts; empty if each counts once.
    pub weights: &'a [f32],
}

impl Batch<'_> {
    pub fn len(&self) -> usize {
        self.columns.first().map_or(self.labels.len(), Column::len)
    }

    /// Copies the records.
    pub fn to_records(&self) -> Records {
        Records {
            features: self.features.iter().copied().collect(),
            width: self.features.ncols(),
            labels: self.labels.to_vec(),
            columns: self.columns.to_vec(),
            weights: self.weights.to_vec(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Checks that every record has `width` features, all of them finite. Models call this first: an
    /// activation may turn an infinite feature into a finite loss.
    pub fn check(&self, width: usize) -> Result<(), ModelError> {
        if self.features.nrows() != self.labels.len() {
            let (features, labels) = (self.features.nrows(), self.labels.len());
            return Err(ModelError::Uneven { features, labels });
        }
        if self.features.ncols() != width && !self.is_empty() {
            return Err(ModelError::Width { expected: width, found: self.features.ncols() });
        }
        let is_weight = |weight: f32| weight.is_finite() && 0.0 <= weight;
        if let Some(record) = self.weights.iter().position(|weight| !is_weight(*weight)) {
            return Err(ModelError::BadWeight { record, value: self.weights[record] });
        }
        if self.features.as_slice().is_some_and(all_finite) {
            return Ok(());
        }
        let bad = self.features.indexed_iter().find(|(_, value)| !value.is_finite());
        match bad {
            Some(((record, feature), _)) => Err(ModelError::BadFeature { record, feature }),
            None => Ok(()),
        }
    }
}

/// # Panics
/// If `records` does not hold `width` features per record.
impl<'a> From<&'a Records> for Batch<'a> {
    fn from(records: &'a Records) -> Self {
        let shape = (records.labels.len(), records.width);
        let features = ArrayView2::from_shape(shape, &records.features)
            .expect("a record has as many features as its width says");
        Self {
            features,
            labels: &records.labels,
            columns: &records.columns,
            weights: &records.weights,
        }
    }
}

/// The key of the random numbers of one gradient: every trainer that computes it draws the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    pub seed: u64,
    pub pass: Pass,
    /// Step within the pass; in asynchronous mode, the number of the mini-batch.
    pub step: u64,
    pub lane: Lane,
}

impl MicroBatch {
    /// Opens stream `index` (for example, one per layer) of random numbers.
    pub fn random(&self, index: u64) -> Random {
        let pass_and_lane = u64::from(self.pass.0) << 32 | u64::from(self.lane.0);
        Random::keyed(self.seed, Purpose::Gradient, pass_and_lane, self.step, index)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_part_of_a_name_opens_another_stream() {
        let key = MicroBatch { seed: 1, pass: Pass(2), step: 3, lane: Lane(4) };
        let mut streams = [
            key.random(0),
            key.random(1),
            MicroBatch { seed: 9, ..key }.random(0),
            MicroBatch { pass: Pass(9), ..key }.random(0),
            MicroBatch { step: 9, ..key }.random(0),
            MicroBatch { lane: Lane(9), ..key }.random(0),
            Random::of_parameter(1, 2),
            Random::of_parameter(1, 3),
        ];
        let first: BTreeSet<[u32; 4]> =
            streams.iter_mut().map(|it| [(); 4].map(|()| it.uniform().to_bits())).collect();
        assert_eq!(first.len(), streams.len());
    }

    fn records(features: &[f32]) -> Records {
        let labels = vec![0.0; features.len() / 2];
        Records { features: features.to_vec(), width: 2, labels, ..Records::default() }
    }

    #[test]
    fn a_feature_that_is_not_finite_is_named() {
        let found = |features: &[f32]| Batch::from(&records(features)).check(2);
        assert_eq!(found(&[1.0, 2.0, 3.0, 4.0]), Ok(()));
        let bad = Err(ModelError::BadFeature { record: 1, feature: 0 });
        assert_eq!(found(&[1.0, 2.0, f32::INFINITY, 4.0]), bad);
    }

    #[test]
    fn records_of_another_width_are_refused() {
        let records = records(&[1.0, 2.0]);
        let bad = Err(ModelError::Width { expected: 3, found: 2 });
        assert_eq!(Batch::from(&records).check(3), bad);
        let batch = Batch { labels: &[0.0, 1.0], ..Batch::from(&records) };
        assert_eq!(batch.check(2), Err(ModelError::Uneven { features: 1, labels: 2 }));
    }

    #[test]
    fn a_weight_is_a_number_from_zero_on() {
        let of = |weight| Records { weights: vec![1.0, weight], ..records(&[0.0; 4]) };
        assert_eq!(Batch::from(&of(0.0)).check(2), Ok(()));
        let refused = ModelError::BadWeight { record: 1, value: -1.0 };
        assert_eq!(Batch::from(&of(-1.0)).check(2), Err(refused));
        assert!(Batch::from(&of(f32::INFINITY)).check(2).is_err());
    }

    #[test]
    fn no_record_fits_every_model() {
        assert_eq!(Batch::from(&Records::default()).check(9), Ok(()));
    }
}
