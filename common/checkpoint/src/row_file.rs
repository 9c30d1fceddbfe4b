//! A row file: rows of tables as a safetensors file, for the ranges of one slot.
//!
//! A shard's rows are in layers of such files: the first layer has all rows at one time, each further one those that
//! changed since the layer before. Of an id that is in several layers, the last one counts. Nothing records that a row
//! has gone: rows go only when they expire, which [`RowsMeta`] says of a row in any layer.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use steadfast_common::ids::{Pass, Version};
use steadfast_common::tensor::byte_segments::shared_bytes;
use steadfast_common::tensor::finite::are_finite;
use steadfast_common::tensor::layout::{Layout, TableParam};
use steadfast_common::tensor::table::{RANGES, check_ids, encode_ids};

use crate::encode::{Dtype, EncodeError, Tensor, encode};
use crate::names::{CANDIDATES, COUNTS, IDS, range_name, state_name};
use crate::shard_file::{FileMeta, META, TensorFile};

/// What a shard states of the rows of its tables.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RowsMeta {
    /// The pass of the shard.
    pub pass: Pass,
    /// The first of the shard's ranges of each table, and the one after the last.
    pub ranges: [u32; 2],
    /// By table, the number of passes without an update after which its rows expire. Layers may hold rows that have
    /// expired in `pass`; see [`is_expired`](steadfast_common::tensor::table::is_expired).
    pub expire_after: Vec<Option<u32>>,
    /// The files of each layer, by ascending ranges.
    pub layers: Vec<Vec<RowFileRecord>>,
}

/// A row file as its shard knows it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RowFileRecord {
    pub sha256: String,
    pub size_bytes: u64,
    /// The first and the last of its ranges; see [`Layout::number_of_range`].
    pub ranges: [u32; 2],
}

/// The metadata of a row file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowFileMeta {
    /// The version of the shard with which the file was written.
    pub version: Version,
}

impl FileMeta for RowFileMeta {
    fn refusal(&self, _: u32, is_range: bool) -> Option<&'static str> {
        (!is_range).then_some("is not of a table")
    }
}

/// A decoded row file of valid form.
pub type RowFile = TensorFile<RowFileMeta>;

/// Some rows of one range of a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RangeTensors {
    /// Number of the range; see [`Layout::number_of_range`].
    pub number: u32,
    /// Ids of the rows, ascending.
    pub ids: Vec<u64>,
    /// Number and pass of the updates of each row.
    pub counts: Vec<[u32; 2]>,
    /// Rows × width.
    pub values: Vec<f32>,
    /// The optimizer states by name, each rows × width.
    pub states: BTreeMap<String, Vec<f32>>,
    /// Ids that are counted and not admitted yet, ascending.
    pub candidate_ids: Vec<u64>,
    pub candidate_counts: Vec<[u32; 2]>,
}

impl RangeTensors {
    /// Appends rows of the same range with larger ids.
    pub fn append(&mut self, mut other: Self) {
        self.ids.append(&mut other.ids);
        self.counts.append(&mut other.counts);
        self.values.append(&mut other.values);
        for (state, mut values) in other.states {
            self.states.entry(state).or_default().append(&mut values);
        }
        self.candidate_ids.append(&mut other.candidate_ids);
        self.candidate_counts.append(&mut other.candidate_counts);
    }

    /// Checks that all parts are of the same rows, which belong to the range, and that values are finite.
    ///
    /// # Errors
    /// What is wrong, to follow the name of the range.
    pub fn check(&self, layout: &Layout) -> Result<(), String> {
        let (_, table, range) = table_of(layout, self.number);
        let ranges = range..range + 1;
        for ids in [&self.ids, &self.candidate_ids] {
            check_ids(ids, &ranges).map_err(|error| error.to_string())?;
        }
        let values = self.ids.len().saturating_mul(table.width);
        let are_complete = self.counts.len() == self.ids.len()
            && self.candidate_counts.len() == self.candidate_ids.len()
            && self.values.len() == values
            && self.states.values().all(|state| state.len() == values);
        if !are_complete {
            return Err("does not have each part of every row".to_owned());
        }
        match [&self.values].into_iter().chain(self.states.values()).all(|it| are_finite(it)) {
            true => Ok(()),
            false => Err("has a value that is not finite".to_owned()),
        }
    }

    fn into_tensors(self, layout: &Layout, tensors: &mut Vec<Tensor<Bytes>>) {
        let (_, table, range) = table_of(layout, self.number);
        let name = range_name(&table.name, range);
        let (rows, candidates) = (self.ids.len(), self.candidate_ids.len());
        let mut add = |name: String, dtype, shape: &[usize], bytes: Bytes| {
            tensors.push(Tensor { name, dtype, shape: shape.to_vec(), bytes });
        };
        let pairs = |pairs: Vec<[u32; 2]>| bytemuck::cast_slice::<_, u8>(&pairs).to_vec().into();
        add(format!("{IDS}/{name}"), Dtype::U64, &[rows], encode_ids(&self.ids).into());
        add(format!("{COUNTS}/{name}"), Dtype::U32, &[rows, 2], pairs(self.counts));
        for (state, values) in self.states {
            let values = shared_bytes(Arc::new(values));
            add(state_name(&state, &name), Dtype::F32, &[rows, table.width], values);
        }
        if 0 < candidates {
            let ids = encode_ids(&self.candidate_ids).into();
            add(format!("{IDS}/{name}{CANDIDATES}"), Dtype::U64, &[candidates], ids);
            let counts = pairs(self.candidate_counts);
            add(format!("{COUNTS}/{name}{CANDIDATES}"), Dtype::U32, &[candidates, 2], counts);
        }
        let values = shared_bytes(Arc::new(self.values));
        add(name, Dtype::F32, &[rows, table.width], values);
    }
}

/// Returns the index of the table that a range belongs to, the table, and the range's place in it.
///
/// # Panics
/// If there is no such range.
pub fn table_of(layout: &Layout, number: u32) -> (usize, &TableParam, u32) {
    let index = number - layout.blocks().len() as u32;
    let table = (index / RANGES) as usize;
    (table, &layout.tables()[table], index % RANGES)
}

/// Returns the numbers of some ranges of every table, ascending.
pub fn range_numbers(layout: &Layout, ranges: Range<u32>) -> impl Iterator<Item = u32> {
    let tables = 0..layout.tables().len();
    tables.flat_map(move |table| {
        ranges.clone().map(move |range| layout.number_of_range(table, range))
    })
}

/// Encodes rows as the segments of a row file.
///
/// # Errors
/// If names of tensors clash, or a value is not finite.
///
/// # Panics
/// If the layout has no such range.
pub fn encode_rows(
    layout: &Layout,
    meta: &RowFileMeta,
    ranges: Vec<RangeTensors>,
) -> Result<Vec<Bytes>, EncodeError> {
    let mut tensors = Vec::new();
    ranges.into_iter().for_each(|range| range.into_tensors(layout, &mut tensors));
    let meta = serde_json::to_string(meta).expect("metadata is plain data");
    let (header, data) = encode(tensors, &BTreeMap::from([(META, meta)]))?;
    Ok([header.into()].into_iter().chain(data).collect())
}
