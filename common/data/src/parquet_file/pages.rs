//! The page index, by which a part of a large row group is read without the rest.

use std::io::Read;
use std::sync::Arc;

use parquet::arrow::ProjectionMask;
use parquet::column::page::PageReader;
use parquet::errors::ParquetError;
use parquet::file::metadata::{
    ColumnChunkMetaData, PageIndexPolicy, ParquetMetaData, ParquetMetaDataReader,
};
use parquet::file::page_index::offset_index::PageLocation;
use parquet::file::reader::ChunkReader;
use parquet::file::serialized_reader::SerializedPageReader;

use super::source::Source;

/// Size of the beginning of a page index: the field header, the list header, and a 32-bit length.
const PAGE_LIST_HEAD_BYTES: u64 = 1 + 1 + 5;

/// Adds the page index to the metadata of a file, if it has one.
///
/// # Errors
/// If the index is damaged.
pub(super) fn load_index(
    source: &Source,
    metadata: ParquetMetaData,
) -> Result<ParquetMetaData, ParquetError> {
    check_claims(source, &metadata)?;
    let mut reader = ParquetMetaDataReader::new_with_metadata(metadata)
        .with_offset_index_policy(PageIndexPolicy::Optional);
    reader.read_page_indexes(source)?;
    reader.finish()
}

/// Whether the page index can be used to find row `first` of a row group: in each wanted column the pages
/// are contiguous, and the page with that row has as many rows as the index states.
pub(super) fn is_index_valid(
    source: &Source,
    metadata: &ParquetMetaData,
    group: usize,
    wanted: &ProjectionMask,
    first: usize,
) -> bool {
    let row_group = metadata.row_group(group);
    let Some((index, rows)) = metadata.page_index().zip(usize::try_from(row_group.num_rows()).ok())
    else {
        return false;
    };
    let mut columns = row_group.columns().iter().enumerate();
    columns.all(|(leaf, column)| {
        let is_valid = |pages: &Vec<PageLocation>| {
            let pages = Pages { column, of: pages, rows };
            pages.are_contiguous() && pages.has_its_rows(source, first).unwrap_or(false)
        };
        !wanted.leaf_included(leaf) || index.page_locations(group, leaf).is_some_and(is_valid)
    })
}

/// The page index of one column of a row group.
struct Pages<'a> {
    column: &'a ColumnChunkMetaData,
    of: &'a Vec<PageLocation>,
    /// Rows in the row group.
    rows: usize,
}

impl Pages<'_> {
    /// Whether the pages, after an optional dictionary, cover the bytes and rows of the column.
    fn are_contiguous(&self) -> bool {
        let end = |page: &PageLocation| page.offset.checked_add(page.compressed_page_size.into());
        let follow = self.of.is_sorted_by(|page, next| {
            end(page) == Some(next.offset) && page.first_row_index <= next.first_row_index
        });
        let (start, size) = self.column.byte_range();
        let ends = self.of.first().zip(self.of.last());
        follow
            && ends.is_some_and(|(first, last)| {
                u64::try_from(first.offset).is_ok_and(|offset| start <= offset)
                    && end(last).and_then(|end| u64::try_from(end).ok()) == start.checked_add(size)
                    && first.first_row_index == 0
            })
    }

    /// Whether the page with that row has as many rows as the index states.
    fn has_its_rows(&self, source: &Source, row: usize) -> Result<bool, ParquetError> {
        let start =
            |page: &PageLocation| usize::try_from(page.first_row_index).unwrap_or(usize::MAX);
        let after = self.of.partition_point(|page| start(page) <= row);
        let end = self.of.get(after).map_or(self.rows, start);
        let Some(page) = after.checked_sub(1) else { return Ok(false) };
        let (source, list) = (Arc::new(source.clone()), Some(self.of.clone()));
        let mut reader = SerializedPageReader::new(source, self.column, self.rows, list)?;
        if self.of[0].offset != self.column.byte_range().0 as i64 {
            reader.skip_next_page()?;
        }
        for _ in 0..page {
            reader.skip_next_page()?;
        }
        let found = reader.get_next_page()?.map(|page| page.num_values() as usize);
        Ok(found == end.checked_sub(start(&self.of[page])))
    }
}

/// Checks that each page index has at least one byte per page, because the library allocates memory for
/// the number of pages that the index claims.
fn check_claims(source: &Source, metadata: &ParquetMetaData) -> Result<(), ParquetError> {
    for column in metadata.row_groups().iter().flat_map(|group| group.columns()) {
        let place = column.offset_index_offset().zip(column.offset_index_length());
        let place =
            place.and_then(|(start, len)| Some((start.try_into().ok()?, len.try_into().ok()?)));
        // The library does not read an index with an invalid location either.
        let Some((start, len)): Option<(u64, u64)> = place else { continue };
        let mut head = Vec::new();
        source.get_read(start)?.take(len.min(PAGE_LIST_HEAD_BYTES)).read_to_end(&mut head)?;
        let claimed = claimed_pages(&head);
        if len < claimed {
            let reason = format!("its page index of {len} bytes claims {claimed} pages");
            return Err(ParquetError::General(reason));
        }
    }
    Ok(())
}

/// The number of pages that an index claims. In Thrift's compact protocol, a field header is followed by a
/// list header, which contains the length if that is below 15 and is followed by it otherwise.
fn claimed_pages(list: &[u8]) -> u64 {
    let [_, head, number @ ..] = list else { return 0 };
    if head >> 4 < 15 {
        return u64::from(head >> 4);
    }
    let mut claimed = 0;
    for (index, byte) in number.iter().enumerate() {
        claimed |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return claimed;
        }
    }
    // Longer than any valid length.
    u64::MAX
}
