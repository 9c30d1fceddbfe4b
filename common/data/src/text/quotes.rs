//! Finds unclosed quotes.

use csv_core::{ReadFieldResult, ReadRecordResult, Reader};

use super::{Beginning, Dialect};

/// Size of the buffers for content that is discarded.
const SCRATCH_BYTES: usize = 1024;

/// Ends the parser's current line: returns the number of fields that this adds to the record, or `None`
/// within quotes.
pub(super) fn end_line(parser: &mut Reader) -> Option<usize> {
    let (mut content, mut ends) = ([0; SCRATCH_BYTES], [0; SCRATCH_BYTES]);
    let (result, _, _, fields) = parser.read_record(b"\n", &mut content, &mut ends);
    (result == ReadRecordResult::Record).then_some(fields)
}

/// Returns the position of the quote that is unclosed at the end of `record`, the beginning of a record; `None` if all
/// quotes are closed.
pub(super) fn open(dialect: Dialect, record: &[u8], beginning: Beginning) -> Option<usize> {
    let mut parser = dialect.parser(beginning);
    let mut content = [0; SCRATCH_BYTES];
    let (mut position, mut field) = (0, 0);
    while position < record.len() {
        let (result, used, _) = parser.read_field(&record[position..], &mut content);
        position += used;
        match result {
            ReadFieldResult::Field { .. } => field = position,
            ReadFieldResult::InputEmpty | ReadFieldResult::OutputFull | ReadFieldResult::End => {}
        }
    }
    let quote = record[field..].iter().position(|byte| *byte == b'"')?;
    end_line(&mut parser).is_none().then_some(field + quote)
}

/// Counts the line feeds in `text`.
pub(super) fn lines(text: &[u8]) -> u64 {
    text.iter().filter(|byte| **byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use steadfast_common::job::spec::Header;

    #[test]
    fn a_quote_opens_only_at_the_start_of_a_field() {
        let dialect = Dialect { delimiter: b',', header: Header::Present };
        let cases: [(&[u8], Option<usize>); 9] = [
            (b"1,\"2", Some(2)),
            (b"\"a\nb\",\"c\n", Some(6)),
            (b"\"a \"\"b", Some(0)),
            (b"\r\n\r\n\"a", Some(4)),
            (b"1,\"2\"", None),
            (b"1,2\"", None),
            (b"1,\"2\"\"\"", None),
            (b"1,", None),
            (b"", None),
        ];
        for (record, expected) in cases {
            assert_eq!(
                open(dialect, record, Beginning::OfFile),
                expected,
                "{}",
                record.escape_ascii()
            );
        }
    }
}
