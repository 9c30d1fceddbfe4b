//! The names of the tensors of shards and row files.
//!
//! The block of parameter `w` that begins at its value 10 is the tensor `w@10`; the block's optimizer
//! state `m` is `m/w@10`. Rows of range 7 of table `t` are the tensor `t#7`, rows × width, and their state
//! `m/t#7`; `ids/t#7` has the ids of these rows, `counts/t#7` the number and the pass of their updates; `ids/t#7?`
//! and `counts/t#7?` are those of ids that are not admitted yet.

use std::collections::BTreeMap;
use std::sync::Arc;

use steadfast_common::tensor::layout::{Block, Layout};
use steadfast_common::tensor::table::RANGES;

use crate::row_file::range_numbers;
use crate::shard_file::ShardMeta;

/// Returns the name of the tensor with a block's values.
pub fn tensor_name(layout: &Layout, block: &Block) -> String {
    let param = block.param as usize;
    let start = block.start - layout.range_of(param).start;
    format!("{}@{start}", layout.params()[param].name)
}

/// Returns the name of the tensor with a block's optimizer state.
pub(crate) fn state_name(state: &str, tensor: &str) -> String {
    format!("{state}/{tensor}")
}

/// Returns the name of the tensor with the values of a table's range.
pub(crate) fn range_name(table: &str, range: u32) -> String {
    format!("{table}#{range}")
}

/// The content of a shard's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content<'a> {
    Values {
        number: u32,
    },
    State {
        number: u32,
        state: &'a str,
    },
    /// A part of a range of a table; `number` is that of the range.
    Rows {
        number: u32,
        width: usize,
        part: RowsPart<'a>,
    },
}

/// A part of a range of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowsPart<'a> {
    Ids,
    Counts,
    Values,
    State(&'a str),
    CandidateIds,
    CandidateCounts,
}

/// The prefixes of the names of other parts of a range, before the name of the values; no optimizer state has these
/// names.
pub(crate) const IDS: &str = "ids";
pub(crate) const COUNTS: &str = "counts";
/// The suffix of the names of parts for ids that are not admitted yet.
pub(crate) const CANDIDATES: &str = "?";

/// The names of all blocks of a layout.
#[derive(Clone, Debug)]
pub struct BlockNames {
    layout: Arc<Layout>,
    numbers: BTreeMap<String, u32>,
    /// Number of each range and width of its rows.
    ranges: BTreeMap<String, (u32, usize)>,
}

impl BlockNames {
    /// Names the blocks of `layout`.
    pub fn new(layout: Arc<Layout>) -> Self {
        let name = |(number, block)| (tensor_name(&layout, block), number);
        let numbers = (0..).zip(layout.blocks()).map(name).collect();
        let mut ranges = BTreeMap::new();
        for (table, param) in layout.tables().iter().enumerate() {
            for range in 0..RANGES {
                let number = layout.number_of_range(table, range);
                ranges.insert(range_name(&param.name, range), (number, param.width));
            }
        }
        Self { layout, numbers, ranges }
    }

    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Returns block `number` and the name of its tensor.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn block(&self, number: u32) -> (Block, String) {
        let block = self.layout.blocks()[number as usize];
        (block, tensor_name(&self.layout, &block))
    }

    /// Returns the numbers of the ranges of a shard with `meta`, ascending.
    ///
    /// # Errors
    /// If there are no such ranges.
    pub fn ranges(&self, meta: &ShardMeta) -> Result<Vec<u32>, String> {
        let Some(rows) = &meta.rows else { return Ok(Vec::new()) };
        let [first, end] = rows.ranges;
        if RANGES < end {
            return Err(format!("it claims the ranges {first} to {end} of {RANGES}"));
        }
        let numbers: Vec<u32> = range_numbers(&self.layout, first..end).collect();
        match numbers.iter().find(|number| meta.counted(**number).is_none()) {
            Some(number) => Err(format!("`{}` has no applied records", self.name(*number))),
            None => Ok(numbers),
        }
    }

    /// Returns the name of the block or range `number`.
    ///
    /// # Panics
    /// If there is no such block or range.
    pub fn name(&self, number: u32) -> String {
        match (number as usize).checked_sub(self.layout.blocks().len()) {
            None => self.block(number).1,
            Some(range) => {
                let table = &self.layout.tables()[range / RANGES as usize];
                range_name(&table.name, range as u32 % RANGES)
            }
        }
    }

    /// Returns the content of the tensor `name`, or `None` if the layout has no such tensor. The names of states
    /// contain no slash.
    pub(crate) fn content<'a>(&self, name: &'a str) -> Option<Content<'a>> {
        let of_rows = |tensor: &str, part| {
            let (number, width) = *self.ranges.get(tensor)?;
            Some(Content::Rows { number, width, part })
        };
        let rows = match name.split_once('/') {
            Some((IDS, tensor)) => match tensor.strip_suffix(CANDIDATES) {
                Some(tensor) => of_rows(tensor, RowsPart::CandidateIds),
                None => of_rows(tensor, RowsPart::Ids),
            },
            Some((COUNTS, tensor)) => match tensor.strip_suffix(CANDIDATES) {
                Some(tensor) => of_rows(tensor, RowsPart::CandidateCounts),
                None => of_rows(tensor, RowsPart::Counts),
            },
            Some((state, tensor)) => of_rows(tensor, RowsPart::State(state)),
            None => None,
        };
        if let Some(content) = of_rows(name, RowsPart::Values).or(rows) {
            return Some(content);
        }
        if let Some(number) = self.numbers.get(name) {
            return Some(Content::Values { number: *number });
        }
        let (state, tensor) = name.split_once('/')?;
        let number = *self.numbers.get(tensor)?;
        Some(Content::State { number, state })
    }
}

#[cfg(test)]
mod tests {
    use steadfast_common::tensor::layout::{BLOCK_LEN_MAX, ParamSpec};

    use super::*;

    #[test]
    fn a_tensor_name_holds_its_parameter_and_offset() {
        let params =
            vec![ParamSpec::new("bias", &[3]), ParamSpec::new("a/w", &[BLOCK_LEN_MAX + 5])];
        let names = BlockNames::new(Arc::new(Layout::new(params)));
        let second = format!("a/w@{BLOCK_LEN_MAX}");
        assert_eq!([0, 1, 2].map(|it| names.block(it).1), ["bias@0", "a/w@0", &second]);
        assert_eq!(names.content("a/w@0"), Some(Content::Values { number: 1 }));
        let state = Content::State { number: 2, state: "m" };
        assert_eq!(names.content(&format!("m/{second}")), Some(state));
        for unknown in ["bias", "bias@1", "m/bias@1", "m/m/bias@0", "", "/"] {
            assert_eq!(names.content(unknown), None, "{unknown}");
        }
    }
}
