//! The names of a shard's tensors.
//!
//! The block of parameter `w` that begins at its value 10 is the tensor `w@10`; the block's optimizer
//! state `m` is `m/w@10`.

use std::collections::BTreeMap;
use std::sync::Arc;

use steadfast_common::layout::{Block, Layout};

/// The name of the tensor with a block's values.
pub fn tensor_name(layout: &Layout, block: &Block) -> String {
    let param = block.param as usize;
    let start = block.start - layout.range_of(param).start;
    format!("{}@{start}", layout.params()[param].name)
}

/// The name of the tensor with a block's optimizer state.
pub(crate) fn state_name(state: &str, tensor: &str) -> String {
    format!("{state}/{tensor}")
}

/// The content of a shard's tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content<'a> {
    Values { number: u32 },
    State { number: u32, state: &'a str },
}

/// The names of all blocks of a layout.
#[derive(Clone, Debug)]
pub struct BlockNames {
    layout: Arc<Layout>,
    numbers: BTreeMap<String, u32>,
}

impl BlockNames {
    /// Names the blocks of `layout`.
    pub fn new(layout: Arc<Layout>) -> Self {
        let name = |(number, block)| (tensor_name(&layout, block), number);
        let numbers = (0..).zip(layout.blocks()).map(name).collect();
        Self { layout, numbers }
    }

    /// The layout whose blocks these are.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Block `number` and its name.
    ///
    /// # Panics
    /// If there is no such block.
    pub fn block(&self, number: u32) -> (Block, String) {
        let block = self.layout.blocks()[number as usize];
        (block, tensor_name(&self.layout, &block))
    }

    /// The content of the tensor `name`. The names of states contain no slash.
    pub(crate) fn content<'a>(&self, name: &'a str) -> Option<Content<'a>> {
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
    use steadfast_common::layout::{BLOCK_LEN_MAX, ParamSpec};

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
