//! One record in each line. Blank lines are skipped.

use std::borrow::Cow;
use std::io::{BufRead, Read};

use super::{Refusal, Row, Visit};
use crate::text::RECORD_BYTES_MAX;
use crate::values::Value;

/// The fields of a record, by name; `None` for a line without a record.
pub(super) type Fields<'a> = Option<Vec<(Cow<'a, str>, Value<'a>)>>;

/// Visits the records of a text. `fields` returns the fields of a line, or the reason why it is not a record.
pub(super) fn visit(
    mut text: impl BufRead,
    fields: impl for<'a> Fn(&'a str) -> Result<Fields<'a>, String>,
    visit: &mut Visit,
) -> Result<(), Refusal> {
    let (mut line, mut start, mut end, mut record) = (Vec::new(), 0, 0, 0);
    loop {
        line.clear();
        let read = Read::take(&mut text, RECORD_BYTES_MAX + 1).read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(());
        }
        let refused = |reason| Refusal::Record(record, reason);
        if read as u64 > RECORD_BYTES_MAX {
            return Err(refused(format!("it is longer than {RECORD_BYTES_MAX} bytes")));
        }
        end += read as u64;
        let content =
            std::str::from_utf8(&line).map_err(|_| refused("it is not UTF-8".to_owned()))?;
        let content = content.trim_start_matches('\u{feff}').trim();
        if content.is_empty() {
            continue;
        }
        let Some(fields) = fields(content).map_err(refused)? else { continue };
        if visit(Row { bytes: start..end, fields }).is_break() {
            return Ok(());
        }
        start = end;
        record += 1;
    }
}
