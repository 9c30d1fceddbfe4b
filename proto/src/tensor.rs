//! Tensor bytes on their way into and out of messages, without copies of ours.

use crate::v1::BlockData;

/// Tensor bytes in one message of a stream; larger contributions span several.
pub const CHUNK_BYTES: usize = 2 << 20;

/// Packs blocks into groups of about [`CHUNK_BYTES`], one for each message; at least one group.
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
