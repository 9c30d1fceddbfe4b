//! The layout of a model's parameters: concatenated, and split into blocks; and its tables.
//!
//! Every process computes the same layout from the same parameter specs, so it is not sent. A block is at
//! most [`BLOCK_LEN_MAX`] values of one parameter. A table has no blocks, but ranges of ids. See
//! [`crate::tensor::placement`] for the slots of blocks and ranges.

use std::collections::BTreeSet;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::job::dataset::hex;
use crate::tensor::table::{Initial, RANGES, RangeDigest, WIDTH_MAX};

/// Values in the largest block: 1 MiB of `f32`.
pub const BLOCK_LEN_MAX: usize = 1 << 18;

/// Maximum number of tables of a model; each has 128 ranges, which take memory.
const TABLES_MAX: usize = 1 << 10;

/// How the contributions of a step or a push change a parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UpdateRule {
    /// The optimizer applies the mean gradient.
    #[default]
    Optimizer,
    /// The mean over the records is added: for state that models average beside the gradient, such as the
    /// running statistics of a batch normalization.
    AddMean,
    /// The values stay as they are: the job freezes the parameter.
    Frozen,
}

impl UpdateRule {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// One named tensor or table of a model; values are `f32`, row-major.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParamSpec {
    pub name: String,
    /// The sides of the tensor; for a table, the width of its rows.
    pub shape: Vec<usize>,
    #[serde(default, skip_serializing_if = "UpdateRule::is_default")]
    pub update: UpdateRule,
    /// In place of the optimizer's weight decay; set by the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f32>,
    /// Factor of the learning rate; set by the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f32>,
    /// Sets the values with which rows of a table begin; absent for a tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<Initial>,
}

impl ParamSpec {
    /// Creates the spec of a parameter that the optimizer updates.
    pub fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        let update = UpdateRule::Optimizer;
        let (name, shape) = (name.into(), shape.to_vec());
        Self { name, shape, update, weight_decay: None, learning_rate: None, table: None }
    }

    /// Creates the spec of a table whose rows have `width` values.
    pub fn table(name: impl Into<String>, width: usize, initial: Initial) -> Self {
        Self { table: Some(initial), ..Self::new(name, &[width]) }
    }

    /// Creates the spec of a tensor to which the mean of the contributions is added.
    pub fn averaged(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { update: UpdateRule::AddMean, ..Self::new(name, shape) }
    }

    /// Returns whether the model itself sets how the parameter is updated.
    pub fn is_grouped(&self) -> bool {
        self.weight_decay.is_some()
            || self.learning_rate.is_some()
            || self.update == UpdateRule::Frozen
    }

    /// Returns the number of values; 0 for a table, whose rows are elsewhere. Saturates, so that a malicious shape
    /// cannot overflow.
    pub fn len(&self) -> usize {
        if self.table.is_some() { 0 } else { self.product() }
    }

    fn product(&self) -> usize {
        self.shape.iter().fold(1, |product: usize, side| product.saturating_mul(*side))
    }

    /// Returns whether the tensor has no values. Always true for a table.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Returns what is wrong with the tables among parameters: their number, widths, initial values, or names, which must
/// stay distinct as names of files. Returns `None` if they are valid.
pub fn invalid_tables(params: &[ParamSpec]) -> Option<String> {
    let mut files = BTreeSet::new();
    for param in params {
        let Some(initial) = param.table else { continue };
        let (name, width) = (&param.name, param.product());
        if !(1..=WIDTH_MAX).contains(&width) {
            return Some(format!(
                "table `{name}` has rows of {width} values; 1 to {WIDTH_MAX} are possible"
            ));
        }
        if !initial.is_finite() || param.update != UpdateRule::Optimizer {
            return Some(format!("table `{name}` has initial values or updates that tables lack"));
        }
        if name.contains('/') {
            return Some(format!("the name of table `{name}` has a slash; rename it"));
        }
        if !files.insert(file_name(name)) {
            return Some(format!("table `{name}` has the same file as another; rename it"));
        }
    }
    (TABLES_MAX < files.len())
        .then(|| format!("{} tables exceed the maximum of {TABLES_MAX}", files.len()))
}

/// Returns the name with `_` in place of every character other than ASCII letters, digits, `-`, `_` and `.`.
pub fn file_name(name: &str) -> String {
    let is_safe = |it: char| it.is_ascii_alphanumeric() || "-_.".contains(it);
    name.chars().map(|it| if is_safe(it) { it } else { '_' }).collect()
}

/// A part of one parameter: the unit of placement, transport and update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Index into [`Layout::params`].
    pub param: u32,
    /// Index of the first value in the flat vector of all parameters.
    pub start: usize,
    /// Number of values.
    pub len: usize,
}

impl Block {
    /// Returns the range of the block in the flat vector of all parameters.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// A parameter that is a table.
#[derive(Clone, Debug, PartialEq)]
pub struct TableParam {
    /// Index into [`Layout::params`].
    pub param: u32,
    pub name: String,
    /// Values of a row.
    pub width: usize,
    pub initial: Initial,
}

/// All parameters of a model and their blocks, in order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<ParamSpec>", into = "Vec<ParamSpec>")]
pub struct Layout {
    params: Vec<ParamSpec>,
    offsets: Vec<usize>,
    blocks: Vec<Block>,
    tables: Vec<TableParam>,
    len: usize,
}

impl From<Vec<ParamSpec>> for Layout {
    fn from(params: Vec<ParamSpec>) -> Self {
        Self::new(params)
    }
}

impl From<Layout> for Vec<ParamSpec> {
    fn from(layout: Layout) -> Self {
        layout.params
    }
}

impl Layout {
    /// Concatenates `params` in the given order, and splits them into blocks.
    pub fn new(params: Vec<ParamSpec>) -> Self {
        let mut layout = Self { params, ..Self::default() };
        for (index, param) in layout.params.iter().enumerate() {
            layout.offsets.push(layout.len);
            let end = layout.len.saturating_add(param.len());
            while layout.len < end {
                let len = BLOCK_LEN_MAX.min(end - layout.len);
                layout.blocks.push(Block { param: index as u32, start: layout.len, len });
                layout.len += len;
            }
            if let Some(initial) = param.table {
                let (param_index, name, width) =
                    (index as u32, param.name.clone(), param.product());
                layout.tables.push(TableParam { param: param_index, name, width, initial });
            }
        }
        layout
    }

    /// Returns the parameters, in the order in which they are concatenated.
    pub fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    /// Returns the blocks, in the order of their values in the flat vector of all parameters.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns the tables, in the order of the parameters.
    pub fn tables(&self) -> &[TableParam] {
        &self.tables
    }

    /// Returns the number under which rows of a table are sent. The numbers of tables follow those of the blocks.
    pub fn number_of_table(&self, table: usize) -> u32 {
        (self.blocks.len() + table) as u32
    }

    /// Returns the index of the table whose rows are sent under a number; `None` if it is not the number of a table.
    pub fn table_of_number(&self, number: u32) -> Option<usize> {
        let table = (number as usize).checked_sub(self.blocks.len())?;
        (table < self.tables.len()).then_some(table)
    }

    /// Returns the number of a range of a table in checkpoints and norms. The numbers of ranges follow those of the
    /// blocks.
    pub fn number_of_range(&self, table: usize, range: u32) -> u32 {
        self.blocks.len() as u32 + table as u32 * RANGES + range
    }

    /// Returns the number of ranges of all tables.
    pub fn ranges(&self) -> usize {
        self.tables.len() * RANGES as usize
    }

    /// Returns the rule by which a block of this layout is updated.
    pub fn update_rule(&self, block: &Block) -> UpdateRule {
        self.params[block.param as usize].update
    }

    /// Returns the number of values of all parameters, without the rows of tables.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the range of parameter `index` in the flat vector.
    ///
    /// # Panics
    /// If the parameter does not exist.
    pub fn range_of(&self, index: usize) -> Range<usize> {
        let start = self.offsets[index];
        start..start + self.params[index].len()
    }

    /// Returns the ranges of the parameters that the optimizer updates, in order.
    pub fn optimized(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let all = self.params.iter().enumerate();
        let optimized = all.filter(|(_, param)| param.update == UpdateRule::Optimizer);
        optimized.map(|(index, _)| self.range_of(index))
    }

    /// Returns the SHA-256 over all parameters in order (name, shape, little-endian values), and then over the
    /// [digests](crate::tensor::table::Rows::digest) of all ranges of all tables, in hexadecimal. It is equal exactly when two
    /// models are equal bit by bit.
    ///
    /// # Panics
    /// If the number of values, or of ranges, is not that of the layout.
    pub fn digest(&self, values: &[f32], ranges: &[RangeDigest]) -> String {
        assert_eq!((values.len(), ranges.len()), (self.len, self.ranges()), "numbers of values");
        let mut hash = Sha256::new();
        for (index, param) in self.params.iter().enumerate() {
            hash.update((param.name.len() as u64).to_le_bytes());
            hash.update(&param.name);
            hash.update((param.shape.len() as u64).to_le_bytes());
            param.shape.iter().for_each(|side| hash.update((*side as u64).to_le_bytes()));
            for value in &values[self.range_of(index)] {
                hash.update(value.to_le_bytes());
            }
        }
        ranges.iter().for_each(|range| hash.update(range));
        hex(&hash.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        Layout::new(vec![
            ParamSpec::new("large", &[3, BLOCK_LEN_MAX]),
            ParamSpec::new("small", &[10]),
            ParamSpec::new("empty", &[0, 5]),
            ParamSpec::table("rows", 3, Initial::Zeros),
            ParamSpec::new("scalar", &[]),
        ])
    }

    #[test]
    fn tables_that_cannot_be_are_named() {
        let table = |name: &str, width| ParamSpec::table(name, width, Initial::Zeros);
        assert_eq!(invalid_tables(&[table("a", 1), table("b", WIDTH_MAX)]), None);
        let infinite = ParamSpec::table("a", 1, Initial::Uniform(f32::INFINITY));
        let averaged = ParamSpec { update: UpdateRule::AddMean, ..table("a", 1) };
        let many = (0..=TABLES_MAX).map(|index| table(&index.to_string(), 1)).collect();
        for bad in [
            vec![table("a", 0)],
            vec![table("a", WIDTH_MAX + 1)],
            vec![ParamSpec { shape: vec![usize::MAX, 2], ..table("a", 1) }],
            vec![infinite],
            vec![averaged],
            vec![table("ids/a", 1)],
            vec![table("a b", 1), table("a_b", 1)],
            many,
        ] {
            assert!(invalid_tables(&bad).is_some(), "{:?}", bad[0]);
        }
    }

    #[test]
    fn a_table_has_no_values_among_the_others() {
        let layout = layout();
        let [table] = layout.tables() else { panic!("one table") };
        assert_eq!((table.param, &table.name[..], table.width), (3, "rows", 3));
        assert_eq!(layout.table_of_number(layout.number_of_table(0)), Some(0));
        let blocks = layout.blocks().len() as u32;
        assert_eq!([blocks - 1, blocks + 1].map(|it| layout.table_of_number(it)), [None, None]);
    }

    #[test]
    fn blocks_cover_the_parameters_without_a_gap() {
        let layout = layout();
        let mut next = 0;
        for block in layout.blocks() {
            assert_eq!(block.start, next);
            next = block.range().end;
        }
        assert_eq!(next, layout.len());
        assert_eq!(layout.range_of(4), 3 * BLOCK_LEN_MAX + 10..3 * BLOCK_LEN_MAX + 11);
    }
}
