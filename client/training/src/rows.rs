//! Pulls rows of embedding tables from the slots that have them.

use futures::future::try_join_all;
use steadfast_common::ids::Version;
use steadfast_common::tensor::byte_segments::ByteSegments;
use steadfast_common::tensor::layout::{Layout, TableParam};
use steadfast_common::tensor::row_ids::RowIds;
use steadfast_common::tensor::table::{ID_BYTES, RANGES, Rows, encode_ids};
use steadfast_proto::tensor::{CHUNK_BYTES, in_chunks};
use steadfast_proto::v1::{BlockData, PullHeader, PullRequest, ReadRangeRequest};
use steadfast_proto::{
    Decoder, PullAnswer, TensorMethod, VersionMatch, call, encode_chunks, framed, next,
};
use tonic::Status;
use tonic::body::Body;

use crate::ClientError;
use crate::pservers::{Pservers, SlotClient, by_slot, with_timeout};
use crate::pulls::PULL_WAIT;

/// Bytes of rows in the answer to one request.
const ANSWER_BYTES: usize = 16 << 20;

/// Rows of all tables.
#[derive(Clone, Debug, PartialEq)]
pub struct PulledRows {
    /// The rows of each table.
    pub rows: Vec<Rows>,
    /// Bytes received from all pservers.
    pub bytes: u64,
}

/// A slot's answer to a request for rows.
struct RowsOfSlot {
    /// The rows of each table; `None` if the slot is past the version.
    pub rows: Option<Vec<Rows>>,
    pub bytes: u64,
}

impl Pservers {
    /// Returns rows of each table: in synchronous mode those of exactly `version`, which some slot has reached;
    /// `None` if a slot is past it, so that the step from this version is complete. In asynchronous mode,
    /// without a version, the current ones.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn pull_rows(
        &self,
        version: Option<Version>,
        ids: Vec<RowIds>,
    ) -> Result<Option<PulledRows>, ClientError> {
        let versions = version.map_or(VersionMatch::AtLeast(Version(0)), VersionMatch::Exactly);
        let parts = self.slots.iter().zip(self.ids_of_slots(&ids));
        let parts = parts.flat_map(|(slot, ids)| {
            in_requests(&self.layout, &ids).into_iter().map(move |ids| (slot, ids))
        });
        let pulls = parts.map(|(slot, ids)| async move {
            let mut retries = self.retries();
            loop {
                let pull = pull_rows(slot, &self.layout, versions, &ids);
                if let Some(answer) = retries.attempt(pull).await? {
                    return Ok::<_, ClientError>(answer);
                }
            }
        });
        // A few whose number is known are polled in their order. Others would be in the order in which the channels
        // wake them, which is random, so that a simulated run could not be repeated.
        let answers = try_join_all(pulls.collect::<Vec<_>>()).await?;
        let bytes = answers.iter().map(|answer| answer.bytes).sum();
        let Some(parts) = answers.into_iter().map(|it| it.rows).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        let of_table = |(table, param): (usize, &TableParam)| {
            Rows::joined(param.width, parts.iter().map(|rows| &rows[table]))
        };
        let rows = self.layout.tables().iter().enumerate().map(of_table).collect();
        Ok(Some(PulledRows { rows, bytes }))
    }

    /// Returns all rows of one range of a table, by ascending id.
    ///
    /// # Errors
    /// A rejection, another generation, or the end of the job.
    pub async fn read_range(&self, table: usize, range: u32) -> Result<Rows, ClientError> {
        let slot = self.slots.iter().find(|slot| slot.ranges.contains(&range));
        let Some(slot) = slot.or_else(|| self.slots.first()) else {
            return Err(ClientError::NewGeneration);
        };
        let width = self.layout.tables()[table].width;
        let mut retries = self.retries();
        loop {
            let read = read_range(slot, table, range, width);
            if let Some(rows) = retries.attempt(read).await? {
                return Ok(rows);
            }
        }
    }

    /// Divides ids of each table among the slots.
    fn ids_of_slots(&self, ids: &[RowIds]) -> Vec<Vec<RowIds>> {
        let (slots, slot_of) = (self.slots.len(), self.slots_of_ranges());
        by_slot(slots, ids.iter().map(|it| it.divided(slots, |range| slot_of[range as usize])))
    }
}

/// Divides ids of each table among requests whose answers are not too large. Returns no request if there are no ids.
fn in_requests(layout: &Layout, ids: &[RowIds]) -> Vec<Vec<RowIds>> {
    let of_table = |(param, ids): (&TableParam, &RowIds)| -> Vec<RowIds> {
        let row_bytes = ID_BYTES + param.width * size_of::<f32>();
        let at_once = (ANSWER_BYTES / layout.tables().len() / row_bytes).max(1);
        ids.chunks(at_once).collect()
    };
    let tables: Vec<Vec<RowIds>> = layout.tables().iter().zip(ids).map(of_table).collect();
    let requests = tables.iter().map(Vec::len).max().unwrap_or(0);
    let request = |index| {
        let part = |table: &Vec<RowIds>| table.get(index).cloned().unwrap_or_default();
        tables.iter().map(part).collect()
    };
    (0..requests).map(request).collect()
}

/// Pulls rows of each table from one slot once it has a version that satisfies the pull.
async fn pull_rows(
    slot: &SlotClient,
    layout: &Layout,
    versions: VersionMatch,
    ids: &[RowIds],
) -> Result<RowsOfSlot, Status> {
    let request = PullRequest::new(slot.target, versions, PULL_WAIT);
    let blocks = (0..).zip(ids).flat_map(|(table, ids)| {
        ids.as_slice().chunks(CHUNK_BYTES / ID_BYTES).map(move |ids| BlockData {
            block: layout.number_of_table(table),
            data: encode_ids(ids).into(),
        })
    });
    let segments = encode_chunks(&request, &in_chunks(blocks));
    loop {
        let mut channel = slot.channel.clone();
        let mut body =
            with_timeout(call(&mut channel, TensorMethod::PullRows, segments.clone())).await?;
        let mut values: Vec<ByteSegments> = vec![ByteSegments::default(); ids.len()];
        let (header, bytes) = receive(&mut body, |number, data| {
            let table = layout.table_of_number(number).ok_or_else(|| no_table(number))?;
            data.iter().for_each(|segment| values[table].push(segment.clone()));
            Ok(())
        })
        .await?;
        let rows = match header.answer(versions) {
            PullAnswer::Ready(_) => Some(rows_of(layout, ids, &values)?),
            PullAnswer::Past { .. } => None,
            PullAnswer::NotYet { .. } => continue,
        };
        return Ok(RowsOfSlot { rows, bytes });
    }
}

/// Returns the rows of each table, given the ids and the received values.
fn rows_of(layout: &Layout, ids: &[RowIds], values: &[ByteSegments]) -> Result<Vec<Rows>, Status> {
    let of_table = |((table, ids), values): ((&TableParam, &RowIds), &ByteSegments)| {
        let mut rows = Rows::zeros(table.width, ids.clone().into_vec());
        if values.len() != size_of_val(rows.values()) {
            return Err(Status::unavailable("the answer does not have every row"));
        }
        values.copy_to(rows.values_mut());
        Ok(rows)
    };
    layout.tables().iter().zip(ids).zip(values).map(of_table).collect()
}

/// Reads one range of a table, whose rows have `width` values.
async fn read_range(
    slot: &SlotClient,
    table: usize,
    range: u32,
    width: usize,
) -> Result<Rows, Status> {
    let request = ReadRangeRequest { target: Some(slot.target), table: table as u32, range };
    let mut channel = slot.channel.clone();
    let mut body =
        with_timeout(call(&mut channel, TensorMethod::ReadRange, vec![framed(&request)])).await?;
    let mut rows = Rows::new(width);
    receive(&mut body, |_, data| {
        let part = Rows::decode_any(width, &(0..RANGES), &data.joined());
        part.and_then(|part| rows.append(part)).map_err(|error| Status::internal(error.to_string()))
    })
    .await?;
    Ok(rows)
}

/// Receives a whole answer; returns its header and its size.
async fn receive(
    body: &mut Body,
    mut take: impl FnMut(u32, ByteSegments) -> Result<(), Status>,
) -> Result<(PullHeader, u64), Status> {
    let (mut decoder, mut bytes) = (Decoder::<PullHeader>::default(), 0);
    while let Some(part) = with_timeout(next(body)).await? {
        bytes += part.len() as u64;
        decoder.feed(part, |_, number, data| take(number, data))?;
    }
    let cut_off = || Status::unavailable("the answer ended early");
    Ok((decoder.end().ok().flatten().ok_or_else(cut_off)?, bytes))
}

fn no_table(number: u32) -> Status {
    Status::internal(format!("block {number} is no table of the model"))
}

#[cfg(test)]
mod tests {
    use steadfast_common::tensor::layout::ParamSpec;
    use steadfast_common::tensor::table::Initial;

    use super::*;

    #[test]
    fn every_id_is_in_one_request_of_bounded_size() {
        let table = |name, width| ParamSpec::table(name, width, Initial::Zeros);
        let layout = Layout::new(vec![table("wide", 1 << 12), table("narrow", 1)]);
        let ids = |count| RowIds::new((0..count).collect());
        for (wide, narrow) in [(0, 0), (1, 5), (1_300, 3), (7, 2_000_000)] {
            let all = [ids(wide), ids(narrow)];
            let requests = in_requests(&layout, &all);
            for (table, all) in all.iter().enumerate() {
                let parts: Vec<u64> = requests
                    .iter()
                    .flat_map(|request| request[table].as_slice())
                    .copied()
                    .collect();
                assert_eq!(parts, all.as_slice());
            }
            for request in &requests {
                let bytes = request[0].len() * (8 + (4 << 12)) + request[1].len() * 12;
                assert!(0 < bytes && bytes <= ANSWER_BYTES, "{bytes}");
            }
        }
    }
}
