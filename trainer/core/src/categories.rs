//! The ids of the categories in a batch.

use std::ops::Range;

use steadfast_common::job::categories::push_ids;
use steadfast_common::job::columns::{Column, Values};

use crate::batch::Batch;
use crate::error::ModelError;

/// The ids of a batch, record by record, and those of a record column by column.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Categories {
    pub ids: Vec<u64>,
    /// For each id, the number by which it counts.
    pub weights: Vec<f32>,
    /// Number of columns.
    columns: usize,
    /// Where each column of each record begins in `ids`, and at last where they end.
    ends: Vec<usize>,
}

impl Categories {
    /// Hashes the categories of all records.
    pub fn of(batch: &Batch) -> Result<Self, ModelError> {
        batch.columns.iter().try_for_each(check)?;
        let (mut ids, mut weights, mut ends) = (Vec::new(), Vec::new(), vec![0]);
        for record in 0..batch.len() {
            for column in batch.columns {
                push_ids(column, record, &mut ids);
                let given = column.weights.get(column.elements_of(record));
                weights.extend_from_slice(given.unwrap_or_default());
                weights.resize(ids.len(), 1.0);
                ends.push(ids.len());
            }
        }
        Ok(Self { ids, weights, columns: batch.columns.len(), ends })
    }

    /// Returns where the ids of a record are.
    pub fn of_record(&self, record: usize) -> Range<usize> {
        self.ends[record * self.columns]..self.ends[(record + 1) * self.columns]
    }

    /// Returns where the ids of one column of a record are.
    pub fn of_column(&self, record: usize, column: usize) -> Range<usize> {
        let index = record * self.columns + column;
        self.ends[index]..self.ends[index + 1]
    }
}

/// Checks that the values of a column can be categories.
pub(crate) fn check(column: &Column) -> Result<(), ModelError> {
    match column.values {
        Values::Bool(_) | Values::Uint8(_) | Values::Int64(_) | Values::Uint64(_) => Ok(()),
        Values::Text(_) | Values::Bytes(_) => Ok(()),
        Values::Float32(_) | Values::Float64(_) => {
            let column = &column.name;
            let message = format!(
                "column `{column}` holds fractions, which are no categories; name it in \
                 `dataset.features`, or set its type in `dataset.types`"
            );
            Err(ModelError::Failed { message })
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::ArrayView2;
    use steadfast_common::job::categories::category_id;
    use steadfast_common::job::columns::{ColumnSpec, Element};

    use super::*;

    fn column(name: &str, kind: &str, values: Values, offsets: &[i64]) -> Column {
        let spec = ColumnSpec { name: name.to_owned(), kind: kind.parse().unwrap() };
        Column { values, offsets: offsets.to_vec(), ..Column::new(&spec) }
    }

    fn categories(columns: &[Column]) -> Result<Categories, ModelError> {
        let features = ArrayView2::from_shape((0, 0), &[]).unwrap();
        Categories::of(&Batch { features, labels: &[], columns, weights: &[] })
    }

    #[test]
    fn an_id_is_that_of_the_columns_name_and_its_value() {
        let words = column("colour", "text", Values::Text(b"redblue".to_vec()), &[0, 3, 7]);
        let lists = column("seen", "int64[]", Values::Int64(vec![7, 8, 7]), &[0, 2, 3]);
        let found = categories(&[words.clone(), lists]).unwrap();
        assert_eq!((found.of_record(0), found.of_record(1)), (0..3, 3..5));
        assert_eq!((found.of_column(0, 1), found.of_column(1, 0)), (1..3, 3..4));
        assert_eq!(found.ids[1], found.ids[4], "the same value of the same column");
        assert_eq!(found.ids[0], category_id("colour", b"red"));
        let other = Column { name: "color".to_owned(), ..words };
        assert_ne!(categories(&[other]).unwrap().ids[0], found.ids[0]);
    }

    #[test]
    fn fractions_are_no_categories() {
        let floats = column("x", "float32", Values::new(Element::Float32), &[]);
        let error = categories(&[floats]).unwrap_err().to_string();
        assert!(error.contains("column `x` holds fractions"), "{error}");
    }
}
