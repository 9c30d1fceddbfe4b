//! The ids of categories, and of combinations of them.
//!
//! A value of a column is hashed with the column's name, so that all columns can share one table: 64-bit FNV-1a
//! (Fowler, Noll and Vo) over the name, a zero byte, and the value: the bytes of text, or an integer as 8
//! little-endian bytes. The hash is part of every model: another hash would give every row of a trained table
//! another meaning.

use std::hash::Hasher;

use fnv::FnvHasher;

use crate::job::columns::{Column, Values};

/// Returns the id of a value of the column `column`: the bytes of text, or an integer as 8 little-endian bytes.
pub fn category_id(column: &str, value: &[u8]) -> u64 {
    let mut hasher = FnvHasher::default();
    hasher.write(column.as_bytes());
    hasher.write(&[0]);
    hasher.write(value);
    hasher.finish()
}

/// Returns the id of a combination of categories, which depends on their order.
pub fn cross_id(ids: impl IntoIterator<Item = u64>) -> u64 {
    let mut hasher = FnvHasher::default();
    ids.into_iter().for_each(|id| hasher.write(&id.to_le_bytes()));
    hasher.finish()
}

/// Appends the ids of the values of one record to `ids`. A column of floating-point numbers adds none, because
/// fractions are not categories.
pub fn push_ids(column: &Column, record: usize, ids: &mut Vec<u64>) {
    let range = column.elements_of(record);
    let mut push = |value: &[u8]| ids.push(category_id(&column.name, value));
    let mut push_integer = |value: i64| push(&value.to_le_bytes());
    match &column.values {
        Values::Bool(values) => values[range].iter().for_each(|it| push_integer((*it).into())),
        Values::Uint8(values) => values[range].iter().for_each(|it| push_integer((*it).into())),
        Values::Int64(values) => values[range].iter().for_each(|it| push_integer(*it)),
        Values::Uint64(values) => values[range].iter().for_each(|it| push(&it.to_le_bytes())),
        Values::Text(bytes) | Values::Bytes(bytes) => push(&bytes[range]),
        Values::Float32(_) | Values::Float64(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Part of every trained model, and in `docs/tables.md`.
    #[test]
    fn ids_are_those_of_the_documentation() {
        let (user, city) = (category_id("user", b"u7"), category_id("city", b"Cork"));
        assert_eq!(user, 0xd7cb_65a5_aacd_826a);
        let cross = cross_id([user, city]);
        assert_eq!(cross, 0x2c13_96e4_4c3e_d2b6);
        assert_eq!(category_id("user_city", &cross.to_le_bytes()), 0x019b_e812_4b24_0f4b);
        assert_ne!(cross_id([city, user]), cross_id([user, city]), "the order counts");
    }
}
