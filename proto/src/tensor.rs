//! Distributes tensors over the messages of a stream.

use crate::v1::BlockData;

/// Tensor bytes per message of a stream; larger contributions span several messages.
pub const CHUNK_BYTES: usize = 2 << 20;

/// Packs blocks into groups of about [`CHUNK_BYTES`], one per message; at least one group.
pub fn in_chunks(blocks: impl IntoIterator<Item = BlockData>) -> Vec<Vec<BlockData>> {
    let mut groups = vec![Vec::new()];
    let mut in_last = 0;
    for block in blocks {
        if CHUNK_BYTES <= in_last {
            groups.push(Vec::new());
            in_last = 0;
        }
        in_last += block.data.len();
        groups.last_mut().expect("there is a first group").push(block);
    }
    groups
}
