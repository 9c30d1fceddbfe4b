//! All values of a model in one flat vector, with a view of each parameter in its own shape; and the rows of its
//! tables that a batch needs.

use std::sync::Arc;

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2};
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::Rows;

const FITS: &str = "a layout gives each parameter as many values as its shape";

/// Values in the order of a [`Layout`]: parameters, or a gradient with respect to them. The vector is
/// always as long as the layout. Clones share the values until one of them changes.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameters {
    layout: Arc<Layout>,
    values: Arc<Vec<f32>>,
    tables: Vec<TableRows>,
    /// Of a gradient: what its records count.
    weight: Option<f64>,
}

/// The rows of one table whose ids occur in a batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TableRows {
    pub rows: Rows,
    /// For each id that [`Model::ids`](crate::Model::ids) returned, in order, the place of its row.
    pub places: Arc<Vec<u32>>,
}

impl TableRows {
    /// Returns rows of zeros for the same ids, to add a gradient to.
    pub fn zeros(&self) -> Self {
        let rows = Rows::zeros(self.rows.width(), self.rows.ids().to_vec());
        Self { rows, places: self.places.clone() }
    }

    /// Returns the row of the id at an index of [`Model::ids`](crate::Model::ids).
    ///
    /// # Panics
    /// If there is none.
    pub fn at(&self, index: usize) -> &[f32] {
        self.rows.row(self.places[index] as usize)
    }

    /// Returns the row that [`TableRows::at`] returns, for changes, such as to add to a gradient.
    ///
    /// # Panics
    /// If there is none.
    pub fn at_mut(&mut self, index: usize) -> &mut [f32] {
        self.rows.row_mut(self.places[index] as usize)
    }
}

/// The distinct ids of one table in a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchIds {
    pub ids: RowIds,
    /// For each id of the batch, its index in `ids`.
    pub places: Arc<Vec<u32>>,
}

impl BatchIds {
    /// Finds the distinct ones among the ids of a batch.
    pub fn new(ids: &[u64]) -> Self {
        let mut order: Vec<(u64, u32)> = ids.iter().copied().zip(0..).collect();
        order.sort_unstable();
        let (mut distinct, mut places) = (Vec::new(), vec![0; ids.len()]);
        for (id, index) in order {
            if distinct.last() != Some(&id) {
                distinct.push(id);
            }
            places[index as usize] = distinct.len() as u32 - 1;
        }
        Self { ids: RowIds::new(distinct), places: places.into() }
    }

    /// Returns the rows of the batch's ids, taken from `rows`, which includes them.
    ///
    /// # Panics
    /// If a row is missing.
    pub fn rows_of(&self, rows: &Rows) -> TableRows {
        TableRows { rows: rows.select(self.ids.clone().into_vec()), places: self.places.clone() }
    }

    /// Returns rows of zeros for these ids, to add a gradient to.
    pub fn zeros(&self, width: usize) -> TableRows {
        TableRows {
            rows: Rows::zeros(width, self.ids.clone().into_vec()),
            places: self.places.clone(),
        }
    }
}

impl Parameters {
    /// Creates values that are all zero.
    pub fn zeros(layout: Arc<Layout>) -> Self {
        let values = vec![0.0; layout.len()];
        Self::new(layout, values)
    }

    /// Wraps `values`, in the order of `layout`.
    ///
    /// # Panics
    /// If `values` is not as long as the layout.
    pub fn new(layout: Arc<Layout>, values: Vec<f32>) -> Self {
        assert_eq!(values.len(), layout.len(), "the number of values must match the layout");
        Self { layout, values: Arc::new(values), tables: Vec::new(), weight: None }
    }

    /// Returns the same values with rows of each table.
    pub fn with_tables(self, tables: Vec<TableRows>) -> Self {
        Self { tables, ..self }
    }

    /// Says what the records of the gradient count together, if that is not their number: the mean gradient and loss of
    /// a step are its sums divided by the weights of all lanes. A model says it in each gradient, or in none.
    pub fn set_weight(&mut self, weight: f64) {
        self.weight = Some(weight);
    }

    /// Takes what [`Parameters::set_weight`] has said of the last gradient.
    pub fn take_weight(&mut self) -> Option<f64> {
        self.weight.take()
    }

    pub fn tables(&self) -> &[TableRows] {
        &self.tables
    }

    /// Returns the rows of one table.
    ///
    /// # Panics
    /// If there is no such table.
    pub fn table(&self, index: usize) -> &TableRows {
        &self.tables[index]
    }

    /// Returns the rows of one table, for changes in place.
    ///
    /// # Panics
    /// If there is no such table.
    pub fn table_mut(&mut self, index: usize) -> &mut TableRows {
        &mut self.tables[index]
    }

    /// Returns the flat vector and the rows of each table.
    pub fn into_parts(self) -> (Vec<f32>, Vec<Rows>) {
        let rows = self.tables.into_iter().map(|table| table.rows).collect();
        (Arc::unwrap_or_clone(self.values), rows)
    }

    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Returns all values, flat.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns all values, flat, for owners that outlive this value.
    pub fn shared(&self) -> Arc<Vec<f32>> {
        self.values.clone()
    }

    /// Returns all values, flat, for changes in place; copies them first if they are shared.
    pub fn values_mut(&mut self) -> &mut [f32] {
        Arc::make_mut(&mut self.values).as_mut_slice()
    }

    /// Returns the flat vector; a copy if it is shared.
    pub fn into_values(self) -> Vec<f32> {
        Arc::unwrap_or_clone(self.values)
    }

    /// Adds a gradient of the same layout, with rows of any ids.
    pub fn add(&mut self, other: &Self) {
        self.values_mut().iter_mut().zip(other.values()).for_each(|(sum, value)| *sum += value);
        let tables = self.tables.iter_mut().zip(&other.tables);
        tables.for_each(|(sum, table)| sum.rows.add(&table.rows));
    }

    /// Sets every value to zero, to begin the sum of a gradient.
    pub fn clear(&mut self) {
        self.values_mut().fill(0.0);
        self.tables.iter_mut().for_each(|table| table.rows.values_mut().fill(0.0));
    }

    /// Returns whether all values are finite, including those of rows.
    pub fn is_finite(&self) -> bool {
        let mut rows = self.tables.iter().map(|table| table.rows.values());
        all_finite(&self.values) && rows.all(all_finite)
    }

    /// Returns the values of parameter `index`, of any shape, row-major.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn vector(&self, index: usize) -> ArrayView1<'_, f32> {
        ArrayView1::from(&self.values[self.layout.range_of(index)])
    }

    /// Returns the values of parameter `index`, of any shape, row-major, for changes in place.
    ///
    /// # Panics
    /// If there is no such parameter.
    pub fn vector_mut(&mut self, index: usize) -> ArrayViewMut1<'_, f32> {
        let range = self.layout.range_of(index);
        ArrayViewMut1::from(&mut self.values_mut()[range])
    }

    /// Returns parameter `index` as a matrix.
    ///
    /// # Panics
    /// If there is no such parameter, or it does not have two dimensions.
    pub fn matrix(&self, index: usize) -> ArrayView2<'_, f32> {
        let values = &self.values[self.layout.range_of(index)];
        ArrayView2::from_shape(sides(&self.layout, index), values).expect(FITS)
    }

    /// Returns parameter `index` as a matrix, for changes in place.
    ///
    /// # Panics
    /// If there is no such parameter, or it does not have two dimensions.
    pub fn matrix_mut(&mut self, index: usize) -> ArrayViewMut2<'_, f32> {
        let (range, sides) = (self.layout.range_of(index), sides(&self.layout, index));
        ArrayViewMut2::from_shape(sides, &mut self.values_mut()[range]).expect(FITS)
    }
}

/// Returns whether all values are finite. Does not stop early, which lets it run at memory speed.
pub(crate) fn all_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |finite, value| finite & value.is_finite())
}

fn sides(layout: &Layout, index: usize) -> (usize, usize) {
    let param = &layout.params()[index];
    match param.shape[..] {
        [rows, columns] => (rows, columns),
        _ => panic!("parameter `{}` is not a matrix: its shape is {:?}", param.name, param.shape),
    }
}

#[cfg(test)]
mod tests {
    use steadfast_common::tensor::layout::ParamSpec;

    use super::*;

    fn counted() -> Parameters {
        let specs = vec![ParamSpec::new("weight", &[2, 3]), ParamSpec::new("bias", &[2])];
        Parameters::new(Arc::new(Layout::new(specs)), (0..8).map(|it| it as f32).collect())
    }

    #[test]
    fn views_show_each_parameter_in_its_own_shape() {
        let mut parameters = counted();
        assert_eq!(parameters.matrix(0).row(1).to_vec(), [3.0, 4.0, 5.0]);
        assert_eq!(parameters.vector(0).len(), 6);
        parameters.matrix_mut(0)[[1, 2]] = 50.0;
        parameters.vector_mut(1)[0] = 60.0;
        assert_eq!(parameters.values(), [0.0, 1.0, 2.0, 3.0, 4.0, 50.0, 60.0, 7.0]);
    }

    #[test]
    fn each_id_of_a_batch_has_the_place_of_its_row() {
        let ids = BatchIds::new(&[7, 3, 7, 9, 3]);
        assert_eq!((ids.ids.as_slice(), &ids.places[..]), (&[3, 7, 9][..], &[1, 0, 1, 2, 0][..]));
        let all = Rows::of(1, vec![1, 3, 7, 8, 9], vec![0.1, 0.3, 0.7, 0.8, 0.9]);
        let rows = ids.rows_of(&all);
        assert_eq!([0, 1, 2, 3, 4].map(|it| rows.at(it)[0]), [0.7, 0.3, 0.7, 0.9, 0.3]);
        assert_eq!(ids.zeros(2).rows.values(), [0.0; 6]);
        assert_eq!(BatchIds::new(&[]), BatchIds::default());
    }

    #[test]
    fn one_value_that_is_not_finite_is_found() {
        let mut parameters = counted();
        assert!(parameters.is_finite());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            parameters.values_mut()[5] = bad;
            assert!(!parameters.is_finite());
        }
        parameters.clear();
        assert_eq!(parameters.into_values(), [0.0; 8]);
    }

    #[test]
    #[should_panic(expected = "`bias` is not a matrix")]
    fn a_vector_has_no_matrix_view() {
        counted().matrix(1);
    }
}
