//! Distributes tensors over the messages of a stream.

use steadfast_common::tensor::table::{ID_BYTES, Rows};

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

/// Divides rows into blocks of this number of about [`CHUNK_BYTES`] each; none without rows.
pub fn row_blocks(number: u32, rows: &Rows) -> impl Iterator<Item = BlockData> {
    let at_once = (CHUNK_BYTES / (ID_BYTES + rows.width() * size_of::<f32>())).max(1);
    let starts = (0..rows.len()).step_by(at_once);
    starts.map(move |from| {
        let part = from..rows.len().min(from + at_once);
        BlockData { block: number, data: rows.encode(part).into() }
    })
}
