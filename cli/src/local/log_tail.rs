//! Finds the reason why a process ended at the end of its log.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Maximum number of bytes read from the end of a log.
const TAIL_BYTES: u64 = 16 << 10;

/// Returns the reason found in a log from byte `from` on: its `error:` lines without the program's name, else
/// a panic message, else the last line.
pub fn last_lines(log: &Path, from: u64) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(from.max(length.saturating_sub(TAIL_BYTES)))).ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes).ok()?;
    explain(&String::from_utf8_lossy(&bytes))
}

/// Renames the logs of the previous run (`master-0.log` to `master-0.log.old`): each log covers one run.
pub fn rotate(directory: &Path) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|it| it == "log") {
            // If renaming fails, the new run appends to the log.
            let _ = std::fs::rename(&path, path.with_extension("log.old"));
        }
    }
}

fn explain(text: &str) -> Option<String> {
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let errors: Vec<&str> = lines.iter().filter_map(|line| error_of(line)).collect();
    if !errors.is_empty() {
        return Some(printable(&errors.join("\n")));
    }
    let panic = lines.iter().position(|line| line.contains("panicked at"));
    if let Some(at) = panic {
        return Some(printable(&lines[at..(at + 2).min(lines.len())].join(" ")));
    }
    lines.last().map(|line| printable(line))
}

/// Returns `what` of `steadfast-master: error: what`, and of clap's `error: what`.
fn error_of(line: &str) -> Option<&str> {
    let (program, what) = line.split_once("error: ")?;
    let named = program.strip_suffix(": ").is_some_and(|name| !name.contains(char::is_whitespace));
    (program.is_empty() || named).then_some(what)
}

/// Removes control characters: a log can contain text from untrusted sources.
fn printable(text: &str) -> String {
    text.chars().filter(|it| *it == '\n' || !it.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_lines_have_precedence() {
        let text = "2026 info master started\nsteadfast-master: error: `passes` must be at least 1\n\
                    steadfast-master: error: unknown key `x`\n";
        assert_eq!(explain(text).unwrap(), "`passes` must be at least 1\nunknown key `x`");
    }

    #[test]
    fn a_panic_has_precedence_over_the_hint_below_it() {
        let text = "info\nthread 'main' panicked at src/a.rs:1:2:\nbroken\nnote: run with `RUST_BACKTRACE=1`";
        assert_eq!(explain(text).unwrap(), "thread 'main' panicked at src/a.rs:1:2: broken");
    }

    #[test]
    fn otherwise_the_last_line_is_shown_without_control_characters() {
        assert_eq!(explain("a\nb \x1b[31mred\n\n").unwrap(), "b [31mred");
        assert_eq!(explain("\n"), None);
    }
}
