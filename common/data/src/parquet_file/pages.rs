//! The pages of a column, and the page index, by which a part of a large row group is read without the
//! rest.

use std::io::Read;
use std::sync::Arc;

use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::ParquetError;
use parquet::file::metadata::page_index::PageIndexProvider;
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

/// Returns the page index if it can be used to find row `first` of a row group: in each wanted column the
/// pages are contiguous, and the page with that row has as many rows as the index states.
pub(super) fn valid_index<'a>(
    source: &Source,
    metadata: &'a ParquetMetaData,
    group: usize,
    mut wanted: impl Iterator<Item = usize>,
    first: usize,
) -> Option<&'a dyn PageIndexProvider> {
    let row_group = metadata.row_group(group);
    let index = metadata.page_index()?.as_ref();
    let rows = usize::try_from(row_group.num_rows()).ok()?;
    let is_valid = wanted.all(|leaf| {
        index.page_locations(group, leaf).is_some_and(|pages| {
            let pages = Pages { column: row_group.column(leaf), of: pages, rows };
            pages.are_contiguous() && pages.has_its_rows(source, first).unwrap_or(false)
        })
    });
    is_valid.then_some(index)
}

/// The pages of a column, with checks that the decoder lacks.
pub(super) struct CheckedPages {
    pub pages: SerializedPageReader<Source>,
    /// Whether a row may have more or less than one value.
    pub is_list: bool,
}

impl PageReader for CheckedPages {
    fn get_next_page(&mut self) -> Result<Option<Page>, ParquetError> {
        while let Some(page) = self.pages.get_next_page()? {
            match &page {
                // The decoder allocates memory for the number of values that a dictionary claims.
                Page::DictionaryPage { buf, num_values, .. }
                    if buf.len() < *num_values as usize =>
                {
                    let bytes = buf.len();
                    let reason =
                        format!("a dictionary of {bytes} bytes claims {num_values} values");
                    return Err(ParquetError::General(reason));
                }
                // The decoder stops at a data page without values.
                page if page.is_data_page() && page.num_values() == 0 => {}
                _ => return Ok(Some(page)),
            }
        }
        Ok(None)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>, ParquetError> {
        // The number of rows that a page claims may be wrong; decoding ignores it. Without lists, there is a
        // row for each value; with lists, rows are counted as they are decoded.
        let page = self.pages.peek_next_page()?;
        Ok(page.map(|page| match self.is_list {
            true => PageMetadata { num_rows: None, ..page },
            false => PageMetadata { num_rows: page.num_levels.or(page.num_rows), ..page },
        }))
    }

    fn skip_next_page(&mut self) -> Result<(), ParquetError> {
        self.pages.skip_next_page()
    }
}

impl Iterator for CheckedPages {
    type Item = Result<Page, ParquetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

/// The page index of one column of a row group.
struct Pages<'a> {
    column: &'a ColumnChunkMetaData,
    of: &'a Vec<PageLocation>,
    /// Rows in the row group.
    rows: usize,
}

impl Pages<'_> {
    /// Returns whether the pages, after an optional dictionary, cover the bytes and rows of the column.
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

    /// Returns whether the page that contains `row` has as many rows as the index states.
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

/// Returns the number of pages that an index claims. In Thrift's compact protocol, a field header is followed by a list
/// header, which contains the length if that is below 15 and is followed by it otherwise.
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
