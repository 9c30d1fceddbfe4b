//! Crosses: columns of categories that combine others, computed from the records that were read.

use steadfast_common::job::categories::{cross_id, push_ids};
use steadfast_common::job::columns::{Column, ColumnSpec, ColumnType, Element, Shape, Values};
use steadfast_common::job::dataset::Cross;
use steadfast_common::job::spec::DatasetSpec;

use crate::error::DataError;

/// The most combinations of a record's categories in one cross.
const COMBINATIONS_MAX: usize = 10_000;

/// Returns the columns of the job's crosses, given those of the files.
pub(crate) fn resolve(
    spec: &DatasetSpec,
    columns: &[ColumnSpec],
    features: &[String],
) -> Result<Vec<ColumnSpec>, DataError> {
    let resolved = |(name, parts): (&String, &Vec<String>)| {
        let mut names = columns.iter().map(|column| &column.name).chain(features);
        if *name == spec.label || names.any(|column| column == name) {
            return Err(DataError::CrossNamedAsColumn { cross: name.clone() });
        }
        let mut kind = ColumnType::one(Element::Int64);
        for part in parts {
            if self::part(name, part, columns)?.kind.shape != Shape::One {
                kind = ColumnType::list(Element::Int64);
            }
        }
        Ok(ColumnSpec { name: name.clone(), kind })
    };
    spec.crosses.iter().map(resolved).collect()
}

/// Finds a part of a cross, and refuses columns of fractional numbers.
fn part<'a>(
    cross: &str,
    name: &str,
    columns: &'a [ColumnSpec],
) -> Result<&'a ColumnSpec, DataError> {
    let (cross, column) = (cross.to_owned(), name.to_owned());
    let Some(part) = columns.iter().find(|column| column.name == name) else {
        return Err(DataError::UnknownPart { cross, column });
    };
    match part.kind.element {
        Element::Float32 | Element::Float64 => Err(DataError::FractionalPart { cross, column }),
        Element::Bool
        | Element::Uint8
        | Element::Int64
        | Element::Uint64
        | Element::Text
        | Element::Bytes => Ok(part),
    }
}

/// Computes a cross of some records, which have the columns of the files. If a record has too many combinations,
/// returns it and the reason.
pub(crate) fn compute(cross: &Cross, columns: &[Column]) -> Result<Column, (usize, String)> {
    let mut crossed = Column::new(&cross.column);
    let parts: Vec<&Column> = cross.parts.iter().map(|part| &columns[*part]).collect();
    let mut values = Vec::new();
    for record in 0..parts.first().map_or(0, |part| part.len()) {
        let ids: Vec<Vec<u64>> = parts.iter().map(|part| ids_of(part, record)).collect();
        let count = ids.iter().fold(1, |count: usize, ids| count.saturating_mul(ids.len()));
        if COMBINATIONS_MAX < count {
            let reason = format!(
                "it has {count} combinations of the values of its parts, and at most \
                 {COMBINATIONS_MAX} are possible"
            );
            return Err((record, reason));
        }
        for index in 0..count {
            values.push(combination(&ids, index));
        }
        if !crossed.offsets.is_empty() {
            crossed.offsets.push(values.len() as i64);
        }
    }
    crossed.values = Values::Int64(values);
    Ok(crossed)
}

fn ids_of(column: &Column, record: usize) -> Vec<u64> {
    let mut ids = Vec::new();
    push_ids(column, record, &mut ids);
    ids
}

/// Returns the id of the combination at an index, as the signed integer with the same bits. Indexes are in an order in
/// which the last part changes first.
fn combination(ids: &[Vec<u64>], index: usize) -> i64 {
    let mut rest = index;
    let mut chosen: Vec<u64> = Vec::with_capacity(ids.len());
    for ids in ids.iter().rev() {
        chosen.push(ids[rest % ids.len()]);
        rest /= ids.len();
    }
    cross_id(chosen.into_iter().rev()) as i64
}
