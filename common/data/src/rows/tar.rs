//! WebDataset: tar archives in which consecutive files with the same name, up to its first dot, are one
//! record. What follows the dot names the column, and `__key__` is the name.
//!
//! Rules of names as in `webdataset`'s `group_by_keys` and `base_plus_ext`:
//! <https://github.com/webdataset/webdataset/blob/main/src/webdataset/tariterators.py>.

use std::borrow::Cow;
use std::io::{BufRead, Read, Seek};

use steadfast_common::job::columns::{ColumnType, Element};
use tar::{Archive, Entry, EntryType, PaxExtensions};

use super::{Contents, Refusal, Row, Visit};
use crate::values::Value;

const KEY: &str = "__key__";
/// Blocks of a tar archive.
const BLOCK_BYTES: u64 = 512;
/// The largest record.
const RECORD_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// The most files of a record.
const RECORD_FILES_MAX: usize = 256;
/// The largest header that extends another one, such as by a long name.
const EXTENSION_BYTES_MAX: u64 = 64 * 1024;

/// Returns the type of a column, by the extension of its files, as `webdataset` decodes them.
pub(super) fn type_of(extension: &str) -> ColumnType {
    ColumnType::one(match extension.rsplit('.').next().unwrap_or_default() {
        KEY | "txt" | "text" | "transcript" | "json" | "jsn" => Element::Text,
        "cls" | "cls2" | "class" | "count" | "index" | "inx" | "id" => Element::Int64,
        _ => Element::Bytes,
    })
}

pub(super) fn visit(
    file: impl BufRead + Seek,
    contents: Contents,
    visit: &mut Visit,
) -> Result<(), Refusal> {
    let mut archive = Archive::new(file);
    // Archives may be concatenated: nothing after the end of the first one is lost.
    archive.set_ignore_zeros(true);
    // Raw, because extended headers would be read without a limit.
    match contents {
        Contents::Read => visit_entries(archive.entries()?.raw(true), contents, visit),
        Contents::Skip => visit_entries(archive.entries_with_seek()?.raw(true), contents, visit),
    }
}

/// The record to which the next file may belong.
struct Sample {
    key: String,
    start: u64,
    size_bytes: u64,
    fields: Vec<(Cow<'static, str>, Value<'static>)>,
}

impl Sample {
    fn row(mut self, end: u64) -> Row<'static> {
        self.fields.push((Cow::Borrowed(KEY), Value::Text(Cow::Owned(self.key))));
        self.fields.sort_by(|(a, _), (b, _)| a.cmp(b));
        Row { bytes: self.start..end, fields: self.fields }
    }
}

fn visit_entries<'a, R: Read + 'a>(
    entries: impl Iterator<Item = std::io::Result<Entry<'a, R>>>,
    contents: Contents,
    visit: &mut Visit,
) -> Result<(), Refusal> {
    let mut sample: Option<Sample> = None;
    // The end of the entries so far.
    let (mut end, mut record) = (0, 0);
    // The extended headers before the next file: where they begin, and its name.
    let (mut extended_from, mut long_name) = (None, None);
    for entry in entries {
        let mut entry = entry?;
        let start = extended_from.take().unwrap_or(end);
        let size_bytes = entry.size();
        end = size_bytes
            .checked_next_multiple_of(BLOCK_BYTES)
            .and_then(|padded| entry.raw_file_position().checked_add(padded))
            .ok_or_else(|| std::io::Error::other("a size in the archive is invalid"))?;
        let refused = |reason| Refusal::Record(record, reason);
        match extension(&mut entry).map_err(refused)? {
            Extension::Name(name) => {
                (extended_from, long_name) = (Some(start), Some(name));
                continue;
            }
            Extension::Other => {
                extended_from = Some(start);
                continue;
            }
            Extension::None => {}
        }
        let path = long_name.take().unwrap_or_else(|| entry.path_bytes().into_owned());
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let Ok(path) = String::from_utf8(path) else {
            return Err(refused("a file of it has a name that is not UTF-8".to_owned()));
        };
        let Some((key, extension)) = split(&path) else { continue };
        if let Some(before) = sample.take_if(|before| before.key != key) {
            if visit(before.row(start)).is_break() {
                return Ok(());
            }
            record += 1;
        }
        let sample = sample.get_or_insert_with(|| Sample {
            key: key.to_owned(),
            start,
            size_bytes: 0,
            fields: Vec::new(),
        });
        let refused = |reason| Refusal::Record(record, reason);
        let extension = extension.to_lowercase();
        if sample.fields.len() == RECORD_FILES_MAX {
            return Err(refused(format!(
                "more than {RECORD_FILES_MAX} files are called `{}.…`; files with the same path up to the \
                 first dot of the name are one record",
                sample.key
            )));
        }
        if sample.fields.iter().any(|(name, _)| *name == extension) {
            return Err(refused(format!("it has two files `{path}`")));
        }
        sample.size_bytes = sample.size_bytes.saturating_add(size_bytes);
        if sample.size_bytes > RECORD_BYTES_MAX {
            return Err(refused(format!("its files have more than {RECORD_BYTES_MAX} bytes")));
        }
        let mut content = Vec::new();
        if contents == Contents::Read {
            entry.read_to_end(&mut content)?;
            if content.len() as u64 != size_bytes {
                return Err(refused(format!("the archive ends within `{path}`")));
            }
        }
        sample.fields.push((Cow::Owned(extension), Value::Bytes(Cow::Owned(content))));
    }
    if let Some(sample) = sample {
        // Nothing follows, so the answer does not matter.
        let _ = visit(sample.row(end));
    }
    Ok(())
}

/// The meaning of a header for the file that follows.
enum Extension {
    /// No extension: the header is that of a file itself.
    None,
    Name(Vec<u8>),
    Other,
}

/// Reads an entry that extends the next one.
fn extension<R: Read>(entry: &mut Entry<R>) -> Result<Extension, String> {
    let sparse =
        || "its files are stored without their zeros; pack it without `--sparse`".to_owned();
    let kind = entry.header().entry_type();
    match kind {
        EntryType::GNUSparse => return Err(sparse()),
        EntryType::GNULongName | EntryType::XHeader => {}
        EntryType::GNULongLink | EntryType::XGlobalHeader => return Ok(Extension::Other),
        _ => return Ok(Extension::None),
    }
    if EXTENSION_BYTES_MAX < entry.size() {
        let bytes = entry.size();
        return Err(format!("a header has {bytes} bytes, more than {EXTENSION_BYTES_MAX}"));
    }
    let mut content = Vec::new();
    entry.read_to_end(&mut content).map_err(|error| error.to_string())?;
    if kind == EntryType::GNULongName {
        content.truncate(content.iter().position(|byte| *byte == 0).unwrap_or(content.len()));
        return Ok(Extension::Name(content));
    }
    let mut found = Extension::Other;
    for extension in PaxExtensions::new(&content) {
        let extension = extension.map_err(|error| error.to_string())?;
        match extension.key_bytes() {
            b"path" => found = Extension::Name(extension.value_bytes().to_vec()),
            // The header has no room for the size.
            b"size" => return Err("a file of it is larger than 8 GiB".to_owned()),
            key if key.starts_with(b"GNU.sparse") => return Err(sparse()),
            _ => {}
        }
    }
    Ok(found)
}

/// Splits a path at the first dot of its last part. Returns `None` for files that belong to no record.
fn split(path: &str) -> Option<(&str, &str)> {
    let path = path.strip_prefix("./").unwrap_or(path);
    let name = path.rfind('/').map_or(0, |slash| slash + 1);
    let dot = name + path[name..].find('.')?;
    let is_meta = path.starts_with("__") && path.contains("__/");
    (name < dot && !is_meta).then(|| (&path[..dot], &path[dot + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_dot_of_a_name_ends_the_key() {
        assert_eq!(split("a/b.c/x.left.png"), Some(("a/b.c/x", "left.png")));
        assert_eq!(split("./x.cls"), Some(("x", "cls")));
        for none in ["README", "a.b/README", ".hidden", "a/.hidden", "__meta__/x.json"] {
            assert_eq!(split(none), None, "{none}");
        }
    }
}
