//! Detects the format of a file by its first bytes, for error messages.

use steadfast_common::job::spec::DataFormat;

use crate::error::DataError;
use crate::rows::{RowFormat, is_tfrecord};

/// Bytes that are read to detect a file's format.
pub(crate) const HEAD_BYTES: u64 = 256;
/// The most characters of a file that a message shows.
const SHOWN_MAX: usize = 40;

const AS_PARQUET: &str = "set `format = \"parquet\"`";
const EXTRACT: &str = "extract it";
const RECOMPRESS: &str = "decompress it, or compress it with gzip, zstd or bzip2";

/// Binary formats, by their first bytes.
const NOT_TEXT: &[(&[u8], &str, &str)] = &[
    (b"PAR1", "a Parquet file", AS_PARQUET),
    (b"PK\x03\x04", "a zip archive", EXTRACT),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", EXTRACT),
    (b"\xfd7zXZ\0", "compressed with xz", RECOMPRESS),
    (b"\x04\x22\x4d\x18", "compressed with LZ4", RECOMPRESS),
];

/// Rejects known binary formats.
pub(crate) fn expect_text(file: &str, head: &[u8]) -> Result<(), DataError> {
    match NOT_TEXT.iter().find(|(magic, ..)| head.starts_with(magic)) {
        Some((_, found, way_out)) => Err(other(file, "CSV or TSV", found, way_out)),
        None => Ok(()),
    }
}

/// Rejects files that are known to have another format.
pub(crate) fn expect_rows(file: &str, format: RowFormat, head: &[u8]) -> Result<(), DataError> {
    let expected = match format {
        RowFormat::Jsonl => "JSON lines",
        RowFormat::Tfrecord => "TFRecord",
        RowFormat::Libsvm => "LibSVM",
        RowFormat::Webdataset => "a tar archive",
    };
    if let Some((_, found, way_out)) = NOT_TEXT.iter().find(|(magic, ..)| head.starts_with(magic)) {
        return Err(other(file, expected, found, way_out));
    }
    let found = match format {
        RowFormat::Jsonl if head.trim_ascii_start().starts_with(b"[") => "a JSON array",
        RowFormat::Tfrecord if !head.is_empty() && !is_tfrecord(head) => {
            "something else: its first 12 bytes are no length with its checksum"
        }
        RowFormat::Webdataset if head.starts_with(b"{") => "JSON",
        _ => return Ok(()),
    };
    let way_out = match format {
        RowFormat::Jsonl => "write one object in each line",
        RowFormat::Tfrecord => "compress TFRecord files with GZIP only, not with ZLIB",
        RowFormat::Libsvm | RowFormat::Webdataset => "set `format = \"jsonl\"`",
    };
    Err(other(file, expected, found, way_out))
}

/// Describes a file that does not begin like Parquet, if its format is known.
pub(crate) fn not_parquet(file: &str, head: &[u8]) -> Option<DataError> {
    const DECOMPRESS: &str = "decompress it: Parquet compresses its own columns";
    let refused = |found: &str, way_out: &str| Some(other(file, "Parquet", found, way_out));
    if head.starts_with(b"PAR1") || head.is_empty() {
        return None;
    }
    if let Some(codec) = crate::text::Codec::detect(head) {
        return refused(&format!("compressed with {}", codec.name()), DECOMPRESS);
    }
    if let Some((_, found, way_out)) = NOT_TEXT.iter().find(|(magic, ..)| head.starts_with(magic)) {
        return refused(found, if *way_out == RECOMPRESS { DECOMPRESS } else { way_out });
    }
    let line = first_line(head)?;
    let found = format!("a text file that begins with `{line}`");
    refused(&found, "set `format = \"csv\"` or `\"tsv\"`")
}

/// Rejects a file with a single column whose name, or first value, contains another separator.
pub(crate) fn expect_separator(file: &str, separator: u8, only: &[u8]) -> Result<(), DataError> {
    const OTHERS: [(u8, &str, &str); 4] = [
        (b';', "semicolons", "write it with commas, and numbers with decimal points"),
        (b'\t', "tabs", "set `format = \"tsv\"`"),
        (b',', "commas", "set `format = \"csv\"`"),
        (b'|', "vertical bars", "write it with commas"),
    ];
    let has = |other: &u8| *other != separator && only.contains(other);
    let Some((_, found, way_out)) = OTHERS.iter().find(|(other, ..)| has(other)) else {
        return Ok(());
    };
    Err(DataError::Separator {
        file: file.to_owned(),
        found,
        line: first_line(only).unwrap_or_default(),
        way_out,
    })
}

/// Returns the usual file name extension of a format, without the dot.
pub(crate) fn ending(format: DataFormat) -> &'static str {
    match format {
        DataFormat::Parquet => "parquet",
        DataFormat::Csv => "csv",
        DataFormat::Tsv => "tsv",
        DataFormat::Jsonl => "jsonl",
        DataFormat::Tfrecord => "tfrecord",
        DataFormat::Libsvm => "libsvm",
        DataFormat::Webdataset => "tar",
    }
}

fn other(file: &str, expected: &'static str, found: &str, way_out: &str) -> DataError {
    DataError::OtherFormat {
        file: file.to_owned(),
        expected,
        found: found.to_owned(),
        way_out: way_out.to_owned(),
    }
}

/// Returns the beginning of the first line of a text, of at most [`SHOWN_MAX`] characters; `None` if `head` is not
/// text.
fn first_line(head: &[u8]) -> Option<String> {
    // The last character may be truncated.
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&head[..error.valid_up_to()]).ok()?
        }
        Err(_) => return None,
    };
    if text.chars().any(|it| it.is_control() && !it.is_ascii_whitespace()) {
        return None;
    }
    let line = text.trim_start_matches('\u{feff}').trim_start().lines().next().unwrap_or("");
    match line.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => Some(format!("{}…", &line[..end])),
        None => Some(line.to_owned()),
    }
}
