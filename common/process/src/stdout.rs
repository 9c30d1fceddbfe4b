//! Prints the output of commands on stdout.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

use crate::Failure;

/// Prints a line on stdout; see [`print`].
pub fn print_line(line: impl Display) {
    print(format_args!("{line}\n"));
}

/// Prints text on stdout at once. If that fails, ends the process, so that no command reports success without
/// its output: in order if the reader is gone, as in `steadfast tasks | head`, and otherwise with the error
/// on stderr. The signal for a lost reader, SIGPIPE, is ignored: it would also end a command whose
/// connection is lost.
pub fn print(text: impl Display) {
    match write(text) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        Err(error) => {
            let failure = unwritten(&error);
            let _ = writeln!(io::stderr(), "steadfast: error: {failure}");
            std::process::exit(i32::from(failure.kind.exit_code()));
        }
    }
}

/// Prints text as [`print`] does, but returns an error instead of ending the process, for a command that has more to
/// do, or an exit code of its own.
///
/// # Errors
/// If stdout cannot be written, unless its reader is gone.
pub fn try_print(text: impl Display) -> Result<(), Failure> {
    match write(text) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(unwritten(&error)),
    }
}

fn write(text: impl Display) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    write!(stdout, "{text}")?;
    stdout.flush()
}

fn unwritten(error: &io::Error) -> Failure {
    Failure::io("cannot write to stdout", error)
}
