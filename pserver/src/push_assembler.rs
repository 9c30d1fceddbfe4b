//! Puts a contribution together as its blocks and rows arrive.

use std::sync::Arc;

use steadfast_common::error::ErrorKind;
use steadfast_common::tensor::byte_segments::ByteSegments;
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::layout::Block;
use steadfast_common::tensor::table::Rows;
use steadfast_proto::status;
use steadfast_proto::v1::PushHeader;
use steadfast_pserver_core::buffer_pool::BufferPool;
use steadfast_pserver_core::contribution::{Contribution, ValidatedBlock};
use steadfast_pserver_core::tables::TablesHeld;
use tonic::Status;

use crate::event_loop::PublishedShard;
use crate::service::{invalid, refuse};

/// Collects the blocks of one contribution as they arrive.
pub(crate) struct PushAssembler {
    buffers: BufferPool,
    codec: Codec,
    wanted: Arc<Vec<(u32, Block)>>,
    /// Whether each block was received.
    received: Vec<bool>,
    /// Blocks not passed on yet.
    blocks: Vec<ValidatedBlock>,
    tables: Arc<TablesHeld>,
    /// The received rows of each table.
    rows: Vec<Rows>,
    size_bytes: usize,
    rows_bytes: usize,
    rows_bytes_max: usize,
}

impl PushAssembler {
    /// Creates an assembler for a contribution to `shard` with rows of at most `rows_bytes_max` bytes.
    pub fn new(shard: &PublishedShard, rows_bytes_max: usize) -> Self {
        let (wanted, buffers, codec) = (shard.blocks.clone(), shard.buffers.clone(), shard.codec);
        let received = vec![false; wanted.len()];
        let rows = shard.tables.widths.iter().map(|width| Rows::new(*width)).collect();
        Self {
            buffers,
            codec,
            wanted,
            received,
            blocks: Vec::new(),
            tables: shard.tables.clone(),
            rows,
            size_bytes: 0,
            rows_bytes: 0,
            rows_bytes_max,
        }
    }

    fn take_rows(
        &mut self,
        (table, width): (usize, usize),
        data: &ByteSegments,
    ) -> Result<(), Status> {
        self.rows_bytes += data.len();
        check_rows_bytes(self.rows_bytes, self.rows_bytes_max)?;
        let rows = Rows::decode(width, &self.tables.ranges, &data.joined());
        let added = rows.and_then(|rows| self.rows[table].append(rows));
        added.map_err(|error| invalid(format!("table {table}: {error}")))
    }

    /// Adds a block, or rows of a table.
    ///
    /// # Errors
    /// If they do not belong to the slot, are there already, or are no valid gradients.
    pub fn take(&mut self, number: u32, data: &ByteSegments) -> Result<(), Status> {
        if let Some(table) = self.tables.table_of(number) {
            return self.take_rows(table, data);
        }
        let place = self.wanted.binary_search_by_key(&number, |(number, _)| *number);
        let place =
            place.map_err(|_| invalid(format!("block {number} does not belong to this slot")))?;
        if std::mem::replace(&mut self.received[place], true) {
            return Err(invalid(format!("block {number} was sent twice")));
        }
        let memory = self.buffers.lend(self.wanted[place].1.len);
        let values = ValidatedBlock::decode(self.codec, number, data, memory);
        self.blocks.push(values.map_err(|refusal| refuse(&refusal.into()))?);
        self.size_bytes += data.len();
        Ok(())
    }

    /// Takes the blocks that were not passed on yet.
    pub fn take_blocks(&mut self) -> Vec<ValidatedBlock> {
        std::mem::take(&mut self.blocks)
    }

    /// Returns the contribution that `header` describes, with the blocks that were not passed on yet, and the size in
    /// bytes of all blocks and rows received.
    ///
    /// # Errors
    /// If only some of the blocks were received, or if the number of rows is not that in the header.
    pub fn finish(self, header: &PushHeader) -> Result<(Contribution, usize), Status> {
        let (received, rows): (u64, _) =
            (self.rows.iter().map(|rows| rows.len() as u64).sum(), header.rows);
        if received != rows {
            return Err(invalid(format!("received {received} of {rows} rows")));
        }
        let (found, wanted) = (self.received.iter().filter(|it| **it).count(), self.received.len());
        if found != 0 && found != wanted {
            return Err(invalid(format!("received {found} of {wanted} blocks")));
        }
        let contribution = Contribution {
            records: header.records,
            loss_sum: header.loss_sum,
            weight: header.weight,
            checksum: header.checksum,
            blocks: self.blocks,
            rows: self.rows,
        };
        Ok((contribution, self.size_bytes + self.rows_bytes))
    }
}

/// Checks that the rows of one call take at most `max` bytes.
pub(crate) fn check_rows_bytes(bytes: usize, max: usize) -> Result<(), Status> {
    if bytes <= max {
        return Ok(());
    }
    let most = max >> 20;
    let message = format!(
        "the rows of one call take more than {most} MiB; use smaller batches, or more pservers"
    );
    Err(status(ErrorKind::TooLarge, message))
}
