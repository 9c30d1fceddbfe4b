//! WebDataset: tar archives in which consecutive files with the same name, up to its first dot, are one
//! record. What follows the dot names the column, and `__key__` is the name.
//!
//! Rules of names as in `webdataset`'s `group_by_keys` and `base_plus_ext`:
//! <https://github.com/webdataset/webdataset/blob/main/src/webdataset/tariterators.py>.

use std::borrow::Cow;
use std::io::{BufRead, Read, Seek};

use steadfast_common::columns::{ColumnType, Element};
use tar::{Archive, Entry};

use super::{Contents, Refusal, Row, Visit};
use crate::values::Value;

const KEY: &str = "__key__";
/// Blocks of a tar archive.
const BLOCK_BYTES: u64 = 512;
/// The largest record.
const RECORD_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// The type of a column, by the extension of its files. As `webdataset` decodes them.
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
    match contents {
        Contents::Read => visit_entries(archive.entries()?, contents, visit),
        Contents::Skip => visit_entries(archive.entries_with_seek()?, contents, visit),
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
    // The end of the entries so far. An entry begins there, with its extended headers.
    let (mut end, mut record) = (0, 0);
    for entry in entries {
        let mut entry = entry?;
        let start = end;
        let size_bytes = entry.size();
        end = size_bytes
            .checked_next_multiple_of(BLOCK_BYTES)
            .and_then(|padded| entry.raw_file_position().checked_add(padded))
            .ok_or_else(|| std::io::Error::other("a size in the archive is invalid"))?;
        let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        if !entry.header().entry_type().is_file() {
            continue;
        }
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

/// Splits a path at the first dot of its last part. Files that belong to no record have no such name.
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
