//! The gradient of several lanes at once.
//!
//! What a lane contributes must not depend on which lanes are computed beside it. Two facts make it possible
//! to compute them together: in a product, each row of the result depends on the same row of the left factor
//! alone; and a sum of gradients needs no gradient as a whole, but can be made tile by tile.

use std::cell::RefCell;
use std::ops::Range;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, ArrayViewMut1, ArrayViewMut2, s};
use steadfast_common::ids::Lane;
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::finite::are_finite;
use steadfast_common::tensor::lane_tree::{LaneSums, LaneTree};

use crate::batch::{Batch, MicroBatch};
use crate::error::ModelError;

/// Rows and columns of a tile. The tiles that exist at a time, one for each level of the tree, stay in the
/// caches; and a tile is large enough that a product of few records is not all preparation.
const TILE: (usize, usize) = (64, 512);

/// The batches of lanes that are all the lanes of a node of the tree, ascending.
#[derive(Clone, Debug)]
pub struct LaneBatches<'a> {
    tree: LaneTree,
    lanes: Vec<(MicroBatch, Batch<'a>)>,
}

impl<'a> LaneBatches<'a> {
    /// Creates the batches of all lanes of a node of `tree`, in ascending order of lanes; a batch may be empty.
    pub fn new(tree: LaneTree, lanes: Vec<(MicroBatch, Batch<'a>)>) -> Self {
        Self { tree, lanes }
    }

    /// Returns the key and the batch of each lane.
    pub fn lanes(&self) -> &[(MicroBatch, Batch<'a>)] {
        &self.lanes
    }

    /// Returns the number of records of all lanes.
    pub fn records(&self) -> usize {
        self.lanes.iter().map(|(_, batch)| batch.len()).sum()
    }

    /// Returns the features of all lanes' records, and where each lane's records are.
    pub(crate) fn joined(&self) -> (Array2<f32>, LaneRows) {
        // A batch without records may be without columns.
        let batches = self.lanes.iter().map(|(_, batch)| batch);
        let columns = batches.map(|batch| batch.features.ncols()).max().unwrap_or(0);
        let mut features = Array2::zeros((self.records(), columns));
        let mut ranges = Vec::with_capacity(self.lanes.len());
        let mut from = 0;
        for (_, batch) in &self.lanes {
            let rows = from..from + batch.len();
            if !batch.is_empty() {
                features.slice_mut(s![rows.clone(), ..]).assign(&batch.features);
            }
            from = rows.end;
            ranges.push(rows);
        }
        let lanes = self.lanes.iter().map(|(key, _)| key.lane).collect();
        (features, LaneRows { tree: self.tree, lanes, ranges })
    }
}

/// The rows of each lane in a matrix with a row for each record.
pub(crate) struct LaneRows {
    tree: LaneTree,
    lanes: Vec<Lane>,
    ranges: Vec<Range<usize>>,
}

impl LaneRows {
    pub(crate) fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Sums what `part` returns for each lane with records, along the tree; `None` if none has any.
    pub(crate) fn sum<T>(
        &self,
        mut part: impl FnMut(usize, Range<usize>) -> Result<T, ModelError>,
        mut add: impl FnMut(&mut T, T),
    ) -> Result<Option<T>, ModelError> {
        let mut sums = LaneSums::new(self.tree);
        for (index, rows) in self.ranges.iter().enumerate() {
            let sum = if rows.is_empty() { None } else { Some(part(index, rows.clone())?) };
            sums.put(self.tree.leaf(self.lanes[index]), sum, &mut add);
        }
        Ok(sums.into_held().next().and_then(|(_, sum)| sum))
    }

    /// Sets `sum`, outputs × inputs, to the sum over lanes of `∂W = Dᵀ X`.
    ///
    /// # Errors
    /// If the part of a lane is not finite.
    pub(crate) fn sum_products(
        &self,
        input: ArrayView2<'_, f32>,
        derivative: ArrayView2<'_, f32>,
        mut sum: ArrayViewMut2<'_, f32>,
    ) -> Result<(), ModelError> {
        // Memory of tiles, which is used again.
        let free = RefCell::new(Vec::<Vec<f32>>::new());
        for (rows, columns) in tiles_of(sum.dim()) {
            let shape = (rows.len(), columns.len());
            let product = |_, records: Range<usize>| {
                let mut values = free.borrow_mut().pop().unwrap_or_default();
                values.resize(shape.0 * shape.1, 0.0);
                let mut target =
                    ArrayViewMut2::from_shape(shape, &mut values).expect("it has this size");
                let input = input.slice(s![records.clone(), columns.clone()]);
                let derivative = derivative.slice(s![records, rows.clone()]);
                // As in the gradient of one lane.
                general_mat_mul(
                    1.0,
                    &input.t(),
                    &derivative,
                    0.0,
                    &mut target.view_mut().reversed_axes(),
                );
                if are_finite(&values) { Ok(values) } else { Err(ModelError::NotFinite) }
            };
            let add = |left: &mut Vec<f32>, right: Vec<f32>| {
                Codec::Plain.add(left, &right);
                free.borrow_mut().push(right);
            };
            let total = self.sum(product, add)?;
            let mut target = sum.slice_mut(s![rows.clone(), columns.clone()]);
            match total {
                Some(values) => {
                    let view = ArrayView2::from_shape(shape, &values).expect("it has this size");
                    target.assign(&view);
                    free.borrow_mut().push(values);
                }
                None => target.fill(0.0),
            }
        }
        Ok(())
    }

    /// Sets `sum` to the sum over lanes of `∂b = Σ rows of D`.
    ///
    /// # Errors
    /// As [`LaneRows::sum_products`].
    pub(crate) fn sum_rows(
        &self,
        derivative: ArrayView2<'_, f32>,
        mut sum: ArrayViewMut1<'_, f32>,
    ) -> Result<(), ModelError> {
        let part = |_, records| {
            let mut values = vec![0.0; sum.len()];
            add_rows(derivative.slice(s![records, ..]), ArrayViewMut1::from(&mut values));
            if are_finite(&values) { Ok(values) } else { Err(ModelError::NotFinite) }
        };
        let total = self.sum(part, |left: &mut Vec<f32>, right| Codec::Plain.add(left, &right))?;
        match total {
            Some(values) => sum.iter_mut().zip(values).for_each(|(sum, value)| *sum = value),
            None => sum.fill(0.0),
        }
        Ok(())
    }
}

/// Returns the rows and columns of each tile of a matrix.
fn tiles_of(shape: (usize, usize)) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let starts =
        move |len: usize, step| (0..len).step_by(step).map(move |from| from..len.min(from + step));
    starts(shape.0, TILE.0)
        .flat_map(move |rows| starts(shape.1, TILE.1).map(move |columns| (rows.clone(), columns)))
}

/// Adds rows to a sum, in order.
pub(crate) fn add_rows(rows: ArrayView2<'_, f32>, mut sum: ArrayViewMut1<'_, f32>) {
    for row in rows.rows() {
        sum += &row;
    }
}
