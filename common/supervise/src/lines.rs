//! Splits output into lines, in bounded memory and with bounded progress bars.

use std::time::{Duration, Instant};

/// A longer line is cut into lines of this length.
pub(crate) const LINE_BYTES_MAX: usize = 64 << 10;

/// A progress bar, which rewrites its line after `\r`, becomes a line at most this often.
const PROGRESS_PERIOD: Duration = Duration::from_secs(1);

/// The unfinished line of one stream.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    line: Vec<u8>,
    /// The last byte was `\r`: either half of `\r\n`, or the line is about to be rewritten.
    after_return: bool,
    /// The latest state of a progress bar, if it was not returned.
    progress: Option<Vec<u8>>,
    progress_returned: Option<Instant>,
}

impl Lines {
    /// Adds bytes and calls `emit` with each line that they complete, without its end.
    pub fn push(&mut self, bytes: &[u8], now: Instant, emit: &mut impl FnMut(&[u8])) {
        for piece in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            let (text, end) = match piece.split_last() {
                Some((end @ (b'\n' | b'\r'), text)) => (text, Some(*end)),
                Some(_) | None => (piece, None),
            };
            if self.after_return && piece != b"\n" {
                self.end_progress(now, emit);
            }
            self.after_return = false;
            self.add(text, emit);
            match end {
                Some(b'\n') => self.end_line(emit),
                Some(_) => self.after_return = true,
                None => {}
            }
        }
    }

    /// Calls `emit` with what is left at the end of the stream.
    pub fn finish(&mut self, emit: &mut impl FnMut(&[u8])) {
        let progress = self.progress.take();
        if !self.line.is_empty() {
            self.end_line(emit);
        } else if let Some(progress) = progress {
            emit(&progress);
        }
    }

    fn add(&mut self, mut text: &[u8], emit: &mut impl FnMut(&[u8])) {
        while let room = LINE_BYTES_MAX - self.line.len()
            && text.len() > room
        {
            let (now, later) = text.split_at(room);
            self.line.extend_from_slice(now);
            self.end_line(emit);
            text = later;
        }
        self.line.extend_from_slice(text);
    }

    fn end_line(&mut self, emit: &mut impl FnMut(&[u8])) {
        emit(&self.line);
        self.line.clear();
        self.progress = None;
    }

    fn end_progress(&mut self, now: Instant, emit: &mut impl FnMut(&[u8])) {
        if self.line.is_empty() {
            return;
        }
        let returned = self.progress_returned;
        if returned.is_none_or(|at| PROGRESS_PERIOD <= now.duration_since(at)) {
            self.progress_returned = Some(now);
            return self.end_line(emit);
        }
        self.progress = Some(std::mem::take(&mut self.line));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(pieces: &[&[u8]]) -> Vec<String> {
        let (mut lines, mut found, now) = (Lines::default(), Vec::new(), Instant::now());
        let mut emit = |line: &[u8]| found.push(String::from_utf8_lossy(line).into_owned());
        for piece in pieces {
            lines.push(piece, now, &mut emit);
        }
        lines.finish(&mut emit);
        found
    }

    #[test]
    fn lines_do_not_depend_on_where_the_input_is_cut() {
        let text = b"one\ntwo\r\n\n\r10%\r20%\r30%\nlast";
        let whole = split(&[text]);
        assert_eq!(whole, ["one", "two", "", "10%", "30%", "last"]);
        for at in 0..text.len() {
            assert_eq!(split(&[&text[..at], &text[at..]]), whole, "cut at {at}");
        }
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(split(&bytes), whole);
    }

    #[test]
    fn a_line_without_end_is_cut_and_loses_nothing() {
        let text = vec![b'x'; 2 * LINE_BYTES_MAX + 10];
        let lengths: Vec<usize> = split(&[&text]).iter().map(String::len).collect();
        assert_eq!(lengths, [LINE_BYTES_MAX, LINE_BYTES_MAX, 10]);
    }

    #[test]
    fn a_line_of_the_greatest_length_is_one_line() {
        let mut text = vec![b'x'; LINE_BYTES_MAX];
        text.push(b'\n');
        assert_eq!(split(&[&text]).len(), 1);
    }

    #[test]
    fn a_progress_bar_becomes_a_line_once_a_second_and_at_its_end() {
        let (mut lines, mut found, start) = (Lines::default(), Vec::new(), Instant::now());
        let mut emit = |line: &[u8]| found.push(String::from_utf8_lossy(line).into_owned());
        for tenth in 0..25_u32 {
            let now = start + tenth * Duration::from_millis(100);
            lines.push(format!("\r{tenth}").as_bytes(), now, &mut emit);
        }
        lines.push(b"\r", start + Duration::from_secs(3), &mut emit);
        lines.finish(&mut emit);
        assert_eq!(found, ["0", "10", "20", "24"]);
    }
}
