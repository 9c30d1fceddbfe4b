//! The lengths of lists that were written as fixed-size lists. Parquet has lists of any length only; Arrow's writers
//! put their own schema into the file's metadata.

use std::collections::HashMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use parquet::file::metadata::ParquetMetaData;
use polars_arrow_format::ipc::planus::ReadAsRoot;
use polars_arrow_format::ipc::{FieldRef, MessageHeaderRef, MessageRef, TypeRef};

/// The key of Arrow's schema: a base64-encoded IPC message.
const ARROW_SCHEMA: &str = "ARROW:schema";
/// Precedes the length of a message.
const CONTINUATION: [u8; 4] = [0xff; 4];

/// Returns the lengths of top-level columns by name; an empty map if the file has no schema of Arrow that can be read.
pub(super) fn lengths(metadata: &ParquetMetaData) -> HashMap<String, u32> {
    let pairs = metadata.file_metadata().key_value_metadata().into_iter().flatten();
    let schema = pairs.filter(|pair| pair.key == ARROW_SCHEMA).find_map(|pair| pair.value.as_ref());
    schema.and_then(|text| read(text)).unwrap_or_default()
}

fn read(text: &str) -> Option<HashMap<String, u32>> {
    let bytes = BASE64_STANDARD.decode(text).ok()?;
    let message = match bytes.strip_prefix(&CONTINUATION) {
        Some(with_length) => with_length.get(size_of::<u32>()..)?,
        None => &bytes[..],
    };
    let message = MessageRef::read_as_root(message).ok()?;
    let MessageHeaderRef::Schema(schema) = message.header().ok()?? else { return None };
    let length = |field: FieldRef<'_>| {
        let TypeRef::FixedSizeList(list) = field.type_().ok()?? else { return None };
        let length = u32::try_from(list.list_size().ok()?).ok().filter(|length| 0 < *length)?;
        Some((field.name().ok()??.to_owned(), length))
    };
    let fields = schema.fields().ok()??;
    Some(fields.iter().filter_map(Result::ok).filter_map(length).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_that_cannot_be_read_has_no_lengths() {
        for text in
            ["", "?", "/////w==", "/////wAAAAA=", "AAAAAAAAAAA=", "EAAAAAAACgAOAAYABQAIAAoAAAAA"]
        {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
