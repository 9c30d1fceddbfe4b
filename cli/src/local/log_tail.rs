//! Finds the reason why a process ended at the end of its log.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use steadfast_process::belongs_to_the_line_above;

/// Maximum number of bytes read from the end of a log.
const TAIL_BYTES: u64 = 16 << 10;

/// Returns the reason found in a log from byte `from` on: its `error:` lines without the program's name, each with
/// the indented lines below it, else a panic message, else the last line.
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
    let lines = text.lines().map(str::trim_end).filter(|line| !line.is_empty());
    let errors = errors_of(lines.clone());
    let lines: Vec<&str> = lines.map(str::trim_start).collect();
    if !errors.is_empty() {
        return Some(printable(&errors.join("\n")));
    }
    let panic = lines.iter().position(|line| line.contains("panicked at"));
    if let Some(at) = panic {
        return Some(printable(&lines[at..(at + 2).min(lines.len())].join(" ")));
    }
    lines.last().map(|line| printable(line))
}

/// Returns the errors among some lines, each with the lines that belong to it.
fn errors_of<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut errors = Vec::new();
    let mut is_within = false;
    for line in lines {
        let error = error_of(line);
        is_within = error.is_some() || (is_within && belongs_to_the_line_above(line));
        if is_within {
            errors.push(error.unwrap_or(line));
        }
    }
    errors
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
    fn an_error_has_the_indented_lines_below_it() {
        let text = "info\nsteadfast-trainer: error: KeyError: 'a'\n  Traceback\n    File \"a.py\"\n\
                    2026 info ended\n  unrelated\n";
        assert_eq!(explain(text).unwrap(), "KeyError: 'a'\n  Traceback\n    File \"a.py\"");
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
